"""The fair runner: all methods in one process on the same prompts, interleaved prompt by prompt.

Same target, dtype, prompts and limits; batch 1; programs compiled before anything is timed; which method goes first
changes from prompt to prompt. Every prompt's tokens are compared with plain decoding's, and where they differ the
logits there are looked at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError
from dflash_jax.decoding.sizes import capacity_bucket
from dflash_jax.drafters.contract import Drafter
from dflash_jax.evaluation.methods import PLAIN, EngineMethod, Method, first_difference
from dflash_jax.evaluation.near_ties import explain
from dflash_jax.evaluation.overhead import host_overhead
from dflash_jax.evaluation.records import Record, RecordFile
from dflash_jax.evaluation.report import aggregate
from dflash_jax.evaluation.statistics import summarise
from dflash_jax.evaluation.tasks import EncodedPrompt, encode_task, load_task, prompt_hash
from dflash_jax.evaluation.timing import TimedRun
from dflash_jax.models.target import Target


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """A benchmark.

    Attributes:
      target, drafter: see `load_target` and `load_drafter`.
      tasks: how many prompts of each task (see `tasks.TASKS`); 0 for all.
      dtypes: of target and drafter, one run each.
      block_sizes: run-time block sizes of DFlash, compared side by side.
      max_tokens: of an answer.
      draft_vocab: see `load_drafter`.
      overhead_rounds: rounds for timing the host (see `overhead.host_overhead`); 0 for not at all.
    """

    target: str
    drafter: str
    tasks: Mapping[str, int]
    dtypes: Sequence[str] = ("float32",)
    block_sizes: Sequence[int] = ()
    max_tokens: int = 256
    draft_vocab: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overhead_rounds: int = 256

    def __post_init__(self) -> None:
        for name in ("tasks", "dtypes", "block_sizes"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: there is nothing to measure")
        for name in ("dtypes", "block_sizes"):
            values = list(getattr(self, name))
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} is {values}, which names one twice")
        for name, limit in self.tasks.items():
            if limit < 0:
                raise ConfigError(f"tasks.{name} is {limit}, must be a number of prompts, or 0 for all")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens is {self.max_tokens}, must be at least 2: one token is no round")


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is asked.

    Attributes:
      by_task: encoded prompts of each task.
      left_out: how many of each task were left out because the target's context can not hold them.
    """

    by_task: Mapping[str, Sequence[EncodedPrompt]]
    left_out: Mapping[str, int]

    @property
    def hashes(self) -> dict[str, str]:
        """`tasks.prompt_hash` of each task."""
        return {task: prompt_hash(prompts) for task, prompts in self.by_task.items()}

    def __iter__(self):
        return (prompt for prompts in self.by_task.values() for prompt in prompts)


def select_prompts(
    tasks: Mapping[str, int], tokenizer: Tokenizer, max_positions: int, chat_template_kwargs: Mapping[str, Any]
) -> Prompts:
    """Loads, renders and encodes; prompts that leave no room for two tokens are left out and counted.

    Raises:
      ConfigError: see `tasks.load_task`; or no prompt is left.
    """
    by_task, left_out = {}, {}
    for task, limit in tasks.items():
        encoded = encode_task(tokenizer, task, load_task(task, limit or None), chat_template_kwargs)
        by_task[task] = [p for p in encoded if len(p.ids) + 2 <= max_positions]
        left_out[task] = len(encoded) - len(by_task[task])
        if not by_task[task]:
            raise ConfigError(f"task {task!r}: every prompt is longer than the target's context of {max_positions}")
        logging.info("%s: %d prompts, ids %s", task, len(by_task[task]), prompt_hash(by_task[task]))
        if left_out[task]:
            logging.warning("%s: %d prompts do not fit into the context of %d", task, left_out[task], max_positions)
    return Prompts(by_task, left_out)


def own_methods(target: Target, drafter: Drafter, block_sizes: Sequence[int], label: str = "dflash") -> list[Method]:
    """Plain decoding, and DFlash at each block size (`dflash-4`, ...).

    Raises:
      ConfigError: a block size does not suit the drafter.
    """
    for size in block_sizes:
        if not 2 <= size <= drafter.block_size:
            raise ConfigError(
                f"block_sizes holds {size}, must lie in [2, {drafter.block_size}]: {drafter.source} was trained with "
                f"blocks of {drafter.block_size}; such as --block_sizes={drafter.block_size}"
            )
    stop_ids = target.eos_token_ids
    dflash = [EngineMethod(f"{label}-{k}", target, drafter, k, stop_ids) for k in block_sizes]
    return [EngineMethod(PLAIN, target, stop_token_ids=stop_ids), *dflash]


