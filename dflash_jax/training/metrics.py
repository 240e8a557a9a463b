"""Numbers of a run: from sums to means, and onto disk."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.data.responses import write_atomically
from dflash_jax.training.objectives import HARD


def summarise(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over several steps, from the sums of numerators and of denominators (host arrays).

    Returns:
      loss: what is minimised, by its own denominator. hard (-log q(label)) and every objective of the run, by name:
        means over supervised slots, weighted as in the loss.
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
            "loss", "denominator", "weight", "label_weight", "count_J", "correct_J", "agree_J", "chain", "blocks",
        )
    }  # fmt: skip
    count_J = np.maximum(total["count_J"], 1)

    def mean(numerator, denominator):
        return numerator / max(total[denominator], 1e-30)

    result = {"loss": mean(total["loss"], "denominator")}
    for name in steps[0]["sums"].objective:
        value = np.sum([np.asarray(s["sums"].objective[name], np.float64) for s in steps])
        result[name] = mean(value, "label_weight" if name == HARD else "weight")
    result |= {
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
    """Appends to `metrics.jsonl` in the workdir, to TensorBoard files beside it, and to Weights & Biases where asked.

    After a resume, lines of steps that are about to be taken again are dropped: each step stands once.

    Args:
      first_step: that the run goes on from; 0 at its beginning.
      evaluates_again: whether this step is evaluated (again), as where a run is ended already.

    Attributes:
      evaluated: whether `first_step` has an evaluation.
      enabled: False writes nothing: another process of the run does.
      wandb: arguments of `wandb.init`; without a "project" nothing is sent. A resumed run goes on under the same id.
      config: what is shown beside the run there.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        first_step: int = 0,
        enabled: bool = True,
        wandb: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        evaluates_again: bool = False,
    ):
        self._enabled, self.evaluated = enabled, False
        if not enabled:
            return
        import tensorboardX  # in the `train` extra

        directory = pathlib.Path(workdir)
        path = directory / "metrics.jsonl"
        if path.exists():
            last = {"train": first_step, "eval": first_step - evaluates_again}
            places = ((line, *_place(line)) for line in path.read_text().splitlines())
            kept = [line for line, step, kind in places if step <= last.get(kind, first_step)]
            write_atomically(path, "".join(line + "\n" for line in kept))
            self.evaluated = (first_step, "eval") in map(_place, kept)
        self._file = path.open("a")
        self._board = tensorboardX.SummaryWriter(
            str(directory / "tensorboard"), purge_step=first_step + 1 if first_step else None
        )
        self._wandb = _start_wandb(directory, wandb, config) if wandb and wandb.get("project") else None

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One line {"step", "kind", ...}; `kind` is train or eval and the prefix on TensorBoard.

        A list becomes a curve an entry there: histogram [0, 3] is histogram_0 and histogram_1.
        """
        if not self._enabled:
            return
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        numbers = {f"{kind}/{name}": value for name, value in _scalars(values)}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        if self._wandb is not None:
            self._wandb.log({**numbers, "step": step})

    def close(self) -> None:
        if not self._enabled:
            return
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_wandb(options: Mapping[str, Any]) -> None:
    """Refuses a run that is to be reported to Weights & Biases where that is not installed.

    Raises:
      ConfigError: so it is, or there are options but no project.
    """
    project = options.get("project")
    if not project:
        others = sorted(name for name, value in options.items() if value and name != "project")
        if others:
            raise ConfigError(f"run.wandb has {others[0]} but no project; set run.wandb.project, or leave all unset")
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"run.wandb.project is {project!r}, but wandb is not installed: pip install wandb, or leave the project "
            "empty (metrics.jsonl and tensorboard/ are always written)"
        )


def _start_wandb(directory: pathlib.Path, options: Mapping[str, Any], config: Mapping[str, Any] | None) -> Any:
    import wandb

    path = directory / "wandb_id"
    known = path.read_text().strip() if path.exists() else None
    set_here = {name: value for name, value in options.items() if value not in (None, "")}
    run = wandb.init(
        dir=str(directory), config=dict(config or {}), **{"id": known, "resume": "allow", **set_here}
    )  # fmt: skip
    path.write_text(run.id)
    run.define_metric("*", step_metric="step")  # its own count never goes back, a resumed run's steps do
    return run


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}_{i}", x) for i, x in enumerate(value) if isinstance(x, (int, float)))


def _place(line: str) -> tuple[float, str]:
    """Step and kind of a line."""
    try:
        row = json.loads(line)
        return float(row["step"]), str(row["kind"])
    except (ValueError, KeyError, TypeError):  # a line that a killed run left half written
        return float("inf"), ""
