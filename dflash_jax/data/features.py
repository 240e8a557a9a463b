"""Cached target features: for every token of every sample the tapped and the final hidden states.

A frozen target sees each sample once; training then reads from disk. The cache is a folder with a manifest and parts,
one for each process that writes, so that the processes of a pod write at the same time. A part holds two arrays that
grow (tensorstore, zarr v3, bfloat16: residual streams reach magnitudes near float16's limit) and an index of finished
samples; the first part is the folder itself.

Nothing stale is ever read: the manifest pins target, weights, dtype, tokenizer and taps, and a sample is found by the
hash of its tokens. A chat template or its options come in through the tokens alone: other renderings, other samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore
from absl import logging
from flax import nnx

from dflash_jax import sharding
from dflash_jax.config import ConfigError
from dflash_jax.data.fingerprints import target_fingerprint
from dflash_jax.data.responses import (
    Sample,
    StoreError,
    read_manifest,
    refuse_difference,
    write_atomically,
)
from dflash_jax.models.target import Target
from dflash_jax.models.whole_rows import forward_rows

FORMAT = 1
_MANIFEST, _INDEX, _LOCK = "manifest.json", "index.jsonl", ".lock"
# Lengths are padded up to these and then to multiples of 1024, so that few programs are compiled.
_LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
# Rows of the arrays are chunked; the nominal size only bounds them (chunks that were never written do not exist).
_CHUNK_ROWS = 256
_NOMINAL_ROWS = 1 << 40
LOG_EVERY_S = 20.0
_WAY_OUT = "delete the folder, and the same run computes its states again"


def feature_fingerprint(target: Target, tap_ids: Sequence[int]) -> dict[str, Any]:
    """All that a feature depends on besides the tokens."""
    return {**target_fingerprint(target), "tap_ids": list(tap_ids), "hidden_size": target.config.hidden_size}


def sample_key(sample: Sample) -> str:
    """The content address of a sample's features: a hash of its tokens."""
    return hashlib.sha256(np.ascontiguousarray(sample.token_S, dtype="<i4").tobytes()).hexdigest()[:24]


