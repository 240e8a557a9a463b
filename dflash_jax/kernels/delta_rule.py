"""The gated delta rule: linear attention with a matrix state, in chunks, and its state (Yang et al., 2024).

A value head's state S [P, H] maps keys to values. Token t with key k, value v, log decay g <= 0 and rate beta does

    S <- exp(g) S;   w = beta (v - S^T k);   S <- S + k w^T;   out = S^T q

w is the token's *write*: what the state did not know of v. A state is then a sum of decayed writes,

    S_c = exp(g_1 + ... + g_c) S_0 + sum_{t <= c} exp(g_{t+1} + ... + g_c) k_t w_t^T

and a write depends on no later token. So a call over M tokens hands out its writes, and `commit` takes in the first
c of them by one product, for any c: rejected drafts cost nothing and nothing is computed again.

Memory. A row's state takes, in each recurrent layer with G key heads, R value heads a key head, key and value dims P
and H and W taps of the convolution,

    4 * G * R * P * H  +  itemsize * (W - 1) * G * (2 * P + R * H)   bytes

whatever the context's length: 2 MiB + 48 KiB in bf16 for Qwen3-Next (G 16, R 2, P and H 128, W 4; 36 such layers
hold 73.7 MiB a row). Between a call and its commit each token takes 4 * G * (P + R * H + R) + itemsize * G * (2 * P +
R * H) bytes a layer, 40 KiB there. Where the count is known before the call (prefill), XLA can commit a layer as soon
as it has run.

All arithmetic here is float32. Decays are exponentials of sums of log decays over a span of tokens, each span summed
by itself: never of a positive number, and never of the difference of two long sums, which would lose its digits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.config import DeltaConfig

CHUNK = 64
FORGET = -128.0  # a log decay that leaves nothing: exp of it is 0 in float32, and sums with it keep their digits
SMALLEST = 16  # triangular matrices up to this size are inverted in one piece
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@struct.dataclass
class RecurrentState:
    """What a recurrent layer knows of a row's committed tokens.

    Attributes:
      conv_BxWxGxC: inputs of the convolution at the last W = conv_width - 1 tokens, oldest first; C holds q, k and
        the value heads of one key head. Zeros before the first token.
      delta_BxGxRxPxH: float32, the matrix state of each value head.
    """

    conv_BxWxGxC: jax.Array
    delta_BxGxRxPxH: jax.Array


@struct.dataclass
class RecurrentInputs:
    """What a call over M tokens has for the state, committed by nobody yet.

    Valid for the state that the call read, and for no other: writes depend on it.

    Attributes:
      conv_BxMxGxC: inputs of the convolution.
      k_BxMxGxP: float32 keys as they enter the state.
      write_BxMxGxRxH: float32, see the head of this file.
      log_decay_BxMxGxR: float32, at most 0.
    """

    conv_BxMxGxC: jax.Array
    k_BxMxGxP: jax.Array
    write_BxMxGxRxH: jax.Array
    log_decay_BxMxGxR: jax.Array


STATE_AXES = RecurrentState(
    conv_BxWxGxC=("batch", None, "kv_heads", None), delta_BxGxRxPxH=("batch", "kv_heads", None, None, None)
)
"""Logical axes of a state: a key head lives on one device with the value heads that it serves."""


def abstract_state(config: DeltaConfig, batch: int, dtype: jnp.dtype) -> RecurrentState:
    """Shapes of the state of one layer; `dtype` is that of the convolution's inputs."""
    heads = config.num_value_heads // config.num_key_heads
    channels = 2 * config.key_dim + heads * config.value_dim
    return RecurrentState(
        jax.ShapeDtypeStruct((batch, config.conv_width - 1, config.num_key_heads, channels), dtype),
        jax.ShapeDtypeStruct(
            (batch, config.num_key_heads, heads, config.key_dim, config.value_dim), jnp.float32
        ),
    )  # fmt: skip


