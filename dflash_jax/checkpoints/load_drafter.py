"""Loading a trained DFlash drafter and binding it to its target."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, check_draft_to_target
from dflash_jax.checkpoints.drafter_config import bind_to_target
from dflash_jax.checkpoints.drafter_names import OWN_EMBEDDING_OR_HEAD, drafter_placements
from dflash_jax.checkpoints.hub import fetch_snapshot, is_hub_name
from dflash_jax.checkpoints.load_target import as_dtype
from dflash_jax.checkpoints.open_drafter import OWN_HEAD, OWN_TABLE, SPECULATORS, OpenDrafter, open_drafter
from dflash_jax.checkpoints.placement import CheckpointError, Progress, WeightReader, load_params, to_devices
from dflash_jax.config import ConfigError, DrafterConfig
from dflash_jax.drafters.contract import Drafter, SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import Target, abstract_model, place

ASSET = "asset:"
_ASSETS = "assets"
_HUB_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json", DRAFT_VOCAB_FILE)


def load_drafter(
    source: str | pathlib.Path,
    target: Target,
    *,
    dtype: Any = None,
    draft_vocab: bool | None = None,
    allow_end_as_mask: bool = False,
    progress: Progress | None = None,
) -> Drafter:
    """Loads a DFlash drafter in z-lab's format or speculators' for `target`.

    Args:
      source: a local directory with `config.json` and safetensors weights, `asset:NAME` for a drafter that
        comes with this package, or a repository on the Hugging Face hub (owner/name or owner/name@revision).
      target: the loaded target. Its table and head serve the drafter, uncopied where the layout allows, unless a
        speculators checkpoint brings others.
      dtype: of the drafter's own parameters and activations; the target's where None.
      draft_vocab: whether to propose from the pruned vocabulary beside the weights: None, if there is one;
        True, it must be there; False, from the whole vocabulary (which a pruned head of its own can not).
      allow_end_as_mask: accept a mask id that ends answers or pads.
      progress: called as progress(done, total, name) while weights load.

    Raises:
      ConfigError: the configuration can not be right, is not supported, or is for another target.
      CheckpointError: files are missing or broken, a tensor is missing, unknown or misshapen.
    """
    opened = open_drafter(drafter_directory(source, progress), target.config, draft_vocab=draft_vocab)
    if not allow_end_as_mask:
        check_mask(
            opened.config, target, "Set the id the drafter was trained with, or allow_end_as_mask=True if this is it"
        )
    drafter = drafter_from_reader(
        opened.config, opened.weights, target, dtype=dtype, draft_to_target=opened.draft_to_target,
        source=str(source), beside=opened.beside, progress=progress,
    )  # fmt: skip
    return drafter if opened.format != SPECULATORS else _with_own_vocabulary(drafter, opened, target, draft_vocab)


def _with_own_vocabulary(drafter: Drafter, opened: OpenDrafter, target: Target, draft_vocab: bool | None) -> Drafter:
    """The drafter on the table and head that its checkpoint brings, where they are not the target's."""
    theirs, ids_U = drafter.shared, opened.draft_to_target
    own = {name: own_matrix(opened, name, target.mesh) for name in opened.own}
    table_VxD, head_DxU = own.get(OWN_TABLE), own.get(OWN_HEAD)
    same_table = table_VxD is None or same_numbers(table_VxD, theirs.embedding_VxD)
    same_head = head_DxU is None or same_numbers(head_DxU, theirs.head_DxV)
    if same_head and draft_vocab is False:
        theirs = shared_weights(target)
    elif draft_vocab is False and ids_U is not None:
        raise CheckpointError(
            f"draft_vocab is False, but {OWN_HEAD} of {opened.directory} is the drafter's own and has rows for its "
            f"{len(ids_U)} ids only; leave draft_vocab unset"
        )
    if same_table and same_head:
        return dataclasses.replace(drafter, shared=theirs)
    differing = [name for name, same in ((OWN_TABLE, same_table), (OWN_HEAD, same_head)) if not same]
    logging.info("%s drafts with its own %s, not the target's", opened.directory, " and ".join(differing))
    shared = theirs.replace(
        embedding_VxD=theirs.embedding_VxD if same_table else table_VxD.astype(target.dtype),
        head_DxV=theirs.head_DxV if same_head else head_DxU.astype(target.dtype),
    )
    return dataclasses.replace(drafter, shared=shared, own_vocabulary=True)


