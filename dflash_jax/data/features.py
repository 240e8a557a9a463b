"""Cached target features: for every token of every sample the tapped and the final hidden states.

A frozen target sees each sample once; training then reads from disk. The cache is a folder with two arrays that
grow (tensorstore, zarr v3, bfloat16: residual streams reach magnitudes near float16's limit), an index of finished
samples and a manifest. A sample is found by the hash of its tokens, and the manifest pins target, weights, tokenizer
and taps, so that nothing stale is ever read.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
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
from dflash_jax.data.responses import Sample, StoreError, refuse_difference, target_fingerprint, write_atomically
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


def feature_fingerprint(target: Target, tap_ids: Sequence[int]) -> dict[str, Any]:
    """All that a feature depends on besides the tokens."""
    return {**target_fingerprint(target), "tap_ids": list(tap_ids), "hidden_size": target.config.hidden_size}


def sample_key(sample: Sample) -> str:
    """The content address of a sample's features: a hash of its tokens."""
    return hashlib.sha256(np.ascontiguousarray(sample.token_S, dtype="<i4").tobytes()).hexdigest()[:24]


class FeatureStore:
    """Features on disk.

    Args:
      path: the folder.
      fingerprint: None takes the store as it is; else it must be the one that the store was made with. With
        `create` a missing store is made.

    Raises:
      StoreError: no store there, or its fingerprint differs (names the field).
    """

    def __init__(self, path: str | pathlib.Path, fingerprint: Mapping[str, Any] | None = None, *, create: bool = False):
        self.path = pathlib.Path(path)
        manifest = self.path / _MANIFEST
        if not manifest.exists():
            if not create or fingerprint is None:
                raise StoreError(f"{self.path} is no feature store: it has no {_MANIFEST}; compute_features makes one")
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"format": FORMAT, "fingerprint": dict(fingerprint)}, indent=2, sort_keys=True)
            write_atomically(manifest, text + "\n")
        stored = json.loads(manifest.read_text(encoding="utf-8"))
        if stored.get("format") != FORMAT:
            raise StoreError(
                f"feature store {self.path} has format {stored.get('format')!r}, this program reads {FORMAT}"
            )
        self.fingerprint: dict[str, Any] = stored["fingerprint"]
        if fingerprint is not None:
            refuse_difference(f"feature store {self.path}", self.fingerprint, json.loads(json.dumps(fingerprint)))
        self.hidden_size: int = self.fingerprint["hidden_size"]
        self.taps_size: int = self.hidden_size * len(self.fingerprint["tap_ids"])
        self._taps = self._array("taps", self.taps_size)
        self._hidden = self._array("hidden", self.hidden_size)
        self._where: dict[str, tuple[int, int]] = {}  # key -> (first row, rows)
        self._next_row = 0
        self._index_bytes = 0  # of complete lines
        self._read_index()

    def _array(self, name: str, width: int) -> tensorstore.TensorStore:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.path / name)},
            "metadata": {
                "data_type": "bfloat16",
                "shape": [_NOMINAL_ROWS, width],
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_CHUNK_ROWS, width]}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],  # bfloat16 does not compress
                "fill_value": 0.0,
            },
        }
        return tensorstore.open(spec, open=True, create=True).result()

    def _read_index(self) -> None:
        file = self.path / _INDEX
        if not file.exists():
            return
        with open(file, "rb") as f:
            for line in f:
                if not line.endswith(b"\n"):
                    break  # cut off by a kill: that batch is computed again
                self._index_bytes += len(line)
                row = json.loads(line)
                for key, length in row["samples"]:
                    self._where[key] = (self._next_row, length)
                    self._next_row += length

    def __contains__(self, sample: Sample) -> bool:
        return sample_key(sample) in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_tokens(self) -> int:
        """Rows of each array that hold finished samples."""
        return self._next_row

    def append(self, samples: Sequence[Sample], taps: Sequence[np.ndarray], hidden: Sequence[np.ndarray]) -> None:
        """Writes the features of some samples; they are in the index only once the arrays are flushed.

        Args:
          taps, hidden: [S, T*D] and [S, D] a sample.
        """
        first = self._next_row
        last = first + sum(s.length for s in samples)
        writes = [
            array[first:last].write(np.concatenate(parts).astype(ml_dtypes.bfloat16))
            for array, parts in ((self._taps, taps), (self._hidden, hidden))
        ]
        for write in writes:
            write.result()
        entries = [(sample_key(s), s.length) for s in samples]
        with open(self.path / _INDEX, "ab") as f:
            f.truncate(self._index_bytes)  # drops a half-written last line
            f.write(json.dumps({"samples": entries}).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
            self._index_bytes = f.tell()
        for key, length in entries:
            self._where[key] = (self._next_row, length)
            self._next_row += length

    def read(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(taps_SxTD, hidden_SxD), bfloat16, of a sample.

        Raises:
          StoreError: the sample has no features here.
        """
        where = self._where.get(sample_key(sample))
        if where is None:
            raise StoreError(
                f"feature store {self.path} has nothing for sample {sample.id} (another cut or newer than the store); "
                "run compute_features on these samples"
            )
        first, length = where
        taps = self._taps[first : first + length].read()
        return taps.result(), self._hidden[first : first + length].read().result()


def compute_features(
    target: Target,
    samples: Sequence[Sample],
    path: str | pathlib.Path,
    tap_ids: Sequence[int],
    *,
    tokens_per_batch: int = 2048,
    progress: bool = True,
) -> FeatureStore:
    """Fills a feature store with what is missing for these samples and returns it.

    It may be killed at any time and called again, also with more samples than before.

    Args:
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
    fingerprint = feature_fingerprint(target, tap_ids)
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    with open(pathlib.Path(path) / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"feature store {path} is being written by another process; wait for it or stop it"
            ) from error
        store = FeatureStore(path, fingerprint, create=True)
        _fill(store, target, samples, tap_ids, tokens_per_batch, progress)
    return store


def _fill(
    store: FeatureStore, target: Target, samples: Sequence[Sample], tap_ids: tuple[int, ...], tokens_per_batch: int,
    progress: bool,
) -> None:  # fmt: skip
    missing = {sample_key(s): s for s in samples if s not in store}
    total, done = sum(s.length for s in missing.values()), 0
    start = shown = time.perf_counter()
    for batch, token_BxS in _batches(list(missing.values()), tokens_per_batch):
        with sharding.use(target.mesh):
            features = _features(target.graphdef, target.params, token_BxS, tap_ids)
        taps_BxSxTD, hidden_BxSxD = jax.device_get(features)
        store.append(
            batch,
            [taps_BxSxTD[i, : s.length] for i, s in enumerate(batch)],
            [hidden_BxSxD[i, : s.length] for i, s in enumerate(batch)],
        )
        done += sum(s.length for s in batch)
        now = time.perf_counter()
        if progress and (now - shown >= LOG_EVERY_S or done == total):
            shown, rate = now, done / (now - start)
            logging.info("features %d/%d tokens, %.0f tokens/s, %.0f s left", done, total, rate, (total - done) / rate)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(
    graphdef: nnx.GraphDef, params: nnx.State, token_BxS: jax.Array, tap_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    result = forward_rows(nnx.merge(graphdef, params), token_BxS, tap_ids)
    return result.taps_BxMxTD.astype(jnp.bfloat16), result.hidden_BxMxD.astype(jnp.bfloat16)


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
