"""Which stored tensors make which parameter, and the strict loader that works by such a list.

A checkpoint format names tensors; the program's tree fuses, transposes and regroups them. A `Placement`
states both directions for one parameter, so that loading and exporting can not drift apart.

What is read, and what is held. Of each parameter a process reads the pieces that its own devices hold, each piece
once, from the boxes of the stored tensors that make it (`lazy_arrays`). On the host there is one piece at a time,
in the parameter's dtype, and a few times `lazy_arrays.STEP_BYTES` beside it (HOST_BYTES at most), whatever the size
of the model. Pages of mapped files come and go with each step and are the page cache's, not the program's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from dflash_jax import sharding
from dflash_jax.checkpoints.lazy_arrays import STEP_BYTES, Box, LazyArray, as_lazy, box_shape, whole

Path = tuple[Any, ...]
# Called as progress(done, total, what); in bytes while weights are read.
Progress = Callable[[int, int, str], None]

# Host memory while loading, beside the largest piece of one parameter that one device holds: a step as it is
# stored, dequantised, joined and reordered.
HOST_BYTES = 6 * STEP_BYTES
MAX_SHOWN = 4  # of each kind of problem


class CheckpointError(ValueError):
    """A checkpoint that can not be loaded as it is: names the tensor or field, and the way out."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Entries [start, stop) of each of `pieces` equal pieces of the first axis, as [pieces, stop - start, ...]."""

    pieces: int
    start: int
    stop: int

    def of(self, array: np.ndarray | LazyArray) -> np.ndarray | LazyArray:
        """A view where numpy can make one."""
        return array.reshape(self.pieces, -1, *array.shape[1:])[:, self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Name and shape of a tensor as the checkpoint format has it.

    `part`: what one parameter takes of a tensor that several share; together they take all of it.
    """

    name: str
    shape: tuple[int, ...]
    part: Part | None = None

    def take(self, array: np.ndarray | LazyArray) -> np.ndarray | LazyArray:
        """The part of the stored array that `Placement.join` wants."""
        return array if self.part is None else self.part.of(array)


@dataclasses.dataclass(frozen=True)
class Placement:
    """One parameter of the tree and the stored tensors it is made of.

    Attributes:
      path: place in the parameter tree, as `nnx.to_flat_state` has it.
      tensors: what the checkpoint stores, in the order `join` takes and `split` returns.
      join: stored arrays (or the parts taken of them), in memory or lazy -> the parameter.
      split: the parameter -> stored arrays (or parts).
    """

    path: Path
    tensors: tuple[StoredTensor, ...]
    join: Callable[..., Any]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]


class WeightReader(Protocol):
    """Read access to the tensors of a checkpoint under their stored names."""

    source: str

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The stored type as a person would name it, such as BF16 or Q4_1."""
        ...

    def readable(self, name: str) -> bool:
        """Whether the stored type is one that `read` turns into floating point numbers."""
        ...

    def read(self, name: str) -> np.ndarray | LazyArray:
        """The tensor, lazily where it is in a file: entries are read when they are asked for."""
        ...


def identity(path: Path, name: str, shape: tuple[int, ...]) -> Placement:
    """A tensor that is stored as the program keeps it."""
    return Placement(path, (StoredTensor(name, shape),), lambda x: x, lambda x: (x,))


def transposed(path: Path, name: str, shape: tuple[int, int]) -> Placement:
    """A matrix that is stored [out, in] and kept [in, out]."""
    return Placement(path, (StoredTensor(name, shape),), lambda x: x.T, lambda x: (x.T,))


def load_params(
    abstract_params: nnx.State,
    placements: Sequence[Placement],
    reader: WeightReader,
    *,
    harmless: Callable[[str], bool] = lambda name: False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """Fills an abstract parameter tree from a checkpoint, piece by piece, laid out on the mesh from the start.

    Each process reads what its own devices hold; see the top of this file for what is in memory meanwhile.
    Loading is strict; see `check_tensors`.

    Args:
      abstract_params: shapes and dtypes to fill (`models.target.abstract_model`).
      placements: exactly one for each parameter of the tree.
      harmless: stored names that are known to carry nothing and are skipped.
      progress: called as progress(done, total, name) with the bytes of parameters that this process has read and
        will have read.

    Raises:
      CheckpointError: a tensor is missing, unknown, misshapen or of a type that is not supported.
    """
    flat = list(nnx.to_flat_state(abstract_params))
    differing = {path for path, _ in flat} ^ {p.path for p in placements}
    if differing or len({p.path for p in placements}) != len(placements):
        raise AssertionError(f"name map and parameter tree differ at {sorted(map(str, differing))}")
    check_tensors(placements, reader, harmless)
    return fill_params(abstract_params, placements, reader, mesh=mesh, progress=progress)


def fill_params(
    abstract_params: nnx.State,
    placements: Sequence[Placement],
    reader: WeightReader,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """`load_params` of a tree, or a part of one, whose tensors are checked already."""
    by_path = {p.path: p for p in placements}
    flat = list(nnx.to_flat_state(abstract_params))
    layouts = [parameter_sharding(variable, mesh) for _, variable in flat]
    sizes = [
        sum(map(_entries, pieces(variable.get_value().shape, layout))) * variable.get_value().dtype.itemsize
        for (_, variable), layout in zip(flat, layouts, strict=True)
    ]
    filled, done, total = [], 0, sum(sizes)
    for (path, variable), layout, size in zip(flat, layouts, sizes, strict=True):
        placement, abstract = by_path[path], variable.get_value()
        if progress is not None:
            progress(done, total, placement.tensors[0].name)
        value = as_lazy(placement.join(*(tensor.take(reader.read(tensor.name)) for tensor in placement.tensors)))
        if value.shape != abstract.shape:
            raise AssertionError(f"{path}: the name map makes shape {value.shape}, the tree has {abstract.shape}")
        filled.append((path, variable.replace(to_devices(value, abstract.dtype, layout))))
        done += size
    if progress is not None:
        progress(total, total, "weights loaded")
    return nnx.from_flat_state(filled)


def parameter_sharding(variable: nnx.Variable, mesh: Mesh | None) -> Sharding | None:
    """How a parameter of an abstract tree lies on the mesh; None where there is no mesh."""
    if mesh is None:
        return None
    return sharding.named_sharding(mesh, variable.get_metadata("axes"), variable.get_value().shape)


def pieces(
    shape: tuple[int, ...], layout: Sharding | None, devices: Collection[jax.Device] | None = None
) -> dict[Box, list[jax.Device]]:
    """The boxes of an array that devices hold, each with those that hold it.

    Args:
      layout: None for one device, which is not named then.
      devices: those to look at; by default the ones of this process.
    """
    if layout is None:
        return {whole(shape): []}
    found: dict[Box, list[jax.Device]] = {}
    for device, index in layout.devices_indices_map(shape).items():
        if device in (layout.addressable_devices if devices is None else devices):
            box = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
            found.setdefault(box, []).append(device)
    return found


def to_devices(value: LazyArray, dtype: Any, layout: Sharding | None) -> jax.Array:
    """Reads what the devices of this process hold, each piece once, cast to dtype; the host keeps nothing."""
    arrays = {}
    for box, devices in pieces(value.shape, layout).items():
        piece = value.read(box, dtype)
        # Waits, so that no piece is still on the host while the next one is read.
        if layout is None:
            return jax.block_until_ready(jax.device_put(piece))
        arrays.update(zip(devices, jax.block_until_ready([jax.device_put(piece, d) for d in devices]), strict=True))
    ordered = [arrays[device] for device in layout.addressable_devices_indices_map(value.shape)]
    return jax.make_array_from_single_device_arrays(value.shape, layout, ordered, dtype=dtype)


def _entries(box: Box) -> int:
    return math.prod(box_shape(box))


def check_tensors(placements: Iterable[Placement], reader: WeightReader, harmless: Callable[[str], bool]) -> None:
    """Compares the names, shapes and types of a checkpoint with what the model needs, before reading any.

    Raises:
      CheckpointError: names the first few problems of each kind and counts the rest.
    """
    expected = {tensor.name: tensor.shape for p in placements for tensor in p.tensors}
    present = set(reader.names())
    missing, wrong, unknown = [], [], []
    for name, shape in expected.items():
        if name not in present:
            missing.append(f"{name} is missing, expected shape {shape}{_missing_hint(name)}")
        elif not reader.readable(name):
            wrong.append(
                f"{name} has type {reader.dtype(name)}, which is not supported; convert the checkpoint to "
                "float32, float16 or bfloat16"
            )
        elif reader.shape(name) != shape:
            wrong.append(
                f"{name} has shape {reader.shape(name)}, expected {shape}; the configuration does not describe "
                "these weights"
            )
    for name in sorted(present - set(expected)):
        if not harmless(name):
            unknown.append(
                f"{name} with shape {reader.shape(name)} is unknown: this architecture has no such weight, so "
                "leaving it out would change the model"
            )
    problems = []
    for kind, found in (("missing", missing), ("of wrong shape or type", wrong), ("unknown", unknown)):
        problems += found[:MAX_SHOWN]
        if len(found) > MAX_SHOWN:
            problems.append(f"... and {len(found) - MAX_SHOWN} more {kind}")
    if problems:
        raise CheckpointError(f"{reader.source} does not fit the model:\n  " + "\n  ".join(problems))


def _missing_hint(name: str) -> str:
    if name == "lm_head.weight":
        return "; if the head shares the embedding table, set tie_word_embeddings to true in config.json"
    return "; the file is incomplete or the configuration describes another model"


def export_tensors(params: nnx.State, placements: Sequence[Placement]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (stored name, contiguous host array in the parameter's dtype) of a whole tree.

    Placements that read a tensor which another one stores already (a head of its own for a tied table) are
    written once. A tensor that several parameters share is written when its last part is there.
    """
    flat = dict(nnx.to_flat_state(params))
    written = set()
    shared: dict[str, tuple[np.ndarray, int]] = {}  # name -> (the tensor so far, entries to come)
    for placement in placements:
        value = np.asarray(jax.device_get(flat[placement.path].get_value()))
        for tensor, array in zip(placement.tensors, placement.split(value), strict=True):
            if tensor.part is not None:
                whole, missing = shared.pop(tensor.name, (np.empty(tensor.shape, array.dtype), math.prod(tensor.shape)))
                tensor.part.of(whole)[...] = array
                if missing > array.size:
                    shared[tensor.name] = whole, missing - array.size
                    continue
                array = whole
            if tensor.name not in written:
                written.add(tensor.name)
                yield tensor.name, np.ascontiguousarray(array)
    if shared:
        raise AssertionError(f"no parameter holds the rest of {sorted(shared)}")
