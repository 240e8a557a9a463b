"""What the host costs: the part of a round that is not device work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.decoding.step import step
from dflash_jax.evaluation.methods import EngineMethod

SEGMENT = 8  # rounds of a kind before the next kind


def host_overhead(
    method: EngineMethod, prompt_ids: Sequence[int], max_tokens: int = 256, rounds: int = 64
) -> dict[str, Any]:
    """Times rounds of one batch row in three ways, in turn:

    - as they are decoded: dispatch, wait, read the tokens, book them;
    - dispatched and waited for, nothing else;
    - dispatched one after another without waiting, so that the device never waits for the host.

    All three run the same program on the same shapes; its cost does not depend on the tokens.

    Args:
      prompt_ids, max_tokens: any prompt; the cache is the one that it and an answer of at most max_tokens need, or a
        larger one where that is too short for timing.
      rounds: of each kind.

    Returns:
      round_s, call_s, device_s: medians of the three. overhead: 1 - device_s / round_s, all that the host adds to
      the device's work; between_calls: 1 - call_s / round_s, the part of it outside the jitted call. Either may
      come out slightly negative where it is below what the clock resolves.
    """
    needed = 3 * SEGMENT * method.block_size + 1  # what three segments of full blocks emit
    engine = method.new_engine(method.engine_for(prompt_ids, max(needed, max_tokens)).capacity)
    _readmit(engine, prompt_ids, needed)
    engine.round()  # compiles, where this capacity is new
    clock = time.perf_counter
    whole, call, device = [], [], []
    while len(whole) < rounds:
        _readmit(engine, prompt_ids, needed)
        for _ in range(SEGMENT):
            start = clock()
            engine.round()
            whole.append(clock() - start)
        for _ in range(SEGMENT):
            start = clock()
            engine.state, emission = step(engine.config, engine.weights, engine.state, engine.rules)
            jax.block_until_ready(emission)
            call.append(clock() - start)
        start = clock()
        for _ in range(SEGMENT):
            engine.state, emission = step(engine.config, engine.weights, engine.state, engine.rules)
        jax.block_until_ready(emission)
        device.append((clock() - start) / SEGMENT)
    round_s, call_s, device_s = (statistics.median(x) for x in (whole, call, device))
    return {
        "round_s": round_s,
        "call_s": call_s,
        "device_s": device_s,
        "overhead": 1 - device_s / round_s,
        "between_calls": 1 - call_s / round_s,
        "rounds": len(whole),
    }


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
