"""Runs of two processes on this machine: starting them, and reading what they leave."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np


def lines(workdir):
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def arrays(workdir, step):
    """{path: array} of a checkpoint, on one device: the mesh that saved it may not exist here."""
    from orbax.checkpoint import v1 as ocp

    checkpointer = ocp.training.Checkpointer(workdir / "checkpoints")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = checkpointer.checkpointables_metadata(step).metadata["state"]
    abstract = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for path, x in stored.items()}
    return checkpointer.load_checkpointables(step, {"state": abstract})["state"]


def start_two(module, workdir, *options):
    """Both processes of `python -m module WORKDIR PROCESS PORT OPTIONS`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, workdir, str(i), port, *options],
            cwd=pathlib.Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip


def wait_for(started):
    """Both end, and end well."""
    for process in started:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors


def kill_behind(started, workdir, step):
    """Kills both once the checkpoint of a step is whole."""
    try:
        deadline = time.monotonic() + 400
        while not (workdir / "checkpoints" / str(step) / "commit_success.txt").exists():
            for process in started:
                assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def same_bit_by_bit(workdir, expected, step):
    """Two runs said the same, but for the clock, and came to the same state."""
    said = [lines(folder) for folder in (workdir, expected)]
    for line in said[0] + said[1]:
        for clock in ("seconds", "blocks_per_s"):
            line.pop(clock, None)
    assert said[0] == said[1]
    ours, theirs = arrays(workdir, step), arrays(expected, step)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
