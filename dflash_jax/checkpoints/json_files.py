"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from dflash_jax.checkpoints.placement import CheckpointError


def read_json(path: pathlib.Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file, unless it is required.

    Raises:
      CheckpointError: the file is missing though required, is no JSON, or holds no object.
    """
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, must be a JSON object")
    return value
