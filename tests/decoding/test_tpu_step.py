"""Decoding on a TPU mesh passes the real TPU compilers, without a TPU: its kernels are mapped over the mesh."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("tpu_step_compile.py")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu): nothing here can compile for a TPU",
)
def test_programs_compile_for_four_chips():
    done = subprocess.run([sys.executable, str(SCRIPT), "v5e:2x2"], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r for r in reports if "error" in r] == []
    # A kernel a layer: two of the target, one of the drafter. Paged, two of each: pages at home, pages elsewhere.
    assert {r["name"]: r["kernels"] for r in reports} == {
        "step, contiguous": 3, "step with logits rules, contiguous": 3,
        "several steps, paged": 6, "prefill, paged": 4, "admission, paged": 0,
    }  # fmt: skip