def empty_state(config: DeltaConfig, batch: int, dtype: jnp.dtype) -> RecurrentState:
    """The state of one layer before the first token: zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_state(config, batch, dtype))


def commit(state: RecurrentState, inputs: RecurrentInputs, count_B: jax.Array) -> RecurrentState:
    """The state after the first count_B of the M tokens of `inputs`.

    Args:
      state: the one that the call read.
      inputs: what the call returned.
      count_B: int32 in [0, M]. Tokens at or beyond it leave no trace, whatever they hold; a row with count 0 keeps
        its state bit for bit.
    """
    conv_BxTxGxC = jnp.concatenate([state.conv_BxWxGxC, inputs.conv_BxMxGxC.astype(state.conv_BxWxGxC.dtype)], axis=1)
    width = state.conv_BxWxGxC.shape[1]
    last = jax.vmap(lambda conv_TxGxC, count: jax.lax.dynamic_slice_in_dim(conv_TxGxC, count, width))

    slot_M = jnp.arange(inputs.k_BxMxGxP.shape[1], dtype=jnp.int32)
    keep_BxMx1x1 = (slot_M[None] < count_B[:, None])[:, :, None, None]
    decay_BxMxGxR = jnp.where(keep_BxMx1x1, inputs.log_decay_BxMxGxR, 0.0)
    # Summed from the end: the tokens that matter most lie there, and their sums are the short ones.
    since_BxMxGxR = jax.lax.cumsum(decay_BxMxGxR, axis=1, reverse=True)
    after_BxMxGxR = jnp.concatenate([since_BxMxGxR[:, 1:], jnp.zeros_like(since_BxMxGxR[:, :1])], axis=1)
    weighted_BxMxGxRxH = jnp.where(
        keep_BxMx1x1[..., None], inputs.write_BxMxGxRxH * jnp.exp(after_BxMxGxR)[..., None], 0.0
    )
    k_BxMxGxP = jnp.where(keep_BxMx1x1, inputs.k_BxMxGxP, 0.0)
    old_BxGxRxPxH = state.delta_BxGxRxPxH
    new_BxGxRxPxH = jnp.exp(since_BxMxGxR[:, 0])[..., None, None] * old_BxGxRxPxH + _einsum(
        "bmgp,bmgrh->bgrph", k_BxMxGxP, weighted_BxMxGxRxH
    )
    moved_B = (count_B > 0)[:, None, None, None, None]  # 0 + -0 is 0: a sum alone would not keep every bit
    return RecurrentState(last(conv_BxTxGxC, count_B), jnp.where(moved_B, new_BxGxRxPxH, old_BxGxRxPxH))


def causal_conv(
    x_BxMxGxC: jax.Array, past_BxWxGxC: jax.Array, kernel_WxGxC: jax.Array, reach_BxM: jax.Array | None = None
) -> jax.Array:
    """Depthwise convolution of each channel over the tokens up to its own, [B, M, G, C] in float32.

    Args:
      past_BxWxGxC: inputs of the tokens before the first, one fewer than the kernel has taps.
      kernel_WxGxC: taps, oldest first; the last one is the token's own.
      reach_BxM: None, or how many tokens before its own each token sees at most.
    """
    taps, m = kernel_WxGxC.shape[0], x_BxMxGxC.shape[1]
    # Added one by one: XLA has no good depthwise convolution on CPU, and there are four taps.
    x_BxTxGxC = jnp.concatenate([past_BxWxGxC.astype(jnp.float32), x_BxMxGxC.astype(jnp.float32)], axis=1)
    kernel_WxGxC = kernel_WxGxC.astype(jnp.float32)

    def part(tap: int) -> jax.Array:
        part_BxMxGxC = x_BxTxGxC[:, tap : tap + m] * kernel_WxGxC[tap][None, None]
        if reach_BxM is None:
            return part_BxMxGxC
        return jnp.where((reach_BxM >= taps - 1 - tap)[..., None, None], part_BxMxGxC, 0.0)

    return sum(part(tap) for tap in range(taps))


def delta_rule(
    q_BxMxGxP: jax.Array,
    k_BxMxGxP: jax.Array,
    v_BxMxGxRxH: jax.Array,
    log_decay_BxMxGxR: jax.Array,
    beta_BxMxGxR: jax.Array,
    delta_BxGxRxPxH: jax.Array,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gated delta rule over M tokens, a chunk at a time; any M.

    Within a chunk that starts from S, the writes W [C, H] solve a unit lower triangular system,

        (I + A) W = diag(beta) (V - diag(exp(G)) K S),   A_ij = beta_i exp(g_{j+1} + ... + g_i) (k_i . k_j), j < i

    (the UT transform). (I + A)^-1 diag(beta) is free of S: it is solved for all chunks at once. What goes from
    chunk to chunk is a scan of matrix products.

    Args:
      q_BxMxGxP, k_BxMxGxP: float32; of unit length or shorter, q times whatever scale the model has.
      v_BxMxGxRxH: float32; value head (g, r) is served by key head g.
      log_decay_BxMxGxR: float32, finite and at most 0.
      beta_BxMxGxR: float32 in [0, 1].
      delta_BxGxRxPxH: float32, the state before the first token.
      chunk: tokens a chunk.

    Returns:
      (out_BxMxGxRxH, write_BxMxGxRxH, delta_BxGxRxPxH after all M tokens), float32. Tokens whose count is not known
      yet go into the state through `commit` instead.

    Raises:
      ValueError: chunk is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, must be at least 1 token")
    m = q_BxMxGxP.shape[1]
    size = min(chunk, m)
    num_chunks = -(-m // size)

    def chunks(x_BxMx: jax.Array) -> jax.Array:
        """[B, M, ...] -> [N, B, C, ...]; padding has beta 0, log decay 0, key 0: it writes and forgets nothing."""
        padded = jnp.pad(x_BxMx, [(0, 0), (0, num_chunks * size - m)] + [(0, 0)] * (x_BxMx.ndim - 2))
        return jnp.moveaxis(padded.reshape(padded.shape[0], num_chunks, size, *padded.shape[2:]), 1, 0)

    q, k, v, log_decay, beta = map(chunks, (q_BxMxGxP, k_BxMxGxP, v_BxMxGxRxH, log_decay_BxMxGxR, beta_BxMxGxR))
    spans_NxBxGxRxCxC, since_NxBxGxRxC = _span_decays(log_decay)
    beta_NxBxGxRxC = jnp.moveaxis(beta, 2, -1)
    solved_NxBxGxRxCxC = _solve(_einsum("nbigp,nbjgp->nbgij", k, k), spans_NxBxGxRxCxC, beta_NxBxGxRxC)
    scores_NxBxGxRxCxC = _einsum("nbigp,nbjgp->nbgij", q, k)[:, :, :, None] * spans_NxBxGxRxCxC

    def step(delta_BxGxRxPxH: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q_BxCxGxP, k_BxCxGxP, v_BxCxGxRxH, solved_BxGxRxCxC, scores_BxGxRxCxC, spans_BxGxRxCxC, since_BxGxRxC = xs
        since_BxGxRxCx1 = since_BxGxRxC[..., None]
        known_BxGxRxCxH = since_BxGxRxCx1 * _einsum("bcgp,bgrph->bgrch", k_BxCxGxP, delta_BxGxRxPxH)
        v_BxGxRxCxH = v_BxCxGxRxH.transpose(0, 2, 3, 1, 4)
        write_BxGxRxCxH = _einsum("bgrij,bgrjh->bgrih", solved_BxGxRxCxC, v_BxGxRxCxH - known_BxGxRxCxH)
        out_BxGxRxCxH = since_BxGxRxCx1 * _einsum("bcgp,bgrph->bgrch", q_BxCxGxP, delta_BxGxRxPxH) + _einsum(
            "bgrij,bgrjh->bgrih", scores_BxGxRxCxC, write_BxGxRxCxH
        )
        lasting_BxGxRxCxH = spans_BxGxRxCxC[..., -1, :, None] * write_BxGxRxCxH
        delta_BxGxRxPxH = since_BxGxRxC[..., -1, None, None] * delta_BxGxRxPxH + _einsum(
            "bcgp,bgrch->bgrph", k_BxCxGxP, lasting_BxGxRxCxH
        )
        return delta_BxGxRxPxH, (out_BxGxRxCxH, write_BxGxRxCxH)

    xs = (q, k, v, solved_NxBxGxRxCxC, scores_NxBxGxRxCxC, spans_NxBxGxRxCxC, since_NxBxGxRxC)
    if num_chunks == 1:  # decoding: no loop
        delta_BxGxRxPxH, results = step(delta_BxGxRxPxH, jax.tree.map(lambda x: x[0], xs))
        out, write = (x[None] for x in results)
    else:
        delta_BxGxRxPxH, (out, write) = jax.lax.scan(step, delta_BxGxRxPxH, xs)

    def whole(x_NxBxGxRxCxH: jax.Array) -> jax.Array:
        n, b, g, r, c, h = x_NxBxGxRxCxH.shape
        return x_NxBxGxRxCxH.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * c, g, r, h)[:, :m]

    return whole(out), whole(write), delta_BxGxRxPxH


def _span_decays(log_decay_NxBxCxGxR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(g_{j+1} + ... + g_i) at [..., i, j], 0 where j > i; and exp(g_1 + ... + g_i) at [..., i], of each chunk."""
    size = log_decay_NxBxCxGxR.shape[2]
    lower_CxC = jnp.tril(jnp.ones((size, size), jnp.float32))
    log_decay_NxBxGxRxC = jnp.moveaxis(log_decay_NxBxCxGxR, 2, -1)
    # Column j holds the log decays behind token j; a running sum down each column is the span's own sum.
    behind = log_decay_NxBxGxRxC[..., :, None] * jnp.expand_dims(jnp.tril(lower_CxC, -1), (0, 1, 2, 3))
    spans = _einsum("it,nbgrtj->nbgrij", lower_CxC, behind)
    since = _einsum("it,nbgrt->nbgri", lower_CxC, log_decay_NxBxGxRxC)
    return jnp.where(jnp.expand_dims(lower_CxC, (0, 1, 2, 3)) > 0, jnp.exp(spans), 0.0), jnp.exp(since)


