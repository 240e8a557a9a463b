"""Test session set-up: eight virtual CPU devices, one persistent compilation cache, strict broadcasting."""

import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_CACHE = os.environ.get("DFLASH_JAX_TEST_CACHE", str(pathlib.Path.home() / ".cache" / "dflash_jax" / "test-xla"))

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # must precede the first use of a device
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """Lets go of compiled programs after each test file; the next file loads what it shares from the disk cache.

    Each program holds memory maps. Those of the whole suite exceed what Linux allows a process (65,530), and
    the next program then aborts the run.
    """
    yield
    jax.clear_caches()
    gc.collect()
