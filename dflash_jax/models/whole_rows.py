"""The target over whole rows at once, nothing cached: features for training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.attention import causal
from dflash_jax.models.transformer import Forward, Transformer


def forward_rows(target: Transformer, token_BxS: jax.Array, tap_ids: Sequence[int]) -> Forward:
    """Hidden states and taps of rows that start at position 0.

    Padding behind a row's length is harmless: attention is causal.
    """
    b, s = token_BxS.shape
    config = target.config
    # One slot that no one sees (length 0): attention wants a context of at least one.
    empty = jnp.zeros((b, config.num_kv_heads, 1, config.head_dim), target.embedding_VxD.dtype)
    nothing = KVCache((empty,) * config.num_layers, (empty,) * config.num_layers, None, jnp.zeros((b,), jnp.int32))
    position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    return target(token_BxS, position_BxS, nothing, causal(s), tuple(tap_ids))
