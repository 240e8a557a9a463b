"""A training run on a mesh of 2 x 2, by as many processes as there are: the same run with one and with two.

    python -m tests.training.one_of_two WORKDIR PROCESS PORT

is one of two processes with two devices each, both on this machine.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from dflash_jax.decoding.generate import generate
from dflash_jax.sharding import make_mesh
from dflash_jax.training import processes
from dflash_jax.training.loop import TrainResult, train
from tests.training import toy

PROMPTS = [[7, 9], [11, 5, 30], [21], [8, 8, 4, 17], [40, 6]]
TOKENS = 10


def evaluate(target, drafter) -> dict[str, Any]:
    """Acceptance over all prompts, from each process's share; plain answers must be the same."""
    mine = processes.share(PROMPTS)
    drafted = generate(target, drafter, mine, max_tokens=TOKENS, batch=4)
    plain = generate(target, None, mine, max_tokens=TOKENS, batch=4)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    rounds = processes.gather([r.acceptance for r in drafted], len(PROMPTS), TOKENS)
    return {"tau": (TOKENS - 1) * len(PROMPTS) / sum(map(len, rounds)), "rounds": rounds}


def run(workdir: str, stop_after: int) -> TrainResult:
    mesh = make_mesh(2, 2)
    config = toy.experiment(stop_after=stop_after, eval_every=2, save_every_minutes=None, export_weights="ema")
    config.mesh.update(data=2, tensor=2)
    config.step.accumulation = 1
    data = toy.data(process=jax.process_index(), processes=jax.process_count())
    return train(config, workdir, target=toy.target(mesh=mesh), data=data, evaluate=evaluate)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
    print(run(sys.argv[1], 4))
