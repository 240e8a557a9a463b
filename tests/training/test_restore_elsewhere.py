"""A checkpoint of eight devices in fresh processes that have one, two, and eight otherwise arranged (B80)."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from dflash_jax.sharding import make_mesh
from dflash_jax.training.checkpointing import Checkpoints, flatten
from tests.training import restore_elsewhere


@pytest.fixture(scope="module")
def saved_on_eight(tmp_path_factory):
    """(directory, digests, the next three losses): two steps of training on a 4 x 2 mesh, saved."""
    directory, mesh = tmp_path_factory.mktemp("eight"), make_mesh(4, 2)
    state, _ = restore_elsewhere.train(restore_elsewhere.fresh_state(mesh), mesh, range(2))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, {"position": 3}, {"fingerprint": {"seed": 5}})
    digests = restore_elsewhere.digests(state)
    return directory, digests, restore_elsewhere.train(state, mesh, range(2, 5))[1]


def test_b80_from_one_device_to_eight_and_back(tmp_path):
    """Bit-equal both ways, and the steps on eight are those on one."""
    mesh, one, eight = make_mesh(4, 2), tmp_path / "one", tmp_path / "eight"
    state, _ = restore_elsewhere.train(restore_elsewhere.fresh_state(None), None, range(2))
    expected = restore_elsewhere.digests(state)
    with Checkpoints(one) as checkpoints:
        checkpoints.save(state, {"position": 3}, {})
        spread, position = checkpoints.restore(2, restore_elsewhere.fresh_state(mesh, seed=2))
    assert position == {"position": 3} and restore_elsewhere.digests(spread) == expected
    assert any(not x.sharding.is_fully_replicated for x in flatten(spread).values())
    with Checkpoints(eight) as checkpoints:
        checkpoints.save(spread, {"position": 3}, {})
        back, _ = checkpoints.restore(2, restore_elsewhere.fresh_state(None, seed=2))
    assert restore_elsewhere.digests(back) == expected
    _, on_eight = restore_elsewhere.train(spread, mesh, range(2, 5))
    _, on_one = restore_elsewhere.train(back, None, range(2, 5))
    np.testing.assert_allclose(on_eight, on_one, rtol=1e-6)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (8, 1)])
def test_b80_a_fresh_process_with_other_devices_goes_on(saved_on_eight, data, tensor):
    directory, digests, losses = saved_on_eight
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.restore_elsewhere", directory, str(data), str(tensor)],
        cwd=pathlib.Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == data * tensor
    assert (found["step"], found["position"], found["facts"]) == (2, {"position": 3}, {"fingerprint": {"seed": 5}})
    assert found["digests"] == digests  # bit-equal
    assert found["elsewhere"] == [] and (found["split"] > 0) == (tensor > 1)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-6)
