"""Makes family_*.npz: logits and hidden states of tiny random models of each supported family.

    python tests/golden/make_family_vectors.py        (needs torch and transformers: pip install dflash_jax[parity])

Each file holds `config` (the config.json as text, spelled the way real checkpoints of that kind spell it),
`w.NAME` (weights under their Hugging Face names, float16), `ids` [T], `logits` [T, V] and `layers` [L, T, D], the
residual stream behind each decoder layer before any final norm. All computed in float32 with eager attention.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
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
}


def make(name: str, config: dict, seed: int) -> dict[str, np.ndarray]:
    """Runs one random model; asserts that the case tests what its comment says."""
    generator = torch.Generator().manual_seed(seed)
    hf = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("norm.weight"):
                value = 1 + 0.3 * noise
            elif key.endswith(".bias"):
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
    tied = config.get("tie_word_embeddings", False)
    weights = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    return {
        "config": np.array(json.dumps(config)),
        **{f"w.{key}": value.numpy().astype(np.float16) for key, value in weights.items()},
        "ids": ids[0].numpy().astype(np.int32),
        "logits": logits[0].numpy(),
        "layers": torch.stack([x[0] for x in layers]).numpy(),
    }


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    here = pathlib.Path(__file__).parent
    for seed, (name, config) in enumerate(FAMILIES.items()):
        arrays = make(name, config, seed)
        path = here / f"family_{name}.npz"
        np.savez_compressed(path, **arrays)
        spread = np.ptp(arrays["logits"])
        print(f"{path.name}: {path.stat().st_size} bytes, logits over a range of {spread:.2f}")


if __name__ == "__main__":
    main()
