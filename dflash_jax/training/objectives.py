"""What the slots of a block are trained for: objectives with their gradients, and how much each slot counts.

An objective compares, slot by slot, the drafter's law q with the answer's token or with the target's law p given the
true prefix. It is a pure function of `Laws`; each returns its value and, by formula, its gradient with respect to the
draft logits z, where q = softmax(z). A run minimises

    sum over slots of  weight * sum over objectives of  coefficient * value,

divided once by one number for the whole batch: the sum of the weights, or for the D-PACE weights the number of blocks.

Which p, where the draft vocabulary U is a part of the target's vocabulary V. Whatever the drafter does, q is 0 outside
U. `forward_kl` would be infinite against p on V; and `reverse_kl` against p on V differs from that against p on U by
-log p(U), which no drafter changes. Both take p restricted to U and renormalised: they are 0 where q equals it.
`total_variation` and `acceptance` say what serving accepts, sum over U of min(p, q), so they take p as it is: what lies
outside U is lost, and their least value is p(V - U) and -log p(U).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import field_types
from dflash_jax.config import ConfigError, from_config_dict


@dataclasses.dataclass(frozen=True)
class Laws:
    """Draft and target of some slots, all float32. Leading axes (...) are any; U is the draft vocabulary.

    Attributes:
      logit_xU, lse_x: draft logits and their log-sum-exp.
      label_x: draft id of the answer's token, -1 where it lies outside the draft vocabulary.
      teacher_xU, teacher_lse_x: the target's logits over the draft vocabulary, and their log-sum-exp; None where no
        objective asks for the target.
      teacher_whole_lse_x: log-sum-exp of the target's logits over its whole vocabulary; None where no objective asks.
    """

    logit_xU: jax.Array
    lse_x: jax.Array
    label_x: jax.Array
    teacher_xU: jax.Array | None = None
    teacher_lse_x: jax.Array | None = None
    teacher_whole_lse_x: jax.Array | None = None

    @property
    def is_label_xU(self) -> jax.Array:
        id_xU = jax.lax.broadcasted_iota(self.label_x.dtype, self.logit_xU.shape, self.logit_xU.ndim - 1)
        return self.label_x[..., None] == id_xU

    @property
    def label_logit_x(self) -> jax.Array:
        """The draft logit of the answer's token, 0 where it has none."""
        return jnp.sum(jnp.where(self.is_label_xU, self.logit_xU, 0.0), -1)

    @property
    def log_q_xU(self) -> jax.Array:
        return self.logit_xU - self.lse_x[..., None]

    @property
    def log_p_xU(self) -> jax.Array:
        """Of the target's law restricted to the draft vocabulary and renormalised."""
        return self.teacher_xU - self.teacher_lse_x[..., None]

    @property
    def log_p_whole_xU(self) -> jax.Array:
        """Of the target's law as it is: over the draft vocabulary it may sum to less than 1."""
        return self.teacher_xU - self.teacher_whole_lse_x[..., None]


# (value_x, gradient_xU) of an objective. A caller that drops the gradient pays nothing for it under jit.
Objective = Callable[[Laws], tuple[jax.Array, jax.Array]]


def hard(laws: Laws) -> tuple[jax.Array, jax.Array]:
    """-log q(label); nothing where the label is outside the draft vocabulary. d/dz = q - 1[label].

    Source: DFlash (arXiv 2602.06036), the likelihood of the block's tokens.
    """
    known_x = laws.label_x >= 0
    gradient_xU = jnp.exp(laws.log_q_xU) - laws.is_label_xU
    return jnp.where(known_x, laws.lse_x - laws.label_logit_x, 0.0), jnp.where(known_x[..., None], gradient_xU, 0.0)


def forward_kl(laws: Laws) -> tuple[jax.Array, jax.Array]:
    """KL(p || q), p renormalised over the draft vocabulary. d/dz = q - p.

    Source: knowledge distillation, Hinton et al. 2015 (arXiv 1503.02531); for drafters DistillSpec (arXiv 2310.08461).
    """
    p_xU = jnp.exp(laws.log_p_xU)
    value_x = jnp.sum(p_xU * (laws.log_p_xU - laws.log_q_xU), -1)
    return value_x, jnp.exp(laws.log_q_xU) - p_xU


def reverse_kl(laws: Laws) -> tuple[jax.Array, jax.Array]:
    """KL(q || p), p renormalised over the draft vocabulary. d/dz = q (log q - log p - KL).

    Source: MiniLLM (arXiv 2306.08543); for drafters DistillSpec (arXiv 2310.08461).
    """
    q_xU, log_ratio_xU = jnp.exp(laws.log_q_xU), laws.log_q_xU - laws.log_p_xU
    value_x = jnp.sum(q_xU * log_ratio_xU, -1)
    return value_x, q_xU * (log_ratio_xU - value_x[..., None])


