"""Numbers of a run: from sums to means, and onto disk."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def summarise(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over several steps, from the sums of numerators and of denominators (host arrays).

    Returns:
      loss, hard (-log q(label)), soft (KL to the target): weighted means over supervised slots.
      accuracy, accuracy_1 .. accuracy_J: share of supervised slots, all and by position in the block, whose
        label has the highest draft logit; agreement likewise for the target's own first choice.
      chain_tau: 1 + mean number of leading correct slots a block: what the acceptance length would be if
        every round began at a random anchor of these answers. Blocks that the answer's end cuts short pull
        it down a little.
      blocks: supervised blocks; grad_norm (mean), learning_rate (last).
      real_tokens: share of the batches' positions that hold a token, the rest is padding.
    """
    total = {
        name: np.sum([np.asarray(getattr(s["sums"], name), np.float64) for s in steps], axis=0)
        for name in (
            "loss", "hard", "soft", "hard_denominator", "denominator",
            "count_J", "correct_J", "agree_J", "chain", "blocks",
        )
    }  # fmt: skip
    count_J = np.maximum(total["count_J"], 1)
    weight = max(total["denominator"], 1e-30)
    result = {
        "loss": total["loss"] / weight,
        "hard": total["hard"] / max(total["hard_denominator"], 1e-30),
        "soft": total["soft"] / weight,
        "accuracy": total["correct_J"].sum() / count_J.sum(),
        "agreement": total["agree_J"].sum() / count_J.sum(),
        "chain_tau": 1.0 + total["chain"] / max(total["blocks"], 1),
        "blocks": total["blocks"],
        "grad_norm": np.mean([float(s["grad_norm"]) for s in steps]),
        "learning_rate": float(steps[-1]["learning_rate"]),
        "real_tokens": np.mean([float(s["real_tokens"]) for s in steps]),
    }
    for j, (correct, count) in enumerate(zip(total["correct_J"], count_J, strict=True), 1):
        result[f"accuracy_{j}"] = correct / count
    return {name: float(value) for name, value in result.items()}


class MetricsWriter:
    """Appends to `metrics.jsonl` in the workdir, and to TensorBoard files beside it.

    After a resume, lines of steps that are about to be taken again are dropped: each step stands once.

    Args:
      enabled: False writes nothing: another process of the run does.
    """

    def __init__(self, workdir: str | pathlib.Path, first_step: int = 0, enabled: bool = True):
        self._enabled = enabled
        if not enabled:
            return
        import tensorboardX  # in the `train` extra

        directory = pathlib.Path(workdir)
        path = directory / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step]
            path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a")
        self._board = tensorboardX.SummaryWriter(str(directory / "tensorboard"), purge_step=first_step or None)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """One line {"step", "kind", ...}; `kind` is train or eval and the prefix on TensorBoard."""
        if not self._enabled:
            return
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"{kind}/{name}", value, step)
        self._board.flush()

    def close(self) -> None:
        if not self._enabled:
            return
        self._file.close()
        self._board.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # a line that a killed run left half written
        return float("inf")
