"""Meshes over several slices and processes: what lies where. (Shardings: tests/decoding/test_mesh.py and others.)"""

import dataclasses

import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.sharding import grid_of_parts


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as placing one looks at."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def chips(*sizes: int) -> list[Chip]:
    """Slices of these sizes, their chips dealt out in turn, as no runtime promises to sort them."""
    made = [Chip(100 * s + i, s) for s, size in enumerate(sizes) for i in range(size)]
    return sorted(made, key=lambda chip: (chip.id % 100, chip.slice_index))


@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (4, 1, 2, 1), (8, 1, 1, 1)])
def test_only_the_data_axis_leads_from_slice_to_slice(shape):
    grid = grid_of_parts(shape, chips(4, 4))
    assert grid.shape == shape and {chip.id for chip in grid.flat} == {chip.id for chip in chips(4, 4)}
    slice_of = np.vectorize(lambda chip: chip.slice_index)(grid)
    # Everything at one place of the data axis is one slice, and a slice is one stretch of it.
    by_data = slice_of.reshape(shape[0], -1)
    assert (by_data == by_data[:, :1]).all()
    assert by_data[:, 0].tolist() == sorted(by_data[:, 0])


@pytest.mark.parametrize(
    ("shape", "sizes", "named"),
    [((1, 4, 1, 2), (4, 4), "data=1"), ((3, 1, 1, 2), (2, 4), "slices of"), ((2, 1, 1, 3), (2, 4), "slices of 2, 4")],
)
def test_parts_of_slices_and_data_axes_too_short_are_refused(shape, sizes, named):
    with pytest.raises(ValueError, match=named + ".*data must be a multiple of their number"):
        grid_of_parts(shape, chips(*sizes))


@pytest.mark.parametrize("shape", [(4, 2, 1, 1), (8, 1, 1, 1), (4, 1, 1, 2)])
def test_each_process_is_one_stretch_of_the_data_axis_and_slices_keep_theirs_together(shape):
    # Two slices of two hosts each; hosts are not numbered by slice.
    made = [Chip(2 * p + i, p % 2, process_index=p) for i in range(2) for p in range(4)]
    grid = grid_of_parts(shape, made, "process_index")
    assert grid.shape == shape and len({chip.id for chip in grid.flat}) == 8
    by_data = np.vectorize(lambda chip: chip.process_index)(grid).reshape(shape[0], -1)
    assert (by_data == by_data[:, :1]).all()
    per_process = shape[0] // 4
    assert by_data[::per_process, 0].tolist() == [0, 2, 1, 3] and by_data[:, 0].tolist() == [
        p for p in (0, 2, 1, 3) for _ in range(per_process)
    ]


def test_a_mesh_gives_each_process_whole_rows_where_data_divides_over_them(monkeypatch):
    """On a torus JAX's own order would cut them: what a process holds could not be seen as its own."""
    made = [Chip(i, 0, process_index=i % 2) for i in range(4)]
    taken = []
    monkeypatch.setattr(sharding, "Mesh", lambda grid, *_, **__: taken.append(grid))
    monkeypatch.setattr(sharding.jax, "make_mesh", lambda *_, **__: taken.append(None))
    sharding.make_mesh(2, 2, made)
    assert [[chip.process_index for chip in row] for row in taken[0].reshape(2, 2)] == [[0, 0], [1, 1]]
    sharding.make_mesh(1, 4, made)  # cut over both: nothing to keep whole
    sharding.make_mesh(2, 1, made[:2] + made[3:])  # the first two devices, of one process each
    assert taken[1] is None and taken[2].reshape(2).tolist() == made[:2]
