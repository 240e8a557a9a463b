"""The kernels pass the real TPU compilers (XLA and Mosaic), without a TPU. Running them needs one."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("tpu_compile.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu): nothing here can compile for a TPU",
)


@functools.cache
def compiled(topology: str) -> dict[str, dict]:
    """Name -> what the compiler reported, of every program of tpu_compile.py."""
    done = subprocess.run([sys.executable, str(SCRIPT), topology], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return {report["name"]: report for report in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "topology", ["v5e:2x2", *[pytest.param(t, marks=pytest.mark.slow) for t in ("v6e:2x2", "v5p:2x2x1")]]
)
class TestCompilesForTPU:
    def test_every_program_compiles(self, topology):
        reports = compiled(topology)
        assert len(reports) == 37
        assert [r for r in reports.values() if "error" in r] == []

    def test_by_the_kernels_and_not_by_the_reference(self, topology):
        # No program names an implementation: the mesh's platform chose.
        for name, report in compiled(topology).items():
            if name.startswith("anchor attention"):
                assert report["kernels"] == 3, name  # forward, backward of queries, backward of context
            elif "2x2, paged" in name:
                assert report["kernels"] == 2, name  # pages at home; pages on another shard
            elif name.startswith("block attention"):
                assert report["kernels"] == 1, name
            else:
                assert report["kernels"] == (4 if "paged" in name else 2), name  # two layers

    def test_pages_are_read_in_place(self, topology):
        # Gathering the pages would take as many temporary bytes as the pool has.
        for dtype in ("bfloat16", "float32"):
            report = compiled(topology)[f"block attention, verify, pages of 128, {dtype}"]
            assert report["temporary_bytes"] < report["argument_bytes"] / 10

    def test_values_inside_the_keys_are_no_copy_of_them(self, topology):
        pool = 4 * 32 * 64 * 576 * 2
        assert compiled(topology)["block attention, latent, verify, bfloat16"]["temporary_bytes"] < pool / 10

    def test_what_is_cut_alike_exchanges_nothing(self, topology):
        for name in (
            "block attention, 2x2, contiguous, bfloat16",
            "block attention, 2x2, contiguous, latent, bfloat16",
            "anchor attention, 2x2, bfloat16",
        ):
            assert compiled(topology)[name]["collectives"] == 0

    def test_costs_are_reported(self, topology):
        for name, report in compiled(topology).items():
            assert report["flops"] > 0 and report["bytes"] > 0, name
        # 4 rows, 16 slots, 8 heads of 128 against 2048 + 16 keys, two products of two flops each; no less.
        report = compiled(topology)["block attention, verify, pages of 128, bfloat16"]
        assert report["flops"] >= 4 * 16 * 8 * 128 * 2064 * 4
