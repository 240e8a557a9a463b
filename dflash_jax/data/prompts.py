"""Prompts by name: one dict of sources, one split, one rendering of code prompts.

The benchmark and the training set send code prompts through the same `code_message`, so that a drafter is trained on
exactly the text that it will be measured on.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import logging

from dflash_jax.config import ConfigError
from dflash_jax.data import code_prompts, code_tasks, conversation_files, templates
from dflash_jax.data.code_prompts import CodeFunction, stable_hash
from dflash_jax.data.conversation_files import SourceError
from dflash_jax.data.held_out import HeldOut

Split = Literal["train", "heldout"]
Message = Mapping[str, Any]

CODE_INSTRUCTION = "Complete the following Python function:\n\n```python\n{stub}\n```"
CODE_ANSWER = "```python\n{source}\n```"
HELD_OUT_ONE_IN = 20


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to answer, or, where its last message is the assistant's, one that is answered already.

    Attributes:
      id: stable and unique within its source's namespace (`source:hash`).
      messages: chat messages with `role` and `content`.
      source: name of the source.
    """

    id: str
    messages: tuple[Message, ...]
    source: str

    @property
    def answered(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def question(self) -> tuple[Message, ...]:
        """The messages without a last one of the assistant's."""
        return self.messages[:-1] if self.answered else self.messages


def code_message(stub: str) -> dict[str, str]:
    """The user message that asks to complete a function stub (imports, signature, docstring)."""
    # Blank lines around a stub are an accident of its file; a model would see them as part of the question.
    return {"role": "user", "content": CODE_INSTRUCTION.format(stub=stub.strip("\n").rstrip())}


def side(key: str) -> Split:
    """On which side of the split everything with this key falls, for ever: one key in 20 is held out."""
    return "heldout" if stable_hash(f"split:{key}") % HELD_OUT_ONE_IN == 0 else "train"


def code(seed: int, limit: int | None, split: Split, roots: Iterable[str] = ()) -> Iterator[Prompt]:
    """Stubs of installed functions (HumanEval kept out); functions of one name are on one side of the split."""
    return _stubs("code", code_prompts.harvest(tuple(roots), seed), limit, split)


def code_natural(seed: int, limit: int | None, split: Split, roots: Iterable[str] = ()) -> Iterator[Prompt]:
    """The same stubs with the true function as the answer, fenced as a chat model would write it."""
    return _solved("code_natural", code_prompts.harvest(tuple(roots), seed), limit, split)


def tasks(seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """Stubs of small programming tasks with examples, written from parts; HumanEval kept out."""
    return _stubs("tasks", _shuffled_tasks(seed), limit, split)


def tasks_natural(seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """The same tasks with a solution as the answer."""
    return _solved("tasks_natural", _shuffled_tasks(seed), limit, split)


def _shuffled_tasks(seed: int) -> list[CodeFunction]:
    return sorted(code_tasks.tasks(seed), key=lambda f: stable_hash(f"{seed}:{f.id}"))


def _stubs(source: str, functions: Iterable[CodeFunction], limit: int | None, split: Split) -> Iterator[Prompt]:
    for f in itertools.islice((f for f in functions if side(f.name) == split), limit):
        yield Prompt(f"{source}:{f.id}", (code_message(f.stub),), source)


def _solved(source: str, functions: Iterable[CodeFunction], limit: int | None, split: Split) -> Iterator[Prompt]:
    for f in itertools.islice((f for f in functions if side(f.name) == split), limit):
        answer = {"role": "assistant", "content": CODE_ANSWER.format(source=f.source)}
        yield Prompt(f"{source}:{f.id}", (code_message(f.stub), answer), source)


def instruction(seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """Instructions over topics."""
    return _templated("instruction", templates.instruction(), seed, limit, split)


def reasoning(seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """Grade-school word problems. The problems themselves depend on the seed, the split only on the story."""
    return _templated("reasoning", templates.reasoning(seed), seed, limit, split)


def json_output(seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """Requests for JSON objects."""
    return _templated("json", templates.json_output(), seed, limit, split)


SOURCES: dict[str, Callable[..., Iterator[Prompt]]] = {
    "code": code,
    "code_natural": code_natural,
    "tasks": tasks,
    "tasks_natural": tasks_natural,
    "instruction": instruction,
    "reasoning": reasoning,
    "json": json_output,
}


def _templated(
    name: str, written: Iterable[templates.Templated], seed: int, limit: int | None, split: Split
) -> Iterator[Prompt]:
    texts = sorted(
        {t.text for t in written if side(f"{name}:{t.key}") == split}, key=lambda t: stable_hash(f"{seed}:{t}")
    )
    for text in texts[:limit]:
        yield Prompt(f"{name}:{stable_hash(text):016x}", ({"role": "user", "content": text},), name)


def from_files(name: str, seed: int, limit: int | None, split: Split) -> Iterator[Prompt]:
    """Prompts of files or of a dataset, see `dflash_jax.data.conversation_files`; the order is by hash and seed.

    Conversations that end with the assistant's message count as answered; equal ones count once. An id is the row's
    own, or a hash of its messages.

    Raises:
      SourceError: a row can not be read (names it), or an id stands for two conversations.
    """
    source = conversation_files.namespace(name)

    def distinct() -> Iterator[Prompt]:
        seen: dict[str, int] = {}  # of a large source only this is held, and the prompts that are chosen
        for row in conversation_files.conversations(name):
            digest = stable_hash(json.dumps(row.messages, sort_keys=True))
            key = row.given_id or f"{digest:016x}"
            before = seen.get(key)
            if before not in (None, digest):
                raise SourceError(f"{row.where}: id {key!r} is used twice for different conversations")
            seen[key] = digest
            prompt = Prompt(f"{source}:{key}", row.messages, source)
            if before is None and side(prompt.id) == split:
                yield prompt

    def rank(prompt: Prompt) -> int:
        return stable_hash(f"{seed}:{prompt.id}")

    yield from sorted(distinct(), key=rank) if limit is None else heapq.nsmallest(limit, distinct(), key=rank)


def load(name: str, seed: int = 0, limit: int | None = None, split: Split = "train") -> list[Prompt]:
    """Prompts of one source.

    Args:
      name: a name in `SOURCES`, or files or a dataset as `conversation_files` names them (`mine.jsonl`,
        `shards/*.parquet#question`, `hf:org/name:split`). `code` and `code_natural` may say where to look:
        `code@sympy,networkx` or `code@/folder/of/packages` (see `code_prompts.harvest`).
      limit: None: all.

    Raises:
      ValueError: unknown source or split, or a source that holds fewer prompts than `limit` asks for.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}, must be 'train' or 'heldout'")
    _check_name(name)
    source, at, roots = name.partition("@")
    if conversation_files.is_file_source(name):
        prompts = list(from_files(name, seed, limit, split))
    else:
        options = {"roots": tuple(roots.split(","))} if at else {}
        prompts = list(SOURCES[source](seed, limit, split, **options))
    if limit is not None and len(prompts) < limit:
        raise ConfigError(
            f"prompt source {name!r} has {len(prompts)} prompts in split {split!r}, {limit} are asked for; ask for "
            "fewer, or None for all"
        )
    return prompts


Counts = Mapping[str, int | None] | Sequence[tuple[str, int | None]]


def check_counts(counts: Counts, field: str) -> None:
    """Looks at the numbers and at the names of the program's own sources, and reads nothing.

    Raises:
      ConfigError: a number below 1 or an unknown source, by `field`.
    """
    for name, count in counts.items() if isinstance(counts, Mapping) else counts:
        _check_name(name)
        if count is not None and count < 1:
            raise ConfigError(
                f"{field}: {name} is {count}, must be at least 1, or None for all; leave the source out for none"
            )


def _check_name(name: str) -> None:
    source, at, _ = name.partition("@")
    if conversation_files.is_file_source(name):
        return
    if source not in SOURCES:
        raise ConfigError(
            f"prompt source {name!r} is unknown; known are {', '.join(SOURCES)}, paths of .jsonl and .parquet files, "
            "and hf:NAME"
        )
    if at and source not in ("code", "code_natural"):
        raise ConfigError(f"prompt source {name!r}: only code and code_natural take roots behind '@'")


def file_sources(counts: Counts) -> list[str]:
    """The names among these sources that stand for files or datasets."""
    names = counts if isinstance(counts, Mapping) else [name for name, _ in counts]
    return [name for name in names if conversation_files.is_file_source(name)]


def mixture(
    counts: Counts, seed: int = 0, split: Split = "train", held_out: HeldOut | None = None
) -> list[Prompt]:  # fmt: skip
    """That many prompts of each source, shuffled together by hash and seed; one that two sources share counts once.

    Args:
      counts: {source: number} or pairs of them (the keys of a ConfigDict can not hold dots); None takes all.
      held_out: what prompts of files and datasets are checked against; those that share a run of words with it are
        dropped from the number, and the log says how many. (Sources written here keep HumanEval out by themselves.)

    Raises:
      ValueError: see `load`; or a source has nothing, or one id stands for different conversations of two sources.
    """
    prompts: dict[str, Prompt] = {}
    for name, count in counts.items() if isinstance(counts, Mapping) else counts:
        found = load(name, seed, count, split)
        if held_out is not None and conversation_files.is_file_source(name):
            kept = without(found, held_out)
            if len(kept) < len(found):
                logging.info(
                    "%s: %d of %d prompts left out, they share text with a benchmark", name, len(found) - len(kept),
                    len(found),
                )  # fmt: skip
            found = kept
        if not found:
            raise ConfigError(
                f"prompt source {name!r} has no prompts in split {split!r}; leave it out, or look at its rows"
            )
        for p in found:
            if prompts.setdefault(p.id, p).messages != p.messages:
                raise ConfigError(
                    f"prompt source {name!r}: id {p.id} stands for another conversation in a source of the same name; "
                    "rename one of the files"
                )
    return sorted(prompts.values(), key=lambda p: stable_hash(f"{seed}:mixture:{p.id}"))


def without(prompts: Iterable[Prompt], held_out: HeldOut) -> list[Prompt]:
    """The prompts none of whose messages shares a run of words with a held-out text."""
    return [p for p in prompts if not held_out.overlaps(*(m["content"] for m in p.messages))]
