"""`paged_block_attention` as a Pallas kernel for TPUs.

One grid step takes a tile of query rows of one batch row and one KV head, and one stretch of keys: first the
block's own keys, then the committed context, a few pages a step. The r query heads that share a KV head times
the M slots of the block are the rows of one matrix, so that each key is read once and meets all of them in
the matrix unit. Heads that are too many for one tile (the 128 of latent attention share one KV head) are dealt
to several, which read the same keys. The softmax is online (Milakov and Gimelshein, 2018): running peak, sum
and mix stay in VMEM; a sink is where peak and sum begin.

Pages are read in place: the page table is prefetched into scalar memory and the index map of the K and V
operands looks the page up, so the pipeline fetches the next pages while this step computes. The number of
context steps is a traced value, that of the longest row of the batch: a cache with room for 32,768 rows that
holds 300 costs what 300 cost. A shorter row idles in its surplus steps and fetches nothing in them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels.block_attention import (
    MASKED,
    PEAK_FLOOR,
    block_mask,
    capped,
    check_values,
    first_visible,
)
from dflash_jax.kernels.pallas_common import SUBLANES, div, matmul, pad, rem, round_up

ROW_TILE = 512  # query rows a step: scores of 512 x 512 float32 are 1 MiB of about 16 MiB of VMEM
WIDE = 1280  # bytes of a query row; of wider ones there are half as many a step
KEY_TILE = 512  # keys a step; a step costs about 0.4 microseconds besides its work
MAX_FETCHES = 8  # pages a step: each is an operand of its own, with its own index map


def paged_block_attention_pallas(
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
    kv_head_A: jax.Array | None = None,
    *,
    window: int | None,
    scale: float,
    chunk: int | None = None,
    softcap: float | None = None,
    values_in_keys: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `paged_block_attention`; on one device, or on one device's part (`block_attention_mesh`).

    Context rows at or beyond the length are never used, whatever they hold (NaN included). Entries of the
    page table behind the length may be any number.

    Args:
      kv_head_A: None where N / G query heads in a row share each KV head; else the query heads fall into A
        equal runs, and this is the KV head of each.

    Raises:
      ValueError: pages of fewer than 8 slots.
    """
    width = check_values(k_PxGxSxH, v_PxGxSxV, values_in_keys)
    b, m, n, h = q_BxMxNxH.shape
    if kv_head_A is None:
        kv_head_A = jnp.arange(k_PxGxSxH.shape[1], dtype=jnp.int32)
    if page_table_BxT is None:  # contiguous: one page a row
        page_table_BxT = jnp.arange(b, dtype=jnp.int32)[:, None]
    length_B = jnp.clip(length_B.astype(jnp.int32), 0, page_table_BxT.shape[1] * k_PxGxSxH.shape[2])
    if k_PxGxSxH.shape[2] < 8:
        if page_table_BxT.shape[1] > 1:
            raise ValueError(f"page size is {k_PxGxSxH.shape[2]}; the Pallas kernel needs at least 8 slots a page")
        k_PxGxSxH, v_PxGxSxV = pad(k_PxGxSxH, 2, SUBLANES), pad(v_PxGxSxV, 2, SUBLANES)  # one short page a row
    num_pages, _, s, _ = k_PxGxSxH.shape
    page_table_BxT = jnp.clip(page_table_BxT.astype(jnp.int32), 0, num_pages - 1)

    # Query rows: slots times the r heads of a run (A runs), slots outermost.
    limit = ROW_TILE if h * q_BxMxNxH.dtype.itemsize <= WIDE else ROW_TILE // 2
    slot_tile, cuts = _row_tiling(m, n // kv_head_A.shape[0], limit)
    kv_head_A = jnp.repeat(kv_head_A.astype(jnp.int32), cuts)
    a = kv_head_A.shape[0]
    r = n // a
    num_slots = round_up(m, slot_tile)
    q_BxMxAxRxH = pad(q_BxMxNxH, 1, num_slots).reshape(b, num_slots, a, r, h)
    q_BxAxQxH = q_BxMxAxRxH.transpose(0, 2, 1, 3, 4).reshape(b, a, num_slots * r, h)
    row_tile = slot_tile * r
    sinks = []  # one a row of a tile, the same for all tiles
    if sinks_N is not None:
        sinks = [jnp.tile(sinks_N.astype(jnp.float32).reshape(a, r), (1, slot_tile))[..., None]]

    # The in-block mask stays [slots, keys]; the kernel spreads it over the heads of the run.
    block_tile = min(round_up(m, SUBLANES), KEY_TILE)
    num_block_keys = round_up(m, block_tile)
    mask_ExMxM = block_mask(visibility, position_BxM, window, chunk)
    shared = mask_ExMxM.shape[0] == 1
    mask_ExMxK = pad(pad(mask_ExMxM.astype(jnp.bfloat16), 1, num_slots), 2, num_block_keys)

    first_BxM = first_visible(position_BxM, window, chunk)
    first_BxQx1 = jnp.repeat(pad(first_BxM, 1, num_slots), r, axis=1)[..., None]

    # A fetch is a page, or a part of a large one. A step takes several small pages or one part, so that its
    # rows are always consecutive.
    fetch = min(s, KEY_TILE)
    parts = pl.cdiv(s, fetch)
    fetches = 1
    if parts == 1 and s % SUBLANES == 0:
        fetches = max(1, min(KEY_TILE // s, MAX_FETCHES, page_table_BxT.shape[1]))
    begin_B = _fetch_of(jnp.minimum(first_BxM.min(axis=1), length_B), s, fetch, parts)
    end_B = jnp.where(length_B > 0, _fetch_of(length_B - 1, s, fetch, parts) + 1, 0)
    block_steps = num_block_keys // block_tile
    context_steps = jnp.max(pl.cdiv(jnp.maximum(end_B - begin_B, 0), fetches))

    def page_index(which, i, ai, _, j, head, table, begin, end, length):
        # Steps before the context wait at its first fetch, surplus steps at the last: nothing new is fetched.
        f = begin[i] + jnp.maximum(j - block_steps, 0) * fetches + which
        f = jnp.maximum(jnp.minimum(f, end[i] - 1), 0)
        return table[i, div(f, parts)], head[ai], rem(f, parts), 0

    def block_index(i, ai, _, j, head, *scalars):
        return i, head[ai], jnp.minimum(j, block_steps - 1), 0

    def mask_index(i, ai, t, j, *scalars):
        return 0 if shared else i, t, jnp.minimum(j, block_steps - 1)

    def rows_spec(channels):
        return pl.BlockSpec((1, 1, row_tile, channels), lambda i, ai, t, j, *scalars: (i, ai, t, 0))

    def page_specs(channels):
        return [pl.BlockSpec((1, 1, fetch, channels), functools.partial(page_index, w)) for w in range(fetches)]

    own_values = values_in_keys is None
    k_block_BxGxKxH = pad(k_block_BxGxMxH, 2, num_block_keys)
    values, values_specs = [], []
    if own_values:
        values = [pad(v_block_BxGxMxV, 2, num_block_keys), *[v_PxGxSxV] * fetches]
        values_specs = [pl.BlockSpec((1, 1, block_tile, width), block_index), *page_specs(width)]
    capacity = page_table_BxT.shape[1] * s
    channels = h + (width if own_values else 0)  # read of each key, once a tile of query rows
    tiles = num_slots // slot_tile
    out_BxAxQxV = pl.pallas_call(
        functools.partial(
            _kernel, block_steps=block_steps, fetches=fetches, fetch=fetch, parts=parts, page_size=s, heads=r,
            scale=scale, softcap=softcap, windowed=window is not None or chunk is not None,
            sparse=tiles > 1, has_sinks=bool(sinks), own_values=own_values,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(b, a, tiles, block_steps + context_steps),
            in_specs=[
                rows_spec(h),
                pl.BlockSpec((1, row_tile, 1), lambda i, ai, t, j, *scalars: (i, t, 0)),
                pl.BlockSpec((1, slot_tile, block_tile), mask_index),
                *[pl.BlockSpec((1, row_tile, 1), lambda i, ai, t, j, *scalars: (ai, 0, 0)) for _ in sinks],
                pl.BlockSpec((1, 1, block_tile, h), block_index),
                *page_specs(h),
                *values_specs,
            ],
            out_specs=rows_spec(width),
            scratch_shapes=[
                pltpu.VMEM((row_tile, 1), jnp.float32),
                pltpu.VMEM((row_tile, 1), jnp.float32),
                pltpu.VMEM((row_tile, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((b, a, num_slots * r, width), q_BxMxNxH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        # For XLA's scheduler, which can not see how many steps there will be: as if the cache were full.
        cost_estimate=pl.CostEstimate(
            flops=2 * b * m * n * (h + width) * (capacity + m),
            transcendentals=b * m * n * (capacity + m) * (1 if softcap is None else 2),
            bytes_accessed=b * (a * tiles * (capacity + m) * channels + n * m * (h + width)) * q_BxMxNxH.dtype.itemsize,
        ),
        interpret=interpret,
        name="block_attention",
    )(
        kv_head_A, page_table_BxT, begin_B, end_B, length_B,
        q_BxAxQxH, first_BxQx1, mask_ExMxK, *sinks, k_block_BxGxKxH, *[k_PxGxSxH] * fetches, *values,
    )  # fmt: skip
    out_BxMxAxRxV = out_BxAxQxV.reshape(b, a, num_slots, r, width)[:, :, :m].transpose(0, 2, 1, 3, 4)
    return out_BxMxAxRxV.reshape(b, m, n, width)


def _row_tiling(num_slots: int, num_heads: int, limit: int) -> tuple[int, int]:
    """(slots a tile, number of equal parts that the heads of a run are cut into).

    Slots are padded so that a tile is a whole number of slots and its rows a whole number of bf16 sublane tiles.
    The heads are cut where even the smallest tile with all of them would have more than `limit` rows.
    """
    for cuts in (c for c in range(1, num_heads + 1) if num_heads % c == 0):
        heads = num_heads // cuts
        step = SUBLANES // math.gcd(SUBLANES, heads)
        slots = min(round_up(num_slots, step), max(SUBLANES, limit // heads // SUBLANES * SUBLANES))
        if slots * heads <= limit:
            break
    return slots, cuts  # one head alone has few enough rows: the loop always breaks


def _kernel(
    head_ref, table_ref, begin_ref, end_ref, length_ref, q_ref, first_ref, mask_ref, *refs,
    block_steps: int, fetches: int, fetch: int, parts: int, page_size: int, heads: int, scale: float,
    softcap: float | None, windowed: bool, sparse: bool, has_sinks: bool, own_values: bool,
) -> None:  # fmt: skip
    *refs, out_ref, peak_ref, total_ref, mix_ref = refs
    sinks_ref, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    k_block_ref, *k_refs = refs[: 1 + fetches]
    v_block_ref, *v_refs = refs[1 + fetches :] if own_values else refs  # else the keys' first channels
    width = out_ref.shape[-1]
    row, step = pl.program_id(0), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        mix_ref[...] = jnp.zeros_like(mix_ref)
        if has_sinks:
            peak_ref[...] = jnp.maximum(sinks_ref[0], PEAK_FLOOR)
            total_ref[...] = jnp.ones_like(total_ref)  # at the floor too: the first visible score shrinks it to 0
        else:
            peak_ref[...] = jnp.full_like(peak_ref, PEAK_FLOOR)
            total_ref[...] = jnp.zeros_like(total_ref)

    def accumulate(k_KxH, v_KxV, visible_QxK):
        scores_QxK = capped(matmul(q_ref[0, 0], k_KxH, contract=(1, 1)) * scale, softcap)
        scores_QxK = jnp.where(visible_QxK, scores_QxK, MASKED)
        old_Qx1 = peak_ref[...]
        new_Qx1 = jnp.maximum(old_Qx1, scores_QxK.max(axis=1, keepdims=True))
        shrink_Qx1 = jnp.exp(old_Qx1 - new_Qx1)
        weights_QxK = jnp.exp(scores_QxK - new_Qx1)
        peak_ref[...] = new_Qx1
        total_ref[...] = shrink_Qx1 * total_ref[...] + weights_QxK.sum(axis=1, keepdims=True)
        mix_ref[...] = shrink_Qx1 * mix_ref[...] + matmul(weights_QxK.astype(v_KxV.dtype), v_KxV, contract=(1, 0))

    in_block = step < block_steps
    if sparse:  # a long chain: the tiles above the diagonal hold nothing
        in_block = in_block & (jnp.max(mask_ref[0].astype(jnp.float32)) > 0)

    @pl.when(in_block)
    def _():
        # Row q belongs to slot q // heads. A product with the 0/1 matrix that says so repeats each slot's mask
        # over its heads; the matrix unit is idle here, and repeating rows by shuffles is not cheap.
        shape = (q_ref.shape[2], mask_ref.shape[1])
        first_Qx = jax.lax.broadcasted_iota(jnp.int32, shape, 1) * heads
        row_Qx = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        spread_QxM = jnp.where((row_Qx >= first_Qx) & (row_Qx < first_Qx + heads), 1.0, 0.0).astype(jnp.bfloat16)
        visible_QxK = matmul(spread_QxM, mask_ref[0], contract=(1, 0)) > 0.5
        accumulate(k_block_ref[0, 0], v_block_ref[0, 0, :, :width], visible_QxK)

    f = begin_ref[row] + (step - block_steps) * fetches

    @pl.when((step >= block_steps) & (f < end_ref[row]))
    def _():
        page = div(f, parts)
        start = page * page_size + rem(f, parts) * fetch
        # The last part of a page may reach beyond it, and what lies there is another page's or nobody's.
        limit = jnp.minimum(length_ref[row], (page + fetches) * page_size)
        k_KxH = jnp.concatenate([ref[0, 0] for ref in k_refs], axis=0)
        v_KxV = jnp.concatenate([ref[0, 0, :, :width] for ref in v_refs], axis=0)
        # A weight of zero does not silence NaN: rows that no one may see are silenced themselves.
        key_Kx1 = start + jax.lax.broadcasted_iota(jnp.int32, (fetches * fetch, 1), 0)
        v_KxV = jnp.where(key_Kx1 < limit, v_KxV, jnp.zeros_like(v_KxV))
        key_1xK = start + jax.lax.broadcasted_iota(jnp.int32, (1, fetches * fetch), 1)
        visible_QxK = jnp.broadcast_to(key_1xK < limit, (q_ref.shape[2], fetches * fetch))
        if windowed:
            visible_QxK = visible_QxK & (key_1xK >= first_ref[0])
        accumulate(k_KxH, v_KxV, visible_QxK)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        # The sum is at least 1 wherever anything is visible, and the mix is 0 elsewhere.
        out_ref[0, 0] = (mix_ref[...] / jnp.maximum(total_ref[...], 1e-30)).astype(out_ref.dtype)


def _fetch_of(row_B: jax.Array, page_size: int, fetch: int, parts: int) -> jax.Array:
    return row_B // page_size * parts + row_B % page_size // fetch
