"""What a run keeps beside its checkpoints: the lock that one run holds, the best evaluation, the draft vocabulary."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging

from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.training import processes

LOCK_FILE, BEST_FILE = ".lock", "best.json"


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
    """Makes the workdir, and keeps other runs out of it until the end; the system lets go of it when a process dies.

    The first process of a run holds it. This works among the processes of one host; on file systems without locks, and
    among hosts that share one, nothing keeps a second run out.

    Raises:
      ConfigError: another run holds it, or the hosts of this run do not share it.
      OSError: the workdir can not be made or written to.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:  # /proc finds nothing to make it in
        raise ConfigError(
            f"workdir {workdir} is no folder, or lies in none ({error}); take another --workdir"
        ) from error
    processes.check_shared(workdir)
    if not processes.is_first():
        yield
        return
    with open(workdir / LOCK_FILE, "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.seek(0)
                raise ConfigError(
                    f"workdir {workdir} is in use by another run ({lock.read().strip() or 'just begun'}); wait for it "
                    "or stop it, or take another --workdir"
                ) from error
            logging.warning("%s can not be locked (%s): see that no second run uses it", workdir, error)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def no_best() -> dict[str, Any]:
    """`read_best` before the first evaluation."""
    return {"step": 0, "tau": -math.inf}


def read_best(workdir: pathlib.Path) -> dict[str, Any]:
    """The best evaluation so far: its "step" and "tau"; step 0 with a tau of -inf before the first.

    Raises:
      CheckpointError: best.json is damaged.
    """
    try:
        best = read_json(workdir / BEST_FILE) if (workdir / BEST_FILE).exists() else no_best()
        if any(not isinstance(best.get(name), int | float) for name in ("step", "tau")):
            raise CheckpointError(f'{workdir / BEST_FILE} holds {best}, must hold the numbers "step" and "tau"')
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; delete the file: the next evaluation counts as the best so far, and replaces {workdir / 'best'}"
        ) from error
    return best


def read_own_vocabulary(workdir: pathlib.Path, size: int, vocab_size: int) -> np.ndarray | None:
    """The draft vocabulary that a run began with, target ids [U]; None for a run with the target's whole vocabulary.

    Args:
      size: `drafter.draft_vocab_size`. vocab_size: the target's.

    Raises:
      CheckpointError: the file is missing, damaged or of another size.
    """
    file = workdir / DRAFT_VOCAB_FILE
    wanted = size if size and size != vocab_size else None
    try:
        ids_U = read_draft_vocab(workdir, vocab_size)
        found = None if ids_U is None else len(ids_U)
        if found != wanted:
            raise CheckpointError(
                f"{file} {'is missing' if found is None else f'holds {found} ids'}, this run began with "
                f"{wanted or 'the whole vocabulary and no such file'}"
            )
    except CheckpointError as error:
        out = f"copy the file of {workdir / 'export'} or {workdir / 'best'} here" if wanted else "delete the file"
        raise CheckpointError(f"{error}; {out}") from error
    return ids_U
