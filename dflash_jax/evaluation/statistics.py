"""Numbers of a decoding run: acceptance from what rounds emitted, speed from the wall clock of events."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dflash_jax.decoding.engine import Engine, Request, timed_events


class HasAcceptance(Protocol):
    """An answer with the tokens that each of its rounds emitted, as `decoding.generate.Result` has them."""

    acceptance: Sequence[int]


def acceptance_statistics(results: Iterable[HasAcceptance], block_size: int) -> dict[str, Any]:
    """How many tokens a target call gave, over several answers.

    A round is one draft and one target call after the prefill. Its tokens are those really returned, so a
    last round that a stop or a limit cut counts with what was left of it; the answer's first token comes
    from the prefill and is in no round. The target's own token, correction or bonus, is counted in.

    Args:
      results: answers; their last round is taken to be the one that ended them.
      block_size: tokens of a target call, root included (1 for plain decoding): what a round emits at most.

    Returns:
      rounds, tokens: how many, tokens those of the rounds.
      tau_global: tokens / rounds. tau_mean: mean over the answers (with a round) of their own.
      histogram: {n: rounds that emitted n tokens}, n = 1 .. block_size.
      conditional_acceptance: of drafts j = 1 .. block_size - 1, the share accepted among those whose
        predecessors were. An answer's last round says nothing of the drafts behind its end, so there a draft
        counts only where a token came after it.

      What has no denominator is None.

    Raises:
      ValueError: a round emitted no token, or more than block_size.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1")
    answers = [list(result.acceptance) for result in results]
    whole = Counter(n for answer in answers for n in answer[:-1])
    last = Counter(answer[-1] for answer in answers if answer)
    counts = whole + last
    wrong = [n for n in counts if not 1 <= n <= block_size]
    if wrong:
        raise ValueError(f"a round emitted {wrong[0]} tokens, with block_size {block_size} it emits 1 to {block_size}")
    rounds, tokens = counts.total(), sum(n * times for n, times in counts.items())
    conditional = []
    for j in range(1, block_size):
        accepted = sum(times for n, times in counts.items() if n > j)
        conditional.append(_ratio(accepted, accepted + whole[j]))
    own = [sum(answer) / len(answer) for answer in answers if answer]
    return {
        "rounds": rounds,
        "tokens": tokens,
        "tau_global": _ratio(tokens, rounds),
        "tau_mean": statistics.fmean(own) if own else None,
        "histogram": {n: counts[n] for n in range(1, block_size + 1)},
        "conditional_acceptance": conditional,
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


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
    """Answers one request alone in the engine, on the wall clock. The programs should be compiled already.

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
    decode = [_ratio(len(run.token_ids) - 1, run.seconds - run.first_token_s) for run in runs]
    return {
        "tokens_per_s": statistics.median(len(run.token_ids) / run.seconds for run in runs),
        "decode_tokens_per_s": None if None in decode else statistics.median(decode),
        "seconds": statistics.median(run.seconds for run in runs),
        "first_token_s": statistics.median(run.first_token_s for run in runs),
        "run_seconds": [run.seconds for run in runs],
    }
