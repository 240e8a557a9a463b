"""Laying out the shared cache: which pages there are, on which devices, and who owns them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.kernels.delta_rule import STATE_AXES, RecurrentState
from dflash_jax.kernels.kv_cache import KVCache, LayerSpec, abstract_layers, empty_states, storage_dtype

POOL_AXES = ("pages", "kv_heads", None, None)


def make_cache(
    specs: Sequence[LayerSpec],
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache: `abstract_cache` of these arguments, allocated.

    Returns:
      A KVCache of zeros with all lengths 0. Paged: every entry of the page table points at no page (its
      value is the number of pages), until `PageAllocator` hands some out.

    Raises:
      ValueError: see `abstract_cache`.
    """
    shapes = abstract_cache(specs, batch, capacity, dtype, page_size=page_size, num_pages=num_pages, mesh=mesh)

    def full(x: jax.ShapeDtypeStruct, value: int = 0) -> jax.Array:
        return jnp.full(x.shape, value, x.dtype, device=x.sharding)

    table = shapes.page_table_BxT
    zeros = jax.tree.map(full, shapes.replace(page_table_BxT=None))
    return zeros.replace(page_table_BxT=None if table is None else full(table, shapes.k[0].shape[0]))


def abstract_cache(
    specs: Sequence[LayerSpec],
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Shapes and shardings of the cache of target and drafter layers together; nothing is allocated.

    Args:
      specs: every layer's shape, target layers first.
      batch: rows; a multiple of the mesh's data axis.
      capacity: rows of context that each batch row can hold.
      page_size: None for the contiguous layout (a page a row), else slots a page; must divide capacity.
      num_pages: of the pool, a multiple of the mesh's data axis; None: as many as fill every row. Paged only.
      mesh: may be made of the devices of a TPU that is not there.

    Returns:
      A KVCache of ShapeDtypeStructs; their shardings are None without a mesh.

    Raises:
      ValueError: page_size does not divide capacity, or the mesh's data axis does not divide batch or num_pages.
    """
    shards = sharding.data_parallel_size(mesh)
    if batch % shards:
        raise ValueError(f"batch is {batch}, must be a multiple of the mesh's data axis ({shards})")
    if page_size is not None and capacity % page_size:
        raise ValueError(f"page_size {page_size} does not divide the capacity {capacity}")
    if page_size is None and num_pages is not None:
        raise ValueError(f"num_pages is {num_pages}, but the contiguous layout has a page a row; set page_size")
    pages_a_row = 1 if page_size is None else capacity // page_size
    num_pages = batch * pages_a_row if num_pages is None else num_pages
    if num_pages < 1 or num_pages % shards:
        raise ValueError(f"num_pages is {num_pages}, must be a positive multiple of the mesh's data axis ({shards})")

    def placed(x: jax.ShapeDtypeStruct, axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
        return sharding.abstract_array(mesh, x.shape, x.dtype, axes)

    page = capacity if page_size is None else page_size
    k, v = abstract_layers(specs, num_pages, page, storage_dtype(dtype, mesh))
    states = jax.eval_shape(lambda: empty_states(specs, batch, dtype))
    table = None if page_size is None else jax.ShapeDtypeStruct((batch, pages_a_row), jnp.int32)
    return KVCache(
        k=tuple(placed(x, POOL_AXES) for x in k),
        v=tuple(placed(x, POOL_AXES) for x in v),
        page_table_BxT=None if table is None else placed(table, ("batch", None)),
        length_B=placed(jax.ShapeDtypeStruct((batch,), jnp.int32), ("batch",)),
        recurrent=tuple(jax.tree.map(placed, state, STATE_AXES) for state in states),
    )


def make_states(
    specs: Sequence[LayerSpec], batch: int, dtype: jnp.dtype, mesh: Mesh | None = None
) -> tuple[RecurrentState, ...]:
    """`KVCache.recurrent` of rows before their first token."""

    def place(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        return x if mesh is None else sharding.put(x, sharding.named_sharding(mesh, axes, x.shape))

    return tuple(jax.tree.map(place, state, STATE_AXES) for state in empty_states(specs, batch, dtype))


class PageAllocator:
    """Hands out pages of the pool. All or nothing; a page has one owner; freeing twice is an error.

    Args:
      num_pages: of the pool.
      shards: the mesh's data axis. Shard s holds pages s * num_pages / shards and on; all pages of an owner
        come from one shard, since a device reads only the pages that it holds.

    Raises:
      ValueError: shards does not divide num_pages.
    """

    def __init__(self, num_pages: int, shards: int = 1):
        if shards < 1 or num_pages < 1 or num_pages % shards:
            raise ValueError(f"num_pages is {num_pages}, must be a positive multiple of shards ({shards})")
        self.num_pages = num_pages
        self.pages_a_shard = num_pages // shards
        # The lowest page is handed out first.
        self._free = [
            list(range((shard + 1) * self.pages_a_shard - 1, shard * self.pages_a_shard - 1, -1))
            for shard in range(shards)
        ]
        self._owned: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        """Free pages of all shards together."""
        return sum(len(free) for free in self._free)

    def allocate(self, owner: int, count: int, shard: int = 0) -> np.ndarray | None:
        """`count` pages of a shard for `owner`, or None (and nothing taken) when it has not enough.

        Raises:
          ValueError: the owner holds pages already, or count is below 1.
        """
        if owner in self._owned:
            raise ValueError(f"owner {owner} already holds pages {self._owned[owner]}; free them first")
        if count < 1:
            raise ValueError(f"{count} pages asked for owner {owner}, must be at least 1")
        free = self._free[shard]
        if count > len(free):
            return None
        pages = [free.pop() for _ in range(count)]
        self._owned[owner] = pages
        return np.asarray(pages, np.int32)

    def free(self, owner: int) -> None:
        """Takes the owner's pages back.

        Raises:
          ValueError: the owner holds none (freed twice, or never allocated).
        """
        if owner not in self._owned:
            raise ValueError(f"owner {owner} holds no pages: freed twice or never allocated")
        pages = self._owned.pop(owner)
        self._free[pages[0] // self.pages_a_shard].extend(reversed(pages))
