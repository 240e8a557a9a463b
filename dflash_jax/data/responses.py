"""The target's answers on disk: an append-only store that survives being killed, and the samples read from it.

A store is a folder with `manifest.json` (the fingerprint: what produced the answers) and `responses.jsonl` (one
answer a line). A store is only ever continued with the fingerprint that it was started with.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from dflash_jax.config import ConfigError

Mode = Literal["greedy", "sampled", "natural"]
MODES = ("greedy", "sampled", "natural")
FORMAT = 1
TURN = "/turn"  # between the id of a conversation and the number of a turn in it
_MANIFEST = "manifest.json"
_ROWS = "responses.jsonl"


class StoreError(ConfigError):
    """A store that can not be used as asked: names the store, the field and the way out."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One answered prompt.

    Attributes:
      id: of the prompt; unique in a store.
      source: prompt source.
      prompt_ids: everything up to the answer, chat template and generation prompt included.
      answer_ids: the answer, with the end-of-turn id if it ended by itself.
      finish_reason: "stop" or "length".
      seed: of the row's random stream.
      mode: "greedy" or "sampled" for the target's own text, "natural" for text that somebody else wrote.
      earlier_spans: [start, end) ranges of prompt_ids that are earlier assistant turns, and supervised too.
      follows: id of the response to the turn before, "" where there is none; it stands earlier in the store.
    """

    id: str
    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    mode: Mode
    earlier_spans: tuple[tuple[int, int], ...] = ()
    follows: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise StoreError(f"response {self.id}: mode is {self.mode!r}, must be one of {', '.join(MODES)}")
        if self.finish_reason not in ("stop", "length"):
            raise StoreError(f"response {self.id}: finish_reason is {self.finish_reason!r}, must be 'stop' or 'length'")
        if not self.prompt_ids or not self.answer_ids:
            raise StoreError(f"response {self.id}: prompt_ids and answer_ids need at least one token each")
        for start, end in self.earlier_spans:
            if not 0 <= start < end <= len(self.prompt_ids):
                raise StoreError(f"response {self.id}: span [{start}, {end}) lies outside {len(self.prompt_ids)} ids")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sequence to train on.

    Attributes:
      id: of the response.
      token_S: int32 ids, prompt and answer.
      loss_mask_S: bool, True on answer tokens, the end-of-turn id included.
    """

    id: str
    token_S: np.ndarray
    loss_mask_S: np.ndarray

    def __post_init__(self) -> None:
        if self.token_S.shape != self.loss_mask_S.shape:
            raise StoreError(f"sample {self.id}: {self.token_S.shape} tokens, mask of {self.loss_mask_S.shape}")

    @property
    def length(self) -> int:
        return len(self.token_S)


def sample_of(response: Response, max_length: int | None = None) -> Sample:
    """Tokens and loss mask of a response, both cut at max_length."""
    token_S = np.asarray((*response.prompt_ids, *response.answer_ids), np.int32)
    mask_S = np.zeros(token_S.shape, bool)
    mask_S[len(response.prompt_ids) :] = True
    for start, end in response.earlier_spans:
        mask_S[start:end] = True
    return Sample(response.id, token_S[:max_length], mask_S[:max_length])


def joined_turns(responses: Iterable[Response]) -> list[Response]:
    """Turns of a conversation as one response with several spans, where the ids of one simply go on in the next.

    A template that renders earlier turns otherwise than they were written (without their thinking, say) gives prompts
    that do not begin with what was answered: such turns stay apart, each with the context that serving gives it.
    """
    held: dict[str, Response] = {}
    for response in responses:
        before = held.get(response.follows)
        if before is not None:
            ids, start = (*before.prompt_ids, *before.answer_ids), len(before.prompt_ids)
            if response.prompt_ids[: len(ids)] == ids:
                del held[before.id]
                spans = (*before.earlier_spans, (start, len(ids)))
                response = dataclasses.replace(response, earlier_spans=spans)
        held[response.id] = response
    return list(held.values())


def conversation_id(response_id: str, multi_turn: bool) -> str:
    """Id of the prompt that a response answers (a turn of)."""
    return response_id.rpartition(TURN)[0] if multi_turn else response_id


