"""The pruned draft vocabulary: which target ids a drafter may propose, from what the target writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.data.responses import Sample


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """A draft vocabulary.

    Attributes:
      draft_to_target_U: int32 target ids, strictly ascending.
      seen: how many of them occur in the samples' supervised tokens; the rest fills up.
      coverage: share of supervised tokens of the samples that are in the vocabulary.
    """

    draft_to_target_U: np.ndarray
    seen: int
    coverage: float


def count_tokens(samples: Iterable[Sample], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id occurs among supervised tokens."""
    count_V = np.zeros(vocab_size, np.int64)
    for sample in samples:
        ids = sample.token_S[sample.loss_mask_S]
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ConfigError(f"sample {sample.id} holds id {ids.max()}, the vocabulary has {vocab_size}")
        count_V += np.bincount(ids, minlength=vocab_size)
    return count_V


def draft_vocabulary(
    samples: Iterable[Sample], size: int, vocab_size: int, keep: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent supervised ids, always with `keep`, filled up with the lowest unseen ids.

    Low ids of a BPE vocabulary are its most frequent merges, which makes them the best guess for unseen text.

    Args:
      keep: ids that must be in it: the end-of-turn ids.

    Raises:
      ConfigError: size out of [1, vocab_size], or more ids to keep than that.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"the draft vocabulary's size is {size}, must lie in [1, {vocab_size}]")
    count_V = count_tokens(samples, vocab_size)
    forced = np.unique(np.fromiter(keep, np.int64))
    if len(forced) > size or (len(forced) and (forced[0] < 0 or forced[-1] >= vocab_size)):
        raise ConfigError(f"keep holds {forced.tolist()}: at most {size} ids in [0, {vocab_size}) fit")
    rank_V = count_V.astype(np.float64)
    rank_V[forced] = np.inf
    # A stable sort by falling count leaves ids of equal count, unseen ones among them, in rising order.
    chosen_U = np.sort(np.argsort(-rank_V, kind="stable")[:size]).astype(np.int32)
    total = int(count_V.sum())
    covered = int(count_V[chosen_U].sum())
    return DraftVocabulary(chosen_U, int((count_V[chosen_U] > 0).sum()), covered / total if total else 0.0)


def coverage(samples: Iterable[Sample], draft_to_target_U: np.ndarray, vocab_size: int) -> float:
    """Share of the samples' supervised tokens that are in the vocabulary (of held-out samples, say)."""
    count_V = count_tokens(samples, vocab_size)
    return float(count_V[draft_to_target_U].sum() / max(count_V.sum(), 1))
