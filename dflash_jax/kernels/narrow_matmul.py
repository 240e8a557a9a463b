"""Products of a few rows with a weight matrix: what decoding spends its time on.

The kernel in C++ (`narrow_matmul.cc`) runs on CPU at the speed of memory, and a row's result has the same bits
whatever the number of rows. Elsewhere, and for many rows, XLA's product is the right one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.kernels import dispatch, native

MAX_ROWS = 16
_TARGETS = {jnp.dtype(jnp.float32): "dflash_narrow_matmul_f32", jnp.dtype(jnp.bfloat16): "dflash_narrow_matmul_bf16"}


def narrow_matmul(
    x_MxK: jax.Array,
    w_KxN: jax.Array,
    *,
    implementation: str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """x_MxK times w_KxN, sums in float32, in the dtype of x.

    Args:
      x_MxK, w_KxN: the native kernel takes float32 or bfloat16, both alike, of any size with 1 to 16 rows. w_KxN
        should be an array as it lies in memory: XLA copies a transposed one for the kernel.
      implementation: None takes the native kernel where it fits (those types and sizes, CPU, one device, a C++
        compiler; see `kernels.native`), else the reference. "reference" and "native" name one.
      mesh: None takes the mesh of the surrounding `jax.set_mesh`, if any. Programs over several devices get the
        reference, which XLA partitions.

    Raises:
      ValueError: `implementation` is unknown, or is "native" where it does not fit.
    """
    if implementation not in (None, dispatch.REFERENCE, dispatch.NATIVE):
        raise ValueError(
            f"implementation is {implementation!r}, must be None (by platform), {dispatch.REFERENCE!r} or "
            f"{dispatch.NATIVE!r}"
        )
    if implementation == dispatch.REFERENCE:
        return reference(x_MxK, w_KxN)
    obstacle = _obstacle(x_MxK, w_KxN, dispatch.context_mesh(mesh))
    if obstacle is None:
        return _narrow_matmul(x_MxK, w_KxN)
    if implementation == dispatch.NATIVE:
        raise ValueError(f"the native narrow_matmul does not fit: {obstacle}; leave `implementation` out")
    return reference(x_MxK, w_KxN)


def reference(x_MxK: jax.Array, w_KxN: jax.Array) -> jax.Array:
    """The product by XLA.

    Two facts of XLA on CPU are met here. A bf16 product falls into a scalar loop (ten times slower) unless its
    result type is float32; and even then a single row does, so it is computed twice.
    """
    single = x_MxK.shape[0] == 1 and x_MxK.dtype == jnp.bfloat16
    rows = jnp.concatenate([x_MxK, x_MxK]) if single else x_MxK
    y_MxN = jax.lax.dot_general(
        rows,
        w_KxN,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x_MxK.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (y_MxN[:1] if single else y_MxN).astype(x_MxK.dtype)


def _obstacle(x_MxK: jax.Array, w_KxN: jax.Array, mesh: Mesh | AbstractMesh | None) -> str | None:
    """Why the native kernel can not be used; None if it can."""
    if x_MxK.dtype != w_KxN.dtype or x_MxK.dtype not in _TARGETS:
        return f"the types are {x_MxK.dtype} and {w_KxN.dtype}, not both float32 or both bfloat16"
    if not 1 <= x_MxK.shape[0] <= MAX_ROWS:
        return f"there are {x_MxK.shape[0]} rows, not 1 to {MAX_ROWS}"
    if 0 in w_KxN.shape:
        return f"the weights are empty, {w_KxN.shape}"
    return native.obstacle(mesh)


@jax.custom_jvp
def _narrow_matmul(x_MxK: jax.Array, w_KxN: jax.Array) -> jax.Array:
    # Decided again where the platform is certain: a program traced on a CPU may be lowered for a TPU.
    return jax.lax.platform_dependent(x_MxK, w_KxN, cpu=_call, default=reference)


def _jvp(primals: tuple[jax.Array, ...], tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Tangents by XLA; those that are zero (of frozen weights, say) cost nothing."""
    (x_MxK, w_KxN), (dx_MxK, dw_KxN) = primals, tangents
    y_MxN = _narrow_matmul(x_MxK, w_KxN)
    parts = []
    if not isinstance(dx_MxK, SymbolicZero):
        parts.append(reference(dx_MxK, w_KxN))
    if not isinstance(dw_KxN, SymbolicZero):
        parts.append(reference(x_MxK, dw_KxN))
    return y_MxN, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y_MxN)


_narrow_matmul.defjvp(_jvp, symbolic_zeros=True)


def _call(x_MxK: jax.Array, w_KxN: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((x_MxK.shape[0], w_KxN.shape[1]), x_MxK.dtype)
    return jax.ffi.ffi_call(_TARGETS[x_MxK.dtype], result, vmap_method="sequential")(x_MxK, w_KxN)
