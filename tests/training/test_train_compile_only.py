"""train.py --compile_only: a run's own step, abstract, through the TPU compiler; with and without cached features."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.config import ConfigError
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.responses import Sample
from dflash_jax.training.adapter import configured_drafter
from dflash_jax.training.compile_only import abstract_batch, abstract_train_step
from training import tiny_train_compile

HERE, ROOT = pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[2]


def train(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train.py"), f"--config={HERE / 'tiny_train_compile.py'}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=ROOT)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install libtpu)")
@pytest.mark.parametrize(
    ("features", "packing"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_compiles_and_fits(tmp_path, features, packing):
    path = tmp_path / "stats.json"
    done = train(
        "--compile_only", "--topology=v5e:2x2", f"--stats_json={path}", f"--config.data.features={features}",
        f"--config.data.packing={packing}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    stats = json.loads(path.read_text())
    assert (stats["fits"], stats["missing_bytes"], stats["devices"]) == (True, 0, 4)
    kinds = stats["bytes_per_device"]
    assert kinds["total"] == sum(size for kind, size in kinds.items() if kind != "total")
    assert kinds["average"] == kinds["drafter_masters"] > 0
    assert kinds["optimizer"] == pytest.approx(2 * kinds["drafter_masters"], rel=1e-3)  # two moments
    known = sum(kinds[kind] for kind in ("target_weights", "drafter_masters", "optimizer", "average", "batch"))
    assert stats["xla"]["arguments"] >= known * 0.999
    assert min(stats["flops"], stats["bytes"], stats["roofline_seconds"]) > 0
    assert "It fits" in done.stdout


def test_flags_that_do_not_go_together(tmp_path):
    assert "--workdir is needed to train" in train().stderr
    assert "belong together" in train("--compile_only").stderr
    assert "--compile_only makes no data" in train("--compile_only", "--topology=v5e:2x2", "--data_only").stderr


@pytest.fixture(scope="module")
def settings():
    config = tiny_train_compile.get_config()
    target, _ = read_architectures("", config.target.architecture.to_dict())
    return config, target, configured_drafter(config.drafter, target)


def test_layout_and_shapes(settings):
    config, target, drafter = settings
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    step, state, frozen, batch = abstract_train_step(config, target, drafter, jnp.bfloat16, mesh)
    assert frozen.target is None
    assert frozen.shared.head_DxV.shape == (256, 200)  # the pruned vocabulary's
    assert frozen.target_to_draft_V.shape == (512,)
    assert batch["taps_BxSxTD"].shape == (config.data.batch_size, 256, 2 * 256)
    with sharding.use(mesh):
        after, metrics = jax.eval_shape(step, state, frozen, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert math.prod(metrics["grad_norm"].shape) == 1


@pytest.mark.parametrize("packing", [False, True])
def test_the_batch_is_that_of_the_iterator(settings, packing):
    """Names, shapes and dtypes, or a run would compile another step than the one that was looked at."""
    config, _, _ = settings
    config = ConfigDict(config)
    config.data.packing = packing
    abstract = abstract_batch(config, sharding.make_mesh(data=2), 256, None)
    token_S = np.arange(9, dtype=np.int32)
    samples = [Sample(str(i), token_S, token_S > 2) for i in range(8)]
    real = next(make_iterator(samples, batch_size=4, seq_len=config.data.seq_len, seed=0, packing=packing))
    shapes = {name: (x.shape, jnp.dtype(x.dtype)) for name, x in real.items()}
    assert {name: (x.shape, jnp.dtype(x.dtype)) for name, x in abstract.items()} == shapes


def test_rows_stay_on_their_devices_where_fsdp_cuts_the_weights(settings):
    """XLA would cut activations as the table is cut, along the hidden dimension, and keep all rows on each device."""
    config, target, drafter = settings
    config = config.copy_and_resolve_references()
    config.data.update({"batch_size": 8, "seq_len": 256, "features": False})
    config.step.num_anchors = 32
    target = dataclasses.replace(target, num_layers=2, layer_types=target.layer_types[:2], moe=None)
    drafter = dataclasses.replace(drafter, target_layer_ids=(0, 1), num_target_layers=2)
    sizes = {}
    for axis in ("data", "fsdp"):
        mesh = sharding.make_mesh(**{axis: 8})
        step, *arguments = abstract_train_step(config, target, drafter, jnp.float32, mesh)
        with sharding.use(mesh):
            sizes[axis] = step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert sizes["fsdp"] < 1.5 * sizes["data"], sizes


def test_rows_must_divide(settings):
    config, _, _ = settings
    with pytest.raises(ConfigError, match=r"data.batch_size is 4, must be a multiple of the mesh's 8 data shards"):
        abstract_batch(config, sharding.make_mesh(data=8), 256, None)