def read_samples(
    stores: ResponseStore | Iterable[ResponseStore],
    max_length: int | None = None,
    modes: Iterable[Mode] = MODES,
    prompts: Iterable[Collection[str] | None] | None = None,
    vocab_size: int | None = None,
) -> list[Sample]:
    """The samples of one or several stores, in store order, each cut at max_length; see `joined_turns`.

    Samples that keep no two neighbouring supervised tokens after the cut are left out: no block could start there.

    Prompts may be answered in several stores (greedy and sampled, with and without thinking); an answer that two of
    them share counts once.

    Args:
      prompts: for each store the ids of the prompts whose answers are read, None for all: a store is filled by every
        run that uses it, and may hold more than this one asks for.
      vocab_size: of the target; None takes every id.

    Raises:
      StoreError: the stores' tokenizers differ, or a line is damaged (names file and line).
    """
    stores = [stores] if isinstance(stores, ResponseStore) else list(stores)
    prompts = [None] * len(stores) if prompts is None else list(prompts)
    seen: set[tuple[str, bytes]] = set()
    samples = []
    for store, wanted in zip(stores, prompts, strict=True):
        first = stores[0]
        if store.manifest["fingerprint"].get("tokenizer") != first.manifest["fingerprint"].get("tokenizer"):
            raise StoreError(f"{store.path} and {first.path} hold ids of different tokenizers")
        multi_turn = bool(store.manifest["fingerprint"].get("multi_turn"))
        rows = (r for r in store.rows(vocab_size) if wanted is None or conversation_id(r.id, multi_turn) in wanted)
        for response in joined_turns(rows):
            if response.mode not in tuple(modes):
                continue
            sample = sample_of(response, max_length)
            content = (response.id, hashlib.sha256(sample.token_S.tobytes()).digest())
            if content in seen:
                continue
            seen.add(content)
            if np.any(sample.loss_mask_S[1:] & sample.loss_mask_S[:-1]):
                samples.append(sample)
    return samples


