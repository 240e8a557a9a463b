"""Makes family_*.npz: logits and hidden states of tiny random models of each supported family.

    python tests/golden/make_family_vectors.py [NAME ...]    (needs torch and transformers: dflash_jax[parity])

Each file holds `config` (the config.json as text, spelled the way real checkpoints of that kind spell it),
`w.NAME` (weights under their Hugging Face names, float16), `ids` [T], `logits` [T, V] and `layers` [L, T, D], the
residual stream behind each decoder layer before any final norm. All computed in float32 with eager attention.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

NUM_TOKENS = 20
VOCAB = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}

LATENT = {
    "rope_theta": 10000.0,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}

GEMMA = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GATED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
# Model types whose norms are stored around zero, all but the gated one of linear layers.
ZERO_CENTRED = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

FAMILIES = {
    # Head dim from the hidden size, biases everywhere, the scaling of Llama 3 in the old spelling.
    "llama3_rope": {
        **COMMON,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Every head its own KV head, tied, linear scaling under the oldest spelling, `type`.
    "llama_linear": {
        **COMMON,
        "model_type": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    # All heads wider than hidden size / heads, one KV head for all, every layer sliding.
    "mistral_sliding": {
        **COMMON,
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 6,
        "rope_theta": 1000.0,
    },
    # Biases on q, k and v without being asked for; the window in the file is not in use.
    "qwen2": {
        **COMMON,
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 4,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
    },
    # Layers slide from max_window_layers on.
    "qwen2_sliding": {
        **COMMON,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # Norms on q and k; head dim 16 is not 32 / 4; which layers slide is said one by one.
    "qwen3": {
        **COMMON,
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # YaRN, biases on q, k, v and o, tied.
    "qwen3_yarn": {
        **COMMON,
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Seeds go by the place in this table: append, do not insert.
    # Every layer has experts and slides.
    "mixtral": {
        **COMMON,
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rope_theta": 1000000.0,
    },
    # Experts in layers 1 and 2 of 4, a gated shared expert, weights not normalised.
    "qwen2_moe": {
        **COMMON,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [0, 3],
        "rope_theta": 10000.0,
    },
    # Experts in every second layer, weights normalised, no shared expert.
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "rope_theta": 1000000.0,
    },
    # Queries without a latent of their own, groups by their best expert, two shared experts, first layer dense.
    "deepseek_v2": {
        **COMMON,
        **LATENT,
        "model_type": "deepseek_v2",
        "rms_norm_eps": 1e-6,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": False,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # Query latent, groups by their two best, a bias in the choice, cos and sin scaled too (mscale differs).
    "deepseek_v3": {
        **COMMON,
        **LATENT,
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    },
    # Sinks, sliding and full layers in turn, biases everywhere, clipped SwiGLU, YaRN untruncated.
    "gpt_oss": {
        **COMMON,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
        "intermediate_size": 16,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    # Layers sliding, full, sliding; both caps low enough to bend.
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "rope_theta": 1000.0,
    },
    # Every third layer full, with a base and a scaling of its own, in the old spelling.
    "gemma3_text": {
        **GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    # Full layers with wider heads, one KV head, keys as values and a quarter of the frequencies.
    "gemma4_text": {
        **GEMMA,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    },
    # Linear with experts, full with experts, linear and dense; value heads wider than key heads, two a key head.
    "qwen3_next": {
        **COMMON,
        **DELTA,
        **GATED_EXPERTS,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000.0,
        "full_attention_interval": 2,
        "mlp_only_layers": [2],
        "norm_topk_prob": True,
    },
    # Dense, three linear layers to a full one, tied, rotary embedding in the multimodal spelling.
    "qwen3_5": {
        **COMMON,
        **DELTA,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
    # Experts in every layer, one value head a key head.
    "qwen3_5_moe": {
        **COMMON,
        **DELTA,
        **GATED_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    },
    # Dense and expert layers in turn, three chunked layers to one without rotary embedding and with a temperature
    # that grows five times within the vectors.
    "llama4_text": {
        **COMMON,
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 12,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def make(name: str, config: dict, seed: int) -> dict[str, np.ndarray]:
    """Runs one random model. Its weights have the names of published files: those that save_pretrained writes."""
    generator = torch.Generator().manual_seed(seed)
    hf = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32).eval()
    stored = ("e_score_correction_bias", "layer_scalar")
    buffers = [(key, x) for key, x in model.named_buffers() if key.endswith(stored)]
    norm_centre = 0 if config["model_type"] in ZERO_CENTRED else 1
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *buffers]:
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("linear_attn.norm.weight"):
                value = 1 + 0.3 * noise
            elif key.endswith("norm.weight"):
                value = norm_centre + 0.3 * noise
            elif key.endswith("layer_scalar"):
                value = 0.8 + 0.2 * noise
            elif key.endswith("A_log"):
                value = noise - 2  # slow decay: the state remembers the whole sequence
            elif key.endswith(("bias", "sinks")):  # dt_bias too
                value = 0.3 * noise
            else:
                value = noise * weight.shape[-1] ** -0.5
            weight.copy_(value.half().float())  # exact in float16, so that half the bytes are enough
    layers = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: layers.append(out[0] if isinstance(out, tuple) else out))
    ids = torch.randint(VOCAB, (1, NUM_TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        weights = load_file(pathlib.Path(directory) / "model.safetensors")
    return {
        "config": np.array(json.dumps(config)),
        **{f"w.{key}": value.astype(np.float16) for key, value in weights.items()},
        "ids": ids[0].numpy().astype(np.int32),
        "logits": logits[0].numpy(),
        "layers": torch.stack([x[0] for x in layers]).numpy(),
    }


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    here = pathlib.Path(__file__).parent
    for seed, (name, config) in enumerate(FAMILIES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        arrays = make(name, config, seed)
        path = here / f"family_{name}.npz"
        np.savez_compressed(path, **arrays)
        spread = np.ptp(arrays["logits"])
        print(f"{path.name}: {path.stat().st_size} bytes, logits over a range of {spread:.2f}")


if __name__ == "__main__":
    main()
