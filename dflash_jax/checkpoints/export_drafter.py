"""Writing a DFlash drafter in z-lab format, so that this program and other engines load it."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, write_draft_vocab
from dflash_jax.checkpoints.drafter_config import OURS, drafter_config_to_hf
from dflash_jax.checkpoints.drafter_names import drafter_placements
from dflash_jax.checkpoints.placement import CheckpointError, export_tensors
from dflash_jax.checkpoints.safetensors_writer import write_safetensors
from dflash_jax.config import DrafterConfig

_WEIGHTS, _CONFIG, README = "model.safetensors", "config.json", "README.md"
_DTYPES = ("bfloat16", "float16", "float32")


def export_drafter(
    directory: str | pathlib.Path,
    config: DrafterConfig,
    params: nnx.State,
    *,
    dtype: Any = jnp.bfloat16,
    draft_to_target: np.ndarray | None = None,
    readme: str | None = None,
    training: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes `config.json`, `model.safetensors`, and where given `draft_vocab.safetensors` and `README.md`.

    The official torch package, and engines that read its checkpoints, load the directory as it is, unless the drafter
    has projections (`target_hidden_size`) or a Markov head: their format has none, and the architecture says so. All
    files appear at once: they are written to a directory beside it, which then takes its name. An earlier export there
    is replaced.

    Args:
      directory: must not exist, be empty, or hold an earlier export and nothing else.
      config: with `embedding_scale` and `final_logit_softcap` bound to the target (`bind_to_target`), so that
        readers that know nothing of the target's own factors find them here.
      params: the drafter's own parameters.
      dtype: of the stored weights: bfloat16, float16 or float32.
      draft_to_target: target ids [U] of a pruned draft vocabulary.
      readme: text of the model card.
      training: JSON-able, how the weights came about (such as step, or whether they are an average); it becomes
        `dflash_jax.training` in config.json, where other engines look for nothing.

    Returns:
      The directory.

    Raises:
      CheckpointError: a weight is not finite in `dtype`, the ids are wrong, or the directory holds other files.
    """
    directory = pathlib.Path(directory)
    dtype = np.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise CheckpointError(f"dtype is {dtype.name}, drafters are stored as {', '.join(_DTYPES)}")
    if config.num_target_layers - 1 in config.target_layer_ids:
        warnings.warn(
            f"target_layer_ids holds the last layer ({config.num_target_layers - 1}): readers on Hugging Face hidden "
            "states tap it after the final norm, this program before, so acceptance will be lower there",
            stacklevel=2,
        )
    check_replaceable(directory)
    tensors = {}
    for name, array in export_tensors(params, drafter_placements(config)):
        with np.errstate(over="ignore"):
            tensors[name] = array.astype(dtype)
        if not np.isfinite(tensors[name].astype(np.float32)).all():
            raise CheckpointError(f"{name} holds values that are not finite in {dtype.name}; nothing was written")
    values = drafter_config_to_hf(config, dtype.name)
    if training is not None:
        values[OURS] = {**values.get(OURS, {}), "training": dict(training)}
    write_drafter(directory, values, tensors, draft_to_target, readme)
    return directory


def write_drafter(
    directory: pathlib.Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    draft_to_target: np.ndarray | None,
    readme: str | None,
) -> None:
    """Writes the files of a drafter's directory, all at once; see `export_drafter`.

    Args:
      values: config.json.
      tensors: model.safetensors.
      draft_to_target: for a draft_vocab.safetensors; None writes none.

    Raises:
      CheckpointError: the directory holds other files, or the ids are wrong.
    """
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made = pathlib.Path(scratch) / "new"
        made.mkdir()
        write_safetensors(tensors, made / _WEIGHTS, "pt")
        if draft_to_target is not None:
            write_draft_vocab(made, draft_to_target, values["vocab_size"])
        if readme is not None:
            (made / README).write_text(readme, encoding="utf-8")
        text = json.dumps(values, indent=2, allow_nan=False)
        (made / _CONFIG).write_text(text + "\n", encoding="utf-8")
        _swap(made, directory, pathlib.Path(scratch) / "old")


def check_replaceable(directory: pathlib.Path) -> None:
    """Refuses a directory that holds anything but an earlier export."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, a directory is written")
    foreign = sorted({p.name for p in directory.iterdir()} - {_WEIGHTS, _CONFIG, README, DRAFT_VOCAB_FILE})
    if foreign:
        raise CheckpointError(
            f"{directory} holds {foreign[0]}, which is no part of an export; choose another directory"
        )


def _swap(made: pathlib.Path, directory: pathlib.Path, old: pathlib.Path) -> None:
    """Gives `made` the name of `directory`; what was there is moved away first, and back on failure."""
    replaced = directory.exists()
    if replaced:
        directory.rename(old)
    try:
        made.rename(directory)
    except OSError:
        if replaced:
            old.rename(directory)
        raise
    if replaced:
        shutil.rmtree(old)
