"""DeepSeek-V3 in bf16 with a DFlash drafter, 32 rows of 8k tokens, on a slice of 128 devices.

    python serve.py --config=configs/deepseek_v3.py --compile_only --topology=v5p:4x4x8
    python serve.py --config=configs/deepseek_v3.py --compile_only --topology=tpu7x:4x4x4

say, without a TPU and without the weights (1.3 TB in bf16; the published FP8 files are dequantised on load), what the
decode step takes on each device. Results: docs/pods.md. (tpu7x:4x4x4 is 64 chips of two devices each.)

`target.source` is what loading would read. Answering was not run: serve.py is one process, and such a slice has many
hosts.

`architecture` is the published config.json as far as the decoder reads it. No DFlash drafter of this target is known;
the one here has the shape that the conventions would give it (five layers, block 16, five taps by the default rule)
and one of the tokenizer's reserved ids as its mask.
"""

from ml_collections import ConfigDict, config_dict

LAYERS = 61


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.target = ConfigDict({"source": "deepseek-ai/DeepSeek-V3", "dtype": "bfloat16"})
    config.target.architecture = {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    }

    config.drafter = ConfigDict({"source": "", "proposal": "argmax"})
    config.drafter.block_size = config_dict.placeholder(int)  # None: as trained (16)
    config.drafter.architecture = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 5,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "num_target_layers": LAYERS,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 128799, "target_layer_ids": [1, 15, 30, 44, 58]},
    }

    config.generation = ConfigDict({"max_tokens": 1024, "temperature": 0.0})
    config.cache = ConfigDict({"rows": 32, "max_length": 8192, "page_size": 256})
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 16, "tensor": 8})
    return config
