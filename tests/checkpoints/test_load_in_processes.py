"""Two processes of four devices each load one checkpoint, convert it together, and load what they wrote."""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
from synthetic_397b import CUT, config, tensors, write_cut

from dflash_jax.checkpoints.load_target import load_target

BYTES = {"BF16": 2, "F32": 4}


def test_each_process_reads_its_experts_and_both_write_one_checkpoint(tmp_path):
    source, out = write_cut(tmp_path), tmp_path / "out"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = pathlib.Path(__file__).with_name("load_in_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), address, "2", str(i), str(source), str(out)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends[0][1] + ends[1][1]
    found = [json.loads(stdout.splitlines()[-1]) for stdout, _ in ends]
    assert all(process["same"] and process["devices"] == 8 for process in found)
    for name, shape, kind in tensors(config(**CUT), text_only=True):
        size = math.prod(shape) * BYTES[kind]
        # (expert 4, tensor 2) over two processes: each has half of the experts, and both tensor shards.
        for process in found:
            if ".experts." in name:
                assert process["read"][name] == size // 2, name
            else:
                assert 0 < process["read"][name] <= size, name
    assert not any("mtp" in name or "visual" in name for name in found[0]["read"])
    assert load_target(out).dtype == np.float32
