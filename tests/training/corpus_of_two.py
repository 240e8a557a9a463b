"""Prompts to batches by as many processes as there are.

    python -m tests.training.corpus_of_two WORKDIR PROCESS PORT [spread]

is one of two on this machine; it prints the tokens of its batches as JSON. With `spread` each has two devices, and the
target lies over all four.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys

import jax

from dflash_jax.sharding import make_mesh
from dflash_jax.training import corpus
from dflash_jax.training.corpus import TrainingData, open_training_data
from dflash_jax.training.dry_run import tiny_target


def run(workdir: str | pathlib.Path, mesh: jax.sharding.Mesh | None = None) -> TrainingData:
    """Ten prompts, answered by a random target, with cached features."""
    values = {
        "batch_size": 4, "seq_len": 192,
        "answers": {"greedy": {"prompts": {"instruction": 10}, "max_new_tokens": 8, "batch_size": 4}},
    }  # fmt: skip
    return open_training_data(values, tiny_target(mesh=mesh), (1, 3), pathlib.Path(workdir))


def rows(data: TrainingData) -> list[tuple[list[int], int, float]]:
    """(tokens, epoch, sum of the taps) of the rows of six batches."""
    found = []
    for _ in range(6):
        batch = next(data.batches)
        for tokens_S, epoch, taps_SxTD in zip(batch["tokens_BxS"], batch["epoch_B"], batch["taps_BxSxTD"], strict=True):
            found.append((tokens_S.tolist(), int(epoch), float(taps_SxTD.astype("float32").sum())))
    return found


if __name__ == "__main__":
    spread = sys.argv[4:] == ["spread"]
    if spread:
        corpus.compute_features = functools.partial(corpus.compute_features, tokens_per_batch=256)  # several batches
        jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
    print(json.dumps(rows(run(sys.argv[1], make_mesh(fsdp=2, tensor=2) if spread else None))))
