"""The native product of few rows: the reference's numbers, the same bits whatever the rows and the threads."""

import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging as absl_logging
from compiler import needs_compiler
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax import sharding
from dflash_jax.kernels import dispatch, native
from dflash_jax.kernels.narrow_matmul import MAX_ROWS, narrow_matmul, reference
from dflash_jax.models.layers import dense

DTYPES = (jnp.float32, jnp.bfloat16)
# Below, at and beyond the groups of columns, the pieces and the blocks of depth; the last takes several threads.
SIZES = ((1, 1), (3, 5), (8, 32), (37, 53), (9, 513), (40, 1030), (576, 960), (300, 4099))
CALL = "stablehlo.custom_call @dflash_narrow_matmul"


def operands(m: int, k: int, n: int, dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(k * n)
    x, w = rng.standard_normal((MAX_ROWS, k)), rng.standard_normal((k, n))
    return jnp.asarray(x[:m], dtype), jnp.asarray(w, dtype)


by_kernel = functools.partial(narrow_matmul, implementation=dispatch.NATIVE)


@needs_compiler
class TestNumbers:
    @pytest.mark.parametrize("k, n", SIZES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_as_in_float64(self, dtype, k, n):
        for m in (1, 7, 16):
            x, w = operands(m, k, n, dtype)
            exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
            magnitude = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))
            # Of the sum in float32: a few rounding errors, they mostly cancel; then one rounding to the result.
            bound = 4 * np.sqrt(k) * 2.0**-24 * magnitude + float(jnp.finfo(dtype).eps) / 2 * np.abs(exact) * 1.01
            got = by_kernel(x, w)
            assert got.dtype == dtype and got.shape == (m, n)
            assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_as_the_reference(self, dtype):
        x, w = operands(5, 300, 4099, dtype)
        tolerance = {"atol": 2e-5, "rtol": 2e-6} if dtype == jnp.float32 else {"atol": 2e-5, "rtol": 2.0**-7}
        np.testing.assert_allclose(
            np.asarray(by_kernel(x, w), np.float32), np.asarray(reference(x, w), np.float32), **tolerance
        )  # fmt: skip

    @pytest.mark.parametrize("k, n", SIZES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_has_the_same_bits_alone_and_among_others(self, dtype, k, n):
        x, w = operands(MAX_ROWS, k, n, dtype)
        together = np.asarray(by_kernel(x, w))
        for m in range(1, MAX_ROWS):
            np.testing.assert_array_equal(np.asarray(by_kernel(x[:m], w)).view(np.uint8), together[:m].view(np.uint8))
        np.testing.assert_array_equal(np.asarray(by_kernel(x[3:4], w)), together[3:4])

    def test_rounds_to_nearest_even_and_keeps_what_is_not_finite(self):
        # Products with one are sums of one: 1 + 2^-8 lies halfway and goes down, 1 + 3 * 2^-8 up.
        x = jnp.asarray([[1.0, 1.0]], jnp.bfloat16)
        w = np.zeros((2, 40), np.float32)
        w[:, :6] = [[1, 1, np.inf, np.nan, 3e38, -0.0], [2.0**-8, 3 * 2.0**-8, 1, 1, 3e38, -0.0]]
        got = np.asarray(by_kernel(x, jnp.asarray(w, jnp.bfloat16)), np.float32)[0]
        np.testing.assert_array_equal(got[:6], [1, 1 + 2.0**-6, np.inf, np.nan, np.inf, 0.0])
        assert not got[6:].any()

    def test_through_dense_with_any_leading_dimensions(self):
        x, w = operands(6, 12, 24, jnp.float32)
        y = dense(x.reshape(2, 3, 12), w.reshape(12, 2, 3, 4), implementation=dispatch.NATIVE)
        np.testing.assert_allclose(y, np.asarray(x @ w).reshape(2, 3, 2, 3, 4), atol=1e-5)

    def test_many_calls_at_once(self):
        # Pieces of different calls share the pool; a late helper must not touch what is over.
        x, w = operands(4, 300, 4099, jnp.float32)
        expected, run, wrong = np.asarray(by_kernel(x, w)), jax.jit(by_kernel), []

        def work():
            for _ in range(20):
                if not np.array_equal(np.asarray(run(x, w)), expected):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_under_vmap(self):
        x, w = operands(6, 12, 24, jnp.float32)
        y = jax.vmap(by_kernel, in_axes=(0, None))(x.reshape(3, 2, 12), w)
        np.testing.assert_allclose(y, reference(x, w).reshape(3, 2, 24), atol=1e-5)


@needs_compiler
class TestDerivatives:
    def test_gradients_are_the_references(self):
        x, w = operands(5, 33, 70, jnp.float32)

        def loss(product, x, w):
            return jnp.sum(jnp.sin(product(x, w)))

        for got, want in zip(
            jax.grad(functools.partial(loss, by_kernel), (0, 1))(x, w),
            jax.grad(functools.partial(loss, reference), (0, 1))(x, w),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, atol=2e-5)

    def test_forward_mode(self):
        x, w = operands(3, 20, 40, jnp.float32)
        got = jax.jvp(by_kernel, (x, w), (2 * x, w))
        np.testing.assert_allclose(got[1], 3 * got[0], rtol=1e-5, atol=1e-4)

    def test_frozen_weights_cost_no_product(self):
        x, w = operands(3, 20, 40, jnp.float32)
        text = jax.jit(jax.grad(lambda x: by_kernel(x, w).sum())).lower(x).as_text()
        assert text.count("dot_general") == 1


def one_thread_script() -> str:
    return (
        "import sys, numpy as np, jax; from dflash_jax.kernels.narrow_matmul import narrow_matmul; "
        "d = np.load(sys.argv[1]); "
        "np.save(sys.argv[2], narrow_matmul(jax.numpy.asarray(d['x']), jax.numpy.asarray(d['w']), "
        "implementation='native'))"
    )


@needs_compiler
def test_one_thread_gives_the_same_bits(tmp_path):
    x, w = operands(3, 300, 4099, jnp.float32)
    np.savez(tmp_path / "in.npz", x=x, w=w)
    # XLA makes a pool as large as the processors that the process may use.
    only_one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " if hasattr(
        os, "sched_setaffinity") else ""  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", only_one + one_thread_script(), tmp_path / "in.npz", tmp_path / "out.npy"], check=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(native.__file__).parents[2])},
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), by_kernel(x, w))


