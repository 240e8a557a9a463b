"""Test session set-up: eight virtual CPU devices, one persistent compilation cache, strict broadcasting."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_CACHE = os.environ.get("DFLASH_JAX_TEST_CACHE", str(pathlib.Path.home() / ".cache" / "dflash_jax" / "test-xla"))

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # must precede the first use of a device
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
