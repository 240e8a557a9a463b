"""Attention of a block of M tokens over cached context and over the block itself.

One function serves drafting (the whole block visible), verifying a chain (lower triangle) and verifying
a tree (ancestors): only the in-block visibility differs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.kernels import dispatch
from dflash_jax.kernels.kv_cache import gather_pages

MASKED = -1e30  # not -inf: a row with nothing visible must give finite numbers
PEAK_FLOOR = -1e29  # above MASKED, so that masked weights are exp(MASKED - peak) = 0 even where nothing is visible


def paged_block_attention(
    q_BxMxNxH: jax.Array,
    k_PxGxSxH: jax.Array,
    v_PxGxSxH: jax.Array,
    page_table_BxT: jax.Array | None,
    k_block_BxGxMxH: jax.Array,
    v_block_BxGxMxH: jax.Array,
    *,
    length_B: jax.Array,
    position_BxM: jax.Array,
    visibility: jax.Array,
    window: int | None,
    scale: float,
    implementation: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """`block_attention` over one layer of the cache, in its own layout.

    Args:
      k_PxGxSxH, v_PxGxSxH: pages of the layer; slots at or beyond a row's length hold finite garbage.
      page_table_BxT: pages of each row in order; None when page b is row b's whole space (P == B).
      implementation: None chooses by platform: the Pallas kernel on TPU, the jnp reference elsewhere.
        "reference", "pallas" and "pallas_interpret" (the kernel on any platform, slowly) name one.
      mesh: what the Pallas kernel is mapped over (see `block_attention_mesh`); None takes the mesh of the
        surrounding `jax.set_mesh`, if any. The reference is partitioned by XLA and needs none.

    The other arguments and the result are those of `block_attention`.
    """
    mesh = dispatch.context_mesh(mesh)
    chosen = dispatch.choose(implementation, mesh)
    if chosen == dispatch.REFERENCE:
        return block_attention(
            q_BxMxNxH, gather_pages(k_PxGxSxH, page_table_BxT), gather_pages(v_PxGxSxH, page_table_BxT),
            k_block_BxGxMxH, v_block_BxGxMxH,
            length_B=length_B, position_BxM=position_BxM, visibility=visibility, window=window, scale=scale,
        )  # fmt: skip
    # Imported where it is used: programs without the kernel start without Pallas.
    from dflash_jax.kernels.block_attention_mesh import map_over_mesh
    from dflash_jax.kernels.block_attention_pallas import paged_block_attention_pallas

    kernel = functools.partial(
        paged_block_attention_pallas,
        window=window, scale=scale, interpret=chosen == dispatch.PALLAS_INTERPRET,
    )  # fmt: skip
    arrays = (
        q_BxMxNxH, k_PxGxSxH, v_PxGxSxH, page_table_BxT, k_block_BxGxMxH, v_block_BxGxMxH,
        length_B, position_BxM, visibility,
    )  # fmt: skip
    return map_over_mesh(kernel, mesh, *arrays) if dispatch.needs_mapping(mesh) else kernel(*arrays)


def block_attention(
    q_BxMxNxH: jax.Array,
    k_context_BxGxCxH: jax.Array,
    v_context_BxGxCxH: jax.Array,
    k_block_BxGxMxH: jax.Array,
    v_block_BxGxMxH: jax.Array,
    *,
    length_B: jax.Array,
    position_BxM: jax.Array,
    visibility: jax.Array,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Scaled dot-product attention with one softmax over context and block.

    Args:
      length_B: committed context rows; context row c has position c and is visible iff c < length.
      position_BxM: positions of the block's tokens, used by the window only.
      visibility: [M, M] or [B, M, M] bool, entry [i, j]: slot i sees slot j of its own block.
      window: None, or W: key position k is visible from query position q iff q - k < W, in the context
        and in the block.
      scale: factor on the scores, usually head_dim ** -0.5.

    Returns:
      out_BxMxNxH in the dtype of q; zeros for a slot that sees nothing. Scores, softmax and sums are float32.

    Context rows at or beyond the length weigh exactly zero, so what they hold does not matter as long as it
    is finite (0 * NaN is NaN). A cache starts as zeros and is only ever written with finite rows.
    """
    b, m, n, h = q_BxMxNxH.shape
    g, c = k_context_BxGxCxH.shape[1:3]
    r = n // g
    # All query rows that share a KV head form one matrix: r * M rows against C keys.
    q_BxGxQxH = q_BxMxNxH.reshape(b, m, g, r, h).transpose(0, 2, 3, 1, 4).reshape(b, g, r * m, h)
    context_scores_BxGxRxMxC = (_scores(q_BxGxQxH, k_context_BxGxCxH) * scale).reshape(b, g, r, m, c)
    block_scores_BxGxRxMxM = (_scores(q_BxGxQxH, k_block_BxGxMxH) * scale).reshape(b, g, r, m, m)

    row_C = jnp.arange(c, dtype=jnp.int32)
    context_mask_BxMxC = jnp.broadcast_to((row_C[None] < length_B[:, None])[:, None], (b, m, c))
    block_mask_BxMxM = jnp.broadcast_to(visibility, (b, m, m))
    if window is not None:
        context_mask_BxMxC &= position_BxM[:, :, None] - row_C[None, None] < window
        block_mask_BxMxM &= position_BxM[:, :, None] - position_BxM[:, None, :] < window

    context_scores_BxGxRxMxC = jnp.where(context_mask_BxMxC[:, None, None], context_scores_BxGxRxMxC, MASKED)
    block_scores_BxGxRxMxM = jnp.where(block_mask_BxMxM[:, None, None], block_scores_BxGxRxMxM, MASKED)
    peak = jnp.maximum(context_scores_BxGxRxMxC.max(-1, keepdims=True), block_scores_BxGxRxMxM.max(-1, keepdims=True))
    peak = jnp.maximum(peak, PEAK_FLOOR)
    context_weights = jnp.exp(context_scores_BxGxRxMxC - peak)
    block_weights = jnp.exp(block_scores_BxGxRxMxM - peak)
    total = context_weights.sum(-1, keepdims=True) + block_weights.sum(-1, keepdims=True)
    out_BxGxRxMxH = (
        _mix(context_weights.reshape(b, g, r * m, c), v_context_BxGxCxH)
        + _mix(block_weights.reshape(b, g, r * m, m), v_block_BxGxMxH)
    ).reshape(b, g, r, m, h) / jnp.maximum(total, 1e-30)  # at least 1 wherever anything is visible
    return out_BxGxRxMxH.transpose(0, 3, 1, 2, 4).reshape(b, m, n, h).astype(q_BxMxNxH.dtype)


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
