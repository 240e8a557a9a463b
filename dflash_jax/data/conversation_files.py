"""Prompts and conversations that somebody else wrote: JSONL and parquet files, Hugging Face datasets.

A source is named by one string,

    PATH.jsonl[#FIELD]   PATH.parquet[#FIELD]   hf:NAME[,SUBSET][:SPLIT][#FIELD]

PATH may hold * (shards, in the order of their names). NAME is a dataset of the hub, or a local folder: of data files,
or one that `save_to_disk` wrote. FIELD names the field to read; without it a row must have exactly one of

    messages       [{"role": ..., "content": ...}, ...]
    conversations  [{"from": "human" | "gpt" | ..., "value": ...}, ...]
    prompt         a string: the user's message

and FIELD's value may have any of the three forms. An `id` that a row has is kept.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.config import ConfigError

FIELDS = ("messages", "conversations", "prompt")
HUB = "hf:"
SUFFIXES = (".jsonl", ".parquet")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
          "tool": "tool"}  # fmt: skip
# Of messages that have a "role": what chat templates know. Another one would be rendered as if it were.
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


class SourceError(ConfigError):
    """A source or one of its rows that can not be read: names the file, the row and the field."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: its messages, the id that it brought or None, and where it stood, for messages about it."""

    messages: tuple[Mapping[str, Any], ...]
    given_id: str | None
    where: str


def is_file_source(name: str) -> bool:
    """Whether `conversations` reads sources of this name."""
    return name.startswith(HUB) or name.partition("#")[0].endswith(SUFFIXES)


def namespace(name: str) -> str:
    """The short name of a source, that ids and reports begin with: the file's or the dataset's."""
    if name.startswith(HUB):
        return name[len(HUB) :].partition("#")[0].partition(":")[0].partition(",")[0].rstrip("/").rpartition("/")[2]
    return pathlib.Path(name.partition("#")[0]).stem.strip("*-_ ") or "files"


def conversations(name: str) -> Iterator[Row]:
    """The rows of a source, in its own order; empty lines of JSONL are passed over.

    Raises:
      SourceError: no such file, split or field, or a row that is no conversation.
      ModuleNotFoundError: pyarrow or datasets, which the source needs, is not installed.
    """
    place, at, field = name.partition("#")
    if at and not field:
        raise SourceError(f"source {name!r} ends with '#': name the field behind it, or leave it out")
    rows = _hub_rows(place) if place.startswith(HUB) else _file_rows(place)
    for where, row in rows:
        yield Row(parse(row, where, field or None), _id(row, where), where)


def parse(row: Any, where: str, field: str | None = None) -> tuple[Mapping[str, Any], ...]:
    """The messages of a row.

    Raises:
      SourceError: names `where` and the field.
    """
    if not isinstance(row, Mapping):
        raise SourceError(f"{where}: needs an object, found {type(row).__name__}")
    if field is None:
        found = [name for name in FIELDS if row.get(name) is not None]
        if len(found) != 1:
            raise SourceError(
                f"{where}: needs an object with exactly one of {', '.join(map(repr, FIELDS))}; it has "
                f"{', '.join(map(repr, row)) or 'no field'}. Name the field to read behind '#' (FILE#FIELD)"
            )
        field = found[0]
    elif field not in row:
        raise SourceError(f"{where}: has no field {field!r}, only {', '.join(map(repr, row))}")
    value = row[field]
    if isinstance(value, str):
        if not value.strip():
            raise SourceError(f"{where}: field {field!r} is an empty string")
        return ({"role": "user", "content": value},)
    if not isinstance(value, Sequence) or not value:
        raise SourceError(f"{where}: field {field!r} must be a string or a list of messages, found {value!r:.60}")
    messages = tuple(_message(message, f"{where}: {field}[{i}]") for i, message in enumerate(value))
    if all(message["role"] in ("assistant", "system") for message in messages):
        raise SourceError(f"{where}: field {field!r} holds no message that could be answered")
    return messages


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if isinstance(message, Mapping) and message.get("from") is not None and "role" not in message:
        if message["from"] not in _ROLES:
            raise SourceError(f"{where}: 'from' is {message['from']!r}, known are {', '.join(map(repr, _ROLES))}")
        message = {"role": _ROLES[message["from"]], "content": message.get("value")}
    if not isinstance(message, Mapping) or not all(isinstance(message.get(x), str) for x in ("role", "content")):
        raise SourceError(f"{where}: every message needs the strings 'role' and 'content' (or 'from' and 'value')")
    if message["role"] not in _KNOWN:
        raise SourceError(f"{where}: 'role' is {message['role']!r}, known are {', '.join(map(repr, _KNOWN))}")
    # Columns of parquet files and datasets hold null where a message lacks a key that others have.
    return {name: value for name, value in message.items() if value is not None}


def _id(row: Mapping[str, Any], where: str) -> str | None:
    given = row.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int))):
        raise SourceError(f"{where}: field 'id' must be a string or an integer, found {given!r:.60}")
    return None if given is None else str(given)


def _file_rows(pattern: str) -> Iterator[tuple[str, Any]]:
    paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    if not paths:
        raise SourceError(f"source {pattern!r}: no file has such a name")
    for path in paths:
        if not pathlib.Path(path).is_file():
            raise SourceError(f"source {pattern!r}: there is no file {path}")
        yield from _parquet_rows(path) if path.endswith(".parquet") else _jsonl_rows(path)


def _jsonl_rows(path: str) -> Iterator[tuple[str, Any]]:
    # Bytes: a line ends with a newline and nothing else (text may hold U+2028 and its like as they are).
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise SourceError(f"{where}: no JSON ({error.msg} at column {error.colno})") from error
            except UnicodeDecodeError as error:
                raise SourceError(f"{where}: no UTF-8 ({error.reason} at byte {error.start})") from error


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is read with pyarrow, which is not installed (pip install 'dflash_jax[data]')"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path}: no parquet file ({error})") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    path, _, split = name[len(HUB) :].partition(":")
    path, _, subset = path.partition(",")
    split = split or "train"
    if not path:
        raise SourceError(f"source {name!r} names no dataset: hf:NAME[,SUBSET][:SPLIT][#FIELD]")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"source {name!r} needs the package datasets, which is not installed (pip install 'dflash_jax[data]')"
        ) from error
    folder = pathlib.Path(path)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():  # save_to_disk wrote it
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, subset or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # hub, network, files
        raise SourceError(
            f"dataset {path!r} could not be opened ({type(error).__name__}: {error}). Is the name right, and can the "
            "hub be reached? A local folder of data files can be named in its place"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise SourceError(f"dataset {path!r} has no split {split!r}, only {', '.join(map(repr, found))}")
        found = found[split]
    for number, row in enumerate(found, 1):
        yield f"{name}, row {number}", row
