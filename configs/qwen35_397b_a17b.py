"""Qwen3.5-397B-A17B in bf16 and a DFlash drafter for it: training and serving, on a slice of 128 devices.

    python serve.py --config=configs/qwen35_397b_a17b.py --compile_only --topology=v5p:4x4x8
    python serve.py --config=configs/qwen35_397b_a17b.py --compile_only --topology=tpu7x:4x4x4
    python train.py --config=configs/qwen35_397b_a17b.py:train --compile_only --topology=v5p:4x4x8

say, without a TPU and without the 800 GB of weights, what a round of 32 rows of 8k tokens, and a training step with the
target in it, take on each device. Results: docs/pods.md. (tpu7x:4x4x4 is 64 chips of two devices each.) The variant
`train` differs in its mesh, because a step wants rows on many devices and a round few hops, and in scanning the
target's layers, which compiles faster.

On a slice, whose hosts share /SHARED, the target lies over all of them: it answers on the mesh that decodes well, and
the drafter trains on the other.

    python train.py --config=configs/qwen35_397b_a17b.py --workdir=/SHARED/run --distributed --data_only
    python train.py --config=configs/qwen35_397b_a17b.py:train --workdir=/SHARED/run --distributed

`target.source` is what loading reads. Time and tau: not yet run. The variant evaluates nothing (docs/pods.md).

`architecture` is the published config.json as far as the decoder reads it. The drafter's is what one trained by the
conventions of the published Qwen3.5 drafters has: five layers, block 16, five taps by the default rule.

Variant `:tiny`: a random target of the same family with four experts, the whole way in about two minutes on two CPU
cores; tau stays near 1.
"""

from ml_collections import ConfigDict

from configs import base

LAYERS = 60
QWEN35_MOE = {
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
TINY = {
    **QWEN35_MOE["text_config"],
    **base.SMALL_DELTA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant, ("train", "tiny"))
    config = base.experiment(
        "Qwen/Qwen3.5-397B-A17B", QWEN35_MOE, num_layers=5, block_size=16, mask_token_id=248070,
        target_layer_ids=(1, 15, 29, 43, 57), intermediate_size=12288, num_heads=32, num_kv_heads=8,
        head_dim=128,
    )  # fmt: skip
    config.mesh.update({"expert": 16, "tensor": 8})
    if variant == "train":
        return base.over_hosts(config)
    return base.tiny(config, TINY) if variant == "tiny" else config
