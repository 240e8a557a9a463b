"""Meshes, and which logical axis lies on which mesh axis: the only file that knows mesh axis names.

data    rows of a batch; parameters are copied
fsdp    rows of a batch, and each parameter cut along its hidden dimension, gathered where it is used
expert  experts of a mixture; what is no expert is cut along it as along `tensor`, where it divides
tensor  heads, MLP channels and vocabulary
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import ConfigError

DATA = "data"
FSDP = "fsdp"
EXPERT = "expert"
TENSOR = "tensor"
AXES = (DATA, FSDP, EXPERT, TENSOR)

# Attributes of devices: what they lie in.
_PROCESS, _SLICE = "process_index", "slice_index"
_PLURAL = {_PROCESS: "processes", _SLICE: "slices"}

# Logical axis -> mesh axes, major first. Logical axes that are not listed are replicated.
RULES = {
    "batch": (DATA, FSDP),
    "pages": (DATA, FSDP),
    "embed": (FSDP,),
    "experts": (EXPERT,),
    "vocab": (TENSOR, EXPERT),
    "kv_heads": (TENSOR,),
    "mlp": (TENSOR, EXPERT),
}


def make_mesh(
    data: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None, *, fsdp: int = 1, expert: int = 1
) -> Mesh:
    """A (data, fsdp, expert, tensor) mesh over the first of the devices.

    Axis types are Auto: GSPMD partitions from the shardings of parameters and caches. Where the devices are those of
    several processes (hosts of a slice) and `data` divides over them, each process is a part of the data axis, so that
    it holds whole what the other axes cut; else each slice is, where there are several. See `grid_of_parts`.

    Raises:
      ValueError: an axis below 1, fewer devices than the product of the axes, or see `grid_of_parts`.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = (data, fsdp, expert, tensor)
    if min(shape) < 1 or math.prod(shape) > len(devices):
        raise ValueError(
            f"a mesh of data={data} x fsdp={fsdp} x expert={expert} x tensor={tensor} needs {math.prod(shape)} "
            f"devices, there are {len(devices)}; every axis must be at least 1"
        )
    devices = devices[: math.prod(shape)]
    types = (AxisType.Auto,) * len(AXES)
    processes, slices = (collections.Counter(_places(devices, name)) for name in (_PROCESS, _SLICE))
    if len(processes) > 1 and data % len(processes) == 0 and len(set(processes.values())) == 1:
        return Mesh(grid_of_parts(shape, devices, _PROCESS), AXES, axis_types=types)
    if len(slices) > 1:
        return Mesh(grid_of_parts(shape, devices, _SLICE), AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def _places(devices: Sequence[jax.Device], attribute: str) -> list[int]:
    return [getattr(device, attribute, 0) for device in devices]


def grid_of_parts(
    shape: tuple[int, int, int, int], devices: Sequence[jax.Device], attribute: str = _SLICE
) -> np.ndarray:
    """Devices in the order of a (data, fsdp, expert, tensor) mesh, each slice, or each process, a part of `data`.

    The network between slices is far slower than the one within, and along `data` there is one sum of gradients a step
    and nothing else. Left to itself, JAX lays axes along the torus of a slice: rows of data=4 x fsdp=4 on v6e:4x4 would
    then be lines of four chips, each of two hosts, and no host would have a parameter whole.

    Args:
      attribute: of devices, what makes a part: "slice_index" or "process_index".

    Raises:
      ValueError: only a piece of a part is in it, or `data` can not be cut into that many.
    """
    parts = collections.Counter(_places(devices, attribute))
    data, *within = shape
    if len(set(parts.values())) > 1 or data % len(parts):
        raise ValueError(
            f"data={data}, but the devices lie in {_PLURAL[attribute]} of {', '.join(map(str, parts.values()))}: whole "
            f"{_PLURAL[attribute]} are parts of the data axis, so data must be a multiple of their number, the mesh as "
            "large as all"
        )
    # Processes of a slice stay neighbours.
    places = zip(_places(devices, _SLICE), _places(devices, attribute), range(len(devices)), strict=True)
    return mesh_utils.create_hybrid_device_mesh(
        (data // len(parts), *within), (len(parts), 1, 1, 1), [devices[i] for *_, i in sorted(places)],
        process_is_granule=attribute == _PROCESS, should_sort_granules_by_key=False, allow_split_physical_axes=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The `mesh` section of a config: devices along each axis."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"mesh.{name} is {value!r}, must be a whole number, at least 1")

    @property
    def size(self) -> int:
        """Devices of the whole mesh."""
        return self.data * self.fsdp * self.expert * self.tensor

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
        """`make_mesh`; None for one of this machine's devices, which needs no mesh.

        Raises:
          ConfigError: there are fewer devices, or several processes and a mesh that leaves devices of theirs out.
        """
        if devices is None and jax.process_count() > 1 and self.size != jax.device_count():
            raise ConfigError(
                f"mesh has {self.size} devices ({dataclasses.asdict(self)}), must use all {jax.device_count()} of the "
                f"{jax.process_count()} processes"
            )
        if self.size == 1 and devices is None:
            return None
        try:
            return make_mesh(self.data, self.tensor, devices, fsdp=self.fsdp, expert=self.expert)
        except ValueError as error:
            raise ConfigError(f"mesh: {error}") from error


def mesh_axes(
    mesh: Mesh | AbstractMesh, logical: str | None, *sizes: int, taken: Sequence[str] = ()
) -> tuple[str, ...]:
    """The mesh axes to cut dimensions of these sizes along: as many of the logical axis's, major first, as divide
    every size. Axes of size 1 and axes in `taken` are left out; nothing is ever padded."""
    names: tuple[str, ...] = ()
    for name in RULES.get(logical, ()):
        parts = mesh.shape.get(name, 1)
        if parts == 1 or name in taken:
            continue
        if any(size % (axis_size(mesh, names) * parts) for size in sizes):
            break
        names += (name,)
    return names


def axis_size(mesh: Mesh | AbstractMesh, names: str | Sequence[str] | None) -> int:
    """The number of shards along mesh axes together."""
    names = () if names is None else (names,) if isinstance(names, str) else names
    return math.prod(mesh.shape[name] for name in names)


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """While tracing: kernels that XLA can not partition are mapped over this mesh."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """While tracing under `use`: says how an intermediate array is cut; without a mesh nothing.

    XLA lays intermediates out by what they are made of, and a table that is cut along its hidden dimension makes
    activations cut along theirs, with the rows of the whole batch on every device. Said where rows begin and after
    each layer, rows stay where they are and weights are gathered instead.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(mesh, axes, x.shape)))


def partition_spec(mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How an array with these logical axes is cut.

    A dimension that its mesh axes do not divide is cut by fewer of them or replicated, never padded: three KV
    heads on four devices stay whole, and the result is right. No mesh axis cuts two dimensions: the first has it.
    """
    spec, taken = [], ()
    for axis, size in zip(axes, shape, strict=True):
        names = mesh_axes(mesh, axis, size, taken=taken) if size else ()
        taken += names
        spec.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*spec)


def named_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with these logical axes: `partition_spec` on the mesh."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


def abstract_array(
    mesh: Mesh | None, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] | None = None
) -> jax.ShapeDtypeStruct:
    """The shape of an array, laid out by its logical axes (None: replicated); without a sharding where no mesh is."""
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    axes = (None,) * len(shape) if axes is None else axes
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, axes, shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether devices of several processes are in it."""
    return mesh is not None and len(set(_places(list(mesh.devices.flat), _PROCESS))) > 1


def whole_on_each_process(mesh: Mesh | None) -> bool:
    """Whether only `data` leads from process to process, so that each has whole what is cut along the other axes."""
    if mesh is None:
        return True
    process_RxN = np.asarray(_places(list(mesh.devices.flat), _PROCESS)).reshape(mesh.shape[DATA], -1)
    return bool((process_RxN == process_RxN[:, :1]).all())


def put(x: jax.typing.ArrayLike, layout: NamedSharding) -> jax.Array:
    """`jax.device_put`, also onto devices of other processes: each brings the same array and keeps its part.

    An array that lies over several processes already is laid out anew by all of them together.
    """
    if layout.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, layout)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), layout), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, layout, lambda index: whole[index])


