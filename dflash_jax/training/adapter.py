"""One trunk for several targets: only what reads a target is trained, the layers stay another drafter's.

A DFlash drafter meets its target in three places: `fc` and `hidden_norm`, which make context features of the tapped
states; the target's table, whose rows are a block's input; the target's head, which reads its output. Table and head
come with each target, frozen. With `drafter.trunk = "frozen"` a run starts from a drafter that was made for another
target (`drafter.init_from`) and trains an adapter for this one: `fc`, `hidden_norm`, and where the target's width is
not the trunk's, or `drafter.projections` asks for it, two projections, table to trunk and trunk to head. Everything
between stays bit for bit what it was, so that one copy of it can serve all.

So the targets may differ in family, width, depth, vocabulary, mask token and taps; not in the tokenizer where the trunk
has a Markov head, whose tables are by token id and stay too.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
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
from dflash_jax.config import FULL, ConfigError, DrafterConfig, TargetConfig, check_types
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import abstract_model
from dflash_jax.training.initialise import drafter_config, projected_from

TRAINED, FROZEN = "trained", "frozen"
ADAPTER = ("fc_TDxD", "hidden_norm", "embed_projection_ExD", "head_projection_DxE")
# Fields of DrafterConfig that belong to the target or to the run, not to the trunk.
_NOT_THE_TRUNK = (
    "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "max_positions",
    "embedding_scale", "output_multiplier", "final_logit_softcap", "target_hidden_size",
)  # fmt: skip
# Fields of the `drafter` section that say how to start or to serve, not what the drafter is.
_OF_THE_RUN = ("init_layers", "init_from", "init_target", "trunk", "draft_vocab_size", "source", "proposal")
_KINDS = {"init_layers": tuple[int, ...], "init_from": str, "init_target": str, "trunk": str, "draft_vocab_size": int}
# Those that describe a trunk, besides its layers.
_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
_MARKOV = "markov_rank"


def check_trunk(section: Mapping[str, Any]) -> None:
    """Refuses a `drafter` section whose trunk can not be.

    Raises:
      ConfigError: an unknown name, a frozen trunk that comes from nowhere, or a target to fit a trained one to.
    """
    trunk, init_from, init_target = (section.get(name) or "" for name in ("trunk", "init_from", "init_target"))
    if trunk not in (TRAINED, FROZEN):
        raise ConfigError(f"drafter.trunk is {trunk!r}, must be {TRAINED!r} or {FROZEN!r}")
    if trunk == FROZEN and not init_from:
        raise ConfigError(
            "drafter.trunk is 'frozen', but drafter.init_from is empty: a trunk that is never trained must come from a "
            "trained drafter; name one (a directory, asset:NAME or owner/name)"
        )
    if trunk == TRAINED and init_target:
        raise ConfigError(
            f"drafter.init_target is {init_target!r}, but drafter.trunk is {trunk!r}: an adapter is fitted to a frozen "
            "trunk alone; leave it empty"
        )


def check_section(section: Mapping[str, Any]) -> None:
    """Refuses a `drafter` section that can be right for no target.

    Raises:
      ConfigError: names the field.
    """
    kinds = {**typing.get_type_hints(drafter_config), **_KINDS}
    frozen = section.get("trunk") == FROZEN
    if frozen:
        kinds |= {"num_layers": int | None, _MARKOV: int | None}
    known = sorted({*kinds, *_OF_THE_RUN} - {"target", "return"})
    for name in section:
        if name not in known:
            raise ConfigError(f"drafter has no field {name!r}; it knows {', '.join(known)}")
    needed = ("num_layers", "block_size", "mask_token_id", "init_layers", "init_from", "trunk", "draft_vocab_size")
    for name in needed:
        if name not in section:
            raise ConfigError(f"drafter needs the field {name!r}, which is not set")
    check_types(dict(section), kinds, "drafter")
    check_trunk(section)
    if section["block_size"] < 2:
        raise ConfigError(
            f"drafter.block_size is {section['block_size']}, must be at least 2 (the anchor and one drafted token)"
        )
    for name in ("num_layers", *_SHAPE, _MARKOV):
        value, least = section.get(name), 0 if name == _MARKOV else 1
        if value is not None and value < least:
            raise ConfigError(f"drafter.{name} is {value}, must be at least {least}")
    if section["draft_vocab_size"] < 0:
        raise ConfigError(
            f"drafter.draft_vocab_size is {section['draft_vocab_size']}, must be at least 1, or 0 for all"
        )
    if not frozen and section["init_layers"] and len(section["init_layers"]) != section["num_layers"]:
        raise ConfigError(
            f"drafter.init_layers {tuple(section['init_layers'])} must name drafter.num_layers = "
            f"{section['num_layers']} layers of the target, one a drafter layer, or be empty"
        )


def trainable(params: nnx.State, trunk: str) -> Any | None:
    """A tree like the parameters of bools, what a run may change; None for everything."""
    if trunk == TRAINED:
        return None
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in ADAPTER, params)


def configured_drafter(section: Mapping[str, Any], target: TargetConfig) -> DrafterConfig:
    """The drafter that the `drafter` section of a training configuration asks for."""
    fields = {name: value for name, value in section.items() if name not in _OF_THE_RUN}
    if section["trunk"] == FROZEN:
        return drafter_on_trunk(section["init_from"], target, **fields)
    return drafter_config(target, **fields)


def drafter_on_trunk(
    source: str,
    target: TargetConfig,
    *,
    num_layers: int | None = None,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | int = 5,
    projections: bool | None = None,
    num_full_layers: int | None = None,
    **shape: int | None,
) -> DrafterConfig:
    """A drafter for this target on the trunk of the drafter at `source`.

    Args:
      source: as `load_drafter` takes it; its config.json is read.
      target_layer_ids, projections: see `initialise.drafter_config`.
      num_layers, num_full_layers, shape: fields of the `drafter` section that describe the trunk; None takes what it
        is.

    Raises:
      ConfigError: the run asks for another trunk than that (the field is named), or there is no such field.
      CheckpointError: see `load_drafter`.
    """
    theirs = _read_config(source)
    # What belongs to target and run is what a new drafter would have, whatever its shape.
    own = drafter_config(
        target, num_layers=theirs.num_layers, block_size=block_size, mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
    )  # fmt: skip
    full = sum(kind == FULL for kind in theirs.layer_types)
    asked = {"num_layers": (num_layers, theirs.num_layers), "num_full_layers": (num_full_layers, full)}
    for name, value in shape.items():
        if name not in (*_SHAPE, _MARKOV):
            raise ConfigError(f"drafter has no field {name!r}; of a trunk it knows {', '.join((*_SHAPE, _MARKOV))}")
        asked[name] = (value, getattr(theirs, name))
    for name, (mine, its) in asked.items():
        if mine is not None and mine != its:
            raise _other_trunk(source, name, its, mine)
    if theirs.markov_rank and theirs.vocab_size != target.vocab_size:
        raise ConfigError(
            f"drafter.init_from {source} has a Markov head (markov_rank = {theirs.markov_rank}) over the "
            f"{theirs.vocab_size} ids of its target's tokenizer, and this target has {target.vocab_size}: its tables "
            "mean nothing there; take a trunk without a Markov head"
        )
    taken = {name: getattr(own, name) for name in _NOT_THE_TRUNK if name != "output_multiplier"}
    taken["target_hidden_size"] = projected_from(target, theirs.hidden_size, projections)
    return dataclasses.replace(theirs, **taken)


def with_trunk_of(source: str, draft: DrafterConfig, params: nnx.State) -> nnx.State:
    """The parameters of the drafter at `source`, whatever target that was made for, to go on from.

    Of its adapter, `hidden_norm` is taken over, whose output the trunk knows; the rest too if it reads as many taps
    of the same width in the same way (another depth of one family is read alike); else that starts as in `params`.

    Args:
      source: as `load_drafter` takes it.
      draft: the configuration of this run's drafter.
      params: where this run's drafter would start without it.

    Raises:
      ConfigError: the trunks differ in a field, named.
      CheckpointError: see `load_drafter`.
    """
    theirs = _read_config(source)
    for field in dataclasses.fields(DrafterConfig):
        mine, its = getattr(draft, field.name), getattr(theirs, field.name)
        if field.name not in _NOT_THE_TRUNK and mine != its:
            raise _other_trunk(source, field.name, its, mine)
    trunk = read_trunk(source)[1]
    alike = (
        len(theirs.target_layer_ids) == len(draft.target_layer_ids)
        and theirs.target_hidden_size == draft.target_hidden_size
        and theirs.target_width == draft.target_width
    )
    own = set() if alike else set(ADAPTER) - {"hidden_norm"}
    flat = dict(nnx.to_flat_state(trunk))
    return nnx.from_flat_state(
        [(path, value if path[0] in own else flat[path]) for path, value in nnx.to_flat_state(params)]
    )


def read_trunk(source: str) -> tuple[DrafterConfig, nnx.State]:
    """Configuration and float32 parameters of the drafter at `source`, bound to no target."""
    theirs = _read_config(source)
    _, abstract = abstract_model(DFlash, theirs, jnp.float32)
    return theirs, load_params(abstract, drafter_placements(theirs), SafetensorsReader(drafter_directory(source)))


def _read_config(source: str) -> DrafterConfig:
    return drafter_config_from_hf(read_json(drafter_directory(source) / "config.json", required=True))


def _other_trunk(source: str, field: str, its: Any, mine: Any) -> ConfigError:
    return ConfigError(
        f"drafter.init_from {source} has {field} = {its}, this run has {mine}: its trunk can not serve this run. Ask "
        "for what it has, or for nothing (None)"
    )
