"""A drafter's directory as it lies on disk, whichever format it has: configuration, tensors, draft vocabulary."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, draft_to_target_ids, read_draft_vocab
from dflash_jax.checkpoints.drafter_config import OURS, drafter_config_from_hf
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.checkpoints.speculators_config import is_speculators, zlab_from_speculators
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig

ZLAB, ZLAB_OLD, SPECULATORS = "zlab", "zlab_old", "speculators"
OWN_TABLE, OWN_HEAD = "embed_tokens.weight", "lm_head.weight"
_VOCABULARY = ("d2t", "t2d")
# Of the target that a speculators checkpoint was trained with; older versions saved them.
_TEACHER = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclasses.dataclass(frozen=True)
class OpenDrafter:
    """A drafter of which all is read but the weights.

    Attributes:
      directory: where it lies.
      config: of the network; bound to the target if one was given.
      weights: reads tensors by z-lab's names, which both formats share.
      draft_to_target: target ids [U] that it may propose; None for all.
      format: SPECULATORS, or ZLAB in either spelling.
      own: names of a table and head of its own among the tensors. speculators' checkpoints have both, either or none
        (newer versions leave out what is the target's whole); z-lab's none.
      training: what `export_drafter` noted of its training; {} where nothing is known.
    """

    directory: pathlib.Path
    config: DrafterConfig
    weights: SafetensorsReader
    draft_to_target: np.ndarray | None
    format: str = ZLAB
    own: tuple[str, ...] = ()
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def beside(self, name: str) -> bool:
        """Whether a stored tensor is no parameter of the network: its vocabulary, table, head, or the target's."""
        return self.format == SPECULATORS and name in (OWN_TABLE, OWN_HEAD, *_VOCABULARY, *_TEACHER)


def open_drafter(
    directory: pathlib.Path, target: TargetConfig | None = None, *, draft_vocab: bool | None = None
) -> OpenDrafter:
    """Reads a directory in z-lab's format (old or new spelling) or in speculators'.

    Args:
      target: what it drafts for; needed for speculators' format, which does not say all of it.
      draft_vocab: see `load_drafter`.

    Raises:
      ConfigError, CheckpointError: see `load_drafter`.
    """
    path = directory / "config.json"
    hf = read_json(path, required=True)
    try:
        if not is_speculators(hf):
            return _open_zlab(directory, hf, drafter_config_from_hf(hf, target), draft_vocab)
        if target is None:
            raise ConfigError(
                "this is a checkpoint of the speculators format, which does not say how many layers the target has: "
                "the target is needed (--target)"
            )
        config = drafter_config_from_hf(zlab_from_speculators(hf, target), target)
        return _open_speculators(directory, hf, config, draft_vocab)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _open_zlab(
    directory: pathlib.Path, hf: Mapping[str, Any], config: DrafterConfig, draft_vocab: bool | None
) -> OpenDrafter:
    ids_U = None if draft_vocab is False else read_draft_vocab(directory, config.vocab_size)
    if ids_U is None and draft_vocab:
        raise CheckpointError(f"draft_vocab is True, but {directory} has no {DRAFT_VOCAB_FILE}")
    stated = hf.get("draft_vocab_size")
    if stated is not None and draft_vocab is not False:
        size = config.vocab_size if ids_U is None else len(ids_U)
        if stated != size:
            raise CheckpointError(
                f"draft_vocab_size is {stated}, but {DRAFT_VOCAB_FILE} gives {size} ids; without the right table "
                "drafted ids mean nothing. draft_vocab=False loads with the whole vocabulary"
            )
    return OpenDrafter(directory, config, SafetensorsReader(directory), ids_U, training=_training(hf))


def _open_speculators(
    directory: pathlib.Path, hf: Mapping[str, Any], config: DrafterConfig, draft_vocab: bool | None
) -> OpenDrafter:
    reader = SafetensorsReader(directory)
    size = hf.get("draft_vocab_size")
    if size is None:
        raise ConfigError("draft_vocab_size is not set: without it drafted ids mean nothing")
    ids_U = None
    if size != config.vocab_size:
        missing = [name for name in _VOCABULARY if name not in reader.names()]
        if missing:
            raise CheckpointError(
                f"draft_vocab_size is {size} of {config.vocab_size} ids, but {missing[0]} is not among the tensors"
            )
        tables = {name: reader.read(name).read() for name in _VOCABULARY}
        ids_U = draft_to_target_ids(tables, config.vocab_size, f"{reader.source}")
        if len(ids_U) != size:
            raise CheckpointError(f"draft_vocab_size is {size}, but d2t has {len(ids_U)} ids")
    if ids_U is None and draft_vocab:
        raise CheckpointError(f"draft_vocab is True, but {directory} drafts from the whole vocabulary")
    rows_of = {OWN_TABLE: config.vocab_size, OWN_HEAD: size}
    own = tuple(name for name in rows_of if name in reader.names())
    for name in own:
        rows = rows_of[name]
        if reader.shape(name) != (rows, config.hidden_size) or not reader.readable(name):
            raise CheckpointError(
                f"{name} is {reader.dtype(name)} {reader.shape(name)}, expected numbers {(rows, config.hidden_size)}"
            )
    return OpenDrafter(directory, config, reader, ids_U, SPECULATORS, own, _training(hf))


def _training(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    noted = hf.get(OURS)
    return noted.get("training", {}) if isinstance(noted, Mapping) else {}
