"""What a target and a drafter are, without their weights."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.drafter_config import drafter_config_from_hf
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.hub import fetch_snapshot, is_hub_name
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.load_drafter import drafter_directory
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig


def read_architectures(
    target_source: str,
    target_hf: Mapping[str, Any] | None = None,
    drafter_source: str = "",
    drafter_hf: Mapping[str, Any] | None = None,
) -> tuple[TargetConfig, DrafterConfig | None]:
    """The configurations of a target and of its drafter, None where neither source nor config.json of one is given.

    Args:
      target_hf, drafter_hf: decoded config.json; None reads that of the source, a directory or a hub name.

    Raises:
      ConfigError: a configuration is not supported, the two do not belong together, or there is no config.json.
      CheckpointError: the hub did not give it.
    """
    if target_hf is None:
        target_hf = read_json(_target_directory(target_source) / "config.json", required=True)
    target = target_config_from_hf(target_hf)
    if drafter_hf is None:
        if not drafter_source:
            return target, None
        drafter_hf = read_json(drafter_directory(drafter_source) / "config.json", required=True)
    return target, drafter_config_from_hf(drafter_hf, target)


def _target_directory(source: str) -> pathlib.Path:
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path
    if not path.exists() and is_hub_name(source):
        return fetch_snapshot(source, ("config.json",))
    raise ConfigError(
        f"target.source is {source!r}, which has no config.json to read; set target.architecture to what one would hold"
    )
