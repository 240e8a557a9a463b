"""The training loss, a chunk of anchors at a time: [A * K, V] logits never exist at once.

Loss and gradient of a chunk are computed together. The gradient of both cross entropies with respect to
the logits is softmax(z) - p, so the product with the head's transpose that the backward pass would need is
taken while the chunk's logits are at hand, and only [B, A, J, D] is kept: no logits are stored and none are
computed twice. Results are sums with their denominators: dividing is left to whoever has seen the whole
batch, so shards and accumulated parts weigh what they hold.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.config import ConfigError
from dflash_jax.models.transformer import softcap


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    Attributes:
      hard_weight: on -log q(label).
      soft_weight: on KL(p || q), p the target's law over the draft vocabulary, given the true prefix.
      gamma: decay of slot weights, exp(-(o - 1) / gamma); None for none.
      chunk_slots: about how many rows of logits exist at once.
      teacher_dtype: of the product that gives the target's logits: float32 or bfloat16.
    """

    hard_weight: float = 0.0
    soft_weight: float = 1.0
    gamma: float | None = 4.0
    chunk_slots: int = 256
    teacher_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("hard_weight", "soft_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"loss.{name} is {getattr(self, name)}, must not be negative")
        if self.hard_weight + self.soft_weight == 0:
            raise ConfigError("loss.hard_weight and loss.soft_weight are both 0: nothing would be learned")
        if self.gamma is not None and self.gamma <= 0:
            raise ConfigError(f"loss.gamma is {self.gamma}, must be positive (or None for equal weights)")
        if self.chunk_slots < 1:
            raise ConfigError(f"loss.chunk_slots is {self.chunk_slots}, must be at least 1")
        if self.teacher_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"loss.teacher_dtype is {self.teacher_dtype!r}, must be 'float32' or 'bfloat16'")


@struct.dataclass
class LossSums:
    """Sums over slots; add them over parts of a batch, divide once.

    Attributes:
      loss: sum of weight * (hard_weight * hard + soft_weight * soft); the only one with a gradient.
      hard: sum of weight * -log q(label), over slots whose label is in the draft vocabulary.
      soft: sum of weight * KL(p || q).
      hard_denominator, denominator: sums of the weights that `hard`, and `loss` and `soft`, went over.
      count_J: supervised slots at each position of the block, whatever their weight.
      correct_J: those where the label has the highest draft logit.
      agree_J: those where the target's own first choice (in the draft vocabulary) has it; 0 without teacher.
      chain: sum over blocks of the number of leading slots that are correct.
      blocks: blocks with at least one supervised slot.
    """

    loss: jax.Array
    hard: jax.Array
    soft: jax.Array
    hard_denominator: jax.Array
    denominator: jax.Array
    count_J: jax.Array
    correct_J: jax.Array
    agree_J: jax.Array
    chain: jax.Array
    blocks: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadMath:
    """Static part of the loss: the configuration and what lies between head and logits on either side."""

    config: LossConfig
    output_multiplier: float = 1.0
    softcap: float | None = None
    teacher_softcap: float | None = None


