"""A checkpoint restored in a fresh process, on a mesh of its own. Prints what came of it as JSON.

    python -m tests.training.restore_elsewhere CHECKPOINTS DATA TENSOR

The process has DATA * TENSOR devices, and no more: a mesh of the saving run could not be rebuilt here.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.models.target import place, random_target
from dflash_jax.sharding import make_mesh
from dflash_jax.training.checkpointing import Checkpoints, flatten
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import Frozen, StepConfig, TrainState, init_state, make_loss, make_train_step, put_batch
from tests.training import toy

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, total_steps=100, ema_decay=0.9)


def fresh_state(mesh: jax.sharding.Mesh | None, seed: int = 1) -> TrainState:
    _, params = toy.drafter(toy.drafter_config(), seed)
    return init_state(place(params, mesh), make_optimizer(OPTIMIZER), 5, mesh, ema=True)


def train(state: TrainState, mesh: jax.sharding.Mesh | None, seeds: range) -> tuple[TrainState, list[float]]:
    """One step a seed, each on a batch of its own: the new state and the mean loss of each step."""
    config = toy.drafter_config()
    graphdef, _ = toy.drafter(config)
    loss = make_loss(StepConfig(4, config.block_size, LossConfig()), graphdef, config, toy.target_config())
    step = make_train_step(
        StepConfig(4, config.block_size), loss, make_optimizer(OPTIMIZER), OPTIMIZER, mesh=mesh
    )  # fmt: skip
    frozen = Frozen(shared_weights(random_target(toy.target_config(), mesh=mesh)))
    losses = []
    for seed in seeds:
        batch = toy.batch(seed, rows=8, starts=(4,) * 8, ends=(24, 17, 20, 9, 24, 12, 24, 8))
        state, metrics = step(state, frozen, put_batch(batch, mesh))
        losses.append(float(metrics["sums"].loss / metrics["sums"].denominator))
    return state, losses


def digests(state: TrainState) -> dict[str, str]:
    """{path: dtype, shape and SHA-256 of the bytes} of every array."""
    result = {}
    for path, leaf in flatten(state).items():
        whole = np.asarray(leaf)
        result[path] = f"{whole.dtype}{list(whole.shape)} {hashlib.sha256(whole.tobytes()).hexdigest()}"
    return result


def main(directory: str, data: int, tensor: int) -> dict[str, Any]:
    mesh = None if data * tensor == 1 else make_mesh(data, tensor)
    with Checkpoints(directory) as checkpoints:
        step = checkpoints.latest
        # Another seed: whatever is not restored shows.
        like = fresh_state(mesh, seed=2)
        layout = {path: leaf.sharding for path, leaf in flatten(like).items()}
        state, position = checkpoints.restore(step, like)
        facts = checkpoints.facts(step)
    restored = digests(state)
    elsewhere = [p for p, x in flatten(state).items() if not x.sharding.is_equivalent_to(layout[p], x.ndim)]
    split = sum(not x.sharding.is_fully_replicated for x in flatten(state).values())
    _, losses = train(state, mesh, range(2, 5))
    return {
        "devices": len(jax.devices()), "step": step, "facts": facts, "position": position, "digests": restored,
        "elsewhere": elsewhere, "split": split, "losses": losses,
    }  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]) * int(sys.argv[3]))
    print(json.dumps(main(str(pathlib.Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))))
