"""Lazy arrays say what numpy says, box by box, and read no more than a box needs."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoints import lazy_arrays
from dflash_jax.checkpoints.lazy_arrays import LazyArray, as_lazy, box_shape, box_slices, whole


class Recorded:
    """An array of numbers all different, and the boxes that were read of it."""

    def __init__(self, *shape: int, dtype=np.int32):
        self.array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        self.boxes: list = []
        self.lazy = LazyArray(shape, dtype, self.read_box)

    def read_box(self, box):
        for (start, stop), size in zip(box, self.array.shape, strict=True):
            assert 0 <= start < stop <= size, (box, self.array.shape)
        self.boxes.append(box)
        return self.array[box_slices(box)]

    @property
    def entries(self) -> int:
        return sum(math.prod(box_shape(box)) for box in self.boxes)


def boxes_of(shape):
    """Every box of a small shape."""
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return itertools.product(*ranges)


# (shapes of the sources, what is done with them)
STEPS = {
    "transposed": ([(3, 4)], lambda x: x.T),
    "permuted": ([(2, 3, 4)], lambda x: x.transpose(2, 0, 1)),
    "swapped": ([(2, 3, 4)], lambda x: x.swapaxes(1, 2)),
    "split": ([(12, 2)], lambda x: x.reshape(2, 3, 2, 2)),
    "split with an inferred size": ([(12, 2)], lambda x: x.reshape(2, -1, 2, 2)),
    "merged": ([(2, 3, 2, 2)], lambda x: x.reshape(6, 4)),
    "regrouped": ([(4, 6)], lambda x: x.reshape(3, 8)),
    "regrouped twice": ([(4, 6, 2)], lambda x: x.transpose(1, 0, 2).reshape(8, 6).T.reshape(4, 12)),
    "axes of one entry": ([(1, 4, 1)], lambda x: x.reshape(2, 1, 2).reshape(4).reshape(1, 4, 1, 1)),
    "cut": ([(4, 5)], lambda x: x[1:3, -2:]),
    "indexed": ([(3, 4, 2)], lambda x: x[..., None, 1][2][:, None]),
    "stacked": ([(3, 4)] * 3, lambda *xs: np.stack(xs)),
    "stacked inside": ([(3, 4)] * 2, lambda *xs: np.stack(xs, axis=-1).transpose(2, 1, 0)),
    "joined": ([(2, 1, 3), (2, 4, 3), (2, 2, 3)], lambda *xs: np.concatenate(xs, axis=1)),
    "experts": ([(3, 2)] * 4, lambda *xs: np.stack(xs).reshape(2, 2, 3, 2).transpose(1, 3, 0, 2)),
    "pairs to halves": (
        [(8, 3)],
        lambda x: np.concatenate(
            [x.reshape(2, 4, 3)[:, :2], x.reshape(2, 4, 3)[:, 2:].reshape(2, 1, 2, 3).swapaxes(1, 2).reshape(2, 2, 3)],
            axis=1,
        ),
    ),
    "query groups": (
        [(8, 3), (4, 3)],
        lambda q, k: np.concatenate([x.reshape(2, x.shape[0] // 4, 2, -1) for x in (q, k)], axis=1).transpose(
            3, 0, 1, 2
        ),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_box_is_numpys_and_nothing_else_is_read(name):
    shapes, steps = STEPS[name]
    sources = [Recorded(*shape) for shape in shapes]
    for i, source in enumerate(sources):
        source.array += 1000 * i
    wanted = steps(*(source.array for source in sources))
    lazy = steps(*(source.lazy for source in sources))
    assert isinstance(lazy, LazyArray)
    assert (lazy.shape, lazy.dtype) == (wanted.shape, wanted.dtype)
    assert sorted(lazy._order) == list(range(lazy.ndim))
    assert not any(source.boxes for source in sources)
    for box in boxes_of(lazy.shape):
        for source in sources:
            source.boxes.clear()
        np.testing.assert_array_equal(lazy.read(box), wanted[box_slices(box)], err_msg=str(box))
        # Each source entry makes at most one entry here, so this is the least there is to read.
        assert sum(source.entries for source in sources) == math.prod(box_shape(box))


def test_steps_are_bounded_and_follow_the_storage(monkeypatch):
    """A transposed matrix is read in whole stored rows, a stack tensor by tensor."""
    monkeypatch.setattr(lazy_arrays, "STEP_BYTES", 64)
    source = Recorded(10, 8)
    np.testing.assert_array_equal(source.lazy.T.read(dtype=np.float32), source.array.T.astype(np.float32))
    assert source.boxes == [((row, row + 2), (0, 8)) for row in range(0, 10, 2)]
    pair = Recorded(4, 3), Recorded(4, 3)
    np.asarray(np.stack([x.lazy for x in pair], axis=2))
    assert [x.boxes for x in pair] == [[whole((4, 3))]] * 2
    wide = Recorded(2, 100)
    np.testing.assert_array_equal(np.asarray(wide.lazy), wide.array)
    assert max(math.prod(box_shape(box)) for box in wide.boxes) == 16


def test_the_result_is_fresh_contiguous_and_cast():
    array = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    lazy = as_lazy(array).T
    read = lazy.read(dtype=ml_dtypes.bfloat16)
    assert read.flags.c_contiguous and read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, array.T.astype(ml_dtypes.bfloat16))
    same = as_lazy(array).read()
    same[...] = 7
    assert not (array == 7).any()
    mixed = np.concatenate([as_lazy(array), array.astype(ml_dtypes.bfloat16)])
    assert mixed.dtype == np.float32
    assert as_lazy(np.zeros((0, 3))).reshape(3, 0).read().shape == (3, 0)


def test_what_is_not_supported_is_refused():
    lazy = as_lazy(np.zeros((4, 6)))
    with pytest.raises(ValueError, match=r"24 entries of shape \(4, 6\) can not be reshaped to \(5, -1\)"):
        lazy.reshape(5, -1)
    with pytest.raises(IndexError, match="step 2"):
        lazy[::2]
    with pytest.raises(IndexError, match="outside an axis of 4"):
        lazy[4]
    with pytest.raises(IndexError, match="does not fit 2 axes"):
        lazy[0, 0, 0]
    with pytest.raises(ValueError, match="must be those of shape"):
        lazy.transpose(0, 0)
    with pytest.raises(ValueError, match="can not be joined along axis 1"):
        np.concatenate([lazy, lazy[:3]], axis=1)
    with pytest.raises(ValueError, match="without a copy"):
        np.array(lazy, copy=False)
    with pytest.raises(TypeError, match="no implementation found"):
        np.flip(lazy)
