"""Engines run to the end, and what came of each request: ids, acceptance list, reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dflash_jax.decoding.engine import Engine, Event
from dflash_jax.decoding.generate import Result
from dflash_jax.decoding.request import Request


class Answer(NamedTuple):
    """What one request got. `acceptance` has the tokens of each verify round; the prefill's one is in none."""

    token_ids: tuple[int, ...]
    acceptance: tuple[int, ...]
    reason: str | None


def collect(events: Iterable[Event], count: int) -> list[Answer]:
    pieces: list[list[Event]] = [[] for _ in range(count)]
    for event in events:
        assert not pieces[event.index] or pieces[event.index][-1].finish_reason is None, "tokens behind the end"
        pieces[event.index].append(event)
    return [
        Answer(
            tuple(t for event in row for t in event.token_ids),
            tuple(len(event.token_ids) for event in row[1:]),
            row[-1].finish_reason if row else None,
        )
        for row in pieces
    ]


def run(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    return collect(engine.run(requests), len(requests))


def of_results(results: Sequence[Result]) -> list[Answer]:
    return [Answer(tuple(r.token_ids), tuple(r.acceptance), r.finish_reason) for r in results]


def mixed_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """A random prompt of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


class CountCompilations:
    """Counts the programs that are compiled (or fetched from the persistent cache) inside `with`."""

    def __enter__(self) -> CountCompilations:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration: float, **kwargs) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