class _Part:
    """What one process has written: arrays `taps` and `hidden`, and which rows belong to which sample.

    Attributes:
      where: key -> (first row, number of rows).
      num_tokens: rows of each array that hold finished samples.
    """

    def __init__(self, path: pathlib.Path, taps_size: int, hidden_size: int):
        self.path, self._widths = path, {"taps": taps_size, "hidden": hidden_size}
        self.where: dict[str, tuple[int, int]] = {}
        self.num_tokens = 0
        self._index_bytes = 0  # of complete lines
        self._arrays: dict[str, tensorstore.TensorStore] = {}
        self._read_index()

    def _array(self, name: str, writes: bool = False) -> tensorstore.TensorStore:
        if name not in self._arrays:
            width = self._widths[name]
            spec = {
                "driver": "zarr3",
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,  # a chunk that got lost is an error, not zeros to train on
                "kvstore": {"driver": "file", "path": str(self.path / name)},
                "metadata": {
                    "data_type": "bfloat16",
                    "shape": [_NOMINAL_ROWS, width],
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_CHUNK_ROWS, width]}},
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],  # bfloat16: no compression
                    "fill_value": 0.0,
                },
            }
            self._arrays[name] = tensorstore.open(spec, open=True, create=writes).result()
        return self._arrays[name]

    def _read_index(self) -> None:
        file = self.path / _INDEX
        if not file.exists():
            return
        with open(file, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break  # cut off by a kill: that batch is computed again
                self._index_bytes += len(line)
                try:
                    self._add([(str(key), int(length)) for key, length in json.loads(line)["samples"]])
                except (ValueError, KeyError, TypeError) as error:
                    raise StoreError(
                        f"{file}, line {number}: no samples ({type(error).__name__}: {error}); {_WAY_OUT}: rows of the "
                        "arrays are counted by these lines"
                    ) from error

    def _add(self, entries: Sequence[tuple[str, int]]) -> None:
        for key, length in entries:
            self.where[key] = (self.num_tokens, length)
            self.num_tokens += length

    def append(self, entries: Sequence[tuple[str, int]], taps_RxTD: np.ndarray, hidden_RxD: np.ndarray) -> None:
        """Writes rows; they are in the index only once the arrays are flushed."""
        rows = slice(self.num_tokens, self.num_tokens + len(taps_RxTD))
        writes = [
            self._array(name, writes=True)[rows].write(x.astype(ml_dtypes.bfloat16))
            for name, x in (("taps", taps_RxTD), ("hidden", hidden_RxD))
        ]
        for write in writes:
            write.result()
        with open(self.path / _INDEX, "ab") as f:
            f.truncate(self._index_bytes)  # drops a half-written last line
            f.write(json.dumps({"samples": entries}).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
            self._index_bytes = f.tell()
        self._add(entries)

    def read(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        first, length = self.where[key]
        taps = self._array("taps")[first : first + length].read()
        return taps.result(), self._array("hidden")[first : first + length].read().result()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}  # a worker process opens them anew


class FeatureStore:
    """Features on disk.

    Args:
      path: the folder.
      fingerprint: None takes the store as it is; else it must be the one that the store was made with. With
        `create` a missing store is made.
      part: number of the part that `append` writes to; each process that writes has its own.

    Raises:
      StoreError: no store there, or its fingerprint differs (names the field).
    """

    def __init__(
        self, path: str | pathlib.Path, fingerprint: Mapping[str, Any] | None = None, *, create: bool = False,
        part: int = 0,
    ):  # fmt: skip
        self.path = pathlib.Path(path)
        manifest = self.path / _MANIFEST
        if not manifest.exists():
            if not create or fingerprint is None:
                raise StoreError(f"{self.path} is no feature store: it has no {_MANIFEST}; compute_features makes one")
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"format": FORMAT, "fingerprint": dict(fingerprint)}, indent=2, sort_keys=True)
            write_atomically(manifest, text + "\n")
        self.fingerprint: dict[str, Any] = read_manifest(manifest, FORMAT, _WAY_OUT)["fingerprint"]
        if fingerprint is not None:
            refuse_difference(f"feature store {self.path}", self.fingerprint, json.loads(json.dumps(fingerprint)))
        try:
            self.hidden_size: int = self.fingerprint["hidden_size"]
            self.taps_size: int = self.hidden_size * len(self.fingerprint["tap_ids"])
        except (KeyError, TypeError) as error:
            raise StoreError(f"{manifest} is damaged: hidden_size or tap_ids is wrong; {_WAY_OUT}") from error
        own = part_folder(self.path, part)
        folders = {self.path, own, *self.path.glob("part-*")}
        parts = {folder: _Part(folder, self.taps_size, self.hidden_size) for folder in sorted(folders)}
        self._own, self._parts = parts[own], list(parts.values())

    def __contains__(self, sample: Sample) -> bool:
        return self._part_of(sample_key(sample)) is not None

    def __len__(self) -> int:
        return sum(len(part.where) for part in self._parts)

    @property
    def num_tokens(self) -> int:
        """Rows of the arrays of all parts that hold finished samples."""
        return sum(part.num_tokens for part in self._parts)

    def _part_of(self, key: str) -> _Part | None:
        return next((part for part in self._parts if key in part.where), None)

    def append(self, samples: Sequence[Sample], taps: Sequence[np.ndarray], hidden: Sequence[np.ndarray]) -> None:
        """Writes the features of some samples; they are in the index only once the arrays are flushed.

        Args:
          taps, hidden: [S, T*D] and [S, D] a sample.
        """
        entries = [(sample_key(s), s.length) for s in samples]
        with _undamaged(f"{self._own.path}: its arrays"):
            self._own.append(entries, np.concatenate(taps), np.concatenate(hidden))

    def read(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(taps_SxTD, hidden_SxD), bfloat16, of a sample.

        Raises:
          StoreError: the sample has no features here, or they are lost or damaged.
        """
        key = sample_key(sample)
        part = self._part_of(key)
        if part is None:
            raise StoreError(
                f"feature store {self.path} has nothing for sample {sample.id} (another cut or newer than the store); "
                "run compute_features on these samples"
            )
        with _undamaged(f"{part.path}: the states of sample {sample.id}"):
            return part.read(key)


@contextlib.contextmanager
def _undamaged(what: str) -> Iterator[None]:
    """Says it plainly where files of the arrays are missing, cut or of another kind; other faults stay as they are."""
    try:
        yield
    except ValueError as error:  # all that tensorstore raises
        reason = str(error).partition(" [tensorstore_spec")[0]
        if not reason.startswith(("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE")):
            raise
        raise StoreError(f"{what} are lost or damaged ({reason}); {_WAY_OUT}") from error


def part_folder(path: pathlib.Path, part: int) -> pathlib.Path:
    """Where a part lies."""
    return path / f"part-{part}" if part else path


def compute_features(
    target: Target,
    samples: Sequence[Sample],
    path: str | pathlib.Path,
    tap_ids: Sequence[int],
    *,
    tokens_per_batch: int = 2048,
    part: int = 0,
    parts: int = 1,
    wait: Callable[[str], None] | None = None,
    progress: bool = True,
) -> FeatureStore:
    """Fills a feature store with what is missing for these samples and returns it.

    It may be killed at any time and called again, also with more samples than before, or with another number of parts.

    Args:
      part, parts: this process's number and how many compute at the same time: each does the samples whose keys fall to
        it and writes a part of its own. Once all are done, a `FeatureStore` that is opened anew has everything.
      wait: for a target that lies over the processes, returns once every one of them has called it: they compute every
        sample together then, and each writes its share of the batches.
      tap_ids: 0-based layers whose output is kept, ascending.
      tokens_per_batch: tokens of one target call, padding included; a longer sample is a call of its own.

    Raises:
      ConfigError: taps out of range, or a sample longer than the target's context.
      StoreError: the folder belongs to another target, tokenizer or other taps (names the field).
    """
    tap_ids = tuple(tap_ids)
    layers = target.config.num_layers
    if not tap_ids or sorted(set(tap_ids)) != list(tap_ids) or not 0 <= tap_ids[0] <= tap_ids[-1] < layers:
        raise ConfigError(f"tap_ids is {tap_ids}, must ascend strictly and lie in [0, {layers})")
    for sample in samples:
        if sample.length > target.config.max_positions:
            raise ConfigError(
                f"sample {sample.id} has {sample.length} tokens, the target's context is {target.config.max_positions}"
            )
    if not 0 <= part < parts:
        raise ConfigError(f"part is {part}, must lie in [0, {parts})")
    fingerprint = feature_fingerprint(target, tap_ids)
    in_step = wait is not None
    own = samples if in_step or parts == 1 else [s for s in samples if int(sample_key(s), 16) % parts == part]
    if (pathlib.Path(path) / _MANIFEST).exists():
        store = FeatureStore(path, fingerprint, part=part)
        if all(sample in store for sample in own):
            return store  # nothing to write, so another process may be writing here meanwhile
    if wait is not None:
        wait("the features were looked at")
    folder = part_folder(pathlib.Path(path), part)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"feature store {folder} is being written by another process; wait for it or stop it"
            ) from error
        store = FeatureStore(path, fingerprint, create=True, part=part)
        if wait is not None:
            wait(f"states of {len(store)} samples are found")  # the same are missing to all: nobody writes before
        _fill(store, target, own, tap_ids, tokens_per_batch, (part, parts) if in_step else (0, 1), progress)
    return store


def _fill(
    store: FeatureStore, target: Target, samples: Sequence[Sample], tap_ids: tuple[int, ...], tokens_per_batch: int,
    share: tuple[int, int], progress: bool,
) -> None:  # fmt: skip
    """Computes what is missing of the samples and writes batches index, index + count, ... (`share`)."""
    missing = {sample_key(s): s for s in samples if s not in store}
    total, done = sum(s.length for s in missing.values()), 0
    start = shown = time.perf_counter()

    def write(batch: Sequence[Sample], computed: tuple[jax.Array, jax.Array]) -> None:
        taps_BxSxTD, hidden_BxSxD = jax.device_get(computed)
        store.append(
            batch,
            [taps_BxSxTD[i, : s.length] for i, s in enumerate(batch)],
            [hidden_BxSxD[i, : s.length] for i, s in enumerate(batch)],
        )

    pending: tuple[Sequence[Sample], tuple[jax.Array, jax.Array]] | None = None
    index, count = share
    for number, (batch, token_BxS) in enumerate(_batches(list(missing.values()), tokens_per_batch)):
        with sharding.use(target.mesh):
            computed = _features(target.graphdef, target.params, token_BxS, tap_ids)
        if pending is not None:  # written while the device computes the next batch
            write(*pending)
        pending = (batch, computed) if number % count == index else None
        done += sum(s.length for s in batch)
        now = time.perf_counter()
        if progress and (now - shown >= LOG_EVERY_S or done == total):
            shown, rate = now, done / (now - start)
            logging.info("features %d/%d tokens, %.0f tokens/s, %.0f s left", done, total, rate, (total - done) / rate)
    if pending is not None:
        write(*pending)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(
    graphdef: nnx.GraphDef, params: nnx.State, token_BxS: jax.Array, tap_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    result = forward_rows(nnx.merge(graphdef, params), token_BxS, tap_ids)
    # Whole on every device: a process must be able to read them where the target lies over several.
    whole = (None, None, None)
    taps, hidden = sharding.constrain(result.taps_BxMxTD, whole), sharding.constrain(result.hidden_BxMxD, whole)
    return taps.astype(jnp.bfloat16), hidden.astype(jnp.bfloat16)


def _batches(samples: list[Sample], tokens_per_batch: int) -> Iterator[tuple[list[Sample], np.ndarray]]:
    """Batches of like lengths: (samples, token_BxS), rows and columns padded to few shapes."""
    buckets: dict[int, list[Sample]] = {}
    for sample in samples:
        buckets.setdefault(padded_length(sample.length), []).append(sample)
    for length, group in sorted(buckets.items()):
        rows = max(1, tokens_per_batch // length)
        for i in range(0, len(group), rows):
            batch = group[i : i + rows]
            token_BxS = np.zeros((rows, length), np.int32)
            for row, sample in enumerate(batch):
                token_BxS[row, : sample.length] = sample.token_S
            yield batch, token_BxS


def padded_length(length: int) -> int:
    """The smallest bucket that holds a sample."""
    return next((bucket for bucket in _LENGTHS if length <= bucket), -(-length // 1024) * 1024)
