"""`anchor_attention` as Pallas kernels for TPUs, forward and backward.

All slots of all blocks that share a KV head are the query rows of one matrix, so many that here they lie on
the lanes: scores are [keys, queries], softmax reductions run over sublanes (plain vector additions), and what
belongs to a query (its limits, its log-sum-exp) is a dense row instead of a column that wastes 127 lanes of
128. Queries, outputs and their gradients therefore travel as [H, Q]; XLA makes that layout in the transposition
that brings heads before slots anyway.

A grid step takes one tile of queries (a few whole blocks) and one tile of keys: either the keys of those
blocks themselves, as one small product under a block-diagonal mask, or a stretch of context. Tiles of context
at or beyond the largest anchor of the query tile, or before its window or document, are neither fetched nor
computed; anchors in ascending order make that half of all tiles.

The forward pass saves the log-sum-exp of each query; the backward pass makes the weights again from it (Dao,
2023): one kernel goes over the keys of each query tile (gradients of queries and of block keys and values),
one over the queries of each context tile (gradients of context keys and values).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels.block_attention import MASKED, PEAK_FLOOR
from dflash_jax.kernels.pallas_common import SUBLANES, matmul, pad, round_up

QUERY_TILE = 512
KEY_TILE = 512  # a tile of scores is 1 MiB; the backward pass holds about five of them in 16 MiB of VMEM
LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static sizes of one call.

    Attributes:
      blocks: training blocks a query tile.
      queries: query rows a block, K * r padded to whole sublanes.
      block_keys: keys a block, K padded.
      context: context rows a key tile.
      scale: factor on the scores.
      interpret: run the kernels through the interpreter (True), or in the TPU simulator.
    """

    blocks: int
    queries: int
    block_keys: int
    context: int
    scale: float
    interpret: bool | pltpu.InterpretParams

    @property
    def query_tile(self) -> int:
        return self.blocks * self.queries

    @property
    def block_tile(self) -> int:
        return self.blocks * self.block_keys