def _solve(overlap_NxBxGxCxC: jax.Array, spans_NxBxGxRxCxC: jax.Array, beta_NxBxGxRxC: jax.Array) -> jax.Array:
    """(I + A)^-1 diag(beta) of every chunk, see `delta_rule`. Its entries are at most 1: keys are no longer than 1."""
    system = beta_NxBxGxRxC[..., :, None] * spans_NxBxGxRxCxC * overlap_NxBxGxCxC[:, :, :, None]
    return _unit_lower_inverse(system) * beta_NxBxGxRxC[..., None, :]


def _unit_lower_inverse(a_NxBxGxRxCxC: jax.Array) -> jax.Array:
    """(I + A)^-1; of A only what lies strictly below the diagonal is read.

    By halves: the inverses of the two diagonal blocks and the product -X2 A21 X1. Matrix products only, since XLA's
    triangular solve is LAPACK's on CPU, threads of its own for matrices of this size, and slow on a TPU. Every number
    on the way is an entry of the solution for some span of the chunk, so nothing grows (unlike powers of A).
    """
    size = a_NxBxGxRxCxC.shape[-1]
    if size <= SMALLEST or size % 2:
        return _inverse_by_doubling(a_NxBxGxRxCxC)
    half = size // 2
    diagonal = jnp.concatenate([a_NxBxGxRxCxC[..., :half, :half], a_NxBxGxRxCxC[..., half:, half:]])
    first, second = jnp.split(_unit_lower_inverse(diagonal), 2)
    corner = -_matmul(_matmul(second, a_NxBxGxRxCxC[..., half:, :half]), first)
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _inverse_by_doubling(a_NxBxGxRxCxC: jax.Array) -> jax.Array:
    """`_unit_lower_inverse` without cutting anything: for small matrices, which fill no tile, and odd ones."""
    size = a_NxBxGxRxCxC.shape[-1]
    slot_C = np.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), a_NxBxGxRxCxC.shape)
    block = 1
    while block < size:  # `inverse` holds those of the diagonal blocks of this size
        pair_C, side_C = slot_C // (2 * block), slot_C // block % 2
        corner_CxC = (pair_C[:, None] == pair_C[None]) & (side_C[:, None] > side_C[None])
        corners = jnp.where(np.expand_dims(corner_CxC, (0, 1, 2, 3)), a_NxBxGxRxCxC, 0.0)
        inverse = inverse - _matmul(_matmul(inverse, corners), inverse)
        block *= 2
    return inverse


