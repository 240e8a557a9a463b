"""Products of rows, sorted by expert, with their experts' matrices (a grouped or ragged matrix product).

Two implementations. `jax.lax.ragged_dot` is an instruction of the TPU and GPU compilers. On CPU JAX lowers it to
a dense product of all rows with all experts. So a CPU goes through the rows in tiles, each tile within one expert,
and reads no expert that nobody chose. Measured on two cores, both busy with other work, 64 experts of 512 x 512, 8 a
token, milliseconds for 1, 16 and 256 tokens: ragged_dot 95, 149, 1160 (float32) and 56, 127, not tried (bfloat16);
tiles 1, 10, 22 and 0.5, 8, 14; the chosen matrices gathered, 7, 190 (float32) and 0.4, 167 (bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

RAGGED = "ragged_dot"
TILES = "tiles"

# The gradient of ragged_dot by its right side: rows are contracted, expert by expert.
_ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def expert_matmul(
    x_RxI: jax.Array, w_ExIxO: jax.Array, count_E: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Each row times the matrix of its expert, [R, O] in float32.

    Args:
      x_RxI: rows, those of expert 0 first, then those of expert 1, ...
      w_ExIxO: of the same dtype; products are summed in float32.
      count_E: int32, rows of each expert. Rows beyond their sum are no one's, and their result is zero.
      implementation: None (by the platform that the program is lowered for), "ragged_dot" or "tiles".

    Differentiable in reverse by rows and matrices; cotangents are rounded to the dtype of the rows.

    Raises:
      ValueError: the dtypes differ, or `implementation` is unknown.
    """
    if implementation not in (None, RAGGED, TILES):
        raise ValueError(
            f"implementation is {implementation!r}, must be None (by platform), {RAGGED!r} or {TILES!r}"
        )  # fmt: skip
    if x_RxI.dtype != w_ExIxO.dtype:
        raise ValueError(f"rows are {x_RxI.dtype} and matrices {w_ExIxO.dtype}, must be of one dtype")
    return _expert_matmul(implementation, x_RxI, w_ExIxO, count_E)


def _choose(implementation: str | None, tiles: Callable, ragged: Callable, *arrays: jax.Array) -> jax.Array:
    if implementation is None:
        # Not `dispatch.choose`: a program traced on a CPU may be lowered for a TPU, and only then is it known.
        return jax.lax.platform_dependent(*arrays, cpu=tiles, default=ragged)
    return (tiles if implementation == TILES else ragged)(*arrays)


def _forward(implementation: str | None, x_RxI, w_ExIxO, count_E):
    return _choose(implementation, _tiled, _ragged, x_RxI, w_ExIxO, count_E), (x_RxI, w_ExIxO, count_E)


def _backward(implementation: str | None, saved, gradient_RxO):
    x_RxI, w_ExIxO, count_E = saved
    # Results are rounded to the rows' dtype by most callers, so most gradients hold nothing more.
    gradient_RxO = gradient_RxO.astype(x_RxI.dtype)
    w_ExOxI = w_ExIxO.swapaxes(1, 2)
    dx_RxI = _choose(implementation, _tiled, _ragged, gradient_RxO, w_ExOxI, count_E)
    dw_ExIxO = _choose(implementation, _tiled_outer, _ragged_outer, x_RxI, gradient_RxO, count_E)
    return dx_RxI.astype(x_RxI.dtype), dw_ExIxO.astype(w_ExIxO.dtype), None


_expert_matmul = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0,))
_expert_matmul.defvjp(_forward, _backward)


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _ragged(x_RxI: jax.Array, w_ExIxO: jax.Array, count_E: jax.Array) -> jax.Array:
    y_RxO = jax.lax.ragged_dot(
        x_RxI, w_ExIxO, count_E, precision=_precision(x_RxI), preferred_element_type=jnp.float32
    )  # fmt: skip
    # What ragged_dot leaves in rows of no group is not specified.
    owned_R = jnp.arange(x_RxI.shape[0], dtype=jnp.int32) < count_E.sum()
    return jnp.where(owned_R[:, None], y_RxO, 0.0)


