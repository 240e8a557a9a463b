"""What a benchmark measured, prompt by prompt, on disk while it runs: a killed run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import ConfigError
from dflash_jax.evaluation.timing import TimedRun

_SETUP, _RECORDS = "setup.json", "records.jsonl"


@dataclasses.dataclass
class Record:
    """One prompt under all methods.

    Attributes:
      task, id, prompt_hash, prompt_tokens: which prompt, and what the model was given.
      order: names of the methods in the order they ran.
      runs: by name.
      differences: by name of a method whose tokens are not the baseline's: see `near_ties.Difference`.
    """

    task: str
    id: str
    prompt_hash: str
    prompt_tokens: int
    order: list[str]
    runs: dict[str, TimedRun]
    differences: dict[str, dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        fields = json.loads(line)
        fields["runs"] = {name: TimedRun(**run) for name, run in fields["runs"].items()}
        return cls(**fields)


class RecordFile:
    """Records of one run in a folder: `setup.json`, what was measured, and `records.jsonl`, one prompt a line.

    Args:
      directory: made if needed. One that holds records is continued.
      setup: JSON-able, everything that a number depends on; a folder with another one is refused.

    Raises:
      ConfigError: the folder holds records of another setup (names the field), or a line that can not be read.
    """

    def __init__(self, directory: str | pathlib.Path, setup: Mapping[str, Any]):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_setup(json.loads(json.dumps(setup)))
        path = self.directory / _RECORDS
        self.records = self._read(path)
        self._file = path.open("a", encoding="utf-8")

    def _check_setup(self, setup: dict[str, Any]) -> None:
        path = self.directory / _SETUP
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps(setup, indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)
            return
        kept = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted({*kept, *setup}):
            if kept.get(name) != setup.get(name):
                raise ConfigError(
                    f"{self.directory} holds measurements with {name} = {kept.get(name)!r}, this run has "
                    f"{setup.get(name)!r}; choose another workdir, or remove the folder"
                )

    @staticmethod
    def _read(path: pathlib.Path) -> dict[tuple[str, str], Record]:
        if not path.exists():
            return {}
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a killed run left half a line
            with path.open("r+b") as file:
                file.truncate(len(whole))
        found = {}
        for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
            try:
                record = Record.from_json(line)
            except (ValueError, TypeError, LookupError) as error:
                raise ConfigError(f"{path}, line {number}: no record ({error!r}); remove the line") from error
            found[record.task, record.id] = record
        return found

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self.records

    def append(self, record: Record) -> None:
        """Writes a record; it is on disk when this returns."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records[record.task, record.id] = record

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
