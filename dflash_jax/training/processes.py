"""Several processes, one run: who writes, who waits, and what each sees of arrays that all of them hold.

With one process every function here returns what it was given. With several (`train.py --distributed`) the workdir
lies on a file system that all of them share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax import sharding
from dflash_jax.config import ConfigError
from dflash_jax.models.target import Target

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process writes what only one may write: config, metrics, exports."""
    return jax.process_index() == 0


def in_turn(make: Callable[[], T]) -> T:
    """make() on the first process, then on the next: what one has put on disk the others find there."""
    result = None
    for turn in range(jax.process_count()):
        if turn == jax.process_index():
            result = make()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"in_turn {turn}")
    return result


def all_done(what: str) -> None:
    """Returns once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def here(target: Target) -> Target:
    """The target on this process's devices alone: it decodes and measures without the other processes.

    Its parameters are the same buffers.

    Raises:
      ConfigError: the target lies on no mesh, or a parameter is cut over devices of several processes.
    """
    if jax.process_count() == 1:
        return target
    if target.mesh is None:
        raise ConfigError(f"target {target.source} has no mesh, several processes need one over all their devices")
    params = sharding.on_this_process(target.params, target.mesh)
    return dataclasses.replace(target, params=params, mesh=target.mesh.local_mesh)


def first_rows(rows_RxS: np.ndarray, count: int) -> np.ndarray:
    """The first rows of the whole batch, of which each process holds every n-th; the same on all of them."""
    processes = jax.process_count()
    if processes == 1:
        return rows_RxS[:count]
    parts_PxRxS = multihost_utils.process_allgather(rows_RxS[: -(-count // processes)])
    return parts_PxRxS.swapaxes(0, 1).reshape(-1, *rows_RxS.shape[1:])[:count]


def of_the_first(numbers: Sequence[float]) -> tuple[float, ...]:
    """The first process's numbers, in float32."""
    if jax.process_count() == 1:
        return tuple(numbers)
    return tuple(float(x) for x in multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.float32)))


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's part of what all of them do together."""
    return items[jax.process_index() :: jax.process_count()]


def gather(lists: Sequence[Sequence[int]], count: int, longest: int) -> list[list[int]]:
    """All `count` lists, from the lists that each process made of its `share`.

    Args:
      longest: no list is longer.
    """
    processes = jax.process_count()
    if processes == 1:
        return [list(one) for one in lists]
    packed_RxW = np.zeros((-(-count // processes), 1 + longest), np.int32)
    for row_W, one in zip(packed_RxW, lists, strict=False):
        row_W[0], row_W[1 : 1 + len(one)] = len(one), one
    packed_PxRxW = multihost_utils.process_allgather(packed_RxW)
    rows = [packed_PxRxW[i % processes, i // processes] for i in range(count)]
    return [row_W[1 : 1 + row_W[0]].tolist() for row_W in rows]