def total_variation(laws: Laws) -> tuple[jax.Array, jax.Array]:
    """1 - sum min(p, q) = sum max(q - p, 0): the chance that a drawn token is rejected; p as it is.

    d/dz = q (1[q > p] - sum of q where q > p).

    Source: speculative sampling accepts with min(1, p / q), Leviathan et al. 2023 (arXiv 2211.17192, theorem 3.5).
    """
    log_q_xU, log_p_xU = laws.log_q_xU, laws.log_p_whole_xU
    q_xU, above_xU = jnp.exp(log_q_xU), log_q_xU > log_p_xU
    # q - p where q > p, so that equal laws give 0 and not the rounding of a sum that should be 1.
    value_x = jnp.sum(jnp.where(above_xU, q_xU - jnp.exp(log_p_xU), 0.0), -1)
    q_above_x = jnp.sum(jnp.where(above_xU, q_xU, 0.0), -1)
    return value_x, q_xU * (above_xU - q_above_x[..., None])


def acceptance(laws: Laws) -> tuple[jax.Array, jax.Array]:
    """-log sum min(p, q), the likelihood that a drawn token is accepted; p as it is.

    With r = min(p, q) / sum min(p, q) where q < p, and 0 elsewhere: d/dz = q sum(r) - r. The gradient of
    total variation divided by the acceptance, in logarithms: laws that share next to nothing still give one.

    Source: LK losses (arXiv 2602.23881).
    """
    log_q_xU, log_p_xU = laws.log_q_xU, laws.log_p_whole_xU
    log_least_xU = jnp.minimum(log_q_xU, log_p_xU)
    log_accepted_x = jax.nn.logsumexp(log_least_xU, axis=-1)
    rejected_x, _ = total_variation(laws)
    # Near 1 the rejected share is exact and the sum is not; near 0 the other way round.
    value_x = jnp.where(rejected_x < 0.5, -jnp.log1p(-jnp.minimum(rejected_x, 0.5)), -log_accepted_x)
    share_xU = jnp.where(log_q_xU < log_p_xU, jnp.exp(log_least_xU - log_accepted_x[..., None]), 0.0)
    return value_x, jnp.exp(log_q_xU) * share_xU.sum(-1, keepdims=True) - share_xU


HARD = "hard"
OBJECTIVES: dict[str, Objective] = {
    HARD: hard,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "acceptance": acceptance,
}
_OF_THE_WHOLE_LAW = ("total_variation", "acceptance")

UNIFORM, DECAY = "uniform", "decay"
DPACE, DPACE_CONFIDENCE, DPACE_CONTINUATION = "dpace", "dpace_confidence", "dpace_continuation"
_DYNAMIC = (DPACE, DPACE_CONFIDENCE, DPACE_CONTINUATION)
WEIGHTINGS = (UNIFORM, DECAY, *_DYNAMIC)

# Before objectives were named: field -> its name now.
_OLD_FIELDS = {"hard_weight": HARD, "soft_weight": "forward_kl"}


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    Attributes:
      objective: the coefficient of each objective by name, such as {"forward_kl": 0.9, "hard": 0.1}; or one name alone.
        Kept as sorted pairs without those of coefficient 0. Names: `OBJECTIVES`.
      weighting: how much each slot counts, one of `WEIGHTINGS`; see `position_weights` and `dynamic_weights`.
      gamma: read by "decay": exp(-(o - 1) / gamma) for slot o; None for `default_gamma` of the block size.
      dpace_alpha: read by the D-PACE weightings: how far confidences are lifted towards 1; 0.3 to 0.7 are usual.
      chunk_slots: about how many rows of logits exist at once, over all devices: to be raised with the shards of the
        batch, since each chunk reads the whole head.
      teacher_dtype: of the product that gives the target's logits: float32 or bfloat16.
    """

    objective: Any = (("forward_kl", 1.0),)
    weighting: str = DECAY
    gamma: float | None = None
    dpace_alpha: float = 0.5
    chunk_slots: int = 256
    teacher_dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", _pairs(self.objective))
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"loss.weighting is {self.weighting!r}, must be one of {', '.join(WEIGHTINGS)}")
        if self.gamma is not None and self.gamma <= 0:
            raise ConfigError(
                f"loss.gamma is {self.gamma}, must be positive, or None for the block size's own; equal weights are "
                "loss.weighting = 'uniform'"
            )
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"loss.dpace_alpha is {self.dpace_alpha}, must lie in [0, 1]")
        if self.chunk_slots < 1:
            raise ConfigError(f"loss.chunk_slots is {self.chunk_slots}, must be at least 1")
        if self.teacher_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"loss.teacher_dtype is {self.teacher_dtype!r}, must be 'float32' or 'bfloat16'")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> LossConfig:
        """The `loss` section of a config.

        Raises:
          ConfigError: a field is unknown (one of an older spelling names the new one) or wrong.
        """
        for old, name in _OLD_FIELDS.items():
            if old in section:
                raise ConfigError(
                    f"loss.{old} = {section[old]} is now loss.objective = {{{name!r}: {section[old]}}}: objectives are "
                    "named, with their coefficients, in one field"
                )
        return from_config_dict(cls, section, "loss")

    @property
    def needs_target(self) -> bool:
        """Whether the target's final states are needed, not only the answer's tokens."""
        return any(name != HARD for name, _ in self.objective)

    @property
    def needs_whole_law(self) -> bool:
        """Whether the target's mass outside a pruned draft vocabulary is needed: its whole head then has to be run."""
        return any(name in _OF_THE_WHOLE_LAW for name, _ in self.objective)

    @property
    def is_dynamic(self) -> bool:
        """Whether weights come from the drafter's own confidence; the loss is then a mean over blocks."""
        return self.weighting in _DYNAMIC


