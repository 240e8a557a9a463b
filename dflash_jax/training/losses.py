"""The training loss, a chunk of blocks at a time: [A * K, V] logits never exist at once.

Loss and gradient of a chunk are computed together. Each objective gives its gradient with respect to the logits by
formula (`objectives`), so the product with the head's transpose that the backward pass would need is taken while the
chunk's logits are at hand, and only [B, A, J, D] is kept: no logits are stored and none are computed twice. A chunk
holds whole blocks, so weights that depend on all slots of a block need no second pass. Results are sums with their
denominators: dividing is left to whoever has seen the whole batch, so shards and accumulated parts weigh what they
hold.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import sharding
from dflash_jax.config import ConfigError
from dflash_jax.models.transformer import softcap
from dflash_jax.training.objectives import HARD, OBJECTIVES, Laws, LossConfig, dynamic_weights

_PARTS = ("batch", None, "vocab")  # logical axes of what each shard of the rows adds up of [R, U]


@struct.dataclass
class LossSums:
    """Sums over slots; add them over parts of a batch, divide once.

    Attributes:
      loss: sum of weight * sum of coefficient * objective; the only one with a gradient. `loss / denominator` is what
        is minimised.
      denominator: the sum of the weights; for weights from confidence the number of blocks.
      objective: by name, sum of weight * objective: of those that are minimised, and of "hard" in any case.
      weight, label_weight: sums of the weights of all supervised slots, and of those whose label is in the draft
        vocabulary: `objective` over `weight` is a mean, that of "hard" over `label_weight`.
      count_J: supervised slots at each position of the block, whatever their weight.
      correct_J: those where the label has the highest draft logit.
      agree_J: those where the target's own first choice (in the draft vocabulary) has it; 0 without the target.
      chain: sum over blocks of the number of leading slots that are correct.
      blocks: blocks with at least one supervised slot.
    """

    loss: jax.Array
    denominator: jax.Array
    objective: dict[str, jax.Array]
    weight: jax.Array
    label_weight: jax.Array
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


@struct.dataclass
class _Slots:
    """What the chunks are cut from; every array starts with [B, A]."""

    hidden_BxAxJxD: jax.Array
    before_BxAxJxR: jax.Array | None
    teacher_BxAxJxD: jax.Array | None
    label_BxAxJ: jax.Array
    weight_BxAxJ: jax.Array


@struct.dataclass
class _Heads:
    """The frozen heads: over the draft vocabulary, and over the target's where that is larger and asked for."""

    draft_DxU: jax.Array
    whole_DxV: jax.Array | None


@struct.dataclass
class Markov:
    """What a Markov head adds to the logits of every slot, see `drafters.dflash.MarkovHead`.

    Attributes:
      before_BxAxJxR: of the token before each slot, the answer's own.
      columns_RxU: over the draft vocabulary.
    """

    before_BxAxJxR: jax.Array
    columns_RxU: jax.Array


@struct.dataclass
class _Sums:
    loss: jax.Array
    objective: dict[str, jax.Array]
    weight: jax.Array
    label_weight: jax.Array


@struct.dataclass
class _Grads:
    """Of the loss; None what is not asked for or not there."""

    hidden_BxAxJxD: jax.Array | None = None
    before_BxAxJxR: jax.Array | None = None
    columns_RxU: jax.Array | None = None


