"""The target over whole rows at once, nothing cached: features for training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_jax.kernels.kv_cache import KVCache, abstract_layers, empty_states
from dflash_jax.models.attention import causal
from dflash_jax.models.transformer import Forward, Transformer, layer_specs


def forward_rows(
    target: Transformer,
    token_BxS: jax.Array,
    tap_ids: Sequence[int],
    position_BxS: jax.Array | None = None,
    document_BxS: jax.Array | None = None,
) -> Forward:
    """Hidden states and taps of rows that start at position 0.

    Padding behind a row's length is harmless: attention is causal.

    Args:
      position_BxS, document_BxS: int32, both for packed rows, else None: positions, which restart with each document,
        and any number that tells neighbouring documents of a row apart. A document's states are then those that it
        would have alone, whatever lies before it: attention, convolutions and recurrent states see nothing of it.
        The mask takes B * S * S booleans.
    """
    if (position_BxS is None) != (document_BxS is None):
        raise ValueError("packed rows need both position_BxS and document_BxS")
    b, s = token_BxS.shape
    specs = layer_specs(target.config)
    # One slot that no one sees (length 0): attention wants a context of at least one.
    shapes = abstract_layers(specs, b, 1, target.embedding_VxD.dtype)
    k, v = (tuple(jnp.zeros(x.shape, x.dtype) for x in side) for side in shapes)
    nothing = KVCache(k, v, None, jnp.zeros((b,), jnp.int32), empty_states(specs, b, target.embedding_VxD.dtype))
    visibility = causal(s)
    packed = document_BxS is not None
    if packed:
        visibility = visibility[None] & (document_BxS[:, :, None] == document_BxS[:, None])
    else:
        position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    return target(token_BxS, position_BxS, nothing, visibility, tuple(tap_ids), restarts=packed)
