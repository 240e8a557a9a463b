"""Qwen3.5-397B-A17B in bf16 with a DFlash drafter, 32 rows of 8k tokens, on a slice of 128 devices.

    python serve.py --config=configs/qwen35_397b_a17b.py --compile_only --topology=v5p:4x4x8
    python serve.py --config=configs/qwen35_397b_a17b.py --compile_only --topology=tpu7x:4x4x4

say, without a TPU and without the 800 GB of weights, what the decode step takes on each device. Results: docs/pods.md.
(tpu7x:4x4x4 is 64 chips of two devices each.)

`target.source` is what loading would read. Answering was not run: serve.py is one process, and such a slice has many
hosts.

`architecture` is the published config.json as far as the decoder reads it. The drafter's is what one trained by the
conventions of the published Qwen3.5 drafters has: five layers, block 16, five taps by the default rule.
"""

from ml_collections import ConfigDict, config_dict

LAYERS = 60


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.target = ConfigDict({"source": "Qwen/Qwen3.5-397B-A17B", "dtype": "bfloat16"})
    config.target.architecture = {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "vocab_size": 248320,
            "hidden_size": 4096,
            "num_hidden_layers": LAYERS,
            "full_attention_interval": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attn_output_gate": True,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        },
    }

    config.drafter = ConfigDict({"source": "", "proposal": "argmax"})
    config.drafter.block_size = config_dict.placeholder(int)  # None: as trained (16)
    config.drafter.architecture = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "num_target_layers": LAYERS,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 15, 29, 43, 57]},
    }

    config.generation = ConfigDict({"max_tokens": 1024, "temperature": 0.0})
    config.cache = ConfigDict({"rows": 32, "max_length": 8192, "page_size": 256})
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 16, "tensor": 8})
    return config
