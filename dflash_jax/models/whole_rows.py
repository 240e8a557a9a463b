"""The target over whole rows at once, nothing cached: features for training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_jax.kernels.kv_cache import KVCache, abstract_layers, empty_states
from dflash_jax.models.attention import causal
from dflash_jax.models.transformer import Forward, Transformer, layer_specs


def forward_rows(target: Transformer, token_BxS: jax.Array, tap_ids: Sequence[int]) -> Forward:
    """Hidden states and taps of rows that start at position 0.

    Padding behind a row's length is harmless: attention is causal.
    """
    b, s = token_BxS.shape
    specs = layer_specs(target.config)
    # One slot that no one sees (length 0): attention wants a context of at least one.
    shapes = abstract_layers(specs, b, 1, target.embedding_VxD.dtype)
    k, v = (tuple(jnp.zeros(x.shape, x.dtype) for x in side) for side in shapes)
    nothing = KVCache(k, v, None, jnp.zeros((b,), jnp.int32), empty_states(specs, b, target.embedding_VxD.dtype))
    position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    return target(token_BxS, position_BxS, nothing, causal(s), tuple(tap_ids))
