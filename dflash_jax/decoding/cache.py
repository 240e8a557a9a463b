"""Laying out the shared cache: which pages there are, on which devices, and who owns them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.kernels.kv_cache import KVCache, LayerSpec, abstract_layers

POOL_AXES = ("pages", "kv_heads", None, None)


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that rows are kept in: the model's own, but float32 for bf16 models on CPU.

    XLA's CPU backend has no bf16 scatter: it converts the whole cache to float32 and back at every write
    (180 ms a round at eight rows of 512, against 0.2 ms in float32). The rows are rounded to bf16 either way.
    """
    return jnp.dtype(jnp.float32) if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else jnp.dtype(dtype)


def make_cache(
    specs: Sequence[LayerSpec],
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    *,
    page_size: int | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache for target and drafter layers together.

    Args:
      specs: every layer's shape, target layers first.
      batch: rows; a multiple of the mesh's data axis.
      capacity: rows of context that each batch row can hold.
      page_size: None for the contiguous layout (a page a row), else slots a page; must divide capacity.

    Returns:
      A KVCache of zeros with all lengths 0. Paged: every entry of the page table points at no page (its
      value is the number of pages), until `PageAllocator` hands some out.

    Raises:
      ValueError: page_size does not divide capacity, or the mesh's data axis does not divide batch.
    """
    shards = sharding.data_parallel_size(mesh)
    if batch % shards:
        raise ValueError(f"batch is {batch}, must be a multiple of the mesh's data axis ({shards})")
    if page_size is not None and capacity % page_size:
        raise ValueError(f"page_size {page_size} does not divide the capacity {capacity}")
    pages_a_row = 1 if page_size is None else capacity // page_size
    num_pages = batch * pages_a_row
    shapes = abstract_layers(specs, num_pages, capacity if page_size is None else page_size, storage_dtype(dtype))

    def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if mesh is None:
            return jnp.zeros(shape.shape, shape.dtype)
        place = sharding.named_sharding(mesh, POOL_AXES, shape.shape)
        return jnp.zeros(shape.shape, shape.dtype, device=place)

    table = None if page_size is None else jnp.full((batch, pages_a_row), num_pages, jnp.int32)
    return KVCache(
        k=tuple(zeros(s) for s in shapes),
        v=tuple(zeros(s) for s in shapes),
        page_table_BxT=table,
        length_B=jnp.zeros((batch,), jnp.int32),
    )


class PageAllocator:
    """Hands out pages of the pool. All or nothing; a page has one owner; freeing twice is an error."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, owner: int, count: int) -> np.ndarray | None:
        """`count` pages for `owner`, or None (and nothing taken) when there are not enough.

        Raises:
          ValueError: the owner holds pages already.
        """
        if owner in self._owned:
            raise ValueError(f"owner {owner} already holds pages {self._owned[owner]}; free them first")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] = pages
        return np.asarray(pages, np.int32)

    def free(self, owner: int) -> None:
        """Takes the owner's pages back.

        Raises:
          ValueError: the owner holds none (freed twice, or never allocated).
        """
        if owner not in self._owned:
            raise ValueError(f"owner {owner} holds no pages: freed twice or never allocated")
        self._free.extend(reversed(self._owned.pop(owner)))
