"""The optimiser: clipping, AdamW or Muon, the learning rate's schedule, and the parameters' moving average."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dflash_jax.config import ConfigError
from dflash_jax.drafters.dflash import TABLES

ADAMW, MUON = "adamw", "muon"

# Parameters that are matrices: (axes of the input, axes of the output). Axes in neither count several matrices: k and
# v, gate and up are each one of their own.
MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fc_TDxD": ((0,), (1,)),
    "embed_projection_ExD": ((0,), (1,)),
    "head_projection_DxE": ((0,), (1,)),
    "q_DxGxRxH": ((0,), (1, 2, 3)),
    "kv_DxGx2xH": ((0,), (1, 3)),
    "out_GxRxHxD": ((0, 1, 2), (3,)),
    "gate_up_Dx2xF": ((0,), (2,)),
    "down_FxD": ((0,), (1,)),
}

# Root mean square of Muon's step before the learning rate, about that of Adam's: one rate serves both, and weight decay
# means the same. Source: Liu et al. 2025 (arXiv 2502.16982).
_MUON_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with global-norm clipping and a linear warm-up into a cosine.

    Attributes:
      kind: "adamw", or "muon" for the matrices (`MATRICES`) and AdamW for norm scales, biases and tables.
      learning_rate: the peak, the same for Muon and AdamW. warmup_steps: from 0 to the peak.
      final_fraction: of the peak, reached at total_steps and kept.
      b1, b2, eps: AdamW's. momentum: Muon's.
      weight_decay: on matrices and tables, not on norm scales or biases.
      ema_decay: of the parameters' exponential moving average, by optimiser step; 0 keeps none. See `moving_average`.
    """

    kind: str = ADAMW
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    total_steps: int = 10_000
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in (ADAMW, MUON):
            raise ConfigError(f"optimizer.kind is {self.kind!r}, must be 'adamw' or 'muon'")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate}, must be positive and finite")
        if self.total_steps < 1:
            raise ConfigError(f"optimizer.total_steps is {self.total_steps}, must be at least 1")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ConfigError(
                f"optimizer.warmup_steps is {self.warmup_steps}, must lie in [0, total_steps = {self.total_steps})"
            )
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}, must lie in [0, 1)")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(
                f"optimizer.final_fraction is {self.final_fraction}, must lie in [0, 1]: of the peak, at the end"
            )
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"optimizer.eps is {self.eps}, must be positive and finite, such as 1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}, must be at least 0 (none) and finite")
        if self.clip_norm <= 0:
            raise ConfigError(f"optimizer.clip_norm is {self.clip_norm}, must be positive; inf never clips")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"optimizer.ema_decay is {self.ema_decay}, must lie in [0, 1): 0 keeps no average, 0.999 one over "
                "about a thousand steps"
            )


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.total_steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig, unit: Any = None, trainable: Any = None) -> optax.GradientTransformation:
    """Clip, AdamW or Muon, schedule. The last element of its state counts updates.

    Args:
      unit: None, or a tree like the parameters of factors (broadcastable): parameter = factor * coordinate,
        and clipping, Adam and Muon work on the coordinates. For kernels whose inputs are not of unit scale, see
        `initialise.coordinate_units`.
      trainable: None, or a tree like the parameters of bools: weights that do not train do not decay either.

    Raises:
      ConfigError: at `init` with "muon": a parameter of several dimensions is neither in `MATRICES` nor a bias.
    """

    def decays(params: Any) -> Any:
        matrices = jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and not _is_bias(path), params)
        return matrices if trainable is None else jax.tree.map(lambda a, b: a and b, matrices, trainable)

    def scaled() -> optax.GradientTransformation:
        if unit is None:
            return optax.identity()
        return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, unit))

    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return optax.chain(
        scaled(),  # gradient by coordinate
        optax.clip_by_global_norm(config.clip_norm),
        adam if config.kind == ADAMW else optax.partition({ADAMW: adam, MUON: _muon(config)}, _kinds),
        scaled(),  # step of the coordinate as one of the parameter
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(schedule(config)),
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Momentum, orthogonalised matrix by matrix and brought to Adam's size. Source: Jordan et al. 2024 (Muon)."""

    def form(path: Any, _: Any) -> contrib.MuonDimensionNumbers:
        return contrib.MuonDimensionNumbers(*MATRICES[_name(path)])

    def forms(params: Any) -> Any:  # of the matrices alone: the rest is masked out here
        return jax.tree_util.tree_map_with_path(form, params)

    def to_size(path: Any, x: jax.Array) -> jax.Array:
        # An orthogonal [m, n] matrix has a root mean square of max(m, n) ** -0.5.
        return x * (_MUON_RMS * max(math.prod(x.shape[i] for i in axes) for axes in MATRICES[_name(path)]) ** 0.5)

    return optax.chain(
        contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=forms),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(to_size, updates)),
    )


def _kinds(params: Any) -> Any:
    def kind(path: Any, x: Any) -> str:
        if _name(path) in MATRICES:
            return MUON
        # A step sees few rows of a table, and an orthogonal step would move all of them (speculators issue 1066).
        if getattr(x, "ndim", 0) > 1 and not _is_bias(path) and _name(path) not in TABLES:
            raise ConfigError(
                f"optimizer.kind = 'muon' does not know the matrix form of {jax.tree_util.keystr(path)}; add it to "
                "optimizer.MATRICES, or set optimizer.kind to 'adamw'"
            )
        return ADAMW

    return jax.tree_util.tree_map_with_path(kind, params)


def _is_bias(path: Any) -> bool:
    return "_bias_" in _name(path)


def _name(path: Any) -> str:
    """The parameter's own name: the last key of its path that is one."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str)]
    return names[-1] if names else ""


def moving_average(average: Any, params: Any, decay: float) -> Any:
    """decay * average + (1 - decay) * params, leaf by leaf, in float32 whatever dtype the parameters have.

    In bfloat16 an average would stand still from a decay of 0.998 on: the step is below half a unit in the last place.
    """
    # Widened before the product: (1 - decay) * x in the dtype of x would be rounded to it.
    return jax.tree.map(lambda a, x: a + (1.0 - decay) * (x.astype(jnp.float32) - a), average, params)
