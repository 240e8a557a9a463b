"""A config for `serve.py --compile_only`: a target of two layers with experts, its drafter, nothing on disk."""

from ml_collections import ConfigDict

SHAPE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}  # fmt: skip


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.target = ConfigDict({"source": "nowhere", "dtype": "bfloat16"})
    config.target.architecture = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, **SHAPE,
    }  # fmt: skip
    config.drafter = ConfigDict({"source": "", "proposal": "argmax"})
    config.drafter.architecture = {
        "num_hidden_layers": 1, "num_target_layers": 2, "block_size": 8,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}, **SHAPE,
    }  # fmt: skip
    config.generation = ConfigDict({"temperature": 0.0})
    config.cache = ConfigDict({"rows": 4, "max_length": 512, "page_size": 64})
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 2, "tensor": 2})
    return config
