"""A training run on a mesh of 2 x 2, by as many processes as there are: the same run with one and with two.

    python -m tests.training.one_of_two WORKDIR PROCESS PORT [STEPS] [hang] [apart]

is one of two processes with two devices each, both on this machine. With `hang` its first evaluation never ends: the
run stands still behind step 2, whose checkpoint is written meanwhile, until somebody kills it. With `apart` each has
other data, as where the disk is not shared.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

from dflash_jax.decoding.generate import generate
from dflash_jax.sharding import make_mesh
from dflash_jax.training import processes
from dflash_jax.training.acceptance import Evaluate
from dflash_jax.training.loop import TrainResult, train
from tests.training import toy

PROMPTS = [[7, 9], [11, 5, 30], [21], [8, 8, 4, 17], [40, 6]]
TOKENS = 10


def evaluate(target, drafter) -> dict[str, Any]:
    """Acceptance over all prompts, from each process's share or all together; plain answers must be the same."""
    mine = processes.share(PROMPTS, target.mesh)
    drafted = generate(target, drafter, mine, max_tokens=TOKENS, batch=4)
    plain = generate(target, None, mine, max_tokens=TOKENS, batch=4)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    rounds = processes.gather([r.acceptance for r in drafted], len(PROMPTS), TOKENS, target.mesh)
    return {"tau": (TOKENS - 1) * len(PROMPTS) / sum(map(len, rounds)), "rounds": rounds}


def run(
    workdir: str, stop_after: int, data: int = 2, evaluate: Evaluate = evaluate, apart: bool = False
) -> TrainResult:
    """Steps up to `stop_after` on a mesh of data x 2, with a checkpoint every second step."""
    mesh = make_mesh(data, 2)
    config = toy.experiment(
        stop_after=stop_after, eval_every=2, save_every=2, save_every_minutes=None, export_weights="ema"
    )  # fmt: skip
    config.mesh.update(data=data, tensor=2)
    config.step.accumulation = 1
    rows = toy.data(process=jax.process_index(), processes=jax.process_count())
    if apart:
        rows.facts["tokens_sha256"] = str(jax.process_index())
    return train(config, workdir, target=toy.target(mesh=mesh), data=rows, evaluate=evaluate)


def hang(target, drafter) -> dict[str, Any]:
    time.sleep(3600)
    raise AssertionError("nobody killed this process")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
    steps = int(next((word for word in sys.argv[4:] if word.isdigit()), 4))
    options = sys.argv[4:]
    print(run(sys.argv[1], steps, evaluate=hang if "hang" in options else evaluate, apart="apart" in options))
