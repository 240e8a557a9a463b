"""A DFlash drafter for Llama-3.1-8B-Instruct: five layers, block 10 and five taps, as published.

    python train.py --config=configs/llama31_8b.py --compile_only --topology=v6e:4x4
    python train.py --config=configs/llama31_8b.py --workdir=/SHARED/llama31_8b --distributed \\
        --config.mesh.data=4 --config.mesh.fsdp=4     on every one of the slice's four hosts

The mask is one of the tokenizer's reserved ids (the published one is not known to us), so a drafter from elsewhere is
loaded with its own. Memory, time, tau: not yet run; the published drafter has tau 4.9 on HumanEval (arXiv 2602.06036,
SGLang, greedy).

Variant `:tiny`: a random Llama with llama3 rotary scaling, the whole way in about a minute on two CPU cores; tau stays
near 1.
"""

from ml_collections import ConfigDict

from configs import base

LLAMA31 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TINY = LLAMA31 | base.SMALL_DENSE


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant)
    config = base.experiment(
        "meta-llama/Llama-3.1-8B-Instruct", LLAMA31, num_layers=5, block_size=10, mask_token_id=128002,
        target_layer_ids=(1, 8, 15, 22, 29),
    )  # fmt: skip
    config.mesh.fsdp = 16
    return base.tiny(config, TINY) if variant == "tiny" else config
