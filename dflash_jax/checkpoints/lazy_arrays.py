"""Arrays that are read when, and as far as, somebody asks for numbers.

A parameter is stored tensors transposed, reshaped, cut, stacked and concatenated. `LazyArray` records these
steps instead of taking them, so that one box of the result (what a device holds of the parameter) is made of the
boxes of the tensors that are in it, and nothing else is touched.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

# One (start, stop) an axis.
Box = tuple[tuple[int, int], ...]

# `read` takes what it reads in steps of at most this many bytes: more than a disk needs to be at full speed, and
# little beside any model. Each step holds a few copies of it, see `read`.
STEP_BYTES = 32 * 2**20


class LazyArray:
    """An array of known shape and dtype whose entries are read box by box.

    It has numpy's methods and functions for moving axes: transpose, T, swapaxes, reshape, indexing by whole
    numbers, slices of step 1, None and Ellipsis, np.stack and np.concatenate. `np.asarray` reads all of it.

    Args:
      read_box: the entries of a box that lies inside; may be a view.
      order: the axes as they are stored, outermost first; by default as they are.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        read_box: Callable[[Box], np.ndarray],
        order: Sequence[int] | None = None,
    ):
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self._read_box = read_box
        self._order = tuple(range(len(self.shape)) if order is None else order)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> LazyArray:
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={self.dtype})"

    def read(self, box: Box | None = None, dtype: Any = None) -> np.ndarray:
        """A fresh C-ordered array of a box (default: everything), cast to dtype (default: as it is).

        Beside the result it holds a few times STEP_BYTES, whatever the size.
        """
        box = whole(self.shape) if box is None else box
        out = np.empty(box_shape(box), self.dtype if dtype is None else dtype)
        for step in _steps(box, self._order, self.dtype.itemsize):
            place = tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(step, box, strict=True))
            out[place] = self._read_box(step)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the entries are not in memory: they can not be shared without a copy")
        return self.read(dtype=dtype)

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if function is np.stack:
            return _stack(*args, **kwargs)
        if function is np.concatenate:
            return _concatenate(*args, **kwargs)
        return NotImplemented

    def transpose(self, *axes: int) -> LazyArray:
        """Axes reversed, or in the order that is given."""
        axes = tuple(a % self.ndim for a in axes) or tuple(reversed(range(self.ndim)))
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"axes are {axes}, must be those of shape {self.shape} in some order")
        inverse = tuple(axes.index(a) for a in range(self.ndim))

        def read_box(box: Box) -> np.ndarray:
            return self._read_box(tuple(box[i] for i in inverse)).transpose(axes)

        shape = tuple(self.shape[a] for a in axes)
        return LazyArray(shape, self.dtype, read_box, tuple(inverse[a] for a in self._order))

    def swapaxes(self, first: int, second: int) -> LazyArray:
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return self.transpose(*axes)

    def reshape(self, *shape: int | Sequence[int]) -> LazyArray:
        """The entries in C order under another shape; one size may be -1."""
        shape = tuple(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape)
        known = math.prod(n for n in shape if n != -1)
        if shape.count(-1) == 1 and known and self.size % known == 0:
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if min(shape, default=1) < 0 or math.prod(shape) != self.size:
            raise ValueError(f"{self.size} entries of shape {self.shape} can not be reshaped to {shape}")
        if not self.size:
            return LazyArray(shape, self.dtype, lambda box: np.empty(box_shape(box), self.dtype))
        groups = _groups(self.shape, shape)

        def read_box(box: Box) -> np.ndarray:
            # For each group of axes: the boxes of the old axes that make the box of the new ones, in C order.
            found = [
                [piece for start, stop in _runs(box[new], shape[new]) for piece in _boxes(start, stop, self.shape[old])]
                for old, new in groups
            ]
            if all(len(pieces) == 1 for pieces in found):
                return self._read_box(tuple(itertools.chain(*(pieces[0] for pieces in found)))).reshape(box_shape(box))
            sizes = [[math.prod(box_shape(piece)) for piece in pieces] for pieces in found]
            ends = [list(itertools.accumulate(lengths, initial=0)) for lengths in sizes]
            flat = np.empty([end[-1] for end in ends], self.dtype)
            for index in itertools.product(*(range(len(pieces)) for pieces in found)):
                piece = self._read_box(tuple(itertools.chain(*(found[g][i] for g, i in enumerate(index)))))
                place = tuple(slice(ends[g][i], ends[g][i + 1]) for g, i in enumerate(index))
                flat[place] = piece.reshape([sizes[g][i] for g, i in enumerate(index)])
            return flat.reshape(box_shape(box))

        moved = [axis for a in self._order for old, new in groups if old.start <= a < old.stop for axis in _axes(new)]
        return LazyArray(shape, self.dtype, read_box, tuple(dict.fromkeys((*moved, *range(len(shape))))))

    def __getitem__(self, index: Any) -> LazyArray:
        index = _expanded(index if isinstance(index, tuple) else (index,), self.ndim)
        inner: list[tuple[int, int]] = []  # of each old axis, what is kept
        kept: list[int | None] = []  # of each new axis, the old one
        local: list[Any] = []  # the same index, once what is not kept is cut off
        for i in index:
            if i is None:
                kept.append(None)
                local.append(None)
                continue
            size = self.shape[len(inner)]
            if isinstance(i, slice):
                start, stop, step = i.indices(size)
                if step != 1:
                    raise IndexError(f"slices of step {step} are not supported")
                kept.append(len(inner))
                inner.append((start, max(start, stop)))
                local.append(slice(None))
            else:
                if not -size <= i < size:
                    raise IndexError(f"index {i} is outside an axis of {size}")
                inner.append((i % size, i % size + 1))
                local.append(0)

        def read_box(box: Box) -> np.ndarray:
            wanted = list(inner)
            for (lo, hi), axis in zip(box, kept, strict=True):
                if axis is not None:
                    wanted[axis] = inner[axis][0] + lo, inner[axis][0] + hi
            # An axis of size 1 that is new is whole, as no step divides it.
            return self._read_box(tuple(wanted))[tuple(local)]

        shape = tuple(1 if a is None else inner[a][1] - inner[a][0] for a in kept)
        moved = [kept.index(a) for a in self._order if a in kept]
        new = [axis for axis, a in enumerate(kept) if a is None]
        return LazyArray(shape, self.dtype, read_box, (*new, *moved))