def _pairs(objective: Any) -> tuple[tuple[str, float], ...]:
    """Sorted (name, coefficient) without zeros, from a name, a mapping or pairs."""
    if isinstance(objective, str):
        objective = {objective: 1.0}
    try:
        pairs = dict(objective.items() if hasattr(objective, "items") else objective)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"loss.objective is {objective!r}, must be a name, or a dict of names to coefficients; names are "
            f"{', '.join(OBJECTIVES)}"
        ) from error
    for name, coefficient in pairs.items():
        if name not in OBJECTIVES:
            raise ConfigError(f"loss.objective names {name!r}, must be one of {', '.join(OBJECTIVES)}")
        if not field_types.fits(coefficient, float) or not 0 <= coefficient < math.inf:
            raise ConfigError(f"loss.objective.{name} is {coefficient!r}, must be a number, finite and not negative")
    kept = tuple((name, float(pairs[name])) for name in sorted(pairs) if pairs[name])
    if not kept:
        raise ConfigError(
            f"loss.objective is {pairs}: nothing would be learned; give one of {', '.join(OBJECTIVES)} a coefficient"
        )
    return kept


def default_gamma(block_size: int) -> float:
    """The decay of a block size: 4, 5 and 7 for 8, 10 and 16.

    Source of the three: DFlash (arXiv 2602.06036). Between and beyond them it is ours: the lines through them, half
    the block size up to 10, then a third of each slot more.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def position_weights(config: LossConfig, block_size: int) -> jax.Array:
    """[K - 1] float32, the part of a slot's weight that its position alone decides.

    "decay": exp(-(o - 1) / gamma) for slot o = 1 .. K-1: a wrong token makes all behind it worthless, so early slots
    count more. 1 for all other weightings.
    """
    offset_J = np.arange(block_size - 1, dtype=np.float64)
    if config.weighting != DECAY:
        return jnp.ones(offset_J.shape, jnp.float32)
    gamma = default_gamma(block_size) if config.gamma is None else config.gamma
    return jnp.asarray(np.exp(-offset_J / gamma), jnp.float32)


def dynamic_weights(config: LossConfig, probability_xJ: jax.Array, counts_xJ: jax.Array) -> jax.Array:
    """[..., J] float32, the part of the weights of a block's slots that its confidence decides; 1 if not dynamic.

    With c_i = (1 - alpha) q_i + alpha, q_i the drafter's probability of the answer's token in slot i:

    "dpace"               w_j = sum over m >= j of  product over i <= m of  c_i
    "dpace_confidence"    its first factor alone, product over i <= j of c_i: how likely slot j is reached and right
    "dpace_continuation"  its second factor alone, sum over m >= j of product over j < i <= m of c_i: how many slots are
                          accepted from j on, given that j is right

    At alpha 0 the gradient of sum w_j (-log q_j) is that of minus the expected number of accepted drafts, sum over m of
    product over i <= m of q_i. Slots that are not supervised multiply nothing and add nothing; a token outside the
    draft vocabulary has q 0. The weights are constants to the gradient.

    Source: D-PACE (arXiv 2605.18810, equations 7 and 8) and the two component ablations of its code. The denominator,
    the number of blocks, is what its author asks for (SpecForge issue 828): the sum of the weights would cancel what
    they say.
    """
    if not config.is_dynamic:
        return counts_xJ.astype(jnp.float32)
    counts_xJ = counts_xJ.astype(jnp.float32)
    lifted_xJ = (1.0 - config.dpace_alpha) * jax.lax.stop_gradient(probability_xJ) + config.dpace_alpha
    lifted_xJ = jnp.where(counts_xJ > 0, lifted_xJ, 1.0)
    reached_xJ = jnp.cumprod(lifted_xJ, axis=-1)
    # The sum as a recursion from the last slot: dividing sums by products would be 0 / 0 once a product is 0.
    after_x, continued = jnp.zeros_like(lifted_xJ[..., 0]), []
    for j in reversed(range(lifted_xJ.shape[-1])):
        continued.append(counts_xJ[..., j] + after_x)
        after_x = lifted_xJ[..., j] * continued[-1]
    continued_xJ = jnp.stack(continued[::-1], axis=-1)
    weight_xJ = {
        DPACE: reached_xJ * continued_xJ, DPACE_CONFIDENCE: reached_xJ, DPACE_CONTINUATION: continued_xJ,
    }[config.weighting]  # fmt: skip
    return jnp.where(counts_xJ > 0, weight_xJ, 0.0)
