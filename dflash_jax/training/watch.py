"""Signs that a run goes wrong: a loss that is no number, one that explodes, accuracy that decoding does not see."""

from __future__ import annotations

import collections
import statistics

import numpy as np
from absl import logging

from dflash_jax.training.run_config import RunConfig

PATIENCE = 3  # steps in a row beyond a ratio: one hard batch is no explosion
WINDOW, LEAST = 64, 16  # steps that the median is taken over, and how many it needs
FLOOR = 0.01  # a median below counts as this: what was learned by heart goes up and down a hundredfold near zero


class TrainingDiverged(RuntimeError):
    """A loss or gradient that is no finite number, or that explodes: names the step, the samples, the saved state."""


class Explosion:
    """Watches loss and gradient norm against their running medians.

    Steps beyond a ratio do not enter the medians. Nothing of it is saved: after a resume it learns the medians anew.
    """

    def __init__(self, config: RunConfig):
        self._limits = {"loss": config.max_loss_ratio, "grad_norm": config.max_grad_norm_ratio}
        self._seen = {name: collections.deque(maxlen=WINDOW) for name in self._limits}
        self._streak: list[tuple[int, list[int], str]] = []

    @property
    def suspected(self) -> bool:
        """Whether the newest step was beyond a ratio: its state is not one to go back to."""
        return bool(self._streak)

    def see(self, step: int, ids: np.ndarray, loss: float, grad_norm: float) -> str:
        """Takes in a step; what to say where the run has exploded with it, else "".

        Args:
          ids: samples of the step's batch.
        """
        beyond = []
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            seen, limit = self._seen[name], self._limits[name]
            median = max(statistics.median(seen), FLOOR) if len(seen) >= LEAST else None
            if limit is not None and median is not None and value > limit * median:
                beyond.append(
                    f"{name} {value:.4g}, {value / median:.1f} times the median {median:.4g} of the last {len(seen)} "
                    f"steps (run.max_{name}_ratio is {limit})"
                )
            else:
                seen.append(value)
        if not beyond:
            self._streak.clear()
            return ""
        self._streak.append((step, ids.tolist(), " and ".join(beyond)))
        logging.warning("step %d: %s", step, self._streak[-1][2])
        if len(self._streak) < PATIENCE:
            return ""
        samples = "; ".join(f"step {at}: {ids}" for at, ids, _ in self._streak)
        return f"step {step}: {self._streak[-1][2]}, {PATIENCE} steps in a row. Samples of their batches: {samples}"


def warn_if_apart(tau: float, chain_tau: float | None) -> None:
    """Training and serving measure the same thing twice; a large gap is a fault or overfitting."""
    if chain_tau is not None and chain_tau > 1.3 and tau - 1 < 0.5 * (chain_tau - 1):
        logging.warning(
            "tau is %.2f when decoding, but training accuracy would give %.2f: the drafter has overfitted the training "
            "answers, or training and serving differ (answers not the target's own, labels, taps, positions)",
            tau, chain_tau,
        )  # fmt: skip