def as_lazy(array: np.ndarray | LazyArray) -> LazyArray:
    """An array in memory in the same clothes."""
    if isinstance(array, LazyArray):
        return array
    return LazyArray(array.shape, array.dtype, lambda box: array[box_slices(box)])


def whole(shape: Sequence[int]) -> Box:
    """The box of everything."""
    return tuple((0, n) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _stack(arrays: Sequence[np.ndarray | LazyArray], axis: int = 0) -> LazyArray:
    lazy = [as_lazy(array) for array in arrays]
    axis %= lazy[0].ndim + 1
    return _concatenate([x[(slice(None),) * axis + (None,)] for x in lazy], axis)


def _concatenate(arrays: Sequence[np.ndarray | LazyArray], axis: int = 0) -> LazyArray:
    lazy = [as_lazy(array) for array in arrays]
    first = lazy[0]
    axis %= first.ndim
    for x in lazy:
        if (*x.shape[:axis], *x.shape[axis + 1 :]) != (*first.shape[:axis], *first.shape[axis + 1 :]):
            raise ValueError(f"shapes {first.shape} and {x.shape} can not be joined along axis {axis}")
    ends = list(itertools.accumulate((x.shape[axis] for x in lazy), initial=0))
    dtype = np.result_type(*(x.dtype for x in lazy))

    def read_box(box: Box) -> np.ndarray:
        start, stop = box[axis]
        i = bisect.bisect_right(ends, start) - 1
        parts = []
        while i < len(lazy) and ends[i] < stop:
            own = max(start, ends[i]) - ends[i], min(stop, ends[i + 1]) - ends[i]
            parts.append(lazy[i]._read_box((*box[:axis], own, *box[axis + 1 :])))
            i += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)

    return LazyArray((*first.shape[:axis], ends[-1], *first.shape[axis + 1 :]), dtype, read_box, first._order)


def _steps(box: Box, order: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes of at most STEP_BYTES that make up a box, in the order in which they are stored."""
    total = math.prod(box_shape(box)) * itemsize
    if total <= STEP_BYTES or not order:
        yield box
        return
    axis, *rest = order
    start, stop = box[axis]
    width = max(1, STEP_BYTES * (stop - start) // total)
    for lo in range(start, stop, width):
        yield from _steps((*box[:axis], (lo, min(stop, lo + width)), *box[axis + 1 :]), rest, itemsize)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, slice]]:
    """The smallest runs of old and new axes with the same number of entries, in order."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start = i, j
        a, i = (old[i], i + 1) if i < len(old) else (1, i)
        b, j = (new[j], j + 1) if j < len(new) else (1, j)
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append((slice(start[0], i), slice(start[1], j)))
    return groups


def _axes(axes: slice) -> range:
    return range(axes.start, axes.stop)


def _runs(box: Box, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the runs of consecutive entries, in C order, that a box of an array has."""
    k, below = len(sizes), 1
    while k and box[k - 1] == (0, sizes[k - 1]):
        k -= 1
        below *= sizes[k]
    if k == 0:
        yield 0, below
        return
    start, stop = box[k - 1]
    for lead in itertools.product(*(range(lo, hi) for lo, hi in box[: k - 1])):
        row = 0
        for i, size in zip(lead, sizes, strict=False):
            row = row * size + i
        row *= sizes[k - 1]
        yield (row + start) * below, (row + stop) * below


def _boxes(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """Boxes of an array that make up its entries [start, stop) in C order."""
    if len(sizes) < 2:
        yield ((start, stop),) * len(sizes)
        return
    inner = math.prod(sizes[1:])
    first, begun = divmod(start, inner)
    if begun:
        end = min(stop, (first + 1) * inner)
        for box in _boxes(begun, end - first * inner, sizes[1:]):
            yield ((first, first + 1), *box)
        start = end
    first, last = start // inner, stop // inner
    if first < last:
        yield ((first, last), *whole(sizes[1:]))
        start = last * inner
    if start < stop:
        for box in _boxes(0, stop - start, sizes[1:]):
            yield ((last, last + 1), *box)


def _expanded(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An index with Ellipsis written out and one entry for each axis."""
    missing = ndim - sum(i is not None and i is not Ellipsis for i in index)
    if missing < 0 or sum(i is Ellipsis for i in index) > 1:
        raise IndexError(f"index {index} does not fit {ndim} axes")
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
