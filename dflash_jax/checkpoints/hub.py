"""Snapshots of repositories on the Hugging Face hub, when the network allows."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dflash_jax.checkpoints.placement import CheckpointError, Progress

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


def is_hub_name(source: str) -> bool:
    """Whether `source` has the form owner/name or owner/name@revision."""
    return _NAME.fullmatch(source) is not None


def fetch_snapshot(source: str, files: Sequence[str], progress: Progress | None = None) -> pathlib.Path:
    """The directory of a repository's files, downloaded unless the hub's cache has them.

    Args:
      source: owner/name or owner/name@revision; see `is_hub_name`.
      files: patterns of the files that are wanted.
      progress: told once that fetching begins.

    Raises:
      CheckpointError: the hub did not give it.
    """
    match = _NAME.fullmatch(source)
    if match is None:
        raise CheckpointError(f"{source!r} is no hub name (owner/name or owner/name@revision)")
    if progress is not None:
        progress(0, 1, f"fetching {source} from the hub")
    name, revision = match["name"], match["revision"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is no local directory, and the Hugging Face hub did not give it"
            f"{'' if revision is None else f' at revision {revision}'}: {error}. Without a network, download it by "
            "other means and give its directory"
        ) from error
