"""Writing a target as a Hugging Face directory, so that torch runs the very weights that run here."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.checkpoints.hf_config import target_config_to_hf
from dflash_jax.checkpoints.placement import CheckpointError, export_tensors
from dflash_jax.checkpoints.safetensors_writer import write_safetensors
from dflash_jax.checkpoints.target_names import target_placements
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import TargetConfig
from dflash_jax.models.target import Target


def export_target(directory: str | pathlib.Path, target: Target) -> pathlib.Path:
    """Writes config.json, generation_config.json, model.safetensors and, with a tokenizer, its files.

    Weights keep the target's dtype. A GGUF file that is loaded and exported is thereby dequantised. The
    directory appears with all its files or not at all.

    Args:
      directory: must not exist, or be empty.
      target: a loaded target.

    Returns:
      The directory.

    Raises:
      CheckpointError: the directory holds something.
      ConfigError: the family has no Hugging Face configuration that says the same.
    """
    directory = pathlib.Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is no empty directory; choose another one")
    placements = target_placements(target.config, own_head="head_DxV" in target.params)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made = pathlib.Path(scratch) / "new"
        made.mkdir()
        write_text_side(made, target.config, target.dtype, target.eos_token_ids, target.tokenizer)
        write_safetensors(dict(export_tensors(target.params, placements)), made / "model.safetensors", "pt")
        os.replace(made, directory)  # takes the place of an empty directory too
    return directory


def write_text_side(
    directory: pathlib.Path, config: TargetConfig, dtype: Any, ends: Sequence[int], tokenizer: Tokenizer | None
) -> None:
    """Everything of a Hugging Face directory but the weights; see `export_target`."""
    named = {"dtype": np.dtype(dtype).name, "eos_token_id": list(ends) or None}
    _write_json(directory / "config.json", {**target_config_to_hf(config), **named})
    _write_json(directory / "generation_config.json", {"eos_token_id": list(ends) or None})
    if tokenizer is not None:
        _write_tokenizer(directory, tokenizer)


def _write_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer) -> None:
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config.update(tokenizer.special_tokens)
    for name, adds in (("add_bos_token", tokenizer.add_bos), ("add_eos_token", tokenizer.add_eos)):
        if adds is not None:
            config[name] = adds
    _write_json(directory / "tokenizer_config.json", config)
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template.source, encoding="utf-8")


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
