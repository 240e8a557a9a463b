"""A DFlash drafter for gpt-oss-20b: eight layers, block 8, five taps, as published.

    python train.py --config=configs/gpt_oss_20b.py --compile_only --topology=v6e:4x4
    python train.py --config=configs/gpt_oss_20b.py --workdir=/SHARED/gpt_oss_20b --distributed \\
        --config.mesh.data=4 --config.mesh.fsdp=4     on every one of the slice's four hosts

The published MXFP4 experts are dequantised to bf16 on load (42 GB). Memory, time, tau: not yet run; the published
drafter has tau 4.3 on HumanEval (arXiv 2602.06036, SGLang, 8 rows).

Variant `:tiny`: a random gpt-oss with four experts, sinks and sliding layers, the whole way in about two minutes on two
CPU cores; tau stays near 1.
"""

from ml_collections import ConfigDict

from configs import base

GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ("sliding_attention", "full_attention") * 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TINY = {
    **GPT_OSS,
    **base.SMALL,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ("sliding_attention", "full_attention") * 2,
}


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant)
    config = base.experiment(
        "openai/gpt-oss-20b", GPT_OSS, num_layers=8, block_size=8, mask_token_id=200000,
        target_layer_ids=(1, 6, 11, 16, 21), intermediate_size=7680, num_heads=64, num_kv_heads=8,
        head_dim=64,
    )  # fmt: skip
    config.mesh.fsdp = 16
    return base.tiny(config, TINY) if variant == "tiny" else config
