"""DeepSeek-V3 in bf16 and a DFlash drafter for it: training and serving, on a slice of 128 devices.

    python serve.py --config=configs/deepseek_v3.py --compile_only --topology=v5p:4x4x8
    python serve.py --config=configs/deepseek_v3.py --compile_only --topology=tpu7x:4x4x4
    python train.py --config=configs/deepseek_v3.py:train --compile_only --topology=v5p:4x4x8

say, without a TPU and without the weights (1.3 TB in bf16; the published FP8 files are dequantised on load), what a
round of 32 rows of 8k tokens, and a training step with the target in it, take on each device. Results: docs/pods.md.
(tpu7x:4x4x4 is 64 chips of two devices each.) The variant `train` differs in its mesh and in
scanning the target's layers.

On a slice, whose hosts share /SHARED, the target lies over all of them: it answers on the mesh that decodes well, and
the drafter trains on the other.

    python train.py --config=configs/deepseek_v3.py --workdir=/SHARED/run --distributed --data_only
    python train.py --config=configs/deepseek_v3.py:train --workdir=/SHARED/run --distributed

`target.source` is what loading reads. Time and tau: not yet run. The variant evaluates nothing (docs/pods.md).

`architecture` is the published config.json as far as the decoder reads it. No DFlash drafter of this target is known;
the one here has the shape that the conventions would give it (five layers, block 16, five taps by the default rule)
and one of the tokenizer's reserved ids as its mask.

Variant `:tiny`: a random target of the same family, the whole way in about two minutes on two CPU cores; tau stays near
1.
"""

from ml_collections import ConfigDict

from configs import base

LAYERS = 61
DEEPSEEK_V3 = {
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
TINY = DEEPSEEK_V3 | {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant, ("train", "tiny"))
    config = base.experiment(
        "deepseek-ai/DeepSeek-V3", DEEPSEEK_V3, num_layers=5, block_size=16, mask_token_id=128799,
        target_layer_ids=(1, 15, 30, 44, 58), num_heads=56, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    config.mesh.update({"expert": 16, "tensor": 8})
    if variant == "train":
        return base.over_hosts(config)
    return base.tiny(config, TINY) if variant == "tiny" else config
