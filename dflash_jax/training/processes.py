"""Several processes, one run: who writes, who waits, and what each sees of arrays that all of them hold.

With one process every function here returns what it was given. With several (`train.py --distributed`) the workdir
lies on a file system that all of them share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

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
    """Returns once every process has come here.

    Raises:
      ConfigError: on every process, if `what` is not the same for all: they do not find the same on disk.
    """
    if jax.process_count() == 1:
        return
    try:
        multihost_utils.sync_global_devices(what)
    except AssertionError as error:
        raise ConfigError(
            f"the processes do not find the same: {what!r} is what process {jax.process_index()} says, and not all say "
            "so. Put the workdir, and data.directory where it is set, on a file system that all hosts share"
        ) from error


def check_shared(folder: pathlib.Path) -> None:
    """Sees that what the first process writes into a folder, made if need be, is there for all of them.

    Raises:
      ConfigError: on every process, if there is one that does not see it.
      OSError: on the first process, if it can not write there.
    """
    if jax.process_count() == 1:
        return
    nonce = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
    file, refused = folder / f".shared-{nonce}", None
    if is_first():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            refused = error
    all_done("a file is written")
    seen = multihost_utils.process_allgather(np.array([file.exists(), refused is None]))
    if is_first() and refused is None:
        file.unlink()
    if refused is not None:
        raise refused
    blind = [str(index) for index, (sees, _) in enumerate(seen) if not sees]
    if not seen[0, 1]:
        raise ConfigError(f"{folder}: the first process can not write there, see its message")
    if blind:
        raise ConfigError(
            f"{folder} is not the same folder for all {len(seen)} processes: {', '.join(blind)} did not see the file "
            "that process 0 wrote there. It must lie on a file system that all hosts share"
        )


def check_same(facts: Mapping[str, object], shared: object) -> None:
    """Refuses to go on where the processes would train on different things: each would take its own for the run's.

    All processes call this together, and all of them raise.

    Args:
      facts: JSON-able, by names that are the same in every process.
      shared: the folder that they must share, for the message.

    Raises:
      ConfigError: names the first fact that differs.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8] for value in facts.values()]
    digest_Nx2 = np.frombuffer(b"".join(digests), np.int32).reshape(len(digests), 2)
    digest_PxNx2 = multihost_utils.process_allgather(digest_Nx2)
    for i, (name, value) in enumerate(facts.items()):
        others = sorted({p for p, rows in enumerate(digest_PxNx2) if (rows[i] != digest_PxNx2[0, i]).any()})
        if others:
            raise ConfigError(
                f"{name} is not the same in all processes: {', '.join(map(str, others))} of {len(digest_PxNx2)} differ "
                f"from process 0; process {jax.process_index()} has {value!r:.300}. Start all of them with the same "
                f"config and packages, and put {shared}, and data.directory where it is set, on a file system that all "
                "of them share"
            )


def here(target: Target) -> Target:
    """The target on this process's devices alone: it decodes and measures without the other processes.

    Its parameters are the same buffers. Where no process has the target whole, the target itself, which all processes
    run together: what one of them calls with it, all must call, with the same numbers.

    Raises:
      ConfigError: the target lies on no mesh.
    """
    if jax.process_count() == 1:
        return target
    if target.mesh is None:
        raise ConfigError(f"target {target.source} has no mesh, several processes need one over all their devices")
    if not sharding.whole_on_each_process(target.mesh):
        return target
    params = sharding.on_this_process(target.params, target.mesh)
    return dataclasses.replace(target, params=params, mesh=target.mesh.local_mesh)


def row_share(mesh: Mesh | None) -> tuple[int, int]:
    """(index, count): this process reads rows index, index + count, ... of each batch.

    Where the target lies over several processes that is every row on each of them: devices of several processes may
    want the same one, and a mesh may give a process any of them. Such batches hold tokens alone, which is little.
    """
    if sharding.whole_on_each_process(mesh):
        return jax.process_index(), jax.process_count()
    return 0, 1


def whole(tree: T, mesh: Mesh | None) -> T:
    """Arrays of the run's mesh as arrays that this process can read whole. All processes call this together.

    They are its own buffers where it has them whole, else gathered into its host's memory, one after another.
    """
    if jax.process_count() == 1:
        return tree
    if sharding.whole_on_each_process(mesh):
        return sharding.on_this_process(tree, mesh)
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def first_rows(rows_RxS: np.ndarray, count: int, mesh: Mesh | None) -> np.ndarray:
    """The first rows of the whole batch, of which each process holds its `row_share`; the same on all of them."""
    processes = row_share(mesh)[1]
    if processes == 1:
        return rows_RxS[:count]
    parts_PxRxS = multihost_utils.process_allgather(rows_RxS[: -(-count // processes)])
    return parts_PxRxS.swapaxes(0, 1).reshape(-1, *rows_RxS.shape[1:])[:count]


def of_the_first(numbers: Sequence[float]) -> tuple[float, ...]:
    """The first process's numbers, in float32."""
    if jax.process_count() == 1:
        return tuple(numbers)
    return tuple(map(float, array_of_the_first(np.asarray(numbers))))


def array_of_the_first(array: np.ndarray) -> np.ndarray:
    """The first process's array, in float32; all have one of the same shape."""
    array = np.asarray(array, np.float32)
    return array if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(array))


def share(items: Sequence[T], mesh: Mesh | None) -> Sequence[T]:
    """What this process decodes of what is to be decoded: its part, or, where none has the target on `mesh` whole, all
    of it, in step with the others."""
    index, count = row_share(mesh)
    return items[index::count]


def gather(lists: Sequence[Sequence[int]], count: int, longest: int, mesh: Mesh | None) -> list[list[int]]:
    """All `count` lists, from the lists that each process made of its `share`.

    Args:
      longest: no list is longer.
    """
    processes = row_share(mesh)[1]
    if processes == 1:
        return [list(one) for one in lists]
    packed_RxW = np.zeros((-(-count // processes), 1 + longest), np.int32)
    for row_W, one in zip(packed_RxW, lists, strict=False):
        row_W[0], row_W[1 : 1 + len(one)] = len(one), one
    packed_PxRxW = multihost_utils.process_allgather(packed_RxW)
    rows = [packed_PxRxW[i % processes, i // processes] for i in range(count)]
    return [row_W[1 : 1 + row_W[0]].tolist() for row_W in rows]
