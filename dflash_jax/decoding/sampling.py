"""The law a row samples from: temperature, then top-k, then top-p, then min-p.

One law serves plain decoding and verification, slot by slot: everything here maps logits [B, M, V] to a law per
slot, so what changes logits per slot (bias and penalties: `logits_rules`; a grammar) is applied to logits_BxMxV
before it reaches this file and is then respected by both alike.

The filters rank tokens by (logit descending, id ascending). Ranking by the raw logits keeps the order strict even
where dividing by the temperature or taking exp rounds two logits to one number, so that top-k 1 is greedy decoding.
Every filter keeps a beginning of that order:

    top-k   the first k tokens
    top-p   of those, renormalised, the fewest whose mass reaches p; the token that crosses p is kept
    min-p   of those, the tokens whose probability is at least min_p times that of the most likely one

and the law is softmax(logits / temperature) restricted to what is left. A row of temperature 0 has the one-hot law
at the lowest id among the highest logits; the filters do not change it.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# Temperatures below this mean 0, as callers who write 1e-6 for "greedy" expect.
MIN_TEMPERATURE = 1e-5
# Ranked tokens that settle nearly every top-k and top-p; rows that need more fall back to a whole sort.
CANDIDATES = 512
# Tokens in one cell of the two-level inverse CDF of `categorical`.
CELL = 256
FLOAT32_MAX = float(np.finfo(np.float32).max)


@struct.dataclass
class Sampling:
    """How each row samples. All fields are arrays, so that no value recompiles anything.

    Attributes:
      temperature_B: float32; 0 is greedy.
      top_k_B: int32; off where <= 0 or >= V.
      top_p_B: float32 in (0, 1]; 1 is off.
      min_p_B: float32 in [0, 1]; 0 is off.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array


@struct.dataclass
class Support:
    """The warped law of every slot in four numbers; `probabilities` evaluates it for any tokens of the slot.

    Attributes:
      peak_BxM: the highest logit.
      floor_BxM, last_id_BxM: tokens above the logit `floor`, and of those equal to it the ids up to `last_id`, are
        kept by top-k and top-p.
      total_BxM: sum of exp((logit - peak) / temperature) over what all filters keep.
    """

    peak_BxM: jax.Array
    floor_BxM: jax.Array
    last_id_BxM: jax.Array
    total_BxM: jax.Array


# What a field of a request may hold, and how to say so.
FIELDS = {
    "temperature": (lambda t: t >= 0, "a finite number >= 0; 0 decodes greedily"),
    "top_k": (lambda k: k == int(k), "a whole number; 0 or -1 switches top-k off"),
    "top_p": (lambda p: 0 < p <= 1, "in (0, 1]; 1 switches top-p off, top_k=1 decodes greedily"),
    "min_p": (lambda p: 0 <= p <= 1, "in [0, 1]; 0 switches min-p off"),
    "presence_penalty": (lambda p: -2 <= p <= 2, "in [-2, 2]; 0 switches it off"),
    "frequency_penalty": (lambda p: -2 <= p <= 2, "in [-2, 2]; 0 switches it off"),
    # Far wider than what makes sense, narrow enough that no logit overflows.
    "repetition_penalty": (lambda p: 0.01 <= p <= 100, "in [0.01, 100]; 1 switches it off, above 1 repeats less"),
}


def check_sampling_value(name: str, value: float, where: str) -> None:
    """Checks one field of one row; `where` says in the message whose it is.

    Raises:
      ValueError: the value is out of range or no number.
    """
    ok, must = FIELDS[name]
    number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not number or not abs(value) <= FLOAT32_MAX or not ok(value):
        raise ValueError(f"{name} of {where} is {value!r}, must be {must}")


