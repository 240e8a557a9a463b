"""A DFlash drafter for Qwen3-8B: five layers, block 16, as published (z-lab/Qwen3-8B-DFlash-b16).

    python train.py --config=configs/qwen3_8b.py --compile_only --topology=v6e:4x4
    python train.py --config=configs/qwen3_8b.py --workdir=/SHARED/qwen3_8b --distributed \\
        --config.mesh.data=4 --config.mesh.fsdp=4     on every one of the slice's four hosts
    python serve.py --config=configs/qwen3_8b.py --config.mesh.fsdp=1 --config.drafter.source=/SHARED/qwen3_8b/best \\
        --prompt="..."

The target is frozen and runs in each step (no features on disk), weights cut over `fsdp`. A step takes 11.7 of 32 GiB
on each device of v6e:4x4, and at least 0.13 to 0.2 s (docs/pods.md): compiled with `fsdp` over all 16, while a run on
several hosts keeps the target whole on each (`data` leads from host to host). Time and tau: not yet run; the published
drafter has tau 6.5 on HumanEval without thinking (arXiv 2602.06036, greedy).

Variant `:tiny`: a random Qwen3 of width 64, the whole way in about a minute on two CPU cores; tau stays near 1.
"""

from ml_collections import ConfigDict

from configs import base

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
TINY = QWEN3 | base.SMALL_DENSE


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant)
    config = base.experiment(
        "Qwen/Qwen3-8B", QWEN3, num_layers=5, block_size=16, mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33),
    )  # fmt: skip
    config.mesh.fsdp = 16
    base.set_thinking(config, False)
    return base.tiny(config, TINY) if variant == "tiny" else config
