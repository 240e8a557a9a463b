"""A compilation cache on disk: the second start of a program compiles nothing."""

from __future__ import annotations

import pathlib

import jax

from dflash_jax.cache_dir import cache_dir


def use_compilation_cache() -> pathlib.Path:
    """Keeps compiled programs in the `xla` folder of the program's cache ($DFLASH_JAX_CACHE).

    A directory that is already set (JAX_COMPILATION_CACHE_DIR, or jax.config) is left as it is. Call it before the
    first compilation.

    Returns:
      The directory in use.
    """
    configured = jax.config.jax_compilation_cache_dir
    if configured:
        return pathlib.Path(configured)
    directory = cache_dir() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Small programs too: a start runs some dozens of them, and together they take seconds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory
