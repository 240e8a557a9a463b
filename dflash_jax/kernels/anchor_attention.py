"""Attention of many training blocks over one shared context.

Training draws A anchors in a sequence and runs all their blocks at once. The block of anchor a sees the
context strictly before a, and itself; it never sees another block, nor the context row of its own anchor,
which at inference does not exist yet.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax.kernels import dispatch
from dflash_jax.kernels.block_attention import MASKED


def anchor_attention(
    q_BxAxKxNxH: jax.Array,
    k_context_BxGxSxH: jax.Array,
    v_context_BxGxSxH: jax.Array,
    k_block_BxAxGxKxH: jax.Array,
    v_block_BxAxGxKxH: jax.Array,
    *,
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    visibility_KxK: jax.Array,
    window: int | None,
    scale: float,
    document_BxS: jax.Array | None = None,
    implementation: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """One softmax over context and block for each slot of each block; differentiable in q, k and v.

    Args:
      anchor_BxA: position of slot 0 of each block, in rows of the context; any order.
      keep_BxA: False for padding blocks: they give zeros and send no gradient.
      visibility_KxK: bool, entry [i, j]: slot i sees slot j of its own block. Every slot must see itself.
      window: None, or W: a key at position p is seen by slot o of anchor a iff a + o - p < W, in the
        context and in the block.
      scale: factor on the scores, usually head_dim ** -0.5.
      document_BxS: for packed rows, the document of each context row; a block sees its anchor's only. The
        rows of a document lie together.
      implementation: None chooses by platform: the Pallas kernels on TPU, the jnp reference elsewhere.
        "reference", "pallas" and "pallas_interpret" (the kernels on any platform, slowly) name one.
      mesh: what the Pallas kernels are mapped over, rows along the data axis and heads along the tensor axis;
        None takes the mesh of the surrounding `jax.set_mesh`, if any. XLA partitions the reference by itself.

    Returns:
      out_BxAxKxNxH in the dtype of q. Scores, softmax and sums are float32.
    """
    arrays = (q_BxAxKxNxH, k_context_BxGxSxH, v_context_BxGxSxH, k_block_BxAxGxKxH, v_block_BxAxGxKxH)
    mesh = dispatch.context_mesh(mesh)
    chosen = dispatch.choose(implementation, mesh)
    if chosen == dispatch.REFERENCE:
        return anchor_attention_reference(
            *arrays, anchor_BxA=anchor_BxA, keep_BxA=keep_BxA, visibility_KxK=visibility_KxK,
            window=window, scale=scale, document_BxS=document_BxS,
        )  # fmt: skip
    # Imported where it is used: programs without the kernels start without Pallas.
    from dflash_jax.kernels.anchor_attention_pallas import anchor_attention_pallas

    kernel = functools.partial(
        anchor_attention_pallas, window=window, scale=scale, interpret=chosen == dispatch.PALLAS_INTERPRET
    )
    operands = (*arrays, anchor_BxA, keep_BxA, visibility_KxK, document_BxS)
    if not dispatch.needs_mapping(mesh):
        return kernel(*operands)
    rows = dispatch.mesh_axis(mesh, "batch", q_BxAxKxNxH.shape[0])
    heads = dispatch.mesh_axis(mesh, "kv_heads", k_context_BxGxSxH.shape[1])
    query, context, block = P(rows, None, None, heads), P(rows, heads), P(rows, None, heads)
    return jax.shard_map(
        kernel, mesh=mesh, out_specs=query,
        in_specs=(query, context, context, block, block, P(rows), P(rows), P(), P(rows)),
        check_vma=False,  # a pallas_call does not say over which axes its result varies
    )(*operands)  # fmt: skip


def anchor_attention_reference(
    q_BxAxKxNxH: jax.Array,
    k_context_BxGxSxH: jax.Array,
    v_context_BxGxSxH: jax.Array,
    k_block_BxAxGxKxH: jax.Array,
    v_block_BxAxGxKxH: jax.Array,
    *,
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    visibility_KxK: jax.Array,
    window: int | None,
    scale: float,
    document_BxS: jax.Array | None = None,
) -> jax.Array:
    """`anchor_attention` in jax.numpy: all scores at once, [B, G, A, R, K, S + K] float32."""
    b, a, k, n, h = q_BxAxKxNxH.shape
    g, s = k_context_BxGxSxH.shape[1:3]
    r = n // g
    q_BxGxAxRxKxH = q_BxAxKxNxH.reshape(b, a, k, g, r, h).transpose(0, 3, 1, 4, 2, 5)
    # All queries that share a KV head form one matrix: A * R * K rows against S keys.
    context_BxGxAxRxKxS = (
        _product("bgqh,bgsh->bgqs", q_BxGxAxRxKxH.reshape(b, g, a * r * k, h), k_context_BxGxSxH) * scale
    ).reshape(b, g, a, r, k, s)
    k_block_BxGxAxKxH = k_block_BxAxGxKxH.swapaxes(1, 2)
    v_block_BxGxAxKxH = v_block_BxAxGxKxH.swapaxes(1, 2)
    block_BxGxAxRxKxK = (
        _product("bgaqh,bgajh->bgaqj", q_BxGxAxRxKxH.reshape(b, g, a, r * k, h), k_block_BxGxAxKxH) * scale
    ).reshape(b, g, a, r, k, k)

    context_mask_BxAxKxS = context_mask(anchor_BxA, keep_BxA, k, s, window, document_BxS)[:, None, :, None]
    block_mask_BxAxKxK = block_mask(keep_BxA, visibility_KxK, window)[:, None, :, None]
    # Masked on the way in, so that neither a row with nothing visible nor its gradient meets 0/0 or inf - inf.
    context_BxGxAxRxKxS = jnp.where(context_mask_BxAxKxS, context_BxGxAxRxKxS, MASKED)
    block_BxGxAxRxKxK = jnp.where(block_mask_BxAxKxK, block_BxGxAxRxKxK, MASKED)
    peak = jnp.maximum(context_BxGxAxRxKxS.max(-1, keepdims=True), block_BxGxAxRxKxK.max(-1, keepdims=True))
    peak = jax.lax.stop_gradient(peak)
    context_BxGxAxRxKxS = jnp.where(context_mask_BxAxKxS, jnp.exp(context_BxGxAxRxKxS - peak), 0.0)
    block_BxGxAxRxKxK = jnp.where(block_mask_BxAxKxK, jnp.exp(block_BxGxAxRxKxK - peak), 0.0)
    total = context_BxGxAxRxKxS.sum(-1, keepdims=True) + block_BxGxAxRxKxK.sum(-1, keepdims=True)

    dtype = v_context_BxGxSxH.dtype
    out_BxGxAxRxKxH = _product(
        "bgqs,bgsh->bgqh", context_BxGxAxRxKxS.reshape(b, g, a * r * k, s).astype(dtype), v_context_BxGxSxH
    ).reshape(b, g, a, r, k, h)
    out_BxGxAxRxKxH += _product(
        "bgaqj,bgajh->bgaqh", block_BxGxAxRxKxK.reshape(b, g, a, r * k, k).astype(dtype), v_block_BxGxAxKxH
    ).reshape(b, g, a, r, k, h)
    out_BxGxAxRxKxH = out_BxGxAxRxKxH / jnp.where(total > 0, total, 1.0)
    return out_BxGxAxRxKxH.transpose(0, 2, 4, 1, 3, 5).reshape(b, a, k, n, h).astype(q_BxAxKxNxH.dtype)


def context_mask(
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    block_size: int,
    num_rows: int,
    window: int | None,
    document_BxS: jax.Array | None = None,
) -> jax.Array:
    """[B, A, K, S] bool ([B, A, 1, S] without a window): which context rows each slot sees."""
    row_S = jnp.arange(num_rows, dtype=jnp.int32)
    before_BxAxS = (row_S[None, None] < anchor_BxA[..., None]) & keep_BxA[..., None]
    if document_BxS is not None:
        own_BxA = jnp.take_along_axis(document_BxS, jnp.clip(anchor_BxA, 0, num_rows - 1), axis=1)
        before_BxAxS &= document_BxS[:, None] == own_BxA[..., None]
    mask_BxAxKxS = before_BxAxS[:, :, None]
    if window is not None:
        position_BxAxK = anchor_BxA[..., None] + jnp.arange(block_size, dtype=jnp.int32)[None, None]
        mask_BxAxKxS = mask_BxAxKxS & (position_BxAxK[..., None] - row_S[None, None, None] < window)
    return mask_BxAxKxS


def block_mask(keep_BxA: jax.Array, visibility_KxK: jax.Array, window: int | None) -> jax.Array:
    """[B, A, K, K] bool: which slots of its own block each slot sees."""
    slot_K = jnp.arange(visibility_KxK.shape[0], dtype=jnp.int32)
    if window is not None:
        visibility_KxK = visibility_KxK & (slot_K[:, None] - slot_K[None] < window)
    return keep_BxA[:, :, None, None] & visibility_KxK[None, None]


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )  # fmt: skip
