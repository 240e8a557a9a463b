"""How a target's parameters would lie on a mesh: shapes, cuts and bytes a device, with nothing read or allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from dflash_jax import sharding
from dflash_jax.checkpoints.placement import HOST_BYTES
from dflash_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Row:
    """A parameter, or one that several layers have alike.

    Attributes:
      name: place in the tree, `*` for the layer.
      count: how many layers have it (1 outside of layers).
      shape, dtype: of one.
      cuts: mesh axes that cut each dimension.
      nbytes: of all of them.
      device_nbytes: of all of them on one device.
      piece_nbytes: of one on one device.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[tuple[str, ...], ...]
    nbytes: int
    device_nbytes: int
    piece_nbytes: int


def mesh_sizes(text: str) -> dict[str, int]:
    """{axis: size} of "data=2,tensor=4"; axes that are not named have size 1.

    Raises:
      ConfigError: an axis is unknown or named twice, or a size is no positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in sharding.AXES or axis in sizes or not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"mesh is {text!r}: {part!r} must be AXIS=SIZE with one of {', '.join(sharding.AXES)}, each at most "
                "once, and a size of at least 1; for example fsdp=2,expert=8,tensor=4"
            )
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in sharding.AXES}


def layout(abstract_params: nnx.State, sizes: Mapping[str, int]) -> list[Row]:
    """A row for each kind of parameter, in the order of the tree."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    found: dict[tuple, int] = {}
    for path, variable in nnx.to_flat_state(abstract_params):
        value = variable.get_value()
        spec = sharding.partition_spec(mesh, variable.get_metadata("axes"), value.shape)
        cuts = tuple(() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec)
        name = "/".join(map(str, ("layers", "*", *path[2:]) if path[0] == "layers" else path))
        key = name, value.shape, jnp.dtype(value.dtype).name, cuts
        found[key] = found.get(key, 0) + 1
    rows = []
    for (name, shape, dtype, cuts), count in found.items():
        nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
        piece = nbytes // math.prod(sharding.axis_size(mesh, names) for names in cuts)
        rows.append(Row(name, count, shape, dtype, cuts, count * nbytes, count * piece, piece))
    return rows


def table(rows: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """The rows for people, with totals and the memory of the host."""
    lines = [("parameter", "layers", "shape", "dtype", "cut by", "bytes", "a device")]
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        cuts = ", ".join(f"{n}/{' '.join(names)}" for n, names in zip(row.shape, row.cuts, strict=True) if names)
        count = str(row.count) if row.name.startswith("layers/") else ""
        lines.append(
            (row.name, count, shape, row.dtype, cuts or "whole", readable(row.nbytes), readable(row.device_nbytes))
        )
    total, device = sum(row.nbytes for row in rows), sum(row.device_nbytes for row in rows)
    lines.append(("total", "", "", "", "", readable(total), readable(device)))
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"
    largest = max(row.piece_nbytes for row in rows)
    return "\n".join(
        [
            *_aligned(lines),
            f"mesh: {mesh}, {math.prod(sizes.values())} devices" if math.prod(sizes.values()) > 1 else f"mesh: {mesh}",
            f"parameters: {sum(math.prod(row.shape) * row.count for row in rows):,}",
            f"bytes a device: {device:,}",
            f"memory of the host while loading: at most {readable(largest + HOST_BYTES)}",
        ]
    )


def readable(nbytes: int) -> str:
    """Bytes in decimal units, as disks and accelerators are sold."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def _aligned(lines: Iterable[Sequence[str]]) -> list[str]:
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = {1, 5, 6}  # numbers
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
