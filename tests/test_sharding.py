"""Meshes over several slices: what lies where. (Shardings themselves: tests/decoding/test_mesh.py and others.)"""

import dataclasses

import numpy as np
import pytest

from dflash_jax.sharding import grid_of_slices


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
    grid = grid_of_slices(shape, chips(4, 4))
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
        grid_of_slices(shape, chips(*sizes))
