"""Checkpoints are written while training goes on, and a kill -9 meanwhile leaves the earlier ones whole."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import utils as orbax_utils
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.path import atomicity

from dflash_jax.training.checkpointing import Checkpoints, flatten
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import init_state
from tests.training import test_resume, toy

ROOT = pathlib.Path(__file__).parents[2]

# A run whose tenth step is written and never committed: the writer waits in front of the rename for ever.
NEVER_COMMITTED = """
import asyncio, pathlib, sys, tests.conftest
from orbax.checkpoint._src.path import atomicity
from tests.training import test_resume
workdir, commit = pathlib.Path(sys.argv[1]), atomicity.AtomicRenameTemporaryPath.finalize

async def finalize(self, *args, **kwargs):
    if pathlib.Path(str(self.get_final())).name == "10":
        (workdir / "held").touch()
        await asyncio.sleep(3600)
    return await commit(self, *args, **kwargs)

atomicity.AtomicRenameTemporaryPath.finalize = finalize
test_resume.run(workdir, save_every=5, stop_after=14)
"""


def logged(workdir) -> list[int]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_b79_killed_during_a_save(tmp_path):
    """Against an uninterrupted run: parameters, their average, moments, keys, losses and samples, bit by bit."""
    ids, whole = [], tmp_path / "whole"
    test_resume.run(whole, ids)
    workdir = tmp_path / "killed"
    workdir.mkdir()
    process = subprocess.Popen([sys.executable, "-c", NEVER_COMMITTED, str(workdir)], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 240
        # Steps behind the tenth are logged while it is being saved: the save does not hold them up.
        while not ((workdir / "held").exists() and logged(workdir)[-1:] >= [13]):
            assert time.monotonic() < deadline and process.poll() is None, process.stderr.read().decode()
            time.sleep(0.02)
        names = {path.name for path in (workdir / "checkpoints").iterdir()}
        assert "5" in names and "10" not in names and any(name.startswith("10.") for name in names)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    seen = []
    test_resume.run(workdir, seen)
    assert seen == ids[5 * 4 :]
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"5", "20"}  # nothing half written is left
    assert test_resume.losses(workdir) == test_resume.losses(whole)
    ours, theirs = test_resume.final_arrays(workdir), test_resume.final_arrays(whole)
    assert any(".ema" in path for path in theirs) and set(ours) == set(theirs)
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


@pytest.fixture
def state():
    _, params = toy.drafter(toy.drafter_config())
    return init_state(params, make_optimizer(OptimizerConfig()), 5, None)


def test_what_is_saved_is_what_was_given_though_it_is_donated(tmp_path, state, monkeypatch):
    """The writer is held up until the state's buffers hold other numbers."""
    commit, donated = atomicity.AtomicRenameTemporaryPath.create, []

    async def create(self, *args, **kwargs):
        deadline = time.monotonic() + 60
        while not donated:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return await commit(self, *args, **kwargs)

    expected = {path: np.array(x, copy=True) for path, x in flatten(state).items()}
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "create", create)
        checkpoints.save(state, {}, {})
        plain = state.replace(key=jnp.zeros(()))
        jax.block_until_ready(overwrite(plain))
        assert plain.step.is_deleted()
        donated.append(True)
        checkpoints.wait()
        monkeypatch.undo()
        _, params = toy.drafter(toy.drafter_config(), seed=9)
        restored, _ = checkpoints.restore(0, init_state(params, make_optimizer(OptimizerConfig()), 6, None))
    for path, leaf in flatten(restored).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def test_saving_does_not_ask_where_preemption_stops(tmp_path, state, monkeypatch):
    """jax would take the step of a checkpoint, named while it is written, for where training is; see `Checkpoints`."""
    asked = []
    monkeypatch.setattr(orbax_utils, "reached_preemption", lambda step: asked.append(step) or False)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {}, {})
        checkpoints.wait()
        assert checkpoints.latest == 0
    assert asked == []
    with ocp.training.Checkpointer(tmp_path / "as it is") as plain:
        plain.save_checkpointables(0, {"state": flatten(state)})
    assert asked  # else this test says nothing


def test_what_goes_wrong_in_the_background_is_raised(tmp_path, state, monkeypatch):
    async def finalize(self, *args, **kwargs):
        raise OSError("no space left")

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", finalize)
    checkpoints.save(state, {}, {})
    with pytest.raises(OSError, match="no space left"):
        checkpoints.wait()
