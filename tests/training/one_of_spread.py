"""A training run whose target lies over all processes, by as many as there are: the same run with one and with two.

    python -m tests.training.one_of_spread WORKDIR PROCESS PORT ANSWERS MESH [hang] [mixture | hybrid]

is one of two processes with two devices each, both on this machine; ANSWERS is a response store and MESH such as
fsdp=2,tensor=2. With `hang` the first evaluation never ends, see one_of_two.py; with a word of
`TARGETS` the target is that one.
"""

from __future__ import annotations

import pathlib
import sys

import jax

from dflash_jax.data.responses import Response, ResponseStore
from dflash_jax.models.target import random_target
from dflash_jax.sharding import MeshConfig
from dflash_jax.training.loop import TrainResult, train
from tests.training import one_of_two, toy

STEPS = 4
TARGETS = {"dense": toy.target_config, "mixture": toy.mixture_config, "hybrid": toy.hybrid_config}


def store(directory: pathlib.Path) -> None:
    """A response store of the samples that `toy.data` has, as if another engine had answered."""
    with ResponseStore(directory, {"made": "elsewhere"}) as opened:
        for sample in toy.data().samples:
            begin = int(sample.loss_mask_S.argmax())
            ids = sample.token_S.tolist()
            opened.append([Response(sample.id, "toy", tuple(ids[:begin]), tuple(ids[begin:]), "stop", 0, "greedy", ())])


def run(
    workdir: str | pathlib.Path,
    answers: str | pathlib.Path,
    axes: dict[str, int],
    target: str = "dense",
    hang: bool = False,
) -> TrainResult:
    """Steps on a mesh, with a checkpoint and an evaluation every second step; with `hang` the first evaluation never
    ends."""
    config = toy.experiment(
        stop_after=STEPS, eval_every=2, save_every=2, save_every_minutes=None, export_weights="ema"
    )  # fmt: skip
    config.mesh = {"data": 1, **axes}
    config.drafter.markov_rank = 3
    config.step.update(accumulation=1, scan_target="fsdp" in axes)
    if target != "dense":
        config.drafter.init_layers = ()  # experts and recurrent layers are nothing that a drafter could copy
    config.data = {"batch_size": 4, "seq_len": 24, "features": False, "stores": (str(answers),), "seed": 5}
    mesh = MeshConfig(**config.mesh.to_dict()).make()
    evaluate = one_of_two.hang if hang else one_of_two.evaluate
    return train(config, workdir, target=random_target(TARGETS[target](), 0, mesh=mesh), evaluate=evaluate)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
    mesh = {axis: int(size) for axis, size in (word.split("=") for word in sys.argv[5].split(","))}
    names = [word for word in sys.argv[6:] if word in TARGETS] or ["dense"]
    print(run(sys.argv[1], sys.argv[4], mesh, names[0], hang="hang" in sys.argv[6:]))
