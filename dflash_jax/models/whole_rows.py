"""The target over whole rows at once, nothing cached: features for training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.kernels import dispatch
from dflash_jax.kernels.kv_cache import KVCache, abstract_layers, empty_states, storage_dtype
from dflash_jax.models.attention import BlockContext, causal
from dflash_jax.models.scanned import StackedTarget, run_layers
from dflash_jax.models.transformer import Forward, Transformer, layer_specs


def forward_rows(
    target: Transformer | tuple[nnx.GraphDef, StackedTarget],
    token_BxS: jax.Array,
    tap_ids: Sequence[int],
    position_BxS: jax.Array | None = None,
    document_BxS: jax.Array | None = None,
) -> Forward:
    """Hidden states and taps of rows that start at position 0.

    Padding behind a row's length is harmless: attention is causal.

    Args:
      target: the model; or its graphdef and parameters with stacked layers, which are scanned; `block_kv` is then None.
      position_BxS, document_BxS: int32, both for packed rows, else None: positions, which restart with each document,
        and any number that tells neighbouring documents of a row apart. A document's states are then those that it
        would have alone, whatever lies before it: attention, convolutions and recurrent states see nothing of it.
        The mask takes B * S * S booleans.
    """
    if (position_BxS is None) != (document_BxS is None):
        raise ValueError("packed rows need both position_BxS and document_BxS")
    b, s = token_BxS.shape
    if isinstance(target, tuple):
        graphdef, params = target
        config, dtype = params.config, params.rest["embedding_VxD"].dtype
    else:
        config, dtype = target.config, target.embedding_VxD.dtype
    specs = layer_specs(config)
    # One slot that no one sees (length 0): attention wants a context of at least one.
    shapes = abstract_layers(specs, b, 1, storage_dtype(dtype, dispatch.context_mesh(None)))
    k, v = (tuple(jnp.zeros(x.shape, x.dtype) for x in side) for side in shapes)
    nothing = KVCache(k, v, None, jnp.zeros((b,), jnp.int32), empty_states(specs, b, dtype))
    visibility = causal(s)
    packed = document_BxS is not None
    if packed:
        visibility = visibility[None] & (document_BxS[:, :, None] == document_BxS[:, None])
    else:
        position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    if isinstance(target, tuple):
        block = BlockContext(position_BxS, nothing.length_B, visibility, packed)
        return Forward(*run_layers(params, graphdef, token_BxS, block, nothing, tap_ids), None)
    return target(token_BxS, position_BxS, nothing, visibility, tuple(tap_ids), restarts=packed)
