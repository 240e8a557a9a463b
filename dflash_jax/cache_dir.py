"""Where the program keeps what it fetched, compiled and built."""

import os
import pathlib


def cache_dir() -> pathlib.Path:
    """$DFLASH_JAX_CACHE, by default ~/.cache/dflash_jax."""
    configured = os.environ.get("DFLASH_JAX_CACHE")
    return pathlib.Path(configured).expanduser() if configured else pathlib.Path.home() / ".cache" / "dflash_jax"