def describe(target: Target, drafter: Drafter, max_tokens: int, methods: Sequence[Method]) -> dict[str, Any]:
    """Everything that a number depends on besides the prompts: the setup of a `RecordFile`."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((drafter.params, drafter.shared.draft_to_target_V)):
        digest.update(np.asarray(leaf).tobytes())
    device = jax.devices()[0]
    return {
        "target": target.source,
        "drafter": drafter.source,
        "drafter_sha256": digest.hexdigest()[:16],
        "dtype": np.dtype(target.dtype).name,
        "max_tokens": max_tokens,
        "methods": [method.name for method in methods],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device.platform} ({device.device_kind})",
        "jax": jax.__version__,
    }


def order(names: Sequence[str], number: int) -> list[str]:
    """The methods in the order of prompt `number`: everyone comes first, and after everyone else, equally often."""
    turn = number % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned[::-1] if number // len(names) % 2 else turned


def run(
    directory: str | pathlib.Path,
    target: Target,
    setup: Mapping[str, Any],
    methods: Sequence[Method],
    prompts: Prompts,
    max_tokens: int,
    *,
    peers: Mapping[str, str] | None = None,
    overhead_rounds: int = 256,
) -> dict[str, Any]:
    """Measures every prompt that the folder has no record of yet, and reports on all of them.

    Args:
      directory: of the records; may hold some already, of the same setup.
      target: what the engine methods run, for the length of its context.
      setup: see `describe`.
      methods: the baseline, plain decoding, first.
      peers: see `report.aggregate`.

    Returns:
      setup, prompt_hashes and left_out by task, warm_up_s by method (compilation and a first short answer; only of
      this process), host_overhead by method, tasks (see `report.aggregate`), unexplained: prompts on which an
      engine method differs from plain decoding by more than a near tie.

    Raises:
      ConfigError: the folder's records are of another setup, or of other prompts.
    """
    plain = methods[0]
    if not isinstance(plain, EngineMethod) or plain.name != PLAIN:
        raise ValueError(f"the first method is {plain.name!r}, must be plain decoding")
    by_name = {method.name: method for method in methods}
    if len(by_name) < len(methods):
        raise ValueError(f"methods share a name: {[method.name for method in methods]}")
    limit = target.config.max_positions
    with RecordFile(directory, setup) as file:
        for prompt in prompts:
            if (prompt.task, prompt.id) in file:
                _check_same(file.records[prompt.task, prompt.id], prompt, file.directory)
        todo = [p for p in prompts if (p.task, p.id) not in file]
        warm_up_s = _warm_up(methods, todo, max_tokens, limit)
        overhead = {}
        if overhead_rounds:
            shortest = min((p.ids for p in prompts), key=len)
            for method in methods:
                if isinstance(method, EngineMethod):
                    logging.info("timing the host's part of a round: %s", method.name)
                    overhead[method.name] = host_overhead(method, shortest, max_tokens, overhead_rounds)
        number = {(p.task, p.id): i for i, p in enumerate(prompts)}
        for done, prompt in enumerate(todo, len(number) - len(todo) + 1):
            names = order(list(by_name), number[prompt.task, prompt.id])
            budget = _budget(prompt, max_tokens, limit)
            runs = {name: by_name[name].answer(prompt.ids, budget) for name in names}
            record = Record(
                prompt.task, prompt.id, prompt_hash([prompt]), len(prompt.ids), names, runs,
                _differences(plain, prompt, budget, runs),
            )  # fmt: skip
            file.append(record)
            logging.info("[%d/%d] %s: %s", done, len(number), prompt.id, _line(record, by_name))
        records = [file.records[key] for key in number]
    tasks = aggregate(records, {m.name: m.block_size for m in methods}, peers=peers)
    return {
        "setup": dict(setup),
        "prompt_hashes": prompts.hashes,
        "left_out": dict(prompts.left_out),
        "warm_up_s": warm_up_s,
        "host_overhead": overhead,
        "tasks": tasks,
        "unexplained": sum(
            not difference["near_tie"]
            for record in records
            for name, difference in record.differences.items()
            if isinstance(by_name[name], EngineMethod)
        ),
    }


def _check_same(record: Record, prompt: EncodedPrompt, directory: pathlib.Path) -> None:
    if record.prompt_hash != prompt_hash([prompt]):
        raise ConfigError(
            f"{directory} holds a measurement of {prompt.id} with other prompt ids (hash {record.prompt_hash}, now "
            f"{prompt_hash([prompt])}): tokenizer, template or its options have changed; choose another workdir"
        )


def _budget(prompt: EncodedPrompt, max_tokens: int, limit: int) -> int:
    """Tokens that every method may answer with: what the context leaves room for."""
    return min(max_tokens, limit - len(prompt.ids))


def _warm_up(methods: Sequence[Method], todo: Sequence[EncodedPrompt], max_tokens: int, limit: int) -> dict[str, float]:
    """Lets every method answer a prompt of every cache capacity that will be needed; seconds by method."""
    samples = {capacity_bucket(len(p.ids) + _budget(p, max_tokens, limit), limit): p for p in todo}
    seconds = dict.fromkeys((m.name for m in methods), 0.0)
    for capacity, prompt in sorted(samples.items()):
        for method in methods:
            logging.info("compiling and warming up %s for contexts up to %d", method.name, capacity)
            seconds[method.name] += method.warm_up(prompt.ids, _budget(prompt, max_tokens, limit))
    return seconds


def _differences(
    plain: EngineMethod, prompt: EncodedPrompt, budget: int, runs: Mapping[str, TimedRun]
) -> dict[str, dict[str, Any]]:
    found = {}
    expected = runs[plain.name].token_ids
    for name, one in runs.items():
        index = first_difference(expected, one.token_ids)
        if index is not None:
            found[name] = dataclasses.asdict(explain(plain, prompt.ids, budget, expected, one.token_ids, index))
            logging.info("%s: %s differs from plain decoding: %s", prompt.id, name, found[name])
    return found


def _line(record: Record, methods: Mapping[str, Method]) -> str:
    """One prompt in one line, for watching a long run."""
    plain = record.runs[PLAIN]
    parts = []
    for name, method in methods.items():
        one = record.runs[name]
        speed = len(one.token_ids) / one.seconds
        part = f"{name} {speed:.1f} tokens/s"
        if name != PLAIN:
            part += f" ({speed / (len(plain.token_ids) / plain.seconds):.2f}x"
            tau = summarise([one.acceptance], method.block_size)["tau"] if (method.block_size or 1) > 1 else None
            part += f", tau {tau:.2f}" if tau is not None else ""
            part += ", same tokens)" if name not in record.differences else ", DIFFERENT TOKENS)"
        parts.append(part)
    return "; ".join(parts)