def _ragged_outer(x_RxI: jax.Array, gradient_RxO: jax.Array, count_E: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(
        x_RxI, gradient_RxO, count_E, _ROWS_CONTRACTED, precision=_precision(x_RxI),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _over_tiles(body: Callable, init: jax.Array, rows: int, count_E: jax.Array) -> jax.Array:
    """carry = body(carry, expert, first row, used_T) for each tile of T rows, in the order of the rows.

    Only the first rows of a tile, where used_T, are of its expert: an expert's last tile reaches into the next
    expert's rows, or beyond the last row.
    """
    size = _tile_size(rows, count_E.shape[0])
    tiles_E = -(-count_E // size)
    last_E, end_E = jnp.cumsum(tiles_E), jnp.cumsum(count_E)

    def step(i, carry):
        expert = (last_E <= i).sum(dtype=jnp.int32)
        first = end_E[expert] - count_E[expert] + (i - last_E[expert] + tiles_E[expert]) * size
        used_T = jnp.arange(size, dtype=jnp.int32) < end_E[expert] - first
        return body(carry, expert, first, used_T)

    return jax.lax.fori_loop(0, last_E[-1], step, init)


def _tile_size(rows: int, experts: int) -> int:
    # Small tiles waste little where an expert has few rows; a product of 8 rows takes about as long as of one.
    return 8 if rows <= 32 * experts else 64


def _tiled(x_RxI: jax.Array, w_ExIxO: jax.Array, count_E: jax.Array) -> jax.Array:
    rows, width = x_RxI.shape[0], w_ExIxO.shape[2]
    size = _tile_size(rows, count_E.shape[0])
    padded = jnp.pad(x_RxI, ((0, size), (0, 0)))

    def body(y, expert, first, used_T):
        tile_TxI = jax.lax.dynamic_slice_in_dim(padded, first, size)

        def product():
            w_IxO = jax.lax.dynamic_index_in_dim(w_ExIxO, expert, 0, keepdims=False)
            return jax.lax.dot_general(
                tile_TxI, w_IxO, (((1,), (0,)), ((), ())), precision=_precision(x_RxI),
                preferred_element_type=jnp.float32,
            )  # fmt: skip

        # Every tile has rows, which XLA can not know: without a condition it would turn the bf16 matrices of
        # all experts into float32, once in front of the loop.
        y_TxO = jax.lax.cond(used_T[0], product, lambda: jnp.zeros((size, width), jnp.float32))
        # Rows that are not this tile's are written again by those that they belong to.
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(used_T[:, None], y_TxO, 0.0), first, 0)

    return _over_tiles(body, jnp.zeros((rows + size, width), jnp.float32), rows, count_E)[:rows]


def _tiled_outer(x_RxI: jax.Array, gradient_RxO: jax.Array, count_E: jax.Array) -> jax.Array:
    rows, experts = x_RxI.shape[0], count_E.shape[0]
    size = _tile_size(rows, experts)
    padded_x, padded_gradient = (jnp.pad(array, ((0, size), (0, 0))) for array in (x_RxI, gradient_RxO))

    def body(dw_ExIxO, expert, first, used_T):
        tile_TxI = jax.lax.dynamic_slice_in_dim(padded_x, first, size)
        tile_TxO = jax.lax.dynamic_slice_in_dim(padded_gradient, first, size)
        outer_IxO = jax.lax.dot_general(
            jnp.where(used_T[:, None], tile_TxI, jnp.zeros_like(tile_TxI)), tile_TxO, (((0,), (0,)), ((), ())),
            precision=_precision(x_RxI), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return dw_ExIxO.at[expert].add(outer_IxO)

    return _over_tiles(body, jnp.zeros((experts, x_RxI.shape[1], gradient_RxO.shape[1]), jnp.float32), rows, count_E)
