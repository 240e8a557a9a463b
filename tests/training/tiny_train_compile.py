"""A config for `train.py --compile_only`: the shipped one with a small target that is not there, on four devices."""

import importlib.util
import pathlib

from ml_collections import ConfigDict

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "smollm2_135m_dflash.py"


def get_config() -> ConfigDict:
    spec = importlib.util.spec_from_file_location("shipped", SHIPPED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("tiny")
    config.target = ConfigDict({"source": "nowhere", "dtype": "bfloat16"})
    config.target.architecture = {
        "model_type": "qwen3_moe", "num_hidden_layers": 5, "moe_intermediate_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "vocab_size": 512, "hidden_size": 256,
        "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
    }  # fmt: skip
    config.optimizer.ema_decay = 0.9
    config.mesh = ConfigDict({"data": 1, "fsdp": 2, "expert": 1, "tensor": 2})
    return config