def make_sampling(
    batch: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
) -> Sampling:
    """Checks sampling parameters, one for all rows or one a row, and makes arrays of them.

    Raises:
      ValueError: a value is out of range, is no number, or a sequence has another length than the batch.
    """
    if not isinstance(batch, numbers.Integral) or batch < 1:
        raise ValueError(f"batch is {batch!r}, must be a whole number >= 1: the number of rows")

    def rows(name: str, value) -> list:
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy and jax numbers and arrays
        per_row = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * batch
        if len(per_row) != batch:
            raise ValueError(f"{name} has {len(per_row)} values for {batch} rows; give one number, or one a row")
        for row, item in enumerate(per_row):
            check_sampling_value(name, item, f"row {row}")
        return per_row

    temperatures, top_ks = rows("temperature", temperature), rows("top_k", top_k)
    top_ps, min_ps = rows("top_p", top_p), rows("min_p", min_p)
    limit = np.iinfo(np.int32).max  # larger than any vocabulary, so clipping changes nothing
    return Sampling(
        temperature_B=jnp.asarray(temperatures, jnp.float32),
        top_k_B=jnp.asarray([max(0, min(int(k), limit)) for k in top_ks], jnp.int32),
        top_p_B=jnp.asarray(top_ps, jnp.float32),
        min_p_B=jnp.asarray(min_ps, jnp.float32),
    )


def is_greedy(sampling: Sampling) -> jax.Array:
    """Rows that decode greedily, bool [B]."""
    return sampling.temperature_B < MIN_TEMPERATURE


def lowest_argmax(logits_V: jax.Array) -> jax.Array:
    """The lowest id among the highest logits over the last axis, int32.

    Two integer reductions over order-preserving keys: each is associative, so that a CPU compiler may vectorise it
    (the (value, index) reduction of `jnp.argmax` it may not), and the tie rule is explicit instead of a backend's.
    """
    bits = jax.lax.bitcast_convert_type(logits_V.astype(jnp.float32), jnp.int32)
    key_V = jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)  # maps -0.0 and 0.0 to the same key
    best = jnp.max(key_V, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, key_V.shape, key_V.ndim - 1)
    return jnp.min(jnp.where(key_V == best, ids, key_V.shape[-1]), axis=-1)


def support(logits_BxMxV: jax.Array, sampling: Sampling) -> Support:
    """What the filters keep of each slot, and its normaliser.

    Costs one pass over the logits without filters. If a sampled row has top-k or top-p on, the CANDIDATES highest
    logits are ranked; the whole vocabulary is, once, only where these do not settle a cut. Neither branch changes
    a row that did not ask for it, so a row's law does not depend on its neighbours.

    Args:
      logits_BxMxV: any float type; -inf forbids a token. One logit of each slot must be finite.
    """
    logits_BxMxV = logits_BxMxV.astype(jnp.float32)
    vocab = logits_BxMxV.shape[-1]
    greedy_B = is_greedy(sampling)
    best_BxM = lowest_argmax(logits_BxMxV)
    peak_BxM = jnp.take_along_axis(logits_BxMxV, best_BxM[..., None], axis=-1)[..., 0]
    cut_B = ~greedy_B & (((sampling.top_k_B > 0) & (sampling.top_k_B < vocab)) | (sampling.top_p_B < 1))
    everything = (jnp.full_like(peak_BxM, -jnp.inf), jnp.full_like(best_BxM, vocab))
    floor_BxM, last_id_BxM = jax.lax.cond(
        cut_B.any(),
        lambda: _where(cut_B[:, None], _cut(logits_BxMxV, peak_BxM, sampling, cut_B), everything),
        lambda: everything,
    )
    floor_BxM, last_id_BxM = _where(greedy_B[:, None], (peak_BxM, best_BxM), (floor_BxM, last_id_BxM))
    unscaled = Support(peak_BxM, floor_BxM, last_id_BxM, jnp.ones_like(peak_BxM))
    ids = jax.lax.broadcasted_iota(jnp.int32, logits_BxMxV.shape, 2)
    weight_BxMxV = probabilities(logits_BxMxV, ids, unscaled, sampling)
    return unscaled.replace(total_BxM=weight_BxMxV.sum(axis=-1))