def block_loss(
    math: HeadMath,
    hidden_BxAxJxD: jax.Array,
    teacher_BxAxJxD: jax.Array | None,
    head_DxU: jax.Array,
    label_BxAxJ: jax.Array,
    counts_BxAxJ: jax.Array,
    weight_BxAxJ: jax.Array,
) -> LossSums:
    """Sums of the loss over all slots, differentiable in `hidden_BxAxJxD` only (the head is frozen).

    Args:
      hidden_BxAxJxD: the drafter's normed states of slots 1 .. K-1.
      teacher_BxAxJxD: the target's normed states that predict the same tokens, i.e. of position
        anchor + o - 1 for slot o; None where soft_weight is 0.
      head_DxU: the target's head over the draft vocabulary.
      label_BxAxJ: draft ids; -1 for a token outside the draft vocabulary: such a slot has no hard loss and
        counts as wrong, its soft loss stays.
      counts_BxAxJ: which slots are supervised.
      weight_BxAxJ: their weights; ignored where counts is False.
    """
    if math.config.soft_weight and teacher_BxAxJxD is None:
        raise ConfigError("loss.soft_weight needs the target's hidden states, but the batch has none")
    if not math.config.soft_weight:
        teacher_BxAxJxD = None
    weight_BxAxJ = jnp.where(counts_BxAxJ, weight_BxAxJ, 0.0).astype(jnp.float32)
    sums, correct_BxAxJ, agree_BxAxJ = _summed(
        math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ
    )
    loss, hard, soft = sums
    count_J = counts_BxAxJ.sum((0, 1))
    # Leading correct slots: a slot that is not supervised (the answer is over) ends the chain.
    right_BxAxJ = correct_BxAxJ & counts_BxAxJ
    leading_BxAxJ = jnp.cumprod(right_BxAxJ.astype(jnp.int32), axis=-1)
    return LossSums(
        loss=loss,
        hard=hard,
        soft=soft,
        hard_denominator=jnp.sum(jnp.where(label_BxAxJ >= 0, weight_BxAxJ, 0.0)),
        denominator=jnp.sum(weight_BxAxJ),
        count_J=count_J,
        correct_J=right_BxAxJ.sum((0, 1)),
        agree_J=(agree_BxAxJ & counts_BxAxJ).sum((0, 1)),
        chain=leading_BxAxJ.sum(),
        blocks=counts_BxAxJ.any(-1).sum(),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ):
    sums, correct, agree, _ = _chunks(
        math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ, with_grad=False
    )
    return sums, correct, agree


def _summed_fwd(math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ):
    sums, correct, agree, grad_BxAxJxD = _chunks(
        math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ, with_grad=True
    )
    return (sums, correct, agree), grad_BxAxJxD


def _summed_bwd(math, grad_BxAxJxD, cotangents):
    del math
    (loss_cotangent, _, _), _, _ = cotangents  # of hard and soft alone there is no gradient: they are reports
    return (grad_BxAxJxD * loss_cotangent.astype(grad_BxAxJxD.dtype), None, None, None, None)


_summed.defvjp(_summed_fwd, _summed_bwd)


