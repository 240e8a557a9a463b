"""Plain statements, in float64 and loops, of the laws that the decoding tests compare against."""

from __future__ import annotations

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
