"""Block attention in C++ for CPU (`block_attention.cc`): reads the keys and values of each row's length where they lie.

XLA's products read the whole capacity of a cache, masked rows included, and turn a copy of its keys around; pages are
gathered into another copy first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.kernels import native
from dflash_jax.kernels.block_masks import block_mask, first_visible

_TARGET = "dflash_block_attention"
_FLOATS = (jnp.float32, jnp.bfloat16)


def obstacle(
    q_BxMxNxH: jax.Array,
    k_PxGxSxH: jax.Array,
    v_PxGxSxV: jax.Array,
    values_in_keys: int | None,
    mesh: Mesh | AbstractMesh | None,
) -> str | None:
    """Why the native kernel can not be used; None if it can."""
    if k_PxGxSxH.dtype != jnp.float32 or v_PxGxSxV.dtype != jnp.float32 or q_BxMxNxH.dtype not in _FLOATS:
        return f"queries are {q_BxMxNxH.dtype} and the cache {k_PxGxSxH.dtype}: it must be float32, as it is on CPU"
    if values_in_keys is not None:
        return "values lie in the keys"
    if 0 in (*q_BxMxNxH.shape, *k_PxGxSxH.shape, *v_PxGxSxV.shape):
        return "an array is empty"
    return native.obstacle(mesh)


@functools.partial(jax.jit, static_argnames=("reference", "window", "chunk", "scale", "softcap"), inline=True)
def block_attention_native(
    arrays: tuple[jax.Array | None, ...],
    reference: Callable[..., jax.Array],
    *,
    window: int | None,
    chunk: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """The kernel on CPU; the reference where the program is lowered for another platform, or differentiated.

    Jitted so that like layers are traced once.

    Args:
      arrays: q_BxMxNxH, k_PxGxSxH, v_PxGxSxV, page_table_BxT, k_block_BxGxMxH, v_block_BxGxMxV, length_B,
        position_BxM, visibility, sinks_N; of these, table and sinks may be None.
      reference: takes the arrays and, as keywords, the other options.
    """
    reference = functools.partial(reference, window=window, chunk=chunk, scale=scale, softcap=softcap)

    def native_call(q, k, v, page_table, k_block, v_block, length_B, position_BxM, visibility, sinks_N):
        b, m, n, _ = q.shape
        float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
        out = jax.ShapeDtypeStruct((b, m, n, v.shape[-1]), jnp.float32)
        return jax.ffi.ffi_call(_TARGET, out, vmap_method="sequential")(
            float32(q), k, v,
            jnp.arange(b, dtype=jnp.int32)[:, None] if page_table is None else page_table,
            float32(k_block), float32(v_block), length_B,
            first_visible(position_BxM, window, chunk), block_mask(visibility, position_BxM, window, chunk),
            jnp.zeros(0) if sinks_N is None else float32(sinks_N),
            scale=np.float32(scale), softcap=np.float32(0.0 if softcap is None else softcap),
        ).astype(q.dtype)  # fmt: skip

    @jax.custom_jvp
    def attend(*arrays):
        # Decided again where the platform is certain: a program traced on a CPU may be lowered for a TPU.
        return jax.lax.platform_dependent(*arrays, cpu=native_call, default=reference)

    attend.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
    return attend(*arrays)