def _chunks(math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ, *, with_grad):
    """Walks over chunks of anchors; the batch axis stays whole, so a sharded batch stays where it is."""
    b, a, j = label_BxAxJ.shape
    chunk = min(a, max(1, math.config.chunk_slots // (b * j)))
    num_chunks = -(-a // chunk)

    def split(x, fill=0):
        pad = [(0, 0), (0, num_chunks * chunk - a)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return x.reshape(b, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    xs = (
        split(hidden_BxAxJxD),
        None if teacher_BxAxJxD is None else split(teacher_BxAxJxD),
        split(label_BxAxJ, -1),
        split(weight_BxAxJ),
    )

    def run(x):
        return _one_chunk(math, *x[:2], head_DxU, *x[2:], with_grad=with_grad)

    def skip(x):
        shape = x[2].shape
        grad = jnp.zeros_like(x[0]) if with_grad else None
        return (jnp.zeros(()),) * 3, jnp.zeros(shape, bool), jnp.zeros(shape, bool), grad

    def body(sums, x):
        # Padding blocks lie at the end of their rows: chunks of nothing else are not computed.
        part, correct, agree, grad = jax.lax.cond(jnp.any(x[3] > 0), run, skip, x)
        return tuple(s + p for s, p in zip(sums, part, strict=True)), (correct, agree, grad)

    sums, (correct, agree, grad) = jax.lax.scan(body, (jnp.zeros(()),) * 3, xs)

    def join(x):
        return x.swapaxes(0, 1).reshape(b, num_chunks * chunk, *x.shape[3:])[:, :a]

    return sums, join(correct), join(agree), join(grad) if with_grad else None


def _one_chunk(math, hidden_BxAxJxD, teacher_BxAxJxD, head_DxU, label_BxAxJ, weight_BxAxJ, *, with_grad):
    """((loss, hard, soft) sums, correct, agree, d loss / d hidden or None) of one chunk."""
    config = math.config
    raw = _logits(hidden_BxAxJxD, head_DxU.astype(hidden_BxAxJxD.dtype)) * math.output_multiplier
    z_BxAxJxU = softcap(raw, math.softcap)
    peak_BxAxJ = z_BxAxJxU.max(-1)
    lse_BxAxJ = peak_BxAxJ + jnp.log(jnp.sum(jnp.exp(z_BxAxJxU - peak_BxAxJ[..., None]), -1))
    id_U = jnp.arange(head_DxU.shape[1], dtype=label_BxAxJ.dtype)
    is_label_BxAxJxU = label_BxAxJ[..., None] == id_U[None, None, None]
    label_z_BxAxJ = jnp.sum(jnp.where(is_label_BxAxJxU, z_BxAxJxU, 0.0), -1)
    known_BxAxJ = label_BxAxJ >= 0
    hard_weight_BxAxJ = jnp.where(known_BxAxJ, weight_BxAxJ, 0.0)
    hard = jnp.sum(hard_weight_BxAxJ * (lse_BxAxJ - label_z_BxAxJ))
    # A comparison with the maximum is ten times cheaper than an argmax on CPU.
    correct_BxAxJ = known_BxAxJ & (label_z_BxAxJ >= peak_BxAxJ)

    soft, agree_BxAxJ, p_BxAxJxU = jnp.zeros(()), jnp.zeros_like(correct_BxAxJ), None
    if config.soft_weight:
        dtype = jnp.dtype(config.teacher_dtype)
        t_BxAxJxU = _logits(teacher_BxAxJxD.astype(dtype), head_DxU.astype(dtype))
        t_BxAxJxU = softcap(t_BxAxJxU, math.teacher_softcap)
        t_peak_BxAxJ = t_BxAxJxU.max(-1)
        t_lse_BxAxJ = t_peak_BxAxJ + jnp.log(jnp.sum(jnp.exp(t_BxAxJxU - t_peak_BxAxJ[..., None]), -1))
        p_BxAxJxU = jnp.exp(t_BxAxJxU - t_lse_BxAxJ[..., None])
        kl_BxAxJ = jnp.sum(p_BxAxJxU * (t_BxAxJxU - z_BxAxJxU), -1) - t_lse_BxAxJ + lse_BxAxJ
        soft = jnp.sum(weight_BxAxJ * kl_BxAxJ)
        both = (z_BxAxJxU >= peak_BxAxJ[..., None]) & (t_BxAxJxU >= t_peak_BxAxJ[..., None])
        agree_BxAxJ = jnp.any(both, -1)

    loss = config.hard_weight * hard + config.soft_weight * soft
    if not with_grad:
        return (loss, hard, soft), correct_BxAxJ, agree_BxAxJ, None

    hard_scale_BxAxJ1 = (config.hard_weight * hard_weight_BxAxJ)[..., None]
    soft_scale_BxAxJ1 = (config.soft_weight * weight_BxAxJ)[..., None]
    q_BxAxJxU = jnp.exp(z_BxAxJxU - lse_BxAxJ[..., None])
    dz_BxAxJxU = q_BxAxJxU * (hard_scale_BxAxJ1 + soft_scale_BxAxJ1)
    if config.hard_weight:
        dz_BxAxJxU -= jnp.where(is_label_BxAxJxU, hard_scale_BxAxJ1, 0.0)
    if config.soft_weight:
        dz_BxAxJxU -= p_BxAxJxU * soft_scale_BxAxJ1
    if math.softcap is not None:
        dz_BxAxJxU *= 1.0 - jnp.square(z_BxAxJxU / math.softcap)
    dz_BxAxJxU *= math.output_multiplier
    grad_BxAxJxD = jax.lax.dot_general(
        dz_BxAxJxU.astype(hidden_BxAxJxD.dtype), head_DxU.astype(hidden_BxAxJxD.dtype),
        (((3,), (1,)), ((), ())), precision=_precision(hidden_BxAxJxD.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (loss, hard, soft), correct_BxAxJ, agree_BxAxJ, grad_BxAxJxD.astype(hidden_BxAxJxD.dtype)


def _logits(hidden_BxAxJxD, head_DxU):
    return jax.lax.dot_general(
        hidden_BxAxJxD, head_DxU, (((3,), (0,)), ((), ())),
        precision=_precision(hidden_BxAxJxD.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip


def _precision(dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