def lowered(x: jax.Array, w: jax.Array) -> str:
    return jax.jit(lambda x, w: narrow_matmul(x, w)).lower(x, w).as_text()


@needs_compiler
class TestWhereItIsTaken:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_for_few_rows_on_cpu(self, dtype):
        assert CALL in lowered(*operands(16, 8, 8, dtype))

    def test_not_for_many_rows_or_other_types(self):
        x, w = operands(2, 8, 8, jnp.float32)
        assert CALL not in lowered(jnp.ones((17, 8)), w)
        assert CALL not in lowered(x.astype(jnp.bfloat16), w)
        assert CALL not in lowered(x.astype(jnp.float16), w.astype(jnp.float16))

    def test_not_on_a_mesh(self):
        mesh = sharding.make_mesh(1, 4)
        x, w = operands(2, 8, 8, jnp.float32)
        with sharding.use(mesh):
            assert CALL not in lowered(x, w)
            with pytest.raises(ValueError, match="the program runs on 4 devices"):
                by_kernel(x, w)
        assert CALL in lowered(x, w)

    def test_inside_of_shard_map_each_device_has_its_own(self):
        mesh = sharding.make_mesh(1, 4)
        x, w = operands(2, 8, 128, jnp.float32)
        mapped = jax.jit(
            jax.shard_map(
                by_kernel, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(None, "tensor")),
                out_specs=PartitionSpec(None, "tensor"), check_vma=False,
            )
        )  # fmt: skip
        w_cut = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        np.testing.assert_array_equal(mapped(x, w_cut), by_kernel(x, w))

    @pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
    def test_not_in_a_program_for_a_tpu(self):
        # Traced here, on a CPU, without a mesh: only the lowering knows the platform.
        x, w = operands(2, 8, 8, jnp.float32)
        text = jax.jit(lambda x, w: by_kernel(x, w)).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
        assert CALL not in text and "dot_general" in text

    def test_what_does_not_fit_is_refused_by_name(self):
        w = jnp.ones((8, 8))
        with pytest.raises(ValueError, match="there are 17 rows, not 1 to 16"):
            by_kernel(jnp.ones((17, 8)), w)
        with pytest.raises(ValueError, match="float16 and float32"):
            by_kernel(jnp.ones((1, 8), jnp.float16), w)
        with pytest.raises(ValueError, match="weights are empty"):
            by_kernel(jnp.ones((1, 0)), jnp.ones((0, 3)))
        with pytest.raises(ValueError, match="'pallas', must be None"):
            narrow_matmul(jnp.ones((1, 8)), w, implementation="pallas")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process with an empty cache; what is logged."""
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    lines = []
    monkeypatch.setattr(absl_logging, "warning", lambda text, *values: lines.append(text % values))
    for name in ("_registered", "_library_path"):
        monkeypatch.setattr(native, name, functools.cache(getattr(native, name).__wrapped__))
    # XLA takes a name once a process, and these libraries are copies of the one that it has.
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)
    return lines


class TestBuild:
    def test_without_a_compiler_the_reference_runs_and_it_is_said_once(self, fresh, monkeypatch):
        monkeypatch.setenv("PATH", "")
        x, w = operands(2, 8, 8, jnp.float32)
        assert not native.needs_build()
        for _ in range(2):
            assert CALL not in lowered(x, w)
        assert len(fresh) == 1
        assert "no C++ compiler was found" in fresh[0] and "CXX" in fresh[0] and "DFLASH_JAX_NATIVE=0" in fresh[0]
        np.testing.assert_array_equal(narrow_matmul(x, w), reference(x, w))

    def test_a_compiler_that_fails_is_quoted(self, fresh, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 3\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert not native.available() and not native.available()
        assert len(fresh) == 1 and re.search(r"failed with status 3: no such header", fresh[0])
        assert list((tmp_path / "native").iterdir()) == []

    def test_cxx_that_is_no_program(self, fresh, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler -v")
        assert not native.available()
        assert "CXX is 'no-such-compiler -v', which is no program here" in fresh[0]

    def test_switched_off_silently(self, fresh, monkeypatch):
        monkeypatch.setenv("DFLASH_JAX_NATIVE", "0")
        assert not native.available() and not native.needs_build()
        assert CALL not in lowered(*operands(2, 8, 8, jnp.float32))
        assert fresh == []

    def test_the_switch_is_0_or_1(self, fresh, monkeypatch):
        monkeypatch.setenv("DFLASH_JAX_NATIVE", "off")
        with pytest.raises(ValueError, match="DFLASH_JAX_NATIVE is 'off', must be 0"):
            native.available()

    @needs_compiler
    def test_built_once_and_kept(self, fresh, tmp_path):
        assert native.needs_build()
        assert native.available()
        (library,) = (tmp_path / "native").iterdir()
        written = library.stat().st_mtime_ns
        native._registered.cache_clear()
        assert not native.needs_build() and native.available()
        assert library.stat().st_mtime_ns == written and fresh == []

    @needs_compiler
    def test_another_processor_or_compiler_has_another_library(self, fresh, monkeypatch):
        compiler = native._compiler()
        here = native._library_path(compiler)
        native._library_path.cache_clear()
        monkeypatch.setattr(native, "_processor", lambda: "another")
        assert native._library_path(compiler) != here
        assert native._library_path((*compiler, "-O1")) != native._library_path(compiler)

    @needs_compiler
    def test_what_can_not_be_loaded_is_said(self, fresh):
        path = native._library_path(native._compiler())
        path.parent.mkdir(parents=True)
        path.write_bytes(b"not a library")
        assert not native.available()
        assert "can not be loaded" in fresh[0] and "delete it" in fresh[0]