def own_matrix(opened: OpenDrafter, name: str, mesh: Mesh | None) -> jax.Array:
    """A table [V, D] or head [D, U] of a drafter's own, in its stored dtype, laid out as the target's.

    Raises:
      CheckpointError: it holds values that are not finite, as a speculators checkpoint has before it is trained.
    """
    stored, axes = opened.weights.read(name), ("vocab", "embed")
    if name == OWN_HEAD:
        stored, axes = stored.T, ("embed", "vocab")
    layout = None if mesh is None else sharding.named_sharding(mesh, axes, stored.shape)
    matrix = to_devices(stored, stored.dtype, layout)
    if not _all_finite(matrix):
        raise CheckpointError(f"{opened.directory}: {name} holds values that are not finite; it was never filled")
    return matrix


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


@jax.jit
def same_numbers(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether one of two matrices is the other rounded to its own dtype, or they are equal."""
    return (a == b.astype(a.dtype)).all() | (b == a.astype(b.dtype)).all()


def drafter_from_reader(
    config: DrafterConfig,
    reader: WeightReader,
    target: Target,
    *,
    dtype: Any = None,
    draft_to_target: np.ndarray | None = None,
    source: str = "",
    beside: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> Drafter:
    """Builds a drafter from a reader of tensors under their z-lab names; see `load_drafter`.

    Args:
      beside: stored names that are no parameters of the network, and whose reader is someone else.
    """
    config = bind_to_target(config, target.config)
    own = sorted(name for name in set(reader.names()) & set(OWN_EMBEDDING_OR_HEAD) if not beside(name))
    if own:
        raise CheckpointError(
            f"{reader.source} has its own {own[0]}, which z-lab's format does not have: the drafter is run on the "
            "target's table and head, and would accept almost nothing on others than it was trained with"
        )
    dtype = target.dtype if dtype is None else as_dtype(dtype, "float32")
    graphdef, abstract_params = abstract_model(DFlash, config, dtype)
    params = load_params(
        abstract_params, drafter_placements(config), reader, harmless=beside, mesh=target.mesh, progress=progress
    )
    return bind_drafter(config, graphdef, params, target, draft_to_target, source)


def bind_drafter(
    config: DrafterConfig,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    target: Target,
    draft_to_target: np.ndarray | None = None,
    source: str = "",
    shared: SharedWeights | None = None,
) -> Drafter:
    """A `Drafter` from a module that is there already, as after training.

    Args:
      shared: None makes the `shared_weights` of target and draft_to_target; else these, which are in memory already.
    """
    if shared is None:
        shared = shared_weights(target, draft_to_target)
    if config.markov_rank:
        columns_RxU = _markov_columns(graphdef, params, shared.draft_to_target_V, target.mesh)
        shared = shared.replace(markov_RxV=columns_RxU)
    return Drafter(
        graphdef=graphdef,
        params=params,
        shared=shared,
        config=config,
        block_size=config.block_size,
        tap_ids=config.target_layer_ids,
        source=source,
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _markov_columns(graphdef: nnx.GraphDef, params: nnx.State, ids_U: jax.Array | None, mesh: Mesh | None) -> jax.Array:
    """A Markov head's columns as the head's are laid out: gathered once, so that no step does it."""
    columns_RxU = nnx.merge(graphdef, params).markov.columns(ids_U)
    if mesh is None:
        return columns_RxU
    layout = sharding.named_sharding(mesh, (None, "vocab"), columns_RxU.shape)
    return jax.lax.with_sharding_constraint(columns_RxU, layout)


def random_drafter(
    config: DrafterConfig, target: Target, seed: int = 0, draft_to_target: np.ndarray | None = None
) -> Drafter:
    """A drafter with random weights, for tests, dry runs and the start of training."""
    config = bind_to_target(config, target.config)
    graphdef, params = nnx.split(DFlash(config, target.dtype, nnx.Rngs(seed)))
    return bind_drafter(config, graphdef, place(params, target.mesh), target, draft_to_target, f"random:{seed}")


def shared_weights(target: Target, draft_to_target: np.ndarray | None = None) -> SharedWeights:
    """The target's table and head as its drafter reads them, head columns cut to the draft vocabulary.

    Arrays are the target's own where nothing changes. A tied head is transposed once, here, so that no step
    does it.

    Args:
      draft_to_target: target ids [U] of the draft vocabulary, or None for the whole.
    """
    config, mesh = target.config, target.mesh
    table_VxD = target.params["embedding_VxD"].get_value()
    head_DxV = target.params["head_DxV"].get_value() if "head_DxV" in target.params else None
    ids_U = None
    if draft_to_target is not None:
        ids_U = jnp.asarray(check_draft_to_target(draft_to_target, config.vocab_size))
        if mesh is not None:
            ids_U = jax.device_put(ids_U, sharding.replicated(mesh))
    if ids_U is None and head_DxV is not None:
        return SharedWeights(table_VxD, head_DxV)

    size = config.vocab_size if ids_U is None else ids_U.shape[0]
    layout = None if mesh is None else sharding.named_sharding(mesh, ("embed", "vocab"), (config.hidden_size, size))
    tied = head_DxV is None
    return SharedWeights(table_VxD, _head_columns(tied, layout)(table_VxD if tied else head_DxV, ids_U), ids_U)


@functools.cache
def _head_columns(tied: bool, layout: jax.sharding.NamedSharding | None) -> Callable[..., jax.Array]:
    """columns(matrix, ids_U or None) -> head_DxU, jitted once: a run binds a drafter at each evaluation.

    Args:
      tied: the matrix is the table [V, D], not a head [D, V].
    """

    def columns(matrix: jax.Array, ids_U: jax.Array | None) -> jax.Array:
        if tied:
            return (matrix if ids_U is None else matrix[ids_U]).T
        return matrix[:, ids_U]

    return jax.jit(columns, out_shardings=layout)


def check_mask(config: DrafterConfig, target: Target, way_out: str) -> None:
    """Refuses a mask token that the target gives a meaning.

    Raises:
      ConfigError: the mask ends a text or pads one; `way_out` ends the message.
    """
    ends = {"an end of text": target.eos_token_ids}
    padding = getattr(target.tokenizer, "pad_token_id", None)
    if padding is not None:
        ends["padding"] = (padding,)
    for role, ids in ends.items():
        if config.mask_token_id in ids:
            raise ConfigError(
                f"mask_token_id is {config.mask_token_id}, which is {role} of the target: usually a fallback that was "
                f"never meant. {way_out}"
            )


def drafter_directory(source: str | pathlib.Path, progress: Progress | None = None) -> pathlib.Path:
    """The local directory of a drafter that `load_drafter` takes, fetched if it is on the hub.

    Raises:
      CheckpointError: there is none.
    """
    name = str(source)
    if name.startswith(ASSET):
        return _asset(name.removeprefix(ASSET))
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{source} is a file; a drafter is a directory with config.json and model.safetensors")
    if is_hub_name(name):
        return fetch_snapshot(name, _HUB_FILES, progress)
    raise CheckpointError(
        f"{source} is no directory, no {ASSET}NAME and no hub name (owner/name or owner/name@revision); check the path"
    )


def _asset(name: str) -> pathlib.Path:
    root = pathlib.Path(str(importlib.resources.files("dflash_jax"))) / _ASSETS
    known = sorted(p.parent.name for p in root.glob("*/config.json"))
    if name not in known:
        raise CheckpointError(f"{ASSET}{name} does not come with this package; it has {', '.join(known) or 'none'}")
    return root / name