def probabilities(logits_BxMxW: jax.Array, token_BxMxW: jax.Array, support: Support, sampling: Sampling) -> jax.Array:
    """The law of each slot at some of its tokens, float32 [B, M, W].

    Args:
      logits_BxMxW: the logits of those tokens.
      token_BxMxW: their ids.
    """
    logits_BxMxW = logits_BxMxW.astype(jnp.float32)
    floor_BxMx1, last_id_BxMx1 = support.floor_BxM[..., None], support.last_id_BxM[..., None]
    scaled_BxMxW = _scaled(logits_BxMxW, support.peak_BxM, sampling)
    kept = (logits_BxMxW > floor_BxMx1) | ((logits_BxMxW == floor_BxMx1) & (token_BxMxW <= last_id_BxMx1))
    # Compared before exp: subtraction and division round the same everywhere, exp may not, and a token must not be
    # inside the support for the acceptance test and outside it for the draw.
    kept &= scaled_BxMxW >= jnp.log(sampling.min_p_B)[:, None, None]
    return jnp.where(kept, jnp.exp(scaled_BxMxW), 0.0) / support.total_BxM[..., None]


def warp(logits_BxMxV: jax.Array, sampling: Sampling) -> jax.Array:
    """The law each slot is sampled from, float32 [B, M, V]; rows sum to 1, filtered tokens are exactly 0.

    Args:
      logits_BxMxV: any float type; -inf forbids a token. One logit of each slot must be finite.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits_BxMxV.shape, 2)
    return probabilities(logits_BxMxV, ids, support(logits_BxMxV, sampling), sampling)


def _scaled(logits_BxMxW: jax.Array, peak_BxM: jax.Array, sampling: Sampling) -> jax.Array:
    """(logits - peak) / temperature: <= 0, so that no temperature overflows exp."""
    temperature_B = jnp.where(is_greedy(sampling), 1.0, sampling.temperature_B)
    return (logits_BxMxW - peak_BxM[..., None]) / temperature_B[:, None, None]


def _where(condition: jax.Array, yes: tuple, no: tuple) -> tuple:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _cut(
    logits_BxMxV: jax.Array, peak_BxM: jax.Array, sampling: Sampling, cut_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(floor, last id) [B, M] of top-k and top-p; read for rows of `cut_B` only."""
    vocab = logits_BxMxV.shape[-1]
    logits_BxMxV = jnp.where(logits_BxMxV == 0, 0.0, logits_BxMxV)  # a total order would put -0.0 behind 0.0
    mass_BxM = jnp.exp(_scaled(logits_BxMxV, peak_BxM, sampling)).sum(axis=-1)
    few = _cut_ranked(logits_BxMxV, peak_BxM, mass_BxM, sampling, min(vocab, CANDIDATES))
    if vocab <= CANDIDATES:
        return few[:2]
    settled_BxM = few[2] | ~cut_B[:, None]
    return jax.lax.cond(
        settled_BxM.all(),
        lambda: few[:2],
        lambda: _where(settled_BxM, few[:2], _cut_ranked(logits_BxMxV, peak_BxM, mass_BxM, sampling, vocab)[:2]),
    )


