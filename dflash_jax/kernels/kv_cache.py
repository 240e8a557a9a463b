"""The key/value cache: pages shared by target and drafter layers, and the three things done to it.

A cache belongs to no module: it goes into a jitted function as an argument and comes out as a result,
donated. Layers are separate arrays (a stacked array would be sliced, and on CPU copied, at every step).
Within a page, heads come before slots (`k_PxGxSxH`): attention then reads each head's rows as one
contiguous matrix, which measured 1.3 to 3 times faster on CPU than slots before heads.

Two layouts share this interface. *Paged*: `page_table_BxT` lists each row's pages. *Contiguous*:
`page_table_BxT` is None and page b is row b's whole space; attention then reads it without a gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.config import DeltaConfig
from dflash_jax.kernels import dispatch
from dflash_jax.kernels.delta_rule import RecurrentInputs, RecurrentState, commit, empty_state


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer caches.

    Attributes:
      num_kv_heads, head_dim: of its keys; 0 for a recurrent layer.
      value_dim: of its values; None: head_dim. 0: the values are a part of the keys (latent attention).
      delta: of a recurrent layer; it has a state a row instead of keys and values.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    delta: DeltaConfig | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


@struct.dataclass
class KVCache:
    """Committed keys and values of every layer.

    Attributes:
      k: one `k_PxGxSxH` a layer: P pages of S slots, G KV heads of dim H.
      v: one `v_PxGxSxH` a layer.
      page_table_BxT: pages of each row in order, or None for the contiguous layout (P == B).
      length_B: committed rows of each batch row. Slots at or beyond it hold garbage that no one reads.
      recurrent: of each recurrent layer, in order, the state after the committed tokens. Such a layer's k and v
        have no heads. States belong to batch rows, not to pages.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    page_table_BxT: jax.Array | None
    length_B: jax.Array
    recurrent: tuple[RecurrentState, ...] = ()

    @property
    def capacity(self) -> int:
        """Rows that each batch row can hold (allocated length)."""
        slots = self.k[0].shape[2]
        return slots if self.page_table_BxT is None else slots * self.page_table_BxT.shape[1]

    @property
    def batch(self) -> int:
        return self.length_B.shape[0]


@struct.dataclass
class BlockKV:
    """Keys and values of a block of M tokens, not (yet) committed: one `k_BxGxMxH` a layer.

    Attributes:
      recurrent: as in `KVCache`, what a recurrent layer's state takes in of each token.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    recurrent: tuple[RecurrentInputs, ...] = ()


def pages(cache: KVCache, layer: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One layer as attention takes it: (`k_PxGxSxH`, `v_PxGxSxH`, `page_table_BxT` or None). No copy."""
    return cache.k[layer], cache.v[layer], cache.page_table_BxT


def context(cache: KVCache, layer: int) -> tuple[jax.Array, jax.Array]:
    """The rows of one layer as (`k_BxGxCxH`, `v_BxGxCxH`), C = capacity. No copy when contiguous."""
    k_PxGxSxH, v_PxGxSxH, page_table_BxT = pages(cache, layer)
    return gather_pages(k_PxGxSxH, page_table_BxT), gather_pages(v_PxGxSxH, page_table_BxT)


def gather_pages(x_PxGxSxH: jax.Array, page_table_BxT: jax.Array | None) -> jax.Array:
    """Each row's pages side by side, [B, G, T*S, H]; the array itself where the layout is contiguous."""
    if page_table_BxT is None:
        return x_PxGxSxH
    # An entry that points at no page (not allocated yet) lies beyond the row's length: any page will do.
    x_BxTxGxSxH = x_PxGxSxH.at[page_table_BxT].get(mode="clip")
    b, t, g, s, h = x_BxTxGxSxH.shape
    return x_BxTxGxSxH.transpose(0, 2, 1, 3, 4).reshape(b, g, t * s, h)


