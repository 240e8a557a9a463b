"""The wall clock of single answers: the same measurement for serve.py and for benchmarks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from dflash_jax.decoding.engine import Engine, timed_events
from dflash_jax.decoding.request import Request


@dataclasses.dataclass
class TimedRun:
    """One answer and when its tokens came.

    Attributes:
      token_ids, acceptance, finish_reason: as in `decoding.generate.Result`.
      seconds: from the call to the last token, prefill included.
      first_token_s: from the call to the first token: the prefill.
    """

    token_ids: list[int]
    acceptance: list[int]
    finish_reason: str
    seconds: float
    first_token_s: float


def timed_run(engine: Engine, request: Request) -> TimedRun:
    """Answers one request alone in the engine. Its programs should be compiled already.

    Raises:
      ValueError: the request can not be decoded.
    """
    tokens: list[int] = []
    acceptance: list[int] = []
    first = seconds = 0.0
    reason = ""
    for seconds, event in timed_events(engine, [request]):
        if tokens:
            acceptance.append(len(event.token_ids))
        else:
            first = seconds
        tokens += event.token_ids
        reason = event.finish_reason or reason
    return TimedRun(tokens, acceptance, reason, seconds, first)


def speed_statistics(runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Medians over repeated runs of one answer.

    Returns:
      tokens_per_s: all tokens over the whole time, prefill included.
      decode_tokens_per_s: the tokens after the first over the time after it; None for answers of one token.
      seconds, first_token_s: medians. run_seconds: of each run.
    """
    decode = [
        (len(run.token_ids) - 1) / (run.seconds - run.first_token_s) for run in runs if len(run.token_ids) > 1
    ]  # fmt: skip
    return {
        "tokens_per_s": statistics.median(len(run.token_ids) / run.seconds for run in runs),
        "decode_tokens_per_s": statistics.median(decode) if decode else None,
        "seconds": statistics.median(run.seconds for run in runs),
        "first_token_s": statistics.median(run.first_token_s for run in runs),
        "run_seconds": [run.seconds for run in runs],
    }
