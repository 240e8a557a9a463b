"""Batches for training: shuffled each epoch, fixed shapes, position exactly restorable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import ml_dtypes
import numpy as np
from absl import flags

from dflash_jax.config import ConfigError
from dflash_jax.data.features import FeatureStore
from dflash_jax.data.packing import PackedRows, sample_order
from dflash_jax.data.responses import Sample

Batch = dict[str, np.ndarray]


def make_dataset(
    samples: Sequence[Sample],
    features: FeatureStore | None = None,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    packing: bool = False,
    num_epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.MapDataset:
    """The batches as a grain dataset; see `make_iterator`."""
    if not samples:
        raise ConfigError("there are no samples to train on: every one was filtered out, or the stores are empty")
    if batch_size < 1 or seq_len < 2:
        raise ConfigError(f"batch_size is {batch_size} and seq_len {seq_len}; they must be at least 1 and 2")
    if num_epochs is not None and num_epochs < 1:
        raise ConfigError(f"num_epochs is {num_epochs}, must be at least 1, or None for no end")
    if not 0 <= process_index < process_count:
        raise ConfigError(f"process_index is {process_index}, must lie in [0, {process_count})")
    if features is not None:
        for sample in samples:
            if sample not in features:
                features.read(sample)  # raises and names it, now and not after an hour
    order = sample_order(len(samples), seed, num_epochs)
    if packing:
        source = PackedRows([sample.length for sample in samples], order, seq_len, num_epochs)
        dataset = grain.MapDataset.source(source)
    else:
        dataset = order.map_with_index(_Alone(len(samples)))
    if process_count > 1:
        dataset = dataset[process_index::process_count]
    rows = _Rows(samples, features, seq_len, packing)
    # Data without an end leave no remainder; to round their length up, grain divides floats, which overflow at batch 1.
    return dataset.map(rows).batch(batch_size, drop_remainder=num_epochs is None, batch_fn=_Collate(batch_size))


def make_iterator(
    samples: Sequence[Sample],
    features: FeatureStore | None = None,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    packing: bool = False,
    num_epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 4,
    num_workers: int = 0,
) -> grain.DatasetIterator:
    """Batches of samples, every sample once an epoch, in an order that the seed and the epoch alone decide.

    Epochs follow each other without a gap: a batch may hold the end of one and the start of the next. Samples longer
    than seq_len keep their head. If the data end inside a batch, it is filled with rows of length 0.
    `get_state()` gives a JSON-able position, `set_state()` returns to it exactly.

    Args:
      samples: what to iterate over; a sample's id in a batch is its index here.
      features: cached features of these samples, or None for a target that runs in the training step.
      packing: put whole samples together into rows; see `dflash_jax.data.packing`. Which ones share a row depends on
        neither processes nor workers.
      num_epochs: None: for ever.
      process_index, process_count: this host's share: rows process_index, + process_count, ... of the global order.
      prefetch: batches read ahead by threads.
      num_workers: processes that read; 0: threads of this one.

    Yields:
      tokens_BxS int32, 0 behind a row's end; loss_mask_BxS bool; length_B (tokens of the row), epoch_B int32; and with
      features taps_BxSxTD, hidden_BxSxD bfloat16, 0 behind a row's end. Without packing id_B int32, -1 in rows that
      hold nothing. With packing document_BxS int32, the id of the sample that each token belongs to, -1 behind the
      last one, and position_BxS int32, the token's position in its sample.

    Raises:
      ConfigError: a field out of range or no samples. StoreError: a sample without features.
    """
    dataset = make_dataset(
        samples, features, batch_size=batch_size, seq_len=seq_len, seed=seed, packing=packing, num_epochs=num_epochs,
        process_index=process_index, process_count=process_count,
    )  # fmt: skip
    read = grain.ReadOptions(num_threads=2 if prefetch else 0, prefetch_buffer_size=prefetch)
    batches = dataset.to_iter_dataset(read)
    if num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags here; a notebook never parses any
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    return iter(batches)


def sample_ids(batch: Batch) -> np.ndarray:
    """Ids of the samples of a batch, packed or not, in the order of its rows."""
    if "id_B" in batch:
        return batch["id_B"][batch["id_B"] >= 0]
    document_BxS, position_BxS = np.asarray(batch["document_BxS"]), np.asarray(batch["position_BxS"])
    return document_BxS[(document_BxS >= 0) & (position_BxS == 0)]


class _Alone:
    """index in the global stream, sample -> ((sample,), epoch)."""

    def __init__(self, samples_per_epoch: int):
        self._samples_per_epoch = samples_per_epoch

    def __call__(self, index: int, sample: int) -> tuple[tuple[int, ...], int]:
        return (int(sample),), index // self._samples_per_epoch


class _Rows:
    """((sample, ...), epoch) -> one padded row of a batch."""

    def __init__(self, samples: Sequence[Sample], features: FeatureStore | None, seq_len: int, packing: bool):
        self._samples, self._features, self._seq_len, self._packing = samples, features, seq_len, packing

    def __call__(self, element: tuple[tuple[int, ...], int]) -> dict[str, Any]:
        indices, epoch = element
        members = [self._samples[i] for i in indices]
        lengths = [min(sample.length, self._seq_len) for sample in members]
        row = {
            "tokens": self._joined([sample.token_S for sample in members]),
            "loss_mask": self._joined([sample.loss_mask_S for sample in members]),
            "length": np.int32(sum(lengths)),
            "epoch": np.int32(epoch),
        }
        if self._packing:
            ids = [np.full(n, i, np.int32) for i, n in zip(indices, lengths, strict=True)]
            row["document"] = self._joined(ids, fill=-1)
            row["position"] = self._joined([np.arange(n, dtype=np.int32) for n in lengths])
        else:
            row["id"] = np.int32(indices[0])
        if self._features is not None:
            taps, hidden = zip(*(self._features.read(sample) for sample in members), strict=True)
            row["taps"], row["hidden"] = self._joined(taps), self._joined(hidden)
        return row

    def _joined(self, parts: Sequence[np.ndarray], fill: int = 0) -> np.ndarray:
        """The parts one behind the other, each cut to a row's length, `fill` behind the last."""
        out = np.full((self._seq_len, *parts[0].shape[1:]), fill, parts[0].dtype)
        end = 0
        for part in parts:
            part = part[: self._seq_len]
            out[end : end + len(part)] = part
            end += len(part)
        return out


_NAMES = {
    "tokens": "tokens_BxS", "loss_mask": "loss_mask_BxS", "length": "length_B", "id": "id_B", "epoch": "epoch_B",
    "document": "document_BxS", "position": "position_BxS", "taps": "taps_BxSxTD", "hidden": "hidden_BxSxD",
}  # fmt: skip


class _Collate:
    """Rows -> batch; the last, incomplete batch of finite data is filled with rows that hold nothing."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        batch = {_NAMES[name]: np.stack([row[name] for row in rows]) for name in rows[0]}
        empty = self._batch_size - len(rows)
        if not empty:
            return batch
        padded = {k: np.concatenate([x, np.zeros((empty, *x.shape[1:]), x.dtype)]) for k, x in batch.items()}
        for name in ("id_B", "document_BxS"):
            if name in padded:
                padded[name][len(rows) :] = -1
        return padded


# numpy knows bfloat16 only once this is imported, also in worker processes.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
