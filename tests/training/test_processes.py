"""Two processes with two devices each against one with four: the same run, written once."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from dflash_jax import load_drafter, sharding
from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh
from dflash_jax.training import from_config, processes
from tests.training import one_of_two, toy


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def arrays(workdir, step):
    """{path: array} of a checkpoint, on one device: the mesh that saved it may not exist here."""
    from orbax.checkpoint import v1 as ocp

    checkpointer = ocp.training.Checkpointer(workdir / "checkpoints")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = checkpointer.checkpointables_metadata(step).metadata["state"]
    abstract = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for path, x in stored.items()}
    return checkpointer.load_checkpointables(step, {"state": abstract})["state"]


def compare(ours, theirs):
    """Metrics and states of two runs agree; each line stands once."""
    assert [(x["step"], x["kind"]) for x in lines(ours)] == [(x["step"], x["kind"]) for x in lines(theirs)]
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        if one["kind"] == "eval":
            assert one["rounds"] == other["rounds"]
        else:
            for name in ("loss", "grad_norm", "accuracy", "chain_tau", "blocks"):
                np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow  # processes that share two cores wait for each other
def test_two_processes_train_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one_of_two.run(one, 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.one_of_two", two, str(i), port],
            cwd=pathlib.Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    compare(two, one)
    assert [x["kind"] for x in lines(two)].count("eval") == 2
    ours, theirs = arrays(two, 4), arrays(one, 4)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-5, err_msg=path)
    assert {p.name for p in two.iterdir()} == {p.name for p in one.iterdir()}
    best = [json.loads((workdir / "best.json").read_text()) for workdir in (one, two)]
    assert best[0] == best[1]
    drafters = [load_drafter(workdir / "export", toy.target(), dtype="float32") for workdir in (one, two)]
    for a, b in zip(*(jax.tree.leaves(d.params) for d in drafters), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)  # stored in bfloat16

    # What two processes saved, one goes on with.
    one_of_two.run(one, 6)
    one_of_two.run(two, 6)
    compare(two, one)


def test_one_process_changes_nothing():
    target = toy.target()
    assert processes.here(target) is target and processes.is_first()
    assert processes.share([1, 2, 3]) == [1, 2, 3] and processes.gather([[1], [2, 3]], 2, 5) == [[1], [2, 3]]
    assert processes.in_turn(lambda: 7) == 7 and processes.of_the_first((0.1,)) == (0.1,)


def test_a_view_of_this_process_is_the_same_memory():
    mesh = make_mesh(4, 2)
    params = toy.target(mesh=mesh).params
    ours = sharding.on_this_process(params, mesh)  # all devices are this process's
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(ours), strict=True):
        assert a.sharding == b.sharding
        pointers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in (a, b)]
        assert pointers[0] == pointers[1]


@pytest.mark.parametrize(
    ("data", "tensor", "message"),
    [
        (2, 2, "mesh has 4 devices .* must use all 8 of the 2 processes"),
        (1, 8, "mesh.data is 1, must be a multiple of the 2"),
    ],
)
def test_meshes_that_do_not_suit_the_processes_are_refused(monkeypatch, data, tensor, message):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        from_config.configured_mesh(ConfigDict({"mesh": {"data": data, "tensor": tensor}}))
