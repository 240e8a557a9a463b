"""Training text: the target answers prompts, or the answers of finished conversations are taken as they are."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from dflash_jax.config import ConfigError
from dflash_jax.data.code_prompts import stable_hash
from dflash_jax.data.conversations import encode_conversation, encode_prompt
from dflash_jax.data.fingerprints import fingerprint, rendering_fingerprint
from dflash_jax.data.prompts import Prompt
from dflash_jax.data.responses import FollowingStore, Response, ResponseStore, conversation_id
from dflash_jax.data.turns import Talk
from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.decoding.sizes import capacity_bucket
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target

LOG_EVERY_S = 20.0


@dataclasses.dataclass
class Report:
    """What a call did: prompts (or turns of conversations) found answered, answered now, left out as too long, and left
    out since the answer before them was cut; new answer tokens; seconds."""

    found: int = 0
    answered: int = 0
    too_long: int = 0
    cut: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class InStep:
    """How a process answers together with others, none of which has the target whole.

    Attributes:
      writes: whether it is the one whose answers go into the store; the others have the same ones and note them.
      wait: returns once every process has called it with the same text, what it has found.
    """

    writes: bool
    wait: Callable[[str], None]


def regenerate(
    target: Target,
    prompts: Iterable[Prompt],
    store: str | pathlib.Path,
    *,
    batch_size: int = 16,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    multi_turn: bool = False,
    drafter: Drafter | None = None,
    progress: bool = True,
    in_step: InStep | None = None,
) -> Report:
    """Lets the target answer every prompt that the store has no answer to yet, in batches.

    It may be killed at any time and called again: answers are stored as they end. A row's random stream depends on
    the seed and the prompt's id only, so a sampled answer does not depend on what was answered before.

    Args:
      store: folder of the store; made if needed, refused if it was made with other settings.
      batch_size: rows decoded together.
      max_new_tokens: the longest answer; longer ones are cut (finish_reason "length").
      max_prompt_tokens: longer prompts are left out and counted; None: what the target's context leaves room for.
      chat_template_kwargs: thinking on or off, for templates that read it (`enable_thinking`).
      multi_turn: every assistant turn of a conversation is answered anew, one after the other, each in view of the
        target's own earlier answers as serving would render them; a trailing answer is replaced too. A turn is a
        response of its own (ID/turn0, ID/turn1, ...). A conversation ends where an answer was cut at max_new_tokens.
      drafter: speeds the decoding up without changing what is written.
      progress: a bar on a terminal, a log line every 20 seconds elsewhere.
      in_step: for a target that lies over several processes: all of them call this with the same arguments, and the one
        that writes shows the progress.

    Raises:
      ConfigError: a field out of range; a prompt that is answered already, without multi_turn; with it, a conversation
        with tools, or with two messages of the assistant in a row.
      StoreError: see `ResponseStore`.
    """
    _check(target, batch_size, max_new_tokens)
    room = target.config.max_positions - max_new_tokens
    limit = room if max_prompt_tokens is None else min(room, max_prompt_tokens)
    kwargs = dict(chat_template_kwargs or {})
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    made_by = fingerprint(target, max_new_tokens=max_new_tokens, seed=seed, chat_template_kwargs=kwargs, **sampling)
    if multi_turn:
        made_by["multi_turn"] = True
    report = Report()
    with _opened(pathlib.Path(store), made_by, in_step) as opened:
        waiting = [Talk(prompt, target.tokenizer, multi_turn) for prompt in _distinct(prompts)]
        stored = {response.id: response for response in opened.rows()} if multi_turn else {}
        meter = None
        while waiting:  # a turn of every conversation each time
            todo: list[tuple[Talk, list[int]]] = []
            for talk in waiting:
                while not talk.is_over and talk.id in opened:
                    talk.take(stored.get(talk.id))
                    report.found += 1
                if talk.is_over:
                    continue
                ids = encode_prompt(target.tokenizer, talk.question, **kwargs)
                if len(ids) > limit:
                    report.too_long += talk.turns_left
                    if meter is not None:
                        meter.leave_out(talk.turns_left)
                else:
                    todo.append((talk, ids))
            if meter is None:
                shown = progress and (in_step is None or in_step.writes)
                meter = _Meter(sum(talk.turns_left for talk, _ in todo), report, shown)
            for capacity, group in _by_capacity(todo, max_new_tokens, target.config.max_positions):
                requests = [
                    Request(
                        ids, max_new_tokens, seed=stable_hash(f"{seed}:{talk.id}") & 0xFFFFFFFF,
                        stop_token_ids=target.eos_token_ids, **sampling,
                    )
                    for talk, ids in group
                ]  # fmt: skip
                rows = min(batch_size, len(group))
                for index, answer, reason in answers(target, drafter, requests, rows, capacity):
                    talk, ids = group[index]
                    mode = "sampled" if temperature > 0 else "greedy"
                    response = Response(
                        talk.id,
                        talk.source,
                        tuple(ids),
                        answer,
                        reason,
                        requests[index].seed,
                        mode,
                        follows=talk.follows,
                    )
                    opened.append([response])
                    talk.take(response)
                    report.answered += 1
                    report.tokens += len(answer)
                    report.cut += talk.turns_cut
                    meter.leave_out(talk.turns_cut)
                    meter.show()
            waiting = [talk for talk, _ in todo if not talk.is_over]
        if meter is not None:
            meter.close()
    return report


def _opened(store: pathlib.Path, made_by: Mapping[str, Any], in_step: InStep | None) -> ResponseStore:
    """The store to answer into. In step all find the same in it: nobody appends before all have read."""
    if in_step is None:
        return ResponseStore(store, made_by)
    if ResponseStore.exists(store):
        FollowingStore(store, made_by)  # what is wrong with it stops all of them, and none waits for another
    in_step.wait("the store was looked at")
    opened = ResponseStore(store, made_by) if in_step.writes else None
    in_step.wait("the store is there")
    if opened is None:
        opened = FollowingStore(store, made_by)
    in_step.wait(f"{len(opened)} answers are found in {store}")
    return opened


def regenerate_share(
    target: Target,
    prompts: Iterable[Prompt],
    store: str | pathlib.Path,
    *,
    part: int,
    parts: int,
    wait: Callable[[str], None],
    multi_turn: bool = False,
    **options: Any,
) -> tuple[Report, list[pathlib.Path]]:
    """`regenerate` by several processes at the same time, each with a share of the prompts and stores of its own.

    Who answers a prompt follows from its id. Another number of processes may go on: a conversation stays with the store
    that it was begun in, and stores without a process of their own are filled by the others.

    Args:
      prompts: all of them, the same in every process.
      store: folder of the first store; those of the others lie beside it.
      part, parts: this process's number and how many there are; all call this. Of those that answer in step each is
        part 0 of 1.
      wait: returns once every process has called it with the same text, what it has found.

    Returns:
      What this process did, and the folders of all stores, in order.
    """
    store = pathlib.Path(store)
    found = _parts_of(store)
    held: dict[str, int] = {}
    for number, folder in found.items():
        held |= {conversation_id(key, multi_turn): number for key in ResponseStore(folder).ids}
    wait(f"{len(held)} conversations are found in {len(found)} stores")  # nobody writes before all have read
    report = Report()
    distinct = list(_distinct(prompts))
    for number in sorted({*found, part}):
        if number % parts == part:
            mine = [p for p in distinct if held.get(p.id, stable_hash(f"share:{p.id}") % parts) == number]
            done = regenerate(target, mine, _part_folder(store, number), multi_turn=multi_turn, **options)
            sums = {f.name: getattr(report, f.name) + getattr(done, f.name) for f in dataclasses.fields(Report)}
            report = Report(**sums)
    wait("answers are written")
    return report, list(_parts_of(store).values())


def _part_folder(store: pathlib.Path, number: int) -> pathlib.Path:
    return store.with_name(f"{store.name}.part-{number}") if number else store


def _parts_of(store: pathlib.Path) -> dict[int, pathlib.Path]:
    """Stores that were begun, by number."""
    endings = [path.name.rpartition("-")[2] for path in store.parent.glob(f"{store.name}.part-*")]
    numbers = sorted({0, *(int(ending) for ending in endings if ending.isdecimal())})
    folders = {number: _part_folder(store, number) for number in numbers}
    return {number: folder for number, folder in folders.items() if ResponseStore.exists(folder)}


def answers(
    target: Target, drafter: Drafter | None, requests: Sequence[Request], batch: int, max_length: int
) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """(index, answer ids, finish reason) of each request, in the order in which they end."""
    greedy = all(request.temperature == 0 for request in requests)
    engine = Engine(target, drafter, batch=batch, max_length=max_length, greedy=greedy)
    partial: dict[int, list[int]] = {}
    for event in engine.run(requests):
        partial.setdefault(event.index, []).extend(event.token_ids)
        if event.finish_reason is not None:
            yield event.index, tuple(partial.pop(event.index)), event.finish_reason


def _by_capacity(
    todo: list[tuple[Talk, list[int]]], max_new_tokens: int, max_positions: int
) -> Iterator[tuple[int, list[tuple[Talk, list[int]]]]]:
    """Groups by the cache that a prompt and its answer need, so that short ones do not pay for long rows.

    Within a group prompts of like length are neighbours: they are prefilled together.
    """
    groups: dict[int, list[tuple[Talk, list[int]]]] = {}
    for item in sorted(todo, key=lambda item: len(item[1])):
        groups.setdefault(capacity_bucket(len(item[1]) + max_new_tokens, max_positions), []).append(item)
    yield from groups.items()


def store_natural(
    target: Target,
    prompts: Iterable[Prompt],
    store: str | pathlib.Path,
    *,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Stores finished conversations as they are: text that others wrote, for soft labels from the target.

    Args:
      max_length: longer conversations are left out and counted; None: the target's context.

    Raises:
      ConfigError: a prompt without an answer.
      MaskError: the chat template does not tell what the assistant wrote.
      StoreError: see `ResponseStore`.
    """
    limit = target.config.max_positions if max_length is None else min(max_length, target.config.max_positions)
    kwargs = dict(chat_template_kwargs or {})
    report, start = Report(), time.perf_counter()
    with ResponseStore(store, rendering_fingerprint(target.tokenizer, kwargs)) as opened:
        for prompt in _distinct(prompts):
            if not prompt.answered:
                raise ConfigError(
                    f"prompt {prompt.id} has no answer; use regenerate (data.answers) to let the target answer it"
                )
            if prompt.id in opened:
                report.found += 1
                continue
            conversation = encode_conversation(target.tokenizer, prompt.messages, target.eos_token_ids, **kwargs)
            ids, (*earlier, (begin, _)) = conversation.ids, conversation.spans
            if len(ids) > limit:
                report.too_long += 1
                continue
            opened.append(
                [Response(prompt.id, prompt.source, ids[:begin], ids[begin:], "stop", 0, "natural", tuple(earlier))]
            )
            report.answered += 1
            report.tokens += len(ids) - begin
    report.seconds = time.perf_counter() - start
    return report


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Prompts without repetitions.

    Raises:
      ConfigError: one id stands for two conversations.
    """
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.id not in seen:
            seen[prompt.id] = prompt
            yield prompt
        elif seen[prompt.id].messages != prompt.messages:
            raise ConfigError(f"prompt id {prompt.id} stands for two different conversations")


def _check(target: Target, batch_size: int, max_new_tokens: int) -> None:
    if target.tokenizer is None:
        raise ConfigError(f"target {target.source!r} has no tokenizer, so prompts can not be rendered for it")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}, must be at least 1")
    if not 1 <= max_new_tokens < target.config.max_positions:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, must lie in [1, {target.config.max_positions})")


class _Meter:
    """Answers, tokens/s and time left: a bar on a terminal, a log line now and then elsewhere."""

    def __init__(self, total: int, report: Report, enabled: bool):
        self._total, self._report = total, report
        self._start = self._shown = time.perf_counter()
        self._shown_answers = -1
        self._bar = None
        self._enabled = enabled and total > 0
        if self._enabled and sys.stderr.isatty():
            import tqdm

            self._bar = tqdm.tqdm(total=total, unit="answer")

    def leave_out(self, count: int) -> None:
        """That many turns will not be answered after all."""
        self._total -= count
        if self._bar is not None and count:
            self._bar.total = self._total
            self._bar.refresh()

    def show(self, last: bool = False) -> None:
        now = time.perf_counter()
        report = self._report
        report.seconds = now - self._start
        if not self._enabled:
            return
        rate = report.tokens / max(report.seconds, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(report.answered - self._bar.n)
        elif (last or now - self._shown >= LOG_EVERY_S) and report.answered != self._shown_answers:
            self._shown, self._shown_answers = now, report.answered
            left = report.seconds / max(report.answered, 1) * (self._total - report.answered)
            logging.info(
                "answers %d/%d, %d tokens, %.0f tokens/s, %.0f s left",
                report.answered, self._total, report.tokens, rate, left,
            )  # fmt: skip

    def close(self) -> None:
        self.show(last=True)
        if self._bar is not None:
            self._bar.close()