def on_this_process(tree: Any, mesh: Mesh) -> Any:
    """Arrays of `mesh` as arrays of this process's part of it, the same buffers: nothing is sent or copied.

    Raises:
      ConfigError: an array is cut over devices of several processes, so that none has it whole.
    """
    local = mesh.local_mesh

    def view(x: jax.Array) -> jax.Array:
        layout = NamedSharding(local, x.sharding.spec)
        if layout.shard_shape(x.shape) != x.sharding.shard_shape(x.shape):
            raise ConfigError(
                f"an array of shape {x.shape} lies on a mesh of {dict(mesh.shape)} as {x.sharding.spec}: no process "
                f"has it whole on its own {dict(local.shape)}. Only mesh.data may span processes"
            )
        return jax.make_array_from_single_device_arrays(x.shape, layout, [s.data for s in x.addressable_shards])

    return jax.tree.map(view, tree)


def data_parallel_size(mesh: Mesh | None) -> int:
    """How many shards the batch is cut into; the number of rows of a batch must be a multiple of it."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in RULES["batch"])


def batch_shards(rows: int) -> int:
    """While tracing under `use`: how many shards `constrain` cuts so many rows of a batch into; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return 1
    return axis_size(mesh, mesh_axes(mesh, "batch", rows))


def shard_tree(tree: Any, axes_tree: Any, mesh: Mesh | None) -> Any:
    """Lays a pytree of arrays out on the mesh by a pytree of the same structure with logical axes."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda x, axes: jax.device_put(x, named_sharding(mesh, axes, x.shape)),
        tree,
        axes_tree,
    )
