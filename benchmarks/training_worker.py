"""Trains with this program: our side of benchmarks/compare_training.py, which starts it.

The same protocol as specforge_worker.py: {"method": "loss"} and {"method": "train", "steps": N}, one JSON line each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dflash_jax.checkpoints.drafter_config import drafter_config_from_hf
from dflash_jax.checkpoints.drafter_names import drafter_placements
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.placement import load_params
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import abstract_model
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import Frozen, StepConfig, init_state, make_loss, make_train_step, put_batch


class Trainer:
    """The train step over cached features, a batch after another."""

    def __init__(self, arguments: argparse.Namespace):
        folder = pathlib.Path(arguments.inputs)
        inputs = load_file(folder / "inputs.safetensors")
        dtype = jnp.dtype(arguments.dtype)
        config = drafter_config_from_hf(read_json(folder / "drafter" / "config.json", required=True))
        self.graphdef, abstract = abstract_model(DFlash, config, jnp.float32)
        params = load_params(abstract, drafter_placements(config), SafetensorsReader(folder / "drafter"), mesh=None)
        self.config = StepConfig(
            num_anchors=arguments.anchors, block_size=arguments.block_size, compute_dtype=arguments.dtype,
            loss=LossConfig("hard", gamma=4.0),
        )  # fmt: skip
        self.drafter_config = config
        optimizer_config = OptimizerConfig(learning_rate=1e-4, total_steps=10_000)
        optimizer = make_optimizer(optimizer_config)
        self.step = make_train_step(self.config, self._loss(self.config), optimizer, optimizer_config)
        self.state = init_state(params, optimizer, 0, None)
        self.frozen = Frozen(
            SharedWeights(
                embedding_VxD=jnp.asarray(inputs["embedding"], dtype), head_DxV=jnp.asarray(inputs["head"].T, dtype)
            )
        )
        rows = arguments.rows
        length = inputs["tokens"].shape[1]
        self.batches = [
            {
                "tokens_BxS": inputs["tokens"][i : i + rows],
                "loss_mask_BxS": inputs["loss_mask"][i : i + rows].astype(bool),
                "length_B": np.full(rows, length, np.int32),
                "id_B": np.arange(i, i + rows, dtype=np.int32),
                "epoch_B": np.zeros(rows, np.int32),
                "taps_BxSxTD": np.asarray(inputs["taps"][i : i + rows], dtype),
            }
            for i in range(0, len(inputs["tokens"]), rows)
        ]
        self.taken = 0

    def _loss(self, config: StepConfig):
        # Nothing of the target is used but what `Frozen` holds and its soft cap.
        return make_loss(config, self.graphdef, self.drafter_config, _NoTarget())

    def loss(self) -> dict:
        """The first batch's loss where nothing is drawn: every position that can be an anchor is one."""
        batch = self.batches[0]
        config = dataclasses.replace(self.config, num_anchors=batch["tokens_BxS"].shape[1])
        sums = jax.jit(self._loss(config))(self.state.params, self.state.key, self.frozen, put_batch(batch, None))
        return {"loss": float(sums.loss / sums.denominator), "blocks": int(sums.blocks)}

    def train(self, steps: int) -> dict:
        """That many steps, each with its clock."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            batch = put_batch(self.batches[self.taken % len(self.batches)], None)
            self.state, metrics = self.step(self.state, self.frozen, batch)
            jax.block_until_ready((self.state, metrics))
            seconds.append(time.perf_counter() - start)
            self.taken += 1
        return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


@dataclasses.dataclass(frozen=True)
class _NoTarget:
    final_logit_softcap: None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name in ("inputs", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rows", "anchors", "block_size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    pipe, sys.stdout = sys.stdout, sys.stderr
    trainer = Trainer(arguments)
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        said = trainer.loss() if question["method"] == "loss" else trainer.train(question["steps"])
        print(json.dumps(said), file=pipe, flush=True)


if __name__ == "__main__":
    main()
