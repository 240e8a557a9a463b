"""What the host costs: the part of a round that is not device work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.decoding.step import Emission, step
from dflash_jax.evaluation.methods import EngineMethod

SEGMENT = 8  # rounds of a kind before the next kind


def host_overhead(
    method: EngineMethod, prompt_ids: Sequence[int], max_tokens: int = 256, rounds: int = 256
) -> dict[str, Any]:
    """Times rounds of one batch row in three ways, in turn:

    - as they are decoded: dispatch, wait, read the tokens, book them;
    - dispatched and waited for, nothing else;
    - dispatched one after another without waiting, so that the device never waits for the host.

    All three run the same program on the same shapes; its cost does not depend on the tokens.

    Args:
      prompt_ids, max_tokens: any prompt; the cache is the one that it and an answer of at most max_tokens need, or a
        larger one where that is too short for timing.
      rounds: of each kind, in segments of 8; neighbouring segments of the three kinds are compared, so that what the
        machine does meanwhile weighs on all three alike.

    Returns:
      round_s, call_s, device_s: medians of the three. overhead: the median over segments of 1 - device / round, all
      that the host adds to the device's work; between_calls: that of 1 - call / round, the part of it outside the
      jitted call. overhead_quartiles: of the segments. Any may be slightly negative where it is below what the clock
      resolves.
    """
    needed = 3 * SEGMENT * method.block_size + 1  # what three segments of full blocks emit
    engine = method.new_engine(method.engine_for(prompt_ids, max(needed, max_tokens)).capacity)
    _readmit(engine, prompt_ids, needed)
    engine.round()  # compiles, where this capacity is new
    segments = []
    while len(segments) * SEGMENT < rounds:
        _readmit(engine, prompt_ids, needed)
        segments.append((_timed(engine.round), _timed(lambda: _call(engine)), _unwatched(engine)))
    whole, call, device = (statistics.median(x) for x in zip(*segments, strict=True))
    overhead = [1 - d / r for r, _, d in segments]
    return {
        "round_s": whole,
        "call_s": call,
        "device_s": device,
        "overhead": statistics.median(overhead),
        "overhead_quartiles": statistics.quantiles(overhead, n=4)[::2] if len(overhead) > 1 else [overhead[0]] * 2,
        "between_calls": statistics.median(1 - c / r for r, c, _ in segments),
        "rounds": len(segments) * SEGMENT,
    }


def _timed(run: Callable[[], Any]) -> float:
    """Median seconds of one of a segment's rounds."""
    seconds = []
    for _ in range(SEGMENT):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _call(engine: Engine) -> None:
    jax.block_until_ready(_dispatched(engine))


def _unwatched(engine: Engine) -> float:
    """Seconds a round where the host only dispatches."""
    start = time.perf_counter()
    for _ in range(SEGMENT):
        emission = _dispatched(engine)
    jax.block_until_ready(emission)
    return (time.perf_counter() - start) / SEGMENT


def _dispatched(engine: Engine) -> Emission:
    engine.state, emission = step(engine.config, engine.weights, engine.state, engine.rules)
    return emission


def _readmit(engine: Engine, prompt_ids: Sequence[int], needed: int) -> None:
    """Puts the prompt into the one row, whatever was there.

    Raises:
      ValueError: the target's context has no room for the rounds to be timed.
    """
    engine.abort(0)
    budget = engine.max_length - len(prompt_ids)
    if budget < needed:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens leaves {budget} of the context's {engine.max_length}, timing the "
            f"host needs {needed}: give a shorter prompt"
        )
    engine.admit([(0, Request(list(prompt_ids), budget))])
