"""What the Pallas kernels of this package share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

SUBLANES = 16  # rows of a bf16 tile; a float32 tile has 8


def matmul(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of two matrices over the named axis of each, accumulated and returned in float32.

    The matrix unit multiplies bf16. Of float32 it takes several passes: all of them here, as the references
    do, since a drafted token is kept or dropped on the last bits of two logits.
    """
    return jax.lax.dot_general(
        x,
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`x` with zeros (False) behind, so that `axis` has `size` entries."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return x if size == x.shape[axis] else jnp.pad(x, widths)


def div(x: jax.Array, y: int) -> jax.Array:
    """x // y for int32 x >= 0.

    For use inside kernels and index maps: `//` and `%` round towards minus infinity by way of a sign, whose
    lowering asks the default device for its TPU generation and so fails when compiling on another machine.
    """
    return jax.lax.div(x, jnp.int32(y))


def rem(x: jax.Array, y: int) -> jax.Array:
    """x % y for int32 x >= 0; see `div`."""
    return jax.lax.rem(x, jnp.int32(y))