def delta_rule_reference(
    q_BxMxGxP: jax.Array,
    k_BxMxGxP: jax.Array,
    v_BxMxGxRxH: jax.Array,
    log_decay_BxMxGxR: jax.Array,
    beta_BxMxGxR: jax.Array,
    delta_BxGxRxPxH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`delta_rule` by its definition, one token at a time."""

    def step(delta_BxGxRxPxH: jax.Array, token: tuple[jax.Array, ...]):
        q_BxGxP, k_BxGxP, v_BxGxRxH, log_decay_BxGxR, beta_BxGxR = token
        delta_BxGxRxPxH = jnp.exp(log_decay_BxGxR)[..., None, None] * delta_BxGxRxPxH
        known_BxGxRxH = _einsum("bgp,bgrph->bgrh", k_BxGxP, delta_BxGxRxPxH)
        write_BxGxRxH = beta_BxGxR[..., None] * (v_BxGxRxH - known_BxGxRxH)
        delta_BxGxRxPxH += _einsum("bgp,bgrh->bgrph", k_BxGxP, write_BxGxRxH)
        return delta_BxGxRxPxH, (_einsum("bgp,bgrph->bgrh", q_BxGxP, delta_BxGxRxPxH), write_BxGxRxH)

    tokens = (q_BxMxGxP, k_BxMxGxP, v_BxMxGxRxH, log_decay_BxMxGxR, beta_BxMxGxR)
    delta_BxGxRxPxH, results = jax.lax.scan(
        step, delta_BxGxRxPxH, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    )
    out_BxMxGxRxH, write_BxMxGxRxH = (jnp.moveaxis(x, 0, 1) for x in results)
    return out_BxMxGxRxH, write_BxMxGxRxH, delta_BxGxRxPxH