def write(cache: KVCache, rows: BlockKV, first_layer: int, count_B: jax.Array) -> KVCache:
    """Writes the first count_B of M rows behind each row's committed length; length stays as it is.

    `rows` holds layers first_layer, first_layer + 1, ... Rows at or beyond count_B, and rows beyond the
    capacity, are dropped: rejected and padded tokens never reach memory. Recurrent states take in the first
    count_B tokens (see `delta_rule.commit`); a round calls this once with the target's rows.
    """
    num_rows = rows.k[0].shape[2]
    slot_M = jnp.arange(num_rows, dtype=jnp.int32)
    position_BxM = cache.length_B[:, None] + slot_M[None]
    keep_BxM = (slot_M[None] < count_B[:, None]) & (position_BxM < cache.capacity)
    num_pages, _, page_size, _ = cache.k[0].shape
    if cache.page_table_BxT is None:
        page_BxM = jnp.broadcast_to(jnp.arange(cache.batch, dtype=jnp.int32)[:, None], position_BxM.shape)
    else:
        entry_BxM = jnp.minimum(position_BxM // page_size, cache.page_table_BxT.shape[1] - 1)
        page_BxM = jnp.take_along_axis(cache.page_table_BxT, entry_BxM, axis=1)
    # num_pages is out of range, so mode="drop" skips the row. -1 would wrap to the last page.
    page_BxM = jnp.where(keep_BxM, page_BxM, num_pages)
    in_page_BxM = position_BxM % page_size

    def put(x_PxGxSxH: jax.Array, rows_BxGxMxH: jax.Array) -> jax.Array:
        if not x_PxGxSxH.size:  # of a recurrent layer, or values that are a part of the keys
            return x_PxGxSxH
        rows_BxMxGxH = rows_BxGxMxH.transpose(0, 2, 1, 3).astype(x_PxGxSxH.dtype)
        return x_PxGxSxH.at[page_BxM, :, in_page_BxM].set(rows_BxMxGxH, mode="drop")

    k, v = list(cache.k), list(cache.v)
    for i, (k_rows, v_rows) in enumerate(zip(rows.k, rows.v, strict=True)):
        k[first_layer + i] = put(k[first_layer + i], k_rows)
        v[first_layer + i] = put(v[first_layer + i], v_rows)
    recurrent = cache.recurrent
    if rows.recurrent:
        recurrent = tuple(
            commit(state, inputs, count_B) for state, inputs in zip(cache.recurrent, rows.recurrent, strict=True)
        )
    return cache.replace(k=tuple(k), v=tuple(v), recurrent=recurrent)


def advance(cache: KVCache, count_B: jax.Array) -> KVCache:
    """Commits count_B rows that were written behind the length of each row."""
    return cache.replace(length_B=jnp.minimum(cache.length_B + count_B, cache.capacity))


def storage_dtype(dtype: jnp.dtype, mesh: Mesh | AbstractMesh | None = None) -> jnp.dtype:
    """The dtype that rows are kept in: the model's own, but float32 for bf16 models on CPU.

    XLA's CPU backend has no bf16 scatter: it converts the whole cache to float32 and back at every write
    (180 ms a round at eight rows of 512, against 0.2 ms in float32). The rows are rounded to bf16 either way.
    """
    on_cpu = dispatch.platform(mesh) == "cpu"
    return jnp.dtype(jnp.float32) if dtype == jnp.bfloat16 and on_cpu else jnp.dtype(dtype)


def abstract_layers(
    specs: Sequence[LayerSpec], num_pages: int, page_size: int, dtype: jnp.dtype
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes of the keys and of the values of a cache with these layers."""
    return tuple(
        tuple(
            jax.ShapeDtypeStruct((num_pages, spec.num_kv_heads, page_size, spec.widths[side]), dtype) for spec in specs
        )
        for side in (0, 1)
    )


def empty_states(specs: Sequence[LayerSpec], batch: int, dtype: jnp.dtype) -> tuple[RecurrentState, ...]:
    """`KVCache.recurrent` before the first token."""
    return tuple(empty_state(spec.delta, batch, dtype) for spec in specs if spec.delta)
