"""One module a kind of target: its `config.json` and its tensor names, both ways. See `common`."""

from dflash_jax.checkpoints.families import dense

# model_type -> module; a module serves the model types of its DEFAULTS.
FAMILIES = {model_type: module for module in (dense,) for model_type in module.DEFAULTS}