class ResponseStore:
    """An append-only folder of responses. Readers may open it while one writer appends.

    Args:
      path: the folder; made if `fingerprint` is given and it does not exist.
      fingerprint: None to read; else the store is opened for appending, and must have been started with the
        same fingerprint.

    Raises:
      StoreError: the store does not exist, another process appends to it, or its fingerprint differs (names the field).
    """

    def __init__(self, path: str | pathlib.Path, fingerprint: Mapping[str, Any] | None = None):
        self.path = pathlib.Path(path)
        self._file = None
        if fingerprint is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path / _ROWS, "a+b")  # noqa: SIM115 - kept open for the store's life
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._file.close()
                raise StoreError(
                    f"store {self.path} is being written by another process; wait for it or stop it"
                ) from error
        try:
            self.manifest = self._open_manifest(fingerprint)
            self._keys = self._scan()
        except BaseException:
            self.close()
            raise

    def _open_manifest(self, fingerprint: Mapping[str, Any] | None) -> dict[str, Any]:
        file = self.path / _MANIFEST
        wanted = None if fingerprint is None else json.loads(json.dumps(fingerprint, sort_keys=True))
        if not file.exists():
            if wanted is None:
                raise StoreError(f"{self.path} is no response store: it has no {_MANIFEST}")
            if os.path.getsize(self.path / _ROWS):
                raise StoreError(f"store {self.path} has answers but no {_MANIFEST}: nobody can tell what made them")
            manifest = {"format": FORMAT, "fingerprint": wanted}
            write_atomically(file, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            return manifest
        manifest = read_manifest(file, FORMAT, "move the folder away, and its prompts are answered again")
        if wanted is not None:
            refuse_difference(f"store {self.path}", manifest["fingerprint"], wanted)
        return manifest

    def _scan(self) -> set[str]:
        """Ids of the complete rows; when appending, cuts an incomplete last line off."""
        keys: set[str] = set()
        whole = 0
        for number, line, end in self._lines():
            try:
                key = json.loads(line)["id"]
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(number, error) from error
            if not isinstance(key, str):
                raise self._damaged(number, f"id is {key!r}, must be a text")
            if key in keys:
                raise StoreError(
                    f"{self.path / _ROWS}, line {number}: response {key} is there twice; take one of the lines out"
                )
            keys.add(key)
            whole = end
        if self._file is not None and os.path.getsize(self.path / _ROWS) > whole:
            self._file.truncate(whole)
        return keys

    def _damaged(self, number: int, why: object) -> StoreError:
        why = f"{why} is missing" if isinstance(why, KeyError) else why
        return StoreError(
            f"{self.path / _ROWS}, line {number}: no response ({why}); take this line out, and its prompt is answered "
            "again by a run that asks for it"
        )

    def _lines(self) -> Iterator[tuple[int, bytes, int]]:
        """(number, line, offset of its end) of every line that ends; a killed writer's last line does not."""
        file = self.path / _ROWS
        if not file.exists():
            return
        end = 0
        with open(file, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield number, line, end

    @classmethod
    def exists(cls, path: str | pathlib.Path) -> bool:
        """Whether a store was begun there."""
        return (pathlib.Path(path) / _MANIFEST).exists()

    @property
    def ids(self) -> frozenset[str]:
        """Of all responses."""
        return frozenset(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def append(self, responses: Iterable[Response]) -> None:
        """Adds responses; each is on its way to the disk when this returns.

        Raises:
          StoreError: the store was opened for reading, or an id is in it already.
        """
        if self._file is None:
            raise StoreError(f"store {self.path} is open for reading; open it with a fingerprint to append")
        lines = []
        for response in responses:
            self._note(response)
            row = {k: v for k, v in dataclasses.asdict(response).items() if v or k not in ("earlier_spans", "follows")}
            lines.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        # One write in append mode: a kill leaves a prefix of it, of which only the last line can be incomplete.
        self._file.write(b"".join(lines))
        self._file.flush()

    def _note(self, response: Response) -> None:
        if response.id in self._keys:
            raise StoreError(f"store {self.path} already has response {response.id}")
        self._keys.add(response.id)

    def rows(self, vocab_size: int | None = None) -> Iterator[Response]:
        """The responses in the order they were added.

        Args:
          vocab_size: of the target that reads them; None for any.

        Raises:
          StoreError: a line is no response, or holds an id outside the vocabulary; names file and line.
        """
        for number, line, _ in self._lines():
            try:
                response = _response(json.loads(line))
                _check_ids(response, vocab_size)
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(number, error) from error
            yield response

    def close(self) -> None:
        """Ends writing; the rows are on the disk afterwards."""
        if self._file is not None and not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> ResponseStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowingStore(ResponseStore):
    """The store of a process that answers in step with the one that appends to it: its own rows are noted, not written.

    Raises:
      StoreError: the store does not exist, or its fingerprint differs (names the field).
    """

    def __init__(self, path: str | pathlib.Path, fingerprint: Mapping[str, Any]):
        super().__init__(path)
        refuse_difference(f"store {self.path}", self.manifest["fingerprint"], json.loads(json.dumps(fingerprint)))

    def append(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self._note(response)


def _response(row: dict[str, Any]) -> Response:
    """A line of the file."""
    for name in ("id", "source", "finish_reason", "mode", "follows"):
        if not isinstance(row.get(name, ""), str):
            raise StoreError(f"{name} is {row[name]!r}, must be a text")
    spans = tuple(tuple(span) for span in row.get("earlier_spans", ()))
    return Response(
        **{
            **row,
            "prompt_ids": tuple(row["prompt_ids"]),
            "answer_ids": tuple(row["answer_ids"]),
            "earlier_spans": spans,
        }
    )


def _check_ids(response: Response, vocab_size: int | None) -> None:
    end = 2**31 if vocab_size is None else vocab_size
    for name in ("prompt_ids", "answer_ids"):
        for i in getattr(response, name):
            if type(i) is not int or not 0 <= i < end:
                raise StoreError(
                    f"response {response.id}: {name} holds {i!r}, token ids of the target lie in [0, {end})"
                )


def read_manifest(file: pathlib.Path, file_format: int, way_out: str) -> dict[str, Any]:
    """The manifest of a store: its "format" and the "fingerprint" of what made it.

    Args:
      way_out: what to do about a damaged one.

    Raises:
      StoreError: the file is damaged, or of another format.
    """
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("fingerprint", {}), dict):
            raise ValueError("it holds no object with a fingerprint")
    except ValueError as error:
        raise StoreError(f"{file} is damaged ({error}); {way_out}") from error
    if manifest.get("format") != file_format:
        raise StoreError(
            f"{file.parent} has format {manifest.get('format')!r}, this program reads {file_format}; {way_out}"
        )
    if "fingerprint" not in manifest:
        raise StoreError(f"{file} is damaged (it has no fingerprint); {way_out}")
    return manifest


def refuse_difference(where: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares two fingerprints.

    Raises:
      StoreError: names the first field that differs, with both values.
    """
    for field in sorted({*stored, *wanted}):
        if stored.get(field) != wanted.get(field):
            raise StoreError(
                f"{where} was made with {field} = {stored.get(field)!r}, now it is {wanted.get(field)!r}; "
                "use the same value or another folder"
            )


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Writes a whole file or nothing."""
    scratch = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")  # pids repeat on the hosts of a shared disk
    with open(scratch, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(scratch, file)
