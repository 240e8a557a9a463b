"""The drafter over all blocks of a batch at once: what serving computes block by block, for training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax import sharding
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.kernels.anchor_attention import anchor_attention
from dflash_jax.models.layers import rope_table
from dflash_jax.models.transformer import ROWS

# What is kept of a layer between the forward and the backward pass; the rest is computed again.
_REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda run: run,  # everything that the backward pass reads
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "layers": jax.checkpoint,  # its input alone
}
REMAT = tuple(_REMAT)


def block_forward(
    drafter: DFlash,
    shared: SharedWeights,
    token_BxS: jax.Array,
    taps_BxSxTD: jax.Array,
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    block_size: int,
    position_BxS: jax.Array | None = None,
    document_BxS: jax.Array | None = None,
    remat: str = "none",
) -> jax.Array:
    """What the head reads of every slot of every block, [B, A, K, E]: normed, in the target's width.

    Context keys and values are made once a sequence and layer and shared by its blocks.

    Args:
      taps_BxSxTD: the target's tapped states of each token; rows at or beyond a block's anchor are not seen.
      anchor_BxA, keep_BxA: rows of the anchors; padding blocks give some finite number that must not count.
      position_BxS: positions for the rotary embedding, 0 .. S-1 where None (packed rows restart).
      document_BxS: see `anchor_attention`.
      remat: one of `REMAT`: what of a layer is kept for the backward pass. Values are the same.
    """
    config = drafter.config
    b, s = token_BxS.shape
    a, k = anchor_BxA.shape[1], block_size
    if position_BxS is None:
        position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    slot_K = jnp.arange(k, dtype=jnp.int32)
    start_BxA = jnp.take_along_axis(position_BxS, anchor_BxA, axis=1)
    position_BxM = (start_BxA[..., None] + slot_K[None, None]).reshape(b, a * k)
    context_rope = rope_table(config.rope, config.head_dim, position_BxS)
    block_rope = rope_table(config.rope, config.head_dim, position_BxM)

    feature_BxSxD = sharding.constrain(drafter.fuse(taps_BxSxTD), ROWS)
    root_BxAx1 = jnp.take_along_axis(token_BxS, anchor_BxA, axis=1)[..., None]
    token_BxAxK = jnp.where(slot_K[None, None] == 0, root_BxAx1, config.mask_token_id)
    x_BxMxD = sharding.constrain(drafter.embed(shared, token_BxAxK.reshape(b, a * k)), ROWS)

    def by_block(rows_BxGxMxH: jax.Array) -> jax.Array:
        g, h = rows_BxGxMxH.shape[1], rows_BxGxMxH.shape[3]
        return rows_BxGxMxH.reshape(b, g, a, k, h).swapaxes(1, 2)

    for i, layer in enumerate(drafter.layers):
        graphdef, params = nnx.split(layer)

        def run(params, x_BxMxD, feature_BxSxD, graphdef=graphdef):
            layer = nnx.merge(graphdef, params)
            attention = layer.attention
            u_BxMxD = layer.attention_norm(x_BxMxD)
            q_BxMxNxH = attention.queries(u_BxMxD, block_rope)
            k_BxGxMxH, v_BxGxMxH = attention.keys_values(u_BxMxD, block_rope)
            out_BxAxKxNxH = anchor_attention(
                q_BxMxNxH.reshape(b, a, k, *q_BxMxNxH.shape[2:]),
                *attention.keys_values(feature_BxSxD, context_rope),
                by_block(k_BxGxMxH), by_block(v_BxGxMxH),
                anchor_BxA=anchor_BxA, keep_BxA=keep_BxA,
                visibility_KxK=attention.visibility(k), window=attention.window,
                scale=attention.scale, document_BxS=document_BxS,
            )  # fmt: skip
            return sharding.constrain(layer.finish(x_BxMxD, out_BxAxKxNxH.reshape(q_BxMxNxH.shape)), ROWS)

        with jax.named_scope(f"draft_layer_{i}"):
            x_BxMxD = _REMAT[remat](run)(params, x_BxMxD, feature_BxSxD)
    return sharding.constrain(drafter.for_head(x_BxMxD), ROWS).reshape(b, a, k, -1)
