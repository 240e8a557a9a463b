"""What the slots of a block see, of the context and of each other: what every kernel of block attention asks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def first_visible(position_BxM: jax.Array, window: int | None, chunk: int | None) -> jax.Array:
    """The first context position that window and chunk leave visible to each slot, [B, M] int32, at least 0.

    A chunk has an end too, but no context row lies beyond that of a token behind the context.
    """
    first_BxM = jnp.zeros_like(position_BxM)
    if window is not None:
        first_BxM = jnp.maximum(first_BxM, position_BxM - window + 1)
    if chunk is not None:
        first_BxM = jnp.maximum(first_BxM, position_BxM // chunk * chunk)
    return first_BxM


def block_mask(visibility: jax.Array, position_BxM: jax.Array, window: int | None, chunk: int | None) -> jax.Array:
    """`visibility` less what window and chunk hide: [E, M, M] bool, E is B, or 1 where all rows share it."""
    mask_ExMxM = visibility if visibility.ndim == 3 else visibility[None]
    if window is not None:
        mask_ExMxM = mask_ExMxM & (position_BxM[:, :, None] - position_BxM[:, None, :] < window)
    if chunk is not None:
        chunk_BxM = position_BxM // chunk
        mask_ExMxM = mask_ExMxM & (chunk_BxM[:, :, None] == chunk_BxM[:, None, :])
    return mask_ExMxM
