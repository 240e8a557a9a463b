"""Attention of a block of M tokens over cached context and over the block itself.

One function serves drafting (the whole block visible), verifying a chain (lower triangle) and verifying
a tree (ancestors): only the in-block visibility differs. What families do differently (windows, aligned chunks,
soft caps, sinks, values that are a part of the keys) are keywords, off by default, of the jnp reference and of
the Pallas kernel alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.kernels import dispatch
from dflash_jax.kernels.block_attention_native import block_attention_native, obstacle
from dflash_jax.kernels.block_masks import block_mask, first_visible
from dflash_jax.kernels.kv_cache import gather_pages

MASKED = -1e30  # not -inf: a row with nothing visible must give finite numbers
PEAK_FLOOR = -1e29  # above MASKED, so that masked weights are exp(MASKED - peak) = 0 even where nothing is visible


def paged_block_attention(
    q_BxMxNxH: jax.Array,
    k_PxGxSxH: jax.Array,
    v_PxGxSxV: jax.Array,
    page_table_BxT: jax.Array | None,
    k_block_BxGxMxH: jax.Array,
    v_block_BxGxMxV: jax.Array,
    *,
    length_B: jax.Array,
    position_BxM: jax.Array,
    visibility: jax.Array,
    window: int | None,
    scale: float,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values_in_keys: int | None = None,
    implementation: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """`block_attention` over one layer of the cache, in its own layout.

    Args:
      k_PxGxSxH, v_PxGxSxV: pages of the layer; slots at or beyond a row's length hold finite garbage.
      page_table_BxT: pages of each row in order; None when page b is row b's whole space (P == B).
      implementation: None chooses by platform: the Pallas kernel on TPU, the native kernel on CPU where it fits
        (`block_attention_native.obstacle`), the jnp reference elsewhere. "reference", "native", "pallas" and
        "pallas_interpret" (the TPU's kernel on any platform, slowly) name one.
      mesh: what the Pallas kernel is mapped over (see `block_attention_mesh`); None takes the mesh of the
        surrounding `jax.set_mesh`, if any. The reference is partitioned by XLA and needs none.

    The other arguments and the result are those of `block_attention`.

    Raises:
      ValueError: `implementation` is unknown, or is "native" where that does not fit.
    """
    check_values(k_PxGxSxH, v_PxGxSxV, values_in_keys)
    mesh = dispatch.context_mesh(mesh)
    arrays = (
        q_BxMxNxH, k_PxGxSxH, v_PxGxSxV, page_table_BxT, k_block_BxGxMxH, v_block_BxGxMxV,
        length_B, position_BxM, visibility, sinks_N,
    )  # fmt: skip
    options = {"window": window, "scale": scale, "chunk": chunk, "softcap": softcap}
    if implementation in (None, dispatch.NATIVE):
        reason = obstacle(q_BxMxNxH, k_PxGxSxH, v_PxGxSxV, values_in_keys, mesh)
        if reason is None:
            return block_attention_native(arrays, _paged_reference, **options)
        if implementation == dispatch.NATIVE:
            raise ValueError(f"the native block attention does not fit: {reason}; leave `implementation` out")
    options["values_in_keys"] = values_in_keys
    chosen = dispatch.choose(implementation, mesh)
    if chosen == dispatch.REFERENCE:
        return _paged_reference(*arrays, **options)
    # Imported where it is used: programs without the kernel start without Pallas.
    from dflash_jax.kernels.block_attention_mesh import map_over_mesh
    from dflash_jax.kernels.block_attention_pallas import paged_block_attention_pallas

    kernel = functools.partial(
        paged_block_attention_pallas, **options, interpret=chosen == dispatch.PALLAS_INTERPRET
    )  # fmt: skip
    return map_over_mesh(kernel, mesh, *arrays) if dispatch.needs_mapping(mesh) else kernel(*arrays)


def _paged_reference(
    q, k_pages, v_pages, page_table, k_block, v_block, length_B, position_BxM, visibility, sinks_N, **options
):  # fmt: skip
    return block_attention(
        q, gather_pages(k_pages, page_table), gather_pages(v_pages, page_table), k_block, v_block,
        length_B=length_B, position_BxM=position_BxM, visibility=visibility, sinks_N=sinks_N, **options,
    )  # fmt: skip


def block_attention(
    q_BxMxNxH: jax.Array,
    k_context_BxGxCxH: jax.Array,
    v_context_BxGxCxV: jax.Array,
    k_block_BxGxMxH: jax.Array,
    v_block_BxGxMxV: jax.Array,
    *,
    length_B: jax.Array,
    position_BxM: jax.Array,
    visibility: jax.Array,
    window: int | None,
    scale: float,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values_in_keys: int | None = None,
) -> jax.Array:
    """Scaled dot-product attention with one softmax over context and block.

    Args:
      length_B: committed context rows; context row c has position c and is visible iff c < length.
      position_BxM: positions of the block's tokens, at least the length; used by window and chunk only.
      visibility: [M, M] or [B, M, M] bool, entry [i, j]: slot i sees slot j of its own block.
      window: None, or W: key position k is visible from query position q iff q - k < W, in the context
        and in the block.
      scale: factor on the scores, usually head_dim ** -0.5.
      chunk: None, or C: key position k is visible from query position q iff k // C == q // C (Llama 4).
      softcap: None, or the number that scores stay below: cap * tanh(score / cap), before masking (Gemma 2).
      sinks_N: None, or a logit a query head that joins each of its softmaxes and carries no value (gpt-oss).
      values_in_keys: None, or V: the values are the first V channels of the keys, and those passed have
        width 0 (latent attention).

    Returns:
      out_BxMxNxV in the dtype of q; zeros for a slot that sees nothing. Scores, softmax and sums are float32.

    Context rows at or beyond the length weigh exactly zero, so what they hold does not matter as long as it
    is finite (0 * NaN is NaN). A cache starts as zeros and is only ever written with finite rows.
    """
    width = check_values(k_block_BxGxMxH, v_block_BxGxMxV, values_in_keys)
    b, m, n, h = q_BxMxNxH.shape
    g, c = k_context_BxGxCxH.shape[1:3]
    r = n // g
    # All query rows that share a KV head form one matrix: r * M rows against C keys.
    q_BxGxQxH = q_BxMxNxH.reshape(b, m, g, r, h).transpose(0, 2, 3, 1, 4).reshape(b, g, r * m, h)
    context_scores_BxGxRxMxC = capped(_scores(q_BxGxQxH, k_context_BxGxCxH) * scale, softcap).reshape(b, g, r, m, c)
    block_scores_BxGxRxMxM = capped(_scores(q_BxGxQxH, k_block_BxGxMxH) * scale, softcap).reshape(b, g, r, m, m)

    row_C = jnp.arange(c, dtype=jnp.int32)
    context_mask_BxMxC = jnp.broadcast_to((row_C[None] < length_B[:, None])[:, None], (b, m, c))
    if window is not None or chunk is not None:
        context_mask_BxMxC &= row_C[None, None] >= first_visible(position_BxM, window, chunk)[:, :, None]
    block_mask_ExMxM = block_mask(visibility, position_BxM, window, chunk)

    context_scores_BxGxRxMxC = jnp.where(context_mask_BxMxC[:, None, None], context_scores_BxGxRxMxC, MASKED)
    block_scores_BxGxRxMxM = jnp.where(block_mask_ExMxM[:, None, None], block_scores_BxGxRxMxM, MASKED)
    peak = jnp.maximum(context_scores_BxGxRxMxC.max(-1, keepdims=True), block_scores_BxGxRxMxM.max(-1, keepdims=True))
    peak = jnp.maximum(peak, PEAK_FLOOR)
    if sinks_N is not None:
        sinks_1xGxRx1x1 = sinks_N.astype(jnp.float32).reshape(1, g, r, 1, 1)
        peak = jnp.maximum(peak, sinks_1xGxRx1x1)
    context_weights = jnp.exp(context_scores_BxGxRxMxC - peak)
    block_weights = jnp.exp(block_scores_BxGxRxMxM - peak)
    total = context_weights.sum(-1, keepdims=True) + block_weights.sum(-1, keepdims=True)
    if sinks_N is not None:
        total += jnp.exp(sinks_1xGxRx1x1 - peak)
    if values_in_keys is not None:
        # All channels of the keys are mixed and the surplus dropped: a cut of the context would be a copy of it.
        v_context_BxGxCxV, v_block_BxGxMxV = k_context_BxGxCxH, k_block_BxGxMxH
    out_BxGxQxV = (
        _mix(context_weights.reshape(b, g, r * m, c), v_context_BxGxCxV)
        + _mix(block_weights.reshape(b, g, r * m, m), v_block_BxGxMxV)
    )[..., :width]  # fmt: skip
    # The sum is at least 1 wherever anything is visible.
    out_BxGxRxMxV = out_BxGxQxV.reshape(b, g, r, m, width) / jnp.maximum(total, 1e-30)
    return out_BxGxRxMxV.transpose(0, 3, 1, 2, 4).reshape(b, m, n, width).astype(q_BxMxNxH.dtype)


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """softcap * tanh(scores / softcap); the scores themselves where it is None."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def check_values(k: jax.Array, v: jax.Array, values_in_keys: int | None) -> int:
    """The width of the values.

    Raises:
      ValueError: values that `values_in_keys` says are in the keys were passed too, or do not fit into them.
    """
    if values_in_keys is None:
        return v.shape[-1]
    if v.shape[-1] or not 0 < values_in_keys <= k.shape[-1]:
        raise ValueError(
            f"values_in_keys is {values_in_keys} for keys of width {k.shape[-1]} and values of width {v.shape[-1]}: "
            "it must lie in [1, width of the keys], and the values passed must have width 0"
        )
    return values_in_keys


def _scores(q_BxGxQxH: jax.Array, k_BxGxKxH: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bgqh,bgkh->bgqk", q_BxGxQxH, k_BxGxKxH,
        preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip


def _mix(weights_BxGxQxK: jax.Array, v_BxGxKxH: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bgqk,bgkh->bgqh", weights_BxGxQxK.astype(v_BxGxKxH.dtype), v_BxGxKxH,
        preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
