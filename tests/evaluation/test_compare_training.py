"""benchmarks/compare_training.py: our side takes the steps it says, and what is reported follows from them.

The other side needs a checkout of SpecForge; it is not run here.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.config import FULL, DrafterConfig, RopeConfig
from dflash_jax.drafters.dflash import DFlash

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import compare_training
import training_worker

VOCABULARY, WIDTH, ROWS, LENGTH = 40, 16, 2, 12


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    mask = np.zeros((2 * ROWS, LENGTH), np.uint8)
    mask[:, 4:] = 1
    save_file(
        {
            "tokens": rng.integers(4, VOCABULARY, (2 * ROWS, LENGTH)).astype(np.int32),
            "loss_mask": mask,
            "taps": rng.normal(size=(2 * ROWS, LENGTH, 2 * WIDTH)).astype(np.float32),
            "embedding": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
            "head": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
        },
        str(folder / "inputs.safetensors"),
    )
    config = DrafterConfig(
        hidden_size=WIDTH, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        rms_norm_eps=1e-5, rope=RopeConfig(10_000.0), vocab_size=VOCABULARY, block_size=3, mask_token_id=3,
        target_layer_ids=(0, 1), num_target_layers=3, layer_types=(FULL,), max_positions=64,
    )  # fmt: skip
    export_drafter(folder / "drafter", config, nnx.split(DFlash(config, jnp.float32, nnx.Rngs(0)))[1], dtype="float32")
    arguments = argparse.Namespace(inputs=str(folder), dtype="float32", rows=ROWS, anchors=4, block_size=3)
    return training_worker.Trainer(arguments)


def test_every_valid_anchor_counts_in_the_compared_loss(trainer):
    said = trainer.loss()
    assert said["blocks"] == ROWS * (LENGTH - 4 - 1)
    assert np.isfinite(said["loss"]) and said["loss"] > 0


def test_a_turn_trains_that_many_steps_on_batch_after_batch(trainer):
    before, taken = trainer.loss()["loss"], trainer.taken
    said = trainer.train(60)
    assert len(said["seconds"]) == 60 and min(said["seconds"]) > 0 and said["peak_bytes"] > 0
    assert trainer.taken == taken + 60
    assert trainer.loss()["loss"] < before


def test_the_ratio_is_taken_from_the_fastest_rival():
    methods = {
        "dflash_jax": {"seconds": [1.0, 2.0, 9.0]},
        "slow": {"seconds": [8.0, 8.0, 8.0]},
        "fast": {"seconds": [6.0, 3.0, 4.0]},
    }
    assert compare_training.summary(methods) == {"rival": "fast", "speedup": 2.0}
    assert methods["fast"]["median_s"] == 4.0 and methods["dflash_jax"]["quartiles_s"] == [1.5, 5.5]


def test_sides_that_do_not_compute_the_same_are_named():
    methods = {
        "dflash_jax": {"first_loss": 2.0, "blocks": 5},
        "same": {"first_loss": 2.0001, "blocks": 5},
        "apart": {"first_loss": 2.001, "blocks": 5},
        "fewer": {"first_loss": 2.0, "blocks": 4},
    }
    found = compare_training.wrong({"flags": {"dtype": "float32"}, "methods": methods})
    assert [line.split()[0] for line in found] == ["apart", "fewer"]
