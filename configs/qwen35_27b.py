"""A DFlash drafter for Qwen3.5-27B: five layers, block 16, five taps, as published.

    python train.py --config=configs/qwen35_27b.py --compile_only --topology=v5p:2x2x4
    python train.py --config=configs/qwen35_27b.py --workdir=/SHARED/qwen35_27b --distributed \\
        --config.mesh.data=4 --config.mesh.fsdp=4     on every one of the slice's four hosts

Three of four layers of the target are recurrent (Gated DeltaNet), one of full attention. Memory, time, tau: not yet
run; the published drafter has tau 9.1 on HumanEval (thinking, SGLang).

Variant `:tiny`: a random Qwen3.5 with three recurrent layers and one of full attention, the whole way in about two
minutes on two CPU cores; tau stays near 1.
"""

from ml_collections import ConfigDict

from configs import base

QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
TINY = QWEN35 | base.SMALL_DENSE | base.SMALL_DELTA


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant)
    config = base.experiment(
        "Qwen/Qwen3.5-27B", QWEN35, num_layers=5, block_size=16, mask_token_id=248070,
        target_layer_ids=(1, 16, 31, 46, 61), num_heads=32, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    config.mesh.fsdp = 16
    return base.tiny(config, TINY) if variant == "tiny" else config
