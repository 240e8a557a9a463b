"""Tensors of a safetensors checkpoint: one file, or shards with an index."""

from __future__ import annotations

import functools
import json
import mmap
import pathlib
from collections.abc import Collection

import ml_dtypes
import numpy as np
import safetensors

from dflash_jax.checkpoints.lazy_arrays import Box, LazyArray, box_slices
from dflash_jax.checkpoints.placement import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")
# Also what quantised weights are made of (`quantised` makes numbers of them), and tables of ids.
_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "I32": np.int32,
    "I64": np.int64,
}


class SafetensorsReader:
    """Reads tensors by name from a directory; what is touched is what is asked for of a lazy array.

    Raises:
      CheckpointError: no weights are there, a shard is missing or broken, or the index contradicts the files.
    """

    def __init__(self, directory: str | pathlib.Path):
        self.source = str(directory)
        self._entries: dict[str, tuple[pathlib.Path, tuple[int, ...], str]] = {}
        self._offsets: dict[str, tuple[int, int]] = {}  # first byte and the one behind the last, in the file
        self._maps: dict[pathlib.Path, mmap.mmap] = {}
        directory = pathlib.Path(directory)
        index = directory / INDEX
        if index.is_file():
            self._read_index(directory, index)
        elif (directory / SINGLE).is_file():
            self._add(directory / SINGLE)
        else:
            raise CheckpointError(_no_weights(directory))

    def _read_index(self, directory: pathlib.Path, index: pathlib.Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is no index of safetensors shards: {error!r}") from error
        for shard in sorted(set(weight_map.values())):
            if not (directory / shard).is_file():
                raise CheckpointError(f"{index} names the shard {shard}, which is not there; download it again")
            self._add(directory / shard)
        for name, shard in weight_map.items():
            if name not in self._entries or self._entries[name][0].name != shard:
                raise CheckpointError(f"{index} says that {name} is in {shard}, but that file does not hold it")

    def _add(self, path: pathlib.Path) -> None:
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    if name in self._entries:
                        raise CheckpointError(f"{name} is in {self._entries[name][0]} and again in {path}")
                    tensor = file.get_slice(name)
                    self._entries[name] = path, tuple(tensor.get_shape()), tensor.get_dtype()
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is no complete safetensors file ({error}); download it again") from error
        # The library reads no eight-bit floats into numpy. The layout is: length of the header, header, data.
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                self._offsets[name] = 8 + size + start, 8 + size + stop

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files that hold tensors."""
        return tuple(sorted({path for path, _, _ in self._entries.values()}))

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def dtype(self, name: str) -> str:
        return self._entries[name][2]

    def readable(self, name: str) -> bool:
        return self.dtype(name) in _READABLE

    def read(self, name: str) -> LazyArray:
        _, shape, dtype = self._entries[name]
        return LazyArray(shape, _DTYPES[dtype], functools.partial(self._read_box, name))

    def _read_box(self, name: str, box: Box) -> np.ndarray:
        """A copy of a box of the mapped tensor, whose pages then go back to the page cache.

        Copied because the file behind the map may change; jax may keep a host buffer as it is.
        """
        path, shape, dtype = self._entries[name]
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped, (start, stop) = self._maps[path], self._offsets[name]
        if start == stop:
            return np.empty([hi - lo for lo, hi in box], _DTYPES[dtype])
        array = np.frombuffer(mapped, np.uint8, stop - start, start).view(_DTYPES[dtype]).reshape(shape)
        copy = np.array(array[box_slices(box)])
        if shape:
            row = (stop - start) // shape[0]
            start, stop = start + box[0][0] * row, start + box[0][1] * row
        if hasattr(mapped, "madvise"):
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, stop - page)
        return copy


def _no_weights(directory: pathlib.Path) -> str:
    pickled = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pth"))
    if pickled:
        return f"{directory} has weights as {pickled[0]} only; pickled files are not read, convert them to safetensors"
    return f"{directory} has neither {SINGLE} nor {INDEX}"
