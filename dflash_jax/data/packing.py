"""Which samples share a row: whole samples packed into rows of fixed length, decided by lengths, seed and epoch alone.

Grain's own packing (0.2.18) fills rows from a stream: each process would pack its own share, rows would straddle two
epochs, and going on would mean to fill the open rows again. Lengths are known here before anything is read, so an
epoch's rows are planned first. Any row is then found by its number, and shuffling, sharding over processes, worker
processes and exact resume are those of unpacked rows.
"""

from __future__ import annotations

import bisect
import collections
import sys
import threading
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from dflash_jax.config import ConfigError

WINDOW = 256  # rows open at once; more fill little better and put samples together that came far apart


def pack(lengths: Sequence[int], row_length: int, window: int = WINDOW) -> list[list[int]]:
    """Rows of indices into `lengths`, each index once: best fit over a bounded window of open rows.

    Each item goes where it leaves the least room; where none of the open rows has room, it opens a new one. If there
    are more than `window` of them, the fullest is closed. Rows come in the order in which they were opened.

    Args:
      lengths: each in [1, row_length].

    Raises:
      ConfigError: a length out of that range, or a window below 1.
    """
    if window < 1:
        raise ConfigError(f"the packing window is {window}, must be at least 1 row")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of the open rows, ascending
    for item, length in enumerate(lengths):
        if not 1 <= length <= row_length:
            raise ConfigError(f"item {item} has length {length}, must lie in [1, {row_length}] to be packed")
        place = bisect.bisect_left(room, (length, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = row_length, len(rows)
            rows.append([])
        rows[row].append(item)
        if left > length:
            bisect.insort(room, (left - length, row))
            if len(room) > window:
                room.pop(0)
    return rows


class PackedRows:
    """A random-access source for Grain: ((sample, ...), epoch) of each row, one epoch behind the other.

    The samples of an epoch are taken in the order in which they would come unpacked. Rows never hold samples of two
    epochs, so the last ones of an epoch may be short; epochs differ a little in their number of rows.

    Args:
      lengths: tokens of each sample; more than row_length count as row_length (the head is kept).
      order: indices of samples, epoch after epoch, as long as there are epochs.
      num_epochs: None: for ever.

    Planning an epoch takes about 10 s for a million samples. It is done when its first row is asked for; going on in
    epoch e plans the e before it anew, to count their rows.
    """

    def __init__(self, lengths: Sequence[int], order: Sequence[int], row_length: int, num_epochs: int | None = None):
        self._lengths = np.minimum(np.asarray(lengths, np.int64), row_length)
        self._order, self._row_length, self._num_epochs = order, row_length, num_epochs
        self._starts = [0]  # first row of each epoch that was planned, and of the one behind them
        self._plans: collections.OrderedDict[int, list[tuple[int, ...]]] = collections.OrderedDict()
        self._lock = threading.Lock()  # read ahead by several threads

    def __len__(self) -> int:
        if self._num_epochs is None:
            return sys.maxsize
        with self._lock:
            while len(self._starts) <= self._num_epochs:
                self._plan(len(self._starts) - 1)
            return self._starts[self._num_epochs]

    def __getitem__(self, row: int) -> tuple[tuple[int, ...], int]:
        row = int(row)
        with self._lock:
            while row >= self._starts[-1]:
                self._plan(len(self._starts) - 1)
            epoch = bisect.bisect_right(self._starts, row) - 1
            return self._plan(epoch)[row - self._starts[epoch]], epoch

    def rows_of(self, epoch: int) -> list[tuple[int, ...]]:
        """The samples of each row of an epoch."""
        with self._lock:
            while len(self._starts) <= epoch:
                self._plan(len(self._starts) - 1)
            return list(self._plan(epoch))

    def _plan(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._plans:
            count = len(self._lengths)
            order = np.fromiter((self._order[epoch * count + i] for i in range(count)), np.int64, count)
            plan = pack(self._lengths[order].tolist(), self._row_length)
            self._plans[epoch] = [tuple(order[items].tolist()) for items in plan]
            if len(self._plans) > 2:  # reading ahead straddles two epochs
                self._plans.popitem(last=False)
            if epoch == len(self._starts) - 1:
                self._starts.append(self._starts[-1] + len(plan))
        self._plans.move_to_end(epoch)
        return self._plans[epoch]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_plans": collections.OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a worker process
        self.__dict__.update(state, _lock=threading.Lock())


def sample_order(count: int, seed: int, num_epochs: int | None = None) -> grain.MapDataset:
    """Indices of samples, shuffled anew in each epoch, one epoch behind the other."""
    return grain.MapDataset.range(count).seed(seed).shuffle().repeat(num_epochs)
