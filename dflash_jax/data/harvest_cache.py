"""Functions harvested from a package, kept on disk: to parse all that is installed takes most of a minute, and every
run that trains on or is measured with code prompts asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from absl import logging

from dflash_jax.cache_dir import cache_dir
from dflash_jax.data.responses import write_atomically

T = TypeVar("T")


def kept(
    root: str, files: Sequence[pathlib.Path], make: type[T], settings: Any, harvest: Callable[[], Iterable[T]]
) -> tuple[T, ...]:
    """What `harvest` gives for the files of a root, from disk where nothing that it depends on has changed.

    That is: path, size and time of each file, the settings, the code of the harvest, the version of Python (its parser
    decides what is read). One file is kept a root and Python; it is replaced when it is stale or can not be read.

    Args:
      root: what the files belong to; named apart in each environment.
      make: the dataclass of what is harvested; its fields are strings.
      settings: a dataclass; harvests with other settings replace each other.
    """
    state = _digest(
        *(f"{path}:{s.st_size}:{s.st_mtime_ns}" for path in files for s in (path.stat(),)),
        repr(settings), pathlib.Path(sys.modules[make.__module__].__file__).read_text(encoding="utf-8"), sys.version,
    )  # fmt: skip
    name = re.sub(r"[^\w.-]+", "-", pathlib.Path(root).name)
    place = cache_dir() / "code_prompts" / f"{name}-{_digest(root, sys.prefix, sys.version)[:16]}.json"
    try:
        stored = json.loads(place.read_text(encoding="utf-8"))
        if stored["state"] == state:
            return tuple(make(**row) for row in stored["functions"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # not there, or cut off: harvested again
    functions = tuple(harvest())
    rows = [dataclasses.asdict(function) for function in functions]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps({"state": state, "functions": rows}))
    except OSError as error:
        logging.warning("code prompts of %s are not kept, and will be read again by the next run: %s", root, error)
    return functions


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
