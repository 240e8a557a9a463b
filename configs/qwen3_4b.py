"""A DFlash drafter for Qwen3-4B: five layers, block 16, as published (z-lab/Qwen3-4B-DFlash-b16).

    python train.py --config=configs/qwen3_4b.py --compile_only --topology=v6e:4x4
    python train.py --config=configs/qwen3_4b.py --workdir=/SHARED/qwen3_4b --distributed \\
        --config.mesh.data=4 --config.mesh.fsdp=4     on every one of the slice's four hosts

As configs/qwen3_8b.py otherwise. Memory, time, tau: not yet run; the published drafter has tau 6.6 on HumanEval
without thinking (arXiv 2602.06036, greedy).

Variant `:tiny`: a random Qwen3 with a tied head, the whole way in about a minute on two CPU cores; tau stays near 1.
"""

from ml_collections import ConfigDict

from configs import base, qwen3_8b

QWEN3 = qwen3_8b.QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}


def get_config(variant: str = "") -> ConfigDict:
    base.check_variant(variant)
    config = base.experiment(
        "Qwen/Qwen3-4B", QWEN3, num_layers=5, block_size=16, mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33),
    )  # fmt: skip
    config.mesh.fsdp = 16
    base.set_thinking(config, False)
    return base.tiny(config, qwen3_8b.TINY | {"tie_word_embeddings": True}) if variant == "tiny" else config
