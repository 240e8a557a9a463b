"""Acceptance statistics: one set of definitions for training, benchmarks and the server.

A *round* is one call of the target after the prefill. The first token of an answer comes from the prefill and
belongs to no round, so sum(emitted) + 1 is the number of tokens of an answer. Of a round,

    emitted    tokens really given out, the target's own token (correction or bonus) included, cut where the
               answer ended
    proposed   drafted tokens, whatever became of them
    accepted   drafted tokens among the emitted ones: emitted - 1, or emitted where the answer ended within
               the draft and the target's own token was never given out

    tau = sum(emitted) / rounds            (plain decoding: 1; block size K: at most K)
    acceptance rate = sum(accepted) / sum(proposed)

A number whose denominator is zero is None, never 0 and never an error: before the first round there is no tau.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round gave for one answer.

    Attributes:
      emitted: tokens given out, at least 1.
      proposed: drafted tokens (run-time block size - 1; 0 in plain decoding).
      accepted: drafted tokens among the emitted; None where the decoder did not say: then emitted - 1, which
        is one too few where the answer ended within the draft.
      ends: whether the answer ended with this round, by a stop or a limit.
    """

    emitted: int
    proposed: int
    accepted: int | None = None
    ends: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.emitted <= self.proposed + 1:
            raise ValueError(f"a round emitted {self.emitted} tokens, must lie in [1, {self.proposed + 1}]")
        least = self.emitted - 1
        most = min(self.emitted, self.proposed) if self.ends else least
        if self.accepted is not None and not least <= self.accepted <= most:
            raise ValueError(
                f"a round that emitted {self.emitted} of {self.proposed} drafted tokens and the target's own can not "
                f"have accepted {self.accepted}: {least}" + (f" or {most}" if most > least else "")
            )

    @property
    def kept(self) -> int:
        """Accepted drafts, with the default filled in."""
        return self.emitted - 1 if self.accepted is None else self.accepted

    @property
    def refused(self) -> bool:
        """Whether the draft behind the accepted ones is known to have been refused by the target.

        Not so where all were accepted, nor in the last round of an answer: what lies behind its end was cut, and
        maybe never compared.
        """
        return not self.ends and self.kept < self.proposed


def rounds_of(acceptance: Sequence[int], block_size: int) -> list[Round]:
    """The rounds of one finished answer, of its acceptance list (`Result.acceptance`)."""
    last = len(acceptance) - 1
    return [Round(count, block_size - 1, ends=i == last) for i, count in enumerate(acceptance)]


@dataclasses.dataclass
class AcceptanceCounter:
    """Running totals, cheap to add to and to merge.

    Attributes:
      rounds, emitted, proposed, accepted: sums over rounds.
      histogram: rounds by the number of tokens emitted.
      compared, kept: by draft position (from 1): rounds in which the draft was compared with the target's choice
        (all before it were accepted, and the answer had not ended), and in which it was accepted.
      answers: finished or running answers with at least one round; sum_of_means: of their own tau.
    """

    rounds: int = 0
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    histogram: Counter[int] = dataclasses.field(default_factory=Counter)
    compared: Counter[int] = dataclasses.field(default_factory=Counter)
    kept: Counter[int] = dataclasses.field(default_factory=Counter)
    answers: int = 0
    sum_of_means: float = 0.0

    def add_round(self, one: Round) -> None:
        """Counts a round; the mean over answers is not touched (see `add_answer`)."""
        self.rounds += 1
        self.emitted += one.emitted
        self.proposed += one.proposed
        self.accepted += one.kept
        self.histogram[one.emitted] += 1
        positions = range(1, one.kept + 1)
        self.kept.update(positions)
        self.compared.update(positions)
        if one.refused:
            self.compared[one.kept + 1] += 1

    def add_answer(self, rounds: Iterable[Round]) -> None:
        """Counts all rounds of an answer. One of a single token has none and does not count as an answer."""
        rounds = list(rounds)
        for one in rounds:
            self.add_round(one)
        self.close_answer(rounds=len(rounds), emitted=sum(one.emitted for one in rounds))

    def close_answer(self, rounds: int, emitted: int) -> None:
        """Counts an answer, whose rounds were added one by one, in the mean over answers."""
        if rounds:
            self.answers += 1
            self.sum_of_means += emitted / rounds

    def merge(self, other: AcceptanceCounter) -> None:
        """Adds another counter's totals."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def tau(self) -> float | None:
        """Tokens a round, over all rounds."""
        return _ratio(self.emitted, self.rounds)

    @property
    def tau_per_answer(self) -> float | None:
        """Mean of the answers' own tau: every answer weighs the same."""
        return _ratio(self.sum_of_means, self.answers)

    @property
    def rate(self) -> float | None:
        """Accepted of proposed drafts."""
        return _ratio(self.accepted, self.proposed)

    def per_position(self) -> list[float | None]:
        """Conditional acceptance: of the rounds that compared draft j (from 1), the share that accepted it."""
        deepest = max(self.compared, default=0)
        return [_ratio(self.kept[j], self.compared[j]) for j in range(1, deepest + 1)]

    def summary(self) -> dict[str, Any]:
        """All of it, JSON-able; histogram[i] is the number of rounds that emitted i tokens (histogram[0] is 0)."""
        return {
            "rounds": self.rounds,
            "answers": self.answers,
            "emitted": self.emitted,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "tau": self.tau,
            "tau_per_answer": self.tau_per_answer,
            "acceptance_rate": self.rate,
            "histogram": [self.histogram[i] for i in range(max(self.histogram, default=0) + 1)],
            "per_position": self.per_position(),
        }


def summarise(acceptance: Iterable[Sequence[int]], block_size: int) -> dict[str, Any]:
    """`AcceptanceCounter.summary` of finished answers' acceptance lists, decoded at one block size."""
    counter = AcceptanceCounter()
    for one in acceptance:
        counter.add_answer(rounds_of(one, block_size))
    return counter.summary()


def _ratio(numerator: float, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
