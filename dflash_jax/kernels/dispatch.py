"""Which implementation of a kernel runs, and over which mesh: decided while tracing, never while running."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from dflash_jax import sharding

REFERENCE = "reference"
PALLAS = "pallas"
PALLAS_INTERPRET = "pallas_interpret"
NATIVE = "native"  # C++ through XLA's foreign function interface, on CPU; not every kernel has it


def choose(implementation: str | None, mesh: Mesh | AbstractMesh | None = None) -> str:
    """The implementation to trace: the one asked for, else Pallas on TPU and the reference elsewhere.

    The platform is that of `mesh` if there is one (so that a program compiled ahead of time for a TPU
    topology on another machine gets TPU kernels), else JAX's default backend. GPUs run the reference
    through XLA: the Pallas kernels here are written for the TPU's memory and matrix unit.

    Raises:
      ValueError: `implementation` is no known name.
    """
    if implementation is None:
        return PALLAS if platform(mesh) == "tpu" else REFERENCE
    if implementation not in (REFERENCE, PALLAS, PALLAS_INTERPRET):
        raise ValueError(
            f"implementation is {implementation!r}, must be None (by platform), {REFERENCE!r}, {PALLAS!r} or "
            f"{PALLAS_INTERPRET!r}"
        )
    return implementation


def context_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """`mesh`, or else the mesh that `jax.set_mesh` or `jax.sharding.use_abstract_mesh` set, or None."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def needs_mapping(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether a kernel must be mapped over the mesh by hand, because XLA can not partition it.

    Not where there is one device, nor inside a `shard_map`, where the arrays are one device's already.
    """
    return mesh is not None and mesh.size > 1 and AxisType.Manual not in mesh.axis_types


def mesh_axis(mesh: Mesh | AbstractMesh, logical: str, *sizes: int) -> str | tuple[str, ...] | None:
    """The mesh axis or axes to cut dimensions of these sizes along; None where none divides evenly."""
    names = sharding.mesh_axes(mesh, logical, *sizes)
    return names[0] if len(names) == 1 else names or None


def platform(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform of `mesh`, else of JAX's default backend."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    device = getattr(mesh, "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
