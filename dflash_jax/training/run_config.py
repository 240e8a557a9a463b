"""The `run` section of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """When things happen, in steps unless the name says otherwise.

    Attributes:
      stop_after: stop there, with a checkpoint, though the schedule goes on; None runs to total_steps.
      max_minutes: as if stop_after were the step at which `train` has run that long (data and compilation included):
        for a machine that is lent by the hour. One process only. What follows, evaluation and export, comes on top.
      save_every_minutes: besides save_every; one process only, since clocks differ. None or inf never, both times.
      max_loss_ratio: a run stops (`TrainingDiverged`) where this many times the median loss of the last 64 steps is
        exceeded in `watch.PATIENCE` steps in a row; None or inf never. max_grad_norm_ratio: the same of the gradient's
        norm before clipping.
      profile_steps: (first, count): jax.profiler traces these steps into WORKDIR/profile; () for none.
      wandb: arguments of wandb.init; without a "project" nothing is sent there.
      eval_every: 0 for only at the end.
      export_weights: what is evaluated and exported, "raw" parameters or their moving average "ema", which needs
        optimizer.ema_decay. An export's config.json says which it holds. Both are in every checkpoint.
    """

    log_every: int = 20
    eval_every: int = 0
    save_every: int = 500
    save_every_minutes: float | None = 10.0
    keep_checkpoints: int = 2
    stop_after: int | None = None
    max_minutes: float | None = None
    export_weights: str = "raw"
    max_loss_ratio: float | None = 10.0
    max_grad_norm_ratio: float | None = None
    profile_steps: tuple[int, ...] = ()
    wandb: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("log_every", 1), ("eval_every", 0), ("save_every", 1), ("keep_checkpoints", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"run.{name} is {getattr(self, name)}, must be at least {least}")
        if self.stop_after is not None and self.stop_after < 1:
            raise ConfigError(f"run.stop_after is {self.stop_after}, must be a step, at least 1, or None for none")
        for name in ("save_every_minutes", "max_minutes"):
            minutes = getattr(self, name)
            if minutes is not None and minutes <= 0:
                raise ConfigError(f"run.{name} is {minutes}, must be positive or None")
        if self.export_weights not in ("raw", "ema"):
            raise ConfigError(f"run.export_weights is {self.export_weights!r}, must be 'raw' or 'ema'")
        for name in ("max_loss_ratio", "max_grad_norm_ratio"):
            ratio = getattr(self, name)
            if ratio is not None and ratio <= 1:
                raise ConfigError(
                    f"run.{name} is {ratio}, must be above 1 (the median itself), or None for no such check"
                )
        if self.profile_steps and not (len(self.profile_steps) == 2 and min(self.profile_steps) >= 1):
            raise ConfigError(
                f"run.profile_steps is {self.profile_steps}, must be (first step, number of steps), both at least 1, "
                "or () for none"
            )
