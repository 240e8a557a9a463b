"""Plain statements, in float64 and loops, of the laws that the decoding tests compare against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from scipy import stats


def warp_reference(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Temperature, then top-k, then top-p, then min-p, one token at a time in (logit descending, id ascending)."""
    logits_V = np.asarray(logits_V, np.float64)
    order = sorted(range(len(logits_V)), key=lambda i: (-logits_V[i], i))
    probs_V = np.zeros(len(logits_V))
    if temperature == 0:
        probs_V[order[0]] = 1.0
        return probs_V
    weight_V = np.exp((logits_V - logits_V.max()) / temperature)
    kept = order[:top_k] if 0 < top_k < len(order) else order
    total, mass, nucleus = sum(weight_V[i] for i in kept), 0.0, []
    for i in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weight_V[i]
    final = [i for i in nucleus if weight_V[i] >= min_p * weight_V.max()]
    probs_V[final] = weight_V[final]
    return probs_V / probs_V.sum()


def bend_reference(
    logits_V, prompt: Sequence[int], answer: Sequence[int], presence_penalty=0.0, frequency_penalty=0.0,
    repetition_penalty=1.0, logit_bias=None,
) -> np.ndarray:  # fmt: skip
    """The logits of the token behind `prompt` and `answer`, bent as the request asks, one token at a time."""
    bent = []
    for token, logit in enumerate(np.asarray(logits_V, np.float64).tolist()):
        said = list(answer).count(token)
        logit += (logit_bias or {}).get(token, 0.0)
        if said or token in prompt:
            logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
        if said:
            logit -= presence_penalty + frequency_penalty * said
        bent.append(logit)
    return np.array(bent)


def greedy_reference(table_VxV, prompt: Sequence[int], count: int, **rules) -> list[int]:
    """The greedy answer of a target whose logits depend on the last token only."""
    answer: list[int] = []
    while len(answer) < count:
        bent_V = bend_reference(table_VxV[[*prompt, *answer][-1]], prompt, answer, **rules)
        answer.append(int(bent_V.argmax()))
    return answer


def joint_law_reference(table_VxV, prompt: Sequence[int], count: int, rules: dict, warps: dict) -> np.ndarray:
    """The law of the first `count` tokens of such a target, [V] * count, by enumeration."""
    vocab = len(table_VxV)
    law = np.zeros((vocab,) * count)
    for answer in itertools.product(range(vocab), repeat=count):
        probability = 1.0
        for i, token in enumerate(answer):
            bent_V = bend_reference(table_VxV[[*prompt, *answer[:i]][-1]], prompt, answer[:i], **rules)
            probability *= warp_reference(bent_V, **warps)[token]
        law[answer] = probability
    return law


def chi_square(observed: np.ndarray, expected_probs: np.ndarray) -> float:
    """p-value of counts against a law; 0 if something came that the law forbids. Pools cells that expect below 5."""
    observed, probs = np.ravel(observed).astype(np.float64), np.ravel(expected_probs).astype(np.float64)
    if observed[probs == 0].any():
        return 0.0
    expected = probs / probs.sum() * observed.sum()
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5:  # the pool itself is too small: it joins its neighbour
        observed, expected = observed[:-1], expected[:-1]
        expected *= observed.sum() / expected.sum()
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(observed, expected).pvalue)