def choose_tiles(
    num_anchors: int,
    block_size: int,
    heads: int,
    num_context: int,
    scale: float,
    interpret: bool | pltpu.InterpretParams,
) -> Tiles:
    """Query tiles of whole blocks and whole lanes, about QUERY_TILE wide."""
    queries = round_up(block_size * heads, SUBLANES)
    unit = LANES // math.gcd(LANES, queries)  # so many blocks fill whole lanes
    blocks = unit * max(1, QUERY_TILE // (unit * queries))
    blocks = min(blocks, round_up(num_anchors, unit))
    context = max(LANES, KEY_TILE * QUERY_TILE // max(QUERY_TILE, blocks * queries) // LANES * LANES)
    context = min(context, round_up(num_context, SUBLANES))
    return Tiles(blocks, queries, round_up(block_size, SUBLANES), context, scale, interpret)


def anchor_attention_pallas(
    q_BxAxKxNxH: jax.Array,
    k_context_BxGxSxH: jax.Array,
    v_context_BxGxSxH: jax.Array,
    k_block_BxAxGxKxH: jax.Array,
    v_block_BxAxGxKxH: jax.Array,
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    visibility_KxK: jax.Array,
    document_BxS: jax.Array | None,
    *,
    window: int | None,
    scale: float,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `anchor_attention`; on one device. The rows of a document must lie together, as packing lays them."""
    b, a, k, n, h = q_BxAxKxNxH.shape
    g, s = k_context_BxGxSxH.shape[1:3]
    r = n // g
    tiles = choose_tiles(a, k, r, s, scale, interpret)
    num_anchors, num_context = round_up(a, tiles.blocks), round_up(s, tiles.context)

    # [B, G, H, Q]: query rows are blocks times (slots times heads of the group, padded).
    q_BxAxGxHxKxR = q_BxAxKxNxH.reshape(b, a, k, g, r, h).transpose(0, 1, 3, 5, 2, 4)
    q_BxAxGxHxQ = pad(pad(q_BxAxGxHxKxR.reshape(b, a, g, h, k * r), 4, tiles.queries), 1, num_anchors)
    q_BxGxHxQ = q_BxAxGxHxQ.transpose(0, 2, 3, 1, 4).reshape(b, g, h, num_anchors * tiles.queries)

    def block_rows(x_BxAxGxKxH: jax.Array) -> jax.Array:
        x_BxAxGxKxH = pad(pad(x_BxAxGxKxH, 3, tiles.block_keys), 1, num_anchors)
        return x_BxAxGxKxH.swapaxes(1, 2).reshape(b, g, num_anchors * tiles.block_keys, h)

    # A query sees context rows first <= row < limit.
    limit_BxA = jnp.where(keep_BxA, jnp.clip(anchor_BxA, 0, s), 0).astype(jnp.int32)
    first_BxAxK = jnp.zeros((b, a, k), jnp.int32)
    if document_BxS is not None:
        start_BxS = _document_starts(document_BxS)
        start_BxA = jnp.take_along_axis(start_BxS, jnp.clip(anchor_BxA, 0, s - 1), axis=1)
        first_BxAxK = jnp.maximum(first_BxAxK, start_BxA[:, :, None])
    if window is not None:
        position_BxAxK = anchor_BxA[:, :, None] + jnp.arange(k, dtype=jnp.int32)[None, None]
        first_BxAxK = jnp.maximum(first_BxAxK, position_BxAxK - window + 1)
    first_BxAxK = jnp.where(limit_BxA[:, :, None] > 0, jnp.minimum(first_BxAxK, limit_BxA[:, :, None]), s)
    bounds_Bx2xQ = jnp.stack([jnp.broadcast_to(limit_BxA[:, :, None], (b, a, k)), first_BxAxK], axis=1)
    bounds_Bx2xAxQ = pad(jnp.repeat(bounds_Bx2xQ, r, axis=3), 3, tiles.queries)
    # Padded queries see nothing of the context: their limit is 0. `first` of padding must not widen the tile.
    bounds_Bx2xAxQ = pad(bounds_Bx2xAxQ, 2, num_anchors)
    limit_BxTxQ, first_BxTxQ = bounds_Bx2xAxQ.reshape(b, 2, -1, tiles.query_tile).swapaxes(0, 1)
    end_BxT = pl.cdiv(limit_BxTxQ.max(axis=2), tiles.context)
    begin_BxT = jnp.where(limit_BxTxQ > first_BxTxQ, first_BxTxQ, s).min(axis=2) // tiles.context
    begin_BxT = jnp.minimum(begin_BxT, end_BxT)

    out_BxGxHxQ = _attend(
        tiles, q_BxGxHxQ,
        pad(k_context_BxGxSxH, 2, num_context), pad(v_context_BxGxSxH, 2, num_context),
        block_rows(k_block_BxAxGxKxH), block_rows(v_block_BxAxGxKxH),
        bounds_Bx2xAxQ.reshape(b, 2, -1), _diagonal_mask(tiles, visibility_KxK, window, r), begin_BxT, end_BxT,
    )  # fmt: skip
    out_BxGxHxAxQ = out_BxGxHxQ.reshape(b, g, h, num_anchors, tiles.queries)[:, :, :, :a, : k * r]
    out_BxAxKxGxRxH = out_BxGxHxAxQ.reshape(b, g, h, a, k, r).transpose(0, 3, 4, 1, 5, 2)
    # Padding blocks: zero out, and through `where` zero gradient in.
    return jnp.where(keep_BxA[:, :, None, None, None], out_BxAxKxGxRxH.reshape(b, a, k, n, h), 0)


def _document_starts(document_BxS: jax.Array) -> jax.Array:
    """The row at which the document of each row begins."""
    row_S = jnp.arange(document_BxS.shape[1], dtype=jnp.int32)
    changes_BxS = document_BxS != jnp.roll(document_BxS, 1, axis=1)
    return jax.lax.cummax(jnp.where(changes_BxS, row_S[None], 0), axis=1)


def _diagonal_mask(tiles: Tiles, visibility_KxK: jax.Array, window: int | None, heads: int) -> jax.Array:
    """[block keys, queries] of one tile, the same for all tiles: a block sees itself, as far as it may."""
    k = visibility_KxK.shape[0]
    slot_K = jnp.arange(k, dtype=jnp.int32)
    if window is not None:
        visibility_KxK = visibility_KxK & (slot_K[:, None] - slot_K[None] < window)
    one_KxQ = jnp.repeat(visibility_KxK.T.astype(jnp.bfloat16), heads, axis=1)
    one_KxQ = pad(pad(one_KxQ, 0, tiles.block_keys), 1, tiles.queries)
    return jnp.kron(jnp.eye(tiles.blocks, dtype=jnp.bfloat16), one_KxQ)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiles, q_BxGxHxQ, k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ, begin_BxT, end_BxT):
    """out_BxGxHxQ of queries, context, block keys (J) and where they see each other."""
    return _attend_forward(
        tiles, q_BxGxHxQ, k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ, begin_BxT, end_BxT
    )[0]


def _attend_forward(tiles: Tiles, *arrays: jax.Array):
    q_BxGxHxQ, k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ, begin_BxT, end_BxT = arrays
    b, g, h, num_queries = q_BxGxHxQ.shape
    specs = _Specs(tiles, h, key_major=False)
    out_BxGxHxQ, lse_BxGx1xQ = pl.pallas_call(
        functools.partial(_forward_kernel, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, g, num_queries // tiles.query_tile, 1 + k_BxGxSxH.shape[2] // tiles.context),
            in_specs=[specs.query(h), specs.context, specs.context, specs.block, specs.block, specs.bounds, specs.mask],
            out_specs=[specs.query(h), specs.query(1)],
            scratch_shapes=[
                pltpu.VMEM((1, tiles.query_tile), jnp.float32),
                pltpu.VMEM((1, tiles.query_tile), jnp.float32),
                pltpu.VMEM((h, tiles.query_tile), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_BxGxHxQ.shape, q_BxGxHxQ.dtype),
            jax.ShapeDtypeStruct((b, g, 1, num_queries), jnp.float32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=_cost(q_BxGxHxQ, k_BxGxSxH, products=2),
        interpret=tiles.interpret,
        name="anchor_attention_forward",
    )(begin_BxT, end_BxT, q_BxGxHxQ, k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ)
    return out_BxGxHxQ, (*arrays, out_BxGxHxQ, lse_BxGx1xQ)


def _attend_backward(tiles: Tiles, saved, grad_BxGxHxQ: jax.Array):
    (q_BxGxHxQ, k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ, begin_BxT, end_BxT,
     out_BxGxHxQ, lse_BxGx1xQ) = saved  # fmt: skip
    b, g, h, num_queries = q_BxGxHxQ.shape
    query_tiles, context_tiles = num_queries // tiles.query_tile, k_BxGxSxH.shape[2] // tiles.context
    # What the softmax subtracts: sum over keys of weight times its gradient = out . grad.
    product = out_BxGxHxQ.astype(jnp.float32) * grad_BxGxHxQ.astype(jnp.float32)
    delta_BxGx1xQ = product.sum(axis=2, keepdims=True)

    specs = _Specs(tiles, h, key_major=False)
    dq_BxGxHxQ, dkb_BxGxJxH, dvb_BxGxJxH = pl.pallas_call(
        functools.partial(_query_kernel, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, g, query_tiles, 1 + context_tiles),
            in_specs=[
                specs.query(h), specs.query(h), specs.query(1), specs.query(1),
                specs.context, specs.context, specs.block, specs.block, specs.bounds, specs.mask,
            ],
            out_specs=[specs.query(h), specs.block, specs.block],
            scratch_shapes=[pltpu.VMEM((h, tiles.query_tile), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BxGxHxQ, kb_BxGxJxH, vb_BxGxJxH)],
        compiler_params=_compiler_params(),
        cost_estimate=_cost(q_BxGxHxQ, k_BxGxSxH, products=3),
        interpret=tiles.interpret,
        name="anchor_attention_backward_queries",
    )(
        begin_BxT, end_BxT, q_BxGxHxQ, grad_BxGxHxQ, lse_BxGx1xQ, delta_BxGx1xQ,
        k_BxGxSxH, v_BxGxSxH, kb_BxGxJxH, vb_BxGxJxH, bounds_Bx2xQ, mask_JxQ,
    )  # fmt: skip

    specs = _Specs(tiles, h, key_major=True)
    dk_BxGxSxH, dv_BxGxSxH = pl.pallas_call(
        functools.partial(_context_kernel, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, g, context_tiles, query_tiles),
            in_specs=[
                specs.query(h), specs.query(h), specs.query(1), specs.query(1),
                specs.context, specs.context, specs.bounds,
            ],
            out_specs=[specs.context, specs.context],
            scratch_shapes=[pltpu.VMEM((tiles.context, h), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BxGxSxH, v_BxGxSxH)],
        compiler_params=_compiler_params(),
        cost_estimate=_cost(q_BxGxHxQ, k_BxGxSxH, products=4),
        interpret=tiles.interpret,
        name="anchor_attention_backward_context",
    )(
        begin_BxT, end_BxT, q_BxGxHxQ, grad_BxGxHxQ, lse_BxGx1xQ, delta_BxGx1xQ,
        k_BxGxSxH, v_BxGxSxH, bounds_Bx2xQ,
    )  # fmt: skip
    return dq_BxGxHxQ, dk_BxGxSxH, dv_BxGxSxH, dkb_BxGxJxH, dvb_BxGxJxH, None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Specs:
    """Block specs. Grid (row, head, query tile, step), or with `key_major` (row, head, context tile, query tile)."""

    def __init__(self, tiles: Tiles, h: int, key_major: bool):
        def query_tile(i, x, y, begin, end):
            if not key_major:
                return x
            # A query tile that does not see this context tile is not fetched: tile 0 stands in for all of them.
            return jnp.where((begin[i, y] <= x) & (x < end[i, y]), y, 0)

        def context_tile(i, x, y, begin, end):
            if key_major:
                return x
            # Step 0 is the block itself; steps beyond the last tile that is seen wait there.
            return jnp.maximum(jnp.minimum(begin[i, x] + jnp.maximum(y - 1, 0), end[i, x] - 1), 0)

        self._tiles, self._query_tile = tiles, query_tile
        self.context = pl.BlockSpec(
            (1, 1, tiles.context, h), lambda i, gi, x, y, *ranges: (i, gi, context_tile(i, x, y, *ranges), 0)
        )
        self.block = pl.BlockSpec((1, 1, tiles.block_tile, h), lambda i, gi, x, y, *ranges: (i, gi, x, 0))
        self.mask = pl.BlockSpec((tiles.block_tile, tiles.query_tile), lambda i, gi, x, y, *ranges: (0, 0))
        self.bounds = pl.BlockSpec(
            (1, 2, tiles.query_tile), lambda i, gi, x, y, *ranges: (i, 0, query_tile(i, x, y, *ranges))
        )

    def query(self, rows: int) -> pl.BlockSpec:
        """A tile of a [B, G, rows, Q] array."""
        return pl.BlockSpec(
            (1, 1, rows, self._tiles.query_tile),
            lambda i, gi, x, y, *ranges: (i, gi, 0, self._query_tile(i, x, y, *ranges)),
        )


def _forward_kernel(
    begin_ref, end_ref, q_ref, k_ref, v_ref, kb_ref, vb_ref, bounds_ref, mask_ref,
    out_ref, lse_ref, peak_ref, total_ref, mix_ref, *, tiles: Tiles,
) -> None:  # fmt: skip
    step = pl.program_id(3)

    def accumulate(k_KxH, v_KxH, visible_KxQ):
        scores_KxQ = jnp.where(visible_KxQ, matmul(k_KxH, q_ref[0, 0], contract=(1, 0)) * tiles.scale, MASKED)
        old_1xQ = peak_ref[...]
        new_1xQ = jnp.maximum(old_1xQ, scores_KxQ.max(axis=0, keepdims=True))
        shrink_1xQ = jnp.exp(old_1xQ - new_1xQ)
        weights_KxQ = jnp.exp(scores_KxQ - new_1xQ)
        peak_ref[...] = new_1xQ
        total_ref[...] = shrink_1xQ * total_ref[...] + weights_KxQ.sum(axis=0, keepdims=True)
        mix_ref[...] = shrink_1xQ * mix_ref[...] + matmul(v_KxH, weights_KxQ.astype(v_KxH.dtype), contract=(0, 0))

    @pl.when(step == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, PEAK_FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        mix_ref[...] = jnp.zeros_like(mix_ref)
        accumulate(kb_ref[0, 0], vb_ref[0, 0], _in_block(mask_ref))

    tile = begin_ref[pl.program_id(0), pl.program_id(2)] + step - 1

    @pl.when((step > 0) & (tile < end_ref[pl.program_id(0), pl.program_id(2)]))
    def _():
        accumulate(k_ref[0, 0], v_ref[0, 0], _in_context(bounds_ref, tile, tiles))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        total_1xQ = total_ref[...]  # at least 1 wherever anything is visible, else 0
        seen_1xQ = jnp.maximum(total_1xQ, 1e-30)
        out_ref[0, 0] = (mix_ref[...] / seen_1xQ).astype(out_ref.dtype)
        # 0 where nothing is visible: exp(MASKED - 0) is 0 in the backward pass.
        lse_ref[0, 0] = jnp.where(total_1xQ > 0, peak_ref[...] + jnp.log(seen_1xQ), 0.0)


def _query_kernel(
    begin_ref, end_ref, q_ref, grad_ref, lse_ref, delta_ref, k_ref, v_ref, kb_ref, vb_ref, bounds_ref, mask_ref,
    dq_ref, dkb_ref, dvb_ref, sum_ref, *, tiles: Tiles,
) -> None:  # fmt: skip
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _():
        weights_KxQ, slopes_KxQ = _weights_and_slopes(
            q_ref, grad_ref, lse_ref, delta_ref, kb_ref, vb_ref, _in_block(mask_ref), tiles
        )
        sum_ref[...] = matmul(kb_ref[0, 0], slopes_KxQ, contract=(0, 0))
        dkb_ref[0, 0] = matmul(slopes_KxQ, q_ref[0, 0], contract=(1, 1)).astype(dkb_ref.dtype)
        dvb_ref[0, 0] = matmul(weights_KxQ, grad_ref[0, 0], contract=(1, 1)).astype(dvb_ref.dtype)

    tile = begin_ref[pl.program_id(0), pl.program_id(2)] + step - 1

    @pl.when((step > 0) & (tile < end_ref[pl.program_id(0), pl.program_id(2)]))
    def _():
        _, slopes_KxQ = _weights_and_slopes(
            q_ref, grad_ref, lse_ref, delta_ref, k_ref, v_ref, _in_context(bounds_ref, tile, tiles), tiles
        )
        sum_ref[...] += matmul(k_ref[0, 0], slopes_KxQ, contract=(0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dq_ref[0, 0] = sum_ref[...].astype(dq_ref.dtype)


def _context_kernel(
    begin_ref, end_ref, q_ref, grad_ref, lse_ref, delta_ref, k_ref, v_ref, bounds_ref,
    dk_ref, dv_ref, k_sum_ref, v_sum_ref, *, tiles: Tiles,
) -> None:  # fmt: skip
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    @pl.when((begin_ref[row, step] <= tile) & (tile < end_ref[row, step]))
    def _():
        weights_KxQ, slopes_KxQ = _weights_and_slopes(
            q_ref, grad_ref, lse_ref, delta_ref, k_ref, v_ref, _in_context(bounds_ref, tile, tiles), tiles
        )
        k_sum_ref[...] += matmul(slopes_KxQ, q_ref[0, 0], contract=(1, 1))
        v_sum_ref[...] += matmul(weights_KxQ, grad_ref[0, 0], contract=(1, 1))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dk_ref[0, 0] = k_sum_ref[...].astype(dk_ref.dtype)
        dv_ref[0, 0] = v_sum_ref[...].astype(dv_ref.dtype)


def _weights_and_slopes(q_ref, grad_ref, lse_ref, delta_ref, k_ref, v_ref, visible_KxQ, tiles: Tiles):
    """The softmax weights, made again, and the gradient of the unscaled scores; in the dtype of k and v."""
    scores_KxQ = jnp.where(visible_KxQ, matmul(k_ref[0, 0], q_ref[0, 0], contract=(1, 0)) * tiles.scale, MASKED)
    weights_KxQ = jnp.exp(scores_KxQ - lse_ref[0, 0])
    by_weight_KxQ = matmul(v_ref[0, 0], grad_ref[0, 0], contract=(1, 0))
    slopes_KxQ = weights_KxQ * (by_weight_KxQ - delta_ref[0, 0]) * tiles.scale
    return weights_KxQ.astype(v_ref.dtype), slopes_KxQ.astype(k_ref.dtype)


def _in_block(mask_ref) -> jax.Array:
    return mask_ref[...].astype(jnp.float32) > 0.5


def _in_context(bounds_ref, tile: jax.Array, tiles: Tiles) -> jax.Array:
    shape = (tiles.context, tiles.query_tile)
    row_KxQ = tile * tiles.context + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row_KxQ < bounds_ref[0, 0:1]) & (row_KxQ >= bounds_ref[0, 1:2])


def _compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _cost(q_BxGxHxQ: jax.Array, k_BxGxSxH: jax.Array, products: int) -> pl.CostEstimate:
    """For XLA's scheduler: half of the context is before the anchor, on average."""
    (b, g, h, num_queries), num_context = q_BxGxHxQ.shape, k_BxGxSxH.shape[2]
    scores = b * g * num_queries * num_context // 2
    return pl.CostEstimate(
        flops=2 * products * scores * h,
        transcendentals=scores,
        bytes_accessed=(2 * q_BxGxHxQ.size + 2 * k_BxGxSxH.size) * q_BxGxHxQ.dtype.itemsize,
    )
