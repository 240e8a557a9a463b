"""Meshes, and which logical axis lies on which mesh axis: the only file that knows mesh axis names."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA = "data"
TENSOR = "tensor"

# Logical axis -> mesh axis. Axes that are not listed are replicated.
RULES = {
    "batch": DATA,
    "pages": DATA,
    "vocab": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
}


def make_mesh(data: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, tensor) mesh over the first data * tensor devices.

    Axis types are Auto: GSPMD partitions from the shardings of parameters and caches.

    Raises:
      ValueError: fewer devices than data * tensor.
    """
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or tensor < 1 or data * tensor > len(devices):
        raise ValueError(
            f"a mesh of data={data} x tensor={tensor} needs {data * tensor} devices, there are {len(devices)}"
        )
    return jax.make_mesh(
        (data, tensor),
        (DATA, TENSOR),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[: data * tensor],
    )


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """While tracing: kernels that XLA can not partition are mapped over this mesh."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def named_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with these logical axes.

    A dimension that its mesh axis does not divide is replicated, never padded: three KV heads on four
    devices stay whole, and the result is right.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES.get(axis) if axis is not None else None
        spec.append(name if name is not None and size % mesh.shape[name] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def data_parallel_size(mesh: Mesh | None) -> int:
    """How many shards the batch is cut into; the number of rows of a batch must be a multiple of it."""
    return 1 if mesh is None else mesh.shape[DATA]


def shard_tree(tree: Any, axes_tree: Any, mesh: Mesh | None) -> Any:
    """Lays a pytree of arrays out on the mesh by a pytree of the same structure with logical axes."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda x, axes: jax.device_put(x, named_sharding(mesh, axes, x.shape)),
        tree,
        axes_tree,
    )