def _cut_ranked(
    logits_BxMxV: jax.Array, peak_BxM: jax.Array, mass_BxM: jax.Array, sampling: Sampling, num_ranked: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(floor, last id, settled) [B, M] from the `num_ranked` first tokens of the order.

    `settled` says that the cut lies within the ranked tokens.
    """
    batch, slots, vocab = logits_BxMxV.shape
    # Equal values come lowest id first. Two dimensions, because XLA's CPU selection takes no more.
    value, index = jax.lax.top_k(logits_BxMxV.reshape(batch * slots, vocab), num_ranked)
    value_BxMxC, id_BxMxC = value.reshape(batch, slots, -1), index.reshape(batch, slots, -1).astype(jnp.int32)
    cumulative_BxMxC = jnp.cumsum(jnp.exp(_scaled(value_BxMxC, peak_BxM, sampling)), axis=-1)

    k_B = jnp.where((sampling.top_k_B > 0) & (sampling.top_k_B < vocab), sampling.top_k_B, vocab)
    within_k_B = jnp.broadcast_to(jnp.minimum(k_B, num_ranked)[:, None], (batch, slots))
    mass_k_BxM = jnp.take_along_axis(cumulative_BxMxC, within_k_B[..., None] - 1, axis=-1)[..., 0]
    target_BxM = sampling.top_p_B[:, None] * jnp.where(k_B[:, None] < vocab, mass_k_BxM, mass_BxM)
    short_BxM = (cumulative_BxMxC < target_BxM[..., None]).sum(axis=-1)  # tokens before the one that crosses
    crossing_BxM = jnp.where(sampling.top_p_B[:, None] < 1, short_BxM + 1, vocab)
    last_BxMx1 = jnp.minimum(crossing_BxM, within_k_B)[..., None] - 1

    settled_BxM = jnp.where(k_B[:, None] < vocab, k_B[:, None] <= num_ranked, short_BxM < num_ranked)
    floor_BxM = jnp.take_along_axis(value_BxMxC, last_BxMx1, axis=-1)[..., 0]
    return floor_BxM, jnp.take_along_axis(id_BxMxC, last_BxMx1, axis=-1)[..., 0], settled_BxM


def check_seed(seed: int, where: str) -> None:
    """Checks a seed; `where` says in the message whose it is.

    Raises:
      ValueError: it is no whole number or has more than 64 bits.
    """
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, (bool, np.bool_))
    if not whole or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed of {where} is {seed!r}, must be a whole number in [-2**63, 2**64)")


def row_keys(seed_B: Sequence[int] | np.ndarray | jax.Array) -> jax.Array:
    """One PRNG key a row, from its seed alone.

    Args:
      seed_B: whole numbers of up to 64 bits, signed or not; all bits count. A jax array is taken as it is.

    Raises:
      ValueError: a seed is no whole number or has more than 64 bits.
    """
    if isinstance(seed_B, jax.Array):
        low_B, high_B = seed_B.astype(jnp.uint32), jnp.zeros(seed_B.shape, jnp.uint32)
    else:
        for row, seed in enumerate(seed_B):
            check_seed(seed, f"row {row}")
        words = np.asarray([int(seed) % 2**64 for seed in seed_B], np.uint64)
        low_B, high_B = jnp.asarray(words.astype(np.uint32)), jnp.asarray((words >> np.uint64(32)).astype(np.uint32))
    return jax.vmap(lambda low, high: jax.random.fold_in(jax.random.key(low), high))(low_B, high_B)


def round_keys(key_B: jax.Array, length_B: jax.Array) -> jax.Array:
    """The keys of the round that starts at these committed lengths.

    A row's stream depends on its seed and on how far the row has come: not on the batch, its slot in it, its
    neighbours, or on traffic before it.
    """
    return jax.vmap(jax.random.fold_in)(key_B, length_B)


def categorical(key: jax.Array, weight_V: jax.Array) -> jax.Array:
    """Draws an id (int32 scalar) with probability weight / sum(weight); ids of weight 0 are never drawn.

    Inverse CDF on two levels: a cell of CELL tokens, then a token in it, a uniform each. It needs two random numbers
    instead of one a token, and resolves small probabilities that Gumbel noise in float32 never draws.

    Args:
      weight_V: float32, >= 0, not all 0; need not be normalised.
    """
    vocab = weight_V.shape[0]
    width = min(vocab, CELL)
    cells = -(-vocab // width)
    weight_CxW = jnp.pad(weight_V, (0, cells * width - vocab)).reshape(cells, width)
    uniform = jax.random.uniform(key, (2,))
    cell = _inverse_cdf(uniform[0], weight_CxW.sum(axis=1))
    return cell * width + _inverse_cdf(uniform[1], jax.lax.dynamic_index_in_dim(weight_CxW, cell, keepdims=False))


def _inverse_cdf(uniform: jax.Array, weight_N: jax.Array) -> jax.Array:
    """The first id of positive weight whose cumulative weight exceeds uniform * total."""
    cumulative_N = jnp.cumsum(weight_N)
    positive_N = weight_N > 0
    hit_N = positive_N & (cumulative_N > uniform * cumulative_N[-1])
    # A parallel cumsum need not be monotone to the last bit: where rounding leaves no hit, the last id has it.
    last = weight_N.shape[0] - 1 - jnp.argmax(positive_N[::-1])
    return jnp.where(hit_N.any(), jnp.argmax(hit_N), last).astype(jnp.int32)
