"""dflash_jax: train DFlash drafters, and decode, serve and measure with them, losslessly.

The public face: `load_target`, `load_drafter`, `generate`, `stream`. Everything else is reached through
configs (train.py, serve.py).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.checkpoints.load_drafter import load_drafter
    from dflash_jax.checkpoints.load_target import load_target
    from dflash_jax.decoding.generate import generate, stream

__all__ = ["generate", "load_drafter", "load_target", "stream"]
__version__ = "0.1.0"

_HOME = {
    "generate": "dflash_jax.decoding.generate",
    "load_drafter": "dflash_jax.checkpoints.load_drafter",
    "load_target": "dflash_jax.checkpoints.load_target",
    "stream": "dflash_jax.decoding.generate",
}


def __getattr__(name: str):
    # Resolved on first use: importing one room of the package does not import the whole house.
    if name not in _HOME:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
