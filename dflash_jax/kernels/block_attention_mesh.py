"""The paged attention kernel over a mesh: heads over the tensor axis, rows and pages over the data axis.

XLA can not partition a Pallas kernel, so `shard_map` says who computes what. Heads are easy: each device has
its own. Where the KV heads can not be dealt out evenly (one, of latent attention; two on eight devices) every
device holds all of them, and the query heads, if they can, are dealt out alone. A row's pages are not easy: a
device can only read the pages that it holds. The rule is that all pages of a row lie on one data shard. Rows may
come in any order (a prefill of one row uses one shard's pages), but when every row lies on the shard that also
holds its pages, as it should when decoding, no byte is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax import sharding
from dflash_jax.kernels.dispatch import mesh_axis


def map_over_mesh(
    kernel: Callable[..., jax.Array],
    mesh: Mesh | AbstractMesh,
    q_BxMxNxH: jax.Array,
    k_PxGxSxH: jax.Array,
    v_PxGxSxV: jax.Array,
    page_table_BxT: jax.Array | None,
    k_block_BxGxMxH: jax.Array,
    v_block_BxGxMxV: jax.Array,
    length_B: jax.Array,
    position_BxM: jax.Array,
    visibility: jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """`kernel` of these arrays (in this order) on every device's part of them.

    A row whose pages lie on several data shards gives NaN: that is a fault of whoever handed out the pages,
    and it must not pass for an answer.
    """
    b, n, g, num_pages = q_BxMxNxH.shape[0], q_BxMxNxH.shape[2], k_PxGxSxH.shape[1], k_PxGxSxH.shape[0]
    kv_heads = mesh_axis(mesh, "kv_heads", g)
    heads = kv_heads or mesh_axis(mesh, "kv_heads", n)
    rows = mesh_axis(mesh, "batch", b)
    pages = mesh_axis(mesh, "pages", num_pages)
    arrays = (q_BxMxNxH, k_PxGxSxH, v_PxGxSxV, k_block_BxGxMxH, v_block_BxGxMxV, length_B, position_BxM, visibility)

    def attend(q, k, v, table, kb, vb, length, position, visible, sinks) -> jax.Array:
        kv_head_A = None
        if heads != kv_heads:  # query heads are dealt out, KV heads are not
            local = n // sharding.axis_size(mesh, heads)
            run = math.gcd(local, n // g)  # so many neighbours surely share a KV head
            first = jax.lax.axis_index(heads) * local
            kv_head_A = (first + jnp.arange(0, local, run, dtype=jnp.int32)) // (n // g)
        return kernel(q, k, v, table, kb, vb, length, position, visible, sinks, kv_head_A)

    def mapped(body: Callable[..., jax.Array], rows: str | tuple[str, ...] | None) -> jax.Array:
        row_visibility = P(rows, None, None) if visibility.ndim == 3 else P(None, None)
        specs = (
            P(rows, None, heads, None), P(pages, kv_heads, None, None), P(pages, kv_heads, None, None),
            P(rows, kv_heads, None, None), P(rows, kv_heads, None, None), P(rows), P(rows, None), row_visibility,
        )  # fmt: skip
        # None is a tree without leaves, to which any spec applies.
        return jax.shard_map(
            body, mesh=mesh, in_specs=(*specs, P(rows, None), P(heads)), out_specs=P(rows, None, heads, None),
            check_vma=False,  # a pallas_call does not say over which axes its result varies
        )(*arrays, page_table_BxT, sinks_N)  # fmt: skip

    def whole(q, k, v, kb, vb, length, position, visible, table, sinks):
        return attend(q, k, v, table, kb, vb, length, position, visible, sinks)

    # Contiguous: page b is row b's, and both are cut alike. Paged: every data shard may hold all pages.
    if page_table_BxT is None or pages is None:
        return mapped(whole, rows)

    shards = sharding.axis_size(mesh, pages)
    pages_a_shard, page_size = num_pages // shards, k_PxGxSxH.shape[2]
    holder_BxT = page_table_BxT // pages_a_shard
    used_BxT = jnp.arange(page_table_BxT.shape[1], dtype=jnp.int32)[None] * page_size < length_B[:, None]

    def own_rows(q, k, v, kb, vb, length, position, visible, table, sinks):
        base = jax.lax.axis_index(pages) * pages_a_shard
        return attend(q, k, v, table - base, kb, vb, length, position, visible, sinks)

    def any_rows(q, k, v, kb, vb, length, position, visible, table, sinks):
        # Every data shard goes over all rows, but reads the context of those that it holds.
        shard = jax.lax.axis_index(pages)
        holder_B = jnp.where(length > 0, table[:, 0] // pages_a_shard, 0)
        mine_B = holder_B == shard
        out = attend(
            q, k, v, table - shard * pages_a_shard, kb, vb, jnp.where(mine_B, length, 0), position, visible, sinks
        )  # fmt: skip
        return jax.lax.psum(jnp.where(mine_B[:, None, None, None], out, jnp.zeros_like(out)), pages)

    def exchange() -> jax.Array:
        out_BxMxNxV = mapped(any_rows, None)
        split_B = (used_BxT & (holder_BxT != holder_BxT[:, :1])).any(axis=1)
        return jnp.where(split_B[:, None, None, None], jnp.nan, out_BxMxNxV)

    if rows != pages:  # rows that are not cut as the pages are have no home
        return exchange()
    home_B = jnp.arange(b, dtype=jnp.int32) // (b // shards)
    at_home = jnp.where(used_BxT, holder_BxT == home_B[:, None], True).all()
    return jax.lax.cond(at_home, lambda: mapped(own_rows, rows), exchange)
