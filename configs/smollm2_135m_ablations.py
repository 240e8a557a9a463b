"""What a drafter for SmolLM2-135M-Instruct gains from each choice: one thing changed at a time.

    python train.py --config=configs/smollm2_135m_ablations.py:natural --workdir=runs/natural
    python -m dflash_jax.training.sweep --config=configs/smollm2_135m_ablations.py --workdir=runs/ablations --run
    python -m dflash_jax.training.sweep --config=configs/smollm2_135m_ablations.py --workdir=runs/ablations --table

Without `--run` the commands are printed, to be spread over machines that share the folder. All points train on the same
answers, in the same order, from the same seed, and are measured on the same held-out prompts: `base` is a second stage
as in configs/smollm2_135m_dflash.py, one pass over 1,000 of the target's own answers, for a drafter of two layers
without a Markov head, whose slots count by position. What can not go on from the first stage's drafter starts from
target layers, as `scratch` does, and takes twice as many steps: depth and taps.
`--only=gamma` runs the points of one choice (`base` belongs to most of them).

A point takes about three minutes on two CPU cores: 250 steps of up to 128 blocks, and decoding. Answers are made once,
and states once for each choice of taps (6.9 kB a token for five). docs/benchmarks.md has the results.

    python -m dflash_jax.training.sweep --config=configs/smollm2_135m_ablations.py:tiny --workdir=runs/tiny --run

is the same with random weights of width 32, in minutes: a trial of the machinery, whose taus say nothing.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import smollm2_135m_dflash


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "natural", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; known are 'natural', 'tiny' and none")
    config = smollm2_135m_dflash.get_config(variant)
    config.drafter.num_layers = 2
    config.drafter.init_layers = (3, 4) if variant == "tiny" else (27, 29)
    config.drafter.markov_rank = 0
    config.loss.weighting = "decay"
    config.optimizer.ema_decay = 0.0
    config.run.export_weights = "raw"
    if variant == "":
        config.drafter.init_from = "runs/natural/export"
        config.data.answers.greedy.prompts = ConfigDict(
            {"code": 615, "tasks": 125, "instruction": 100, "reasoning": 100, "json": 60}
        )
        config.data.natural = ConfigDict()
        config.optimizer.total_steps = 250
        config.optimizer.warmup_steps = 25
        config.run.eval_every = 0  # at the end
        config.evaluation.prompts = ConfigDict({"code": 24, "instruction": 8, "reasoning": 8, "json": 8})
        config.evaluation.cost_repeats = 0  # beside other runs it would mislead
    return config


def sweep(variant: str = "") -> dict[str, dict[str, Any]]:
    """{point: fields of the recipe that it changes}; those of "tiny" fit its five layers and 259 ids."""
    if variant == "natural":
        raise ValueError("variant 'natural' is the first stage of all points, not a sweep; run it by train.py")
    tiny = variant == "tiny"
    points: dict[str, dict[str, Any]] = {"base": {}}
    # Layers that the first stage has not begin as no change; in `scratch` they are copies of late target layers.
    four = (1, 2, 3, 4) if tiny else (27, 29, 27, 29)
    points["layers-4"] = {"drafter.num_layers": 4, "drafter.init_layers": four}
    for rank in (8,) if tiny else (16, 64):
        points[f"markov-{rank}"] = {"drafter.markov_rank": rank}
    points["uniform"] = {"loss.weighting": "uniform"}
    for gamma in (2.0, 7.0):
        points[f"gamma-{gamma:g}"] = {"loss.gamma": gamma}
    for kind in ("dpace", "dpace_confidence", "dpace_continuation"):
        points[kind.replace("_", "-")] = {"loss.weighting": kind}
    for name, weights in (
        ("hard", {"hard": 1.0}),
        ("forward-kl", {"forward_kl": 1.0}),
        ("reverse-kl", {"hard": 0.1, "reverse_kl": 0.9}),
        ("total-variation", {"hard": 0.1, "total_variation": 0.9}),
        ("acceptance", {"hard": 0.1, "acceptance": 0.9}),
        ("forward-kl-total-variation", {"forward_kl": 0.5, "total_variation": 0.5}),
    ):
        points[f"loss-{name}"] = {
            f"loss.objective.{part}": weights.get(part, 0.0)
            for part in ("hard", "forward_kl", "reverse_kl", "total_variation", "acceptance")
        }
    for size in (100 if tiny else 8192, 0):
        points[f"vocabulary-{size or 'whole'}"] = {"drafter.draft_vocab_size": size}
    for block in (3, 8) if tiny else (4, 8):
        points[f"block-{block}"] = {"drafter.block_size": block}
    scratch = {"drafter.init_from": "", "optimizer.total_steps": 50 if tiny else 500}
    points["scratch"] = scratch
    for layers in ((4,), (1, 2, 3, 4)) if tiny else ((29,), (25, 26, 27, 29)):
        points[f"scratch-layers-{len(layers)}"] = scratch | {
            "drafter.num_layers": len(layers), "drafter.init_layers": layers,
        }  # fmt: skip
    for taps in ((2,), (0, 1, 3)) if tiny else ((15,), (1, 15, 28)):
        points[f"scratch-taps-{len(taps)}"] = scratch | {"drafter.target_layer_ids": taps}
    return points
