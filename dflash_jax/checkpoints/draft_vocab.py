"""The optional pruned draft vocabulary: which target ids a drafter may propose.

It lies beside the weights in `draft_vocab.safetensors`, apart from them, so that readers that do not know
it load the drafter unchanged with the whole vocabulary. The file holds one or both of

    draft_to_target   int [U], strictly ascending target ids; row u of the pruned head is row
                      draft_to_target[u] of the target's
    d2t               int [U], the same as offsets: target id = u + d2t[u]

and optionally `t2d`, bool [V], true at the ids that may be proposed.
"""

from __future__ import annotations

import pathlib

import numpy as np
import safetensors

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.safetensors_writer import write_safetensors

DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
_NAMES = ("draft_to_target", "d2t", "t2d")


def read_draft_vocab(directory: str | pathlib.Path, vocab_size: int) -> np.ndarray | None:
    """Target ids [U] int32 of the draft vocabulary beside a drafter's weights, or None without the file.

    Raises:
      CheckpointError: the file is broken, holds no or contradicting tables, or ids that can not be.
    """
    path = pathlib.Path(directory) / DRAFT_VOCAB_FILE
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is no complete safetensors file ({error})") from error
    unknown = sorted(set(tables) - set(_NAMES))
    if unknown:
        raise CheckpointError(f"{path} holds {unknown[0]!r}, known are {', '.join(_NAMES)}")
    return draft_to_target_ids(tables, vocab_size, str(path))


def draft_to_target_ids(tables: dict[str, np.ndarray], vocab_size: int, where: str) -> np.ndarray:
    """Target ids [U] int32 from the tables of a file; see the module's docstring.

    Raises:
      CheckpointError: as `read_draft_vocab`; `where` begins the message.
    """
    found = []
    if "draft_to_target" in tables:
        found.append(check_draft_to_target(tables["draft_to_target"], vocab_size, f"{where}: draft_to_target"))
    if "d2t" in tables:
        offset_U = _integers(tables["d2t"], f"{where}: d2t")
        index_U = np.arange(len(offset_U))
        # Every second id has these offsets too; another table then says so, and must agree below.
        alone = not {"draft_to_target", "t2d"} & set(tables)
        if alone and len(offset_U) > 1 and np.array_equal(offset_U, index_U):
            raise CheckpointError(
                f"{where}: d2t counts 0, 1, 2, ...: d2t holds offsets (target id = i + d2t[i]), so the identity is all "
                "zeros; absolute ids belong in draft_to_target"
            )
        found.append(check_draft_to_target(index_U + offset_U, vocab_size, f"{where}: i + d2t[i]"))
    if not found:
        raise CheckpointError(f"{where} holds neither draft_to_target nor d2t")
    ids_U = found[0]
    if not all(np.array_equal(ids_U, other) for other in found):
        raise CheckpointError(f"{where}: draft_to_target and d2t name different target ids")
    if "t2d" in tables:
        allowed_V = tables["t2d"].astype(bool)
        if allowed_V.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(allowed_V), ids_U):
            raise CheckpointError(f"{where}: t2d does not mark the target ids that the other table names")
    return ids_U


def check_draft_to_target(ids: np.ndarray, vocab_size: int, where: str = "draft_to_target") -> np.ndarray:
    """The table as int32 [U].

    Raises:
      CheckpointError: not integers, empty, not strictly ascending, or outside [0, vocab_size).
    """
    ids_U = _integers(ids, where)
    low, high = int(ids_U.min()), int(ids_U.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(f"{where} holds {low if low < 0 else high}, target ids lie in [0, {vocab_size})")
    if np.any(np.diff(ids_U) <= 0):
        at = int(np.flatnonzero(np.diff(ids_U) <= 0)[0])
        raise CheckpointError(f"{where} must ascend strictly, but {ids_U[at]} is followed by {ids_U[at + 1]}")
    return ids_U.astype(np.int32)


def write_draft_vocab(directory: str | pathlib.Path, draft_to_target: np.ndarray, vocab_size: int) -> None:
    """Writes `draft_vocab.safetensors` with both tables."""
    ids_U = check_draft_to_target(draft_to_target, vocab_size).astype(np.int64)
    tables = {"draft_to_target": ids_U, "d2t": ids_U - np.arange(len(ids_U))}
    write_safetensors(tables, pathlib.Path(directory) / DRAFT_VOCAB_FILE, "np")


def _integers(values: np.ndarray, where: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        raise CheckpointError(f"{where} has type {array.dtype} and shape {array.shape}, must be integers [U], U >= 1")
    return array.astype(np.int64)
