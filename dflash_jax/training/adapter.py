"""One trunk for several targets: only what reads a target is trained, the layers stay another drafter's.

A DFlash drafter meets its target in three places: `fc` and `hidden_norm`, which make context features of the tapped
states, and the target's own table and head, which it borrows. With `drafter.trunk = "frozen"` a run starts from a
drafter that was made for another target (`drafter.init_from`) and trains the first two for this one; table and head
come with the target, and everything between stays bit for bit what it was, so that one copy of it can serve all.

Both targets must have the hidden size that the trunk has. Depth, taps and weights may differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.checkpoints.drafter_config import drafter_config_from_hf
from dflash_jax.checkpoints.drafter_names import drafter_placements
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.load_drafter import drafter_directory
from dflash_jax.checkpoints.placement import load_params
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.config import ConfigError, DrafterConfig
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import abstract_model

TRAINED, FROZEN = "trained", "frozen"
ADAPTER = ("fc_TDxD", "hidden_norm")
# Fields of DrafterConfig that belong to the target or to the run, not to the trunk.
_NOT_THE_TRUNK = (
    "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "max_positions",
    "embedding_scale", "output_multiplier", "final_logit_softcap",
)  # fmt: skip


def check_trunk(trunk: str, init_from: str) -> None:
    """Refuses a `drafter.trunk` that can not be.

    Raises:
      ConfigError: an unknown name, or a frozen trunk that comes from nowhere.
    """
    if trunk not in (TRAINED, FROZEN):
        raise ConfigError(f"drafter.trunk is {trunk!r}, must be {TRAINED!r} or {FROZEN!r}")
    if trunk == FROZEN and not init_from:
        raise ConfigError(
            "drafter.trunk is 'frozen', but drafter.init_from is empty: a trunk that is never trained must come from a "
            "trained drafter; name one (a directory, asset:NAME or owner/name)"
        )


def trainable(params: nnx.State, trunk: str) -> Any | None:
    """A tree like the parameters of bools, what a run may change; None for everything."""
    if trunk == TRAINED:
        return None
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in ADAPTER, params)


def with_trunk_of(source: str, draft: DrafterConfig, params: nnx.State) -> nnx.State:
    """The parameters of the drafter at `source`, whatever target that was made for, to go on from.

    Its adapter is taken over too if it has as many taps (another depth of one family is read alike); else the
    adapter starts as in `params`.

    Args:
      source: as `load_drafter` takes it.
      draft: the configuration of this run's drafter.
      params: where this run's drafter would start without it.

    Raises:
      ConfigError: the trunks differ in a field, named.
      CheckpointError: see `load_drafter`.
    """
    directory = drafter_directory(source)
    theirs = drafter_config_from_hf(read_json(directory / "config.json", required=True))
    for field in dataclasses.fields(DrafterConfig):
        mine, its = getattr(draft, field.name), getattr(theirs, field.name)
        if field.name not in _NOT_THE_TRUNK and mine != its:
            raise ConfigError(
                f"drafter.init_from {source} has {field.name} = {its}, this run has {mine}: its trunk can not serve "
                "this target"
            )
    _, abstract = abstract_model(DFlash, theirs, jnp.float32)
    trunk = load_params(abstract, drafter_placements(theirs), SafetensorsReader(directory))
    if len(theirs.target_layer_ids) != len(draft.target_layer_ids):
        for name in ADAPTER:
            trunk[name] = params[name]
    return trunk