def block_loss(
    math: HeadMath,
    hidden_BxAxJxD: jax.Array,
    teacher_BxAxJxD: jax.Array | None,
    head_DxU: jax.Array,
    label_BxAxJ: jax.Array,
    counts_BxAxJ: jax.Array,
    weight_BxAxJ: jax.Array,
    whole_head_DxV: jax.Array | None = None,
    markov: Markov | None = None,
) -> LossSums:
    """Sums of the loss over all slots, differentiable in `hidden_BxAxJxD` and `markov` only (the head is frozen).

    Args:
      hidden_BxAxJxD: the drafter's normed states of slots 1 .. K-1.
      teacher_BxAxJxD: the target's normed states that predict the same tokens, i.e. of position
        anchor + o - 1 for slot o; None where no objective asks for the target.
      head_DxU: the target's head over the draft vocabulary.
      label_BxAxJ: draft ids; -1 for a token outside the draft vocabulary: such a slot has no hard loss and
        counts as wrong, its loss against the target's law stays.
      counts_BxAxJ: which slots are supervised.
      weight_BxAxJ: their weights by position, positive (`position_weights`); ignored where counts is False.
      whole_head_DxV: the target's head over its whole vocabulary, where that is larger than the draft vocabulary and
        an objective asks what lies outside; None where the two are the same.
      markov: None for a drafter without a Markov head.
    """
    if not math.config.needs_target:
        teacher_BxAxJxD = None
    elif teacher_BxAxJxD is None:
        names = ", ".join(name for name, _ in math.config.objective if name != HARD)
        raise ConfigError(
            f"loss.objective has {names}, which needs the target's hidden states, but the batch has none; keep "
            "hidden_BxSxD in the features, or set loss.objective to 'hard'"
        )
    if not math.config.needs_whole_law:
        whole_head_DxV = None
    weight_BxAxJ = jnp.where(counts_BxAxJ, weight_BxAxJ, 0.0).astype(jnp.float32)
    before_BxAxJxR, columns_RxU = (None, None) if markov is None else (markov.before_BxAxJxR, markov.columns_RxU)
    slots = _Slots(hidden_BxAxJxD, before_BxAxJxR, teacher_BxAxJxD, label_BxAxJ, weight_BxAxJ)
    sums, correct_BxAxJ, agree_BxAxJ = _summed(math, slots, columns_RxU, _Heads(head_DxU, whole_head_DxV))
    # Leading correct slots: a slot that is not supervised (the answer is over) ends the chain.
    right_BxAxJ = correct_BxAxJ & counts_BxAxJ
    leading_BxAxJ = jnp.cumprod(right_BxAxJ.astype(jnp.int32), axis=-1)
    blocks = counts_BxAxJ.any(-1).sum()
    return LossSums(
        loss=sums.loss,
        denominator=blocks.astype(jnp.float32) if math.config.is_dynamic else sums.weight,
        objective=sums.objective,
        weight=sums.weight,
        label_weight=sums.label_weight,
        count_J=counts_BxAxJ.sum((0, 1)),
        correct_J=right_BxAxJ.sum((0, 1)),
        agree_J=(agree_BxAxJ & counts_BxAxJ).sum((0, 1)),
        chain=leading_BxAxJ.sum(),
        blocks=blocks,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(math, slots, columns_RxU, heads):
    return _chunks(math, slots, columns_RxU, heads, with_grad=False)[:3]


def _summed_fwd(math, slots, columns_RxU, heads):
    *results, grads = _chunks(math, slots, columns_RxU, heads, with_grad=True)
    return tuple(results), grads


def _summed_bwd(math, grads, cotangents):
    del math
    sums, _, _ = cotangents  # of anything but the loss there is no gradient: the rest are reports
    grads = jax.tree.map(lambda grad: grad * sums.loss.astype(grad.dtype), grads)
    return _Slots(grads.hidden_BxAxJxD, grads.before_BxAxJxR, None, None, None), grads.columns_RxU, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _chunks(math, slots, columns_RxU, heads, *, with_grad):
    """Walks over chunks of blocks; the batch axis stays whole, so a sharded batch stays where it is.

    Returns:
      (sums, correct_BxAxJ, agree_BxAxJ, _Grads).
    """
    b, a, j = slots.label_BxAxJ.shape
    chunk = min(a, max(1, math.config.chunk_slots // (b * j)))
    num_chunks = -(-a // chunk)

    def split(x):
        pad = [(0, 0), (0, num_chunks * chunk - a)] + [(0, 0)] * (x.ndim - 2)  # of weight 0
        return jnp.pad(x, pad).reshape(b, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    # Each shard of the rows adds up its own part of the columns' gradient: they are summed once, behind the last chunk.
    shards = sharding.batch_shards(b)
    columns = None
    if with_grad and columns_RxU is not None:
        columns = sharding.constrain(jnp.zeros((shards, *columns_RxU.shape), jnp.float32), _PARTS)

    def run(carry, part):
        sums, columns = carry
        added, dz_BxAxJxU, *rest = _one_chunk(math, part, columns_RxU, heads, with_grad=with_grad)
        if columns is not None:
            before, dz = (x.reshape(shards, -1, x.shape[-1]) for x in (part.before_BxAxJxR, dz_BxAxJxU))
            columns += _product(before, dz, (1,), (1,), (0,))
            columns = sharding.constrain(columns, _PARTS)
        return (jax.tree.map(jnp.add, sums, added), columns), rest

    def skip(carry, part):
        return carry, _zeros(jax.eval_shape(run, carry, part)[1])

    def body(carry, part):
        # Padding blocks lie at the end of their rows: chunks of nothing else are not computed.
        return jax.lax.cond(jnp.any(part.weight_BxAxJ > 0), run, skip, carry, part)

    chunks = jax.tree.map(split, slots)
    one = jax.tree.map(lambda x: x[0], chunks)
    first = _zeros(jax.eval_shape(lambda part: _one_chunk(math, part, columns_RxU, heads, with_grad=False)[0], one))
    (sums, columns), rest = jax.lax.scan(body, (first, columns), chunks)

    def join(x):
        return x.swapaxes(0, 1).reshape(b, num_chunks * chunk, *x.shape[3:])[:, :a]

    correct_BxAxJ, agree_BxAxJ, grads = jax.tree.map(join, rest)
    if columns is not None:
        grads = grads.replace(columns_RxU=columns.sum(0).astype(columns_RxU.dtype))
    return sums, correct_BxAxJ, agree_BxAxJ, grads


def _zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _one_chunk(math, slots, columns_RxU, heads, *, with_grad):
    """(sums, d loss / d scores, correct, agree, _Grads of the slots) of one chunk; None what is not asked for."""
    hidden_BxAxJxD, label_BxAxJ, config = slots.hidden_BxAxJxD, slots.label_BxAxJ, math.config
    head_DxU = heads.draft_DxU.astype(hidden_BxAxJxD.dtype)
    score_BxAxJxU = _logits(hidden_BxAxJxD, head_DxU)
    if columns_RxU is not None:
        score_BxAxJxU += _logits(slots.before_BxAxJxR, columns_RxU)
    z_BxAxJxU = softcap(score_BxAxJxU * math.output_multiplier, math.softcap)
    peak_BxAxJ = z_BxAxJxU.max(-1)
    lse_BxAxJ = _log_sum_exp(z_BxAxJxU, peak_BxAxJ)
    laws, known_BxAxJ = Laws(z_BxAxJxU, lse_BxAxJ, label_BxAxJ), label_BxAxJ >= 0
    # A comparison with the maximum is ten times cheaper than an argmax on CPU.
    correct_BxAxJ = known_BxAxJ & (laws.label_logit_x >= peak_BxAxJ)

    agree_BxAxJ = jnp.zeros_like(correct_BxAxJ)
    if config.needs_target:
        t_BxAxJxU = _teacher_logits(math, slots.teacher_BxAxJxD, heads.draft_DxU)
        t_peak_BxAxJ = t_BxAxJxU.max(-1)
        t_lse_BxAxJ = whole_lse_BxAxJ = _log_sum_exp(t_BxAxJxU, t_peak_BxAxJ)
        if heads.whole_DxV is not None:
            t_BxAxJxV = _teacher_logits(math, slots.teacher_BxAxJxD, heads.whole_DxV)
            whole_lse_BxAxJ = _log_sum_exp(t_BxAxJxV, t_BxAxJxV.max(-1))
        laws = dataclasses.replace(
            laws, teacher_xU=t_BxAxJxU, teacher_lse_x=t_lse_BxAxJ, teacher_whole_lse_x=whole_lse_BxAxJ
        )
        both = (z_BxAxJxU >= peak_BxAxJ[..., None]) & (t_BxAxJxU >= t_peak_BxAxJ[..., None])
        agree_BxAxJ = jnp.any(both, -1)

    probability_BxAxJ = jnp.where(known_BxAxJ, jnp.exp(laws.label_logit_x - lse_BxAxJ), 0.0)
    weight_BxAxJ = slots.weight_BxAxJ * dynamic_weights(config, probability_BxAxJ, slots.weight_BxAxJ > 0)
    loss, dz_BxAxJxU, objective = jnp.zeros(()), 0.0, {HARD: jnp.sum(weight_BxAxJ * OBJECTIVES[HARD](laws)[0])}
    for name, coefficient in config.objective:
        value_BxAxJ, by_logit_BxAxJxU = OBJECTIVES[name](laws)
        objective[name] = jnp.sum(weight_BxAxJ * value_BxAxJ)
        loss += coefficient * objective[name]
        dz_BxAxJxU += coefficient * by_logit_BxAxJxU
    sums = _Sums(loss, objective, weight_BxAxJ.sum(), jnp.sum(jnp.where(known_BxAxJ, weight_BxAxJ, 0.0)))
    if not with_grad:
        return sums, None, correct_BxAxJ, agree_BxAxJ, _Grads()

    dz_BxAxJxU *= weight_BxAxJ[..., None]
    if math.softcap is not None:
        dz_BxAxJxU *= 1.0 - jnp.square(z_BxAxJxU / math.softcap)
    dz_BxAxJxU = (dz_BxAxJxU * math.output_multiplier).astype(hidden_BxAxJxD.dtype)
    grads = _Grads(_product(dz_BxAxJxU, head_DxU, (3,), (1,)).astype(dz_BxAxJxU.dtype))
    if columns_RxU is not None:
        grads = grads.replace(before_BxAxJxR=_product(dz_BxAxJxU, columns_RxU, (3,), (1,)).astype(dz_BxAxJxU.dtype))
    return sums, dz_BxAxJxU, correct_BxAxJ, agree_BxAxJ, grads


def _teacher_logits(math, teacher_BxAxJxD, head_DxU):
    dtype = jnp.dtype(math.config.teacher_dtype)
    return softcap(_logits(teacher_BxAxJxD.astype(dtype), head_DxU.astype(dtype)), math.teacher_softcap)


def _log_sum_exp(z_BxAxJxU, peak_BxAxJ):
    return peak_BxAxJ + jnp.log(jnp.sum(jnp.exp(z_BxAxJxU - peak_BxAxJ[..., None]), -1))


def _logits(hidden_BxAxJxD, head_DxU):
    return _product(hidden_BxAxJxD, head_DxU, (3,), (0,))


def _product(x, y, over_x, over_y, beside=()):
    """Contracted over these axes, in float32; `beside` are axes of both that stay."""
    return jax.lax.dot_general(
        x, y, ((over_x, over_y), (beside, beside)), precision=_precision(x.dtype), preferred_element_type=jnp.float32
    )


def _precision(dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
