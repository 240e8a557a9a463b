"""Quantised weights of Hugging Face checkpoints, dequantised as they are read.

FP8 (`quant_method` fp8; DeepSeek-V3, Qwen): a float8_e4m3fn tensor NAME with float scales NAME_scale_inv, which
multiply it, one a block of `weight_block_size` entries of the last two axes, or a single one where that is null.

MXFP4 (`quant_method` mxfp4; gpt-oss): NAME_blocks [E, R, G, 16] and NAME_scales [E, R, G], both bytes. A byte of
the former holds two E2M1 numbers, the lower half first; 32 of them share a scale 2 ** (byte - 127). Together
they are the transpose of the tensor that unquantised checkpoints call NAME, [E, G * 32, R]. Formats: OCP
Microscaling Formats (MX) Specification v1.0, sections 5.3.3 and 5.4.1.

Scales of activations are skipped: activations are not quantised here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.lazy_arrays import Box, LazyArray, as_lazy
from dflash_jax.checkpoints.placement import CheckpointError, WeightReader
from dflash_jax.config import ConfigError

_FP8_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FLOATS = ("F32", "F16", "BF16")
# Sign, two bits of exponent (bias 1), one of mantissa.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1_VALUES = np.concatenate([_E2M1, -_E2M1])
_E8M0_BIAS, _E8M0_NAN = 127, 255
_NUMBERS_AT_ONCE = 2**20  # in float32 and as indices: what is held of them stays small


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What `quantization_config` says: "fp8" with the block of one scale (None: the whole tensor), or "mxfp4"."""

    method: str
    block: tuple[int, int] | None = None


def quantisation_from_hf(hf: Mapping[str, Any]) -> Quantisation | None:
    """The quantisation of a checkpoint; None where the configuration names none.

    Raises:
      ConfigError: the method, or a variant of it, can not be dequantised.
    """
    values = hf.get("quantization_config") or (hf.get("text_config") or {}).get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"quantization_config is {values!r}, must be a mapping")
    method = values.get("quant_method")
    if method == "mxfp4":
        return Quantisation(method)
    if method != "fp8":
        raise ConfigError(
            f"quantization_config has quant_method {method!r}; fp8 and mxfp4 are dequantised on load, of other kinds "
            "load the unquantised checkpoint or a GGUF file"
        )
    if values.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"quantization_config has fmt {values['fmt']!r}; only e4m3 is supported")
    block = values.get("weight_block_size", (128, 128))
    if block is None:
        return Quantisation(method)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise ConfigError(f"quantization_config has weight_block_size {block!r}, must be two positive whole numbers")
    return Quantisation(method, tuple(block))


class DequantisingReader:
    """Shows a quantised checkpoint as one of ordinary tensors.

    Args:
      reader: of the stored tensors.
      dtype: of the dequantised tensors; products are taken in float32 and rounded once.

    Raises:
      CheckpointError: a scale is missing, belongs to nothing, or does not fit its tensor.
    """

    def __init__(self, reader: WeightReader, quantisation: Quantisation, dtype: Any):
        self.source = reader.source
        self._reader = reader
        self._dtype = np.dtype(dtype)
        self._block = quantisation.block
        stored = set(reader.names())
        find = self._find_fp8 if quantisation.method == "fp8" else self._find_mxfp4
        # Name -> (name of the quantised values, name of their scales).
        self._quantised, dropped = find(stored)
        used = {name for pair in self._quantised.values() for name in pair}
        self._plain = stored - used - dropped

    def _find_fp8(self, stored: set[str]) -> tuple[dict[str, tuple[str, str]], set[str]]:
        values = {name for name in stored if self._reader.dtype(name).startswith("F8") and not _is_scale(name)}
        scales = {name for name in stored if name.endswith(_FP8_SCALE)}
        for name in sorted(values):
            if self._reader.dtype(name) != "F8_E4M3":
                self._fail(f"{name} has type {self._reader.dtype(name)}; of the FP8 types only F8_E4M3 is supported")
            if name + _FP8_SCALE not in scales:
                self._fail(f"{name} is FP8 but has no {name + _FP8_SCALE}; the checkpoint is incomplete")
            shape, found = self._reader.shape(name), self._reader.shape(name + _FP8_SCALE)
            wanted = self._fp8_scale_shapes(shape)
            if found not in wanted:
                self._fail(
                    f"{name + _FP8_SCALE} has shape {found}, but blocks of {self._block} in {shape} need {wanted[0]}"
                )
            if self._reader.dtype(name + _FP8_SCALE) not in (*_FLOATS, "F8_E8M0"):
                self._fail(f"{name + _FP8_SCALE} has type {self._reader.dtype(name + _FP8_SCALE)}, no scale's type")
        for scale in sorted(scales):
            if scale.removesuffix(_FP8_SCALE) not in values:
                self._fail(f"{scale} belongs to no FP8 tensor: {scale.removesuffix(_FP8_SCALE)} is missing or no FP8")
        return (
            {name: (name, name + _FP8_SCALE) for name in values},
            {name for name in stored if name.endswith("activation_scale")},
        )

    def _fp8_scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if self._block is None:
            return (), (1,)
        if len(shape) < 2:
            self._fail(f"an FP8 tensor has shape {shape}; blocks need two axes")
        return ((*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], self._block, strict=True))),)

    def _find_mxfp4(self, stored: set[str]) -> tuple[dict[str, tuple[str, str]], set[str]]:
        pairs = {}
        for name in sorted(stored):
            for suffix, other in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
                if name.endswith(suffix) and name.removesuffix(suffix) + other not in stored:
                    self._fail(f"{name} is there without {name.removesuffix(suffix) + other}")
            if not name.endswith(_BLOCKS):
                continue
            base = name.removesuffix(_BLOCKS)
            if base in stored:
                self._fail(f"both {base} and {name} are there; which one holds the weights is not said")
            blocks, scales = self._reader.shape(name), self._reader.shape(base + _SCALES)
            if len(blocks) != 4 or blocks[-1] != 16 or scales != blocks[:-1]:
                self._fail(f"{name} has shape {blocks} and its scales {scales}; needed are [E, R, G, 16] and [E, R, G]")
            for part in (name, base + _SCALES):
                if self._reader.dtype(part) != "U8":
                    self._fail(f"{part} has type {self._reader.dtype(part)}, MXFP4 is stored as U8")
            pairs[base] = name, base + _SCALES
        return pairs, set()

    def _fail(self, problem: str) -> None:
        raise CheckpointError(f"{self.source}: {problem}")

    def names(self) -> Collection[str]:
        return self._plain | self._quantised.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._quantised or name in self._quantised[name]:
            return self._reader.shape(name)
        experts, rows, groups, _ = self._reader.shape(self._quantised[name][0])
        return experts, groups * 32, rows

    def dtype(self, name: str) -> str:
        return self._reader.dtype(self._quantised[name][0] if name in self._quantised else name)

    def readable(self, name: str) -> bool:
        return name in self._quantised or self._reader.readable(name)

    def read(self, name: str) -> np.ndarray | LazyArray:
        if name not in self._quantised:
            return self._reader.read(name)
        values, scales = (as_lazy(self._reader.read(stored)) for stored in self._quantised[name])
        if name in self._quantised[name]:
            return LazyArray(values.shape, self._dtype, functools.partial(self._fp8_box, values, scales))
        rows = (*values.shape[:2], values.shape[2] * 32)
        stored = LazyArray(rows, self._dtype, functools.partial(self._mxfp4_box, name, values, scales))
        return stored.swapaxes(1, 2)

    def _fp8_box(self, values: LazyArray, scales: LazyArray, box: Box) -> np.ndarray:
        """A box of the tensor from the same box of the values and the scales of the blocks that it meets."""
        if self._block is None:
            return dequantise_fp8(values.read(box), scales.read(), None, self._dtype)
        met = tuple((lo // size, -(-hi // size)) for (lo, hi), size in zip(box[-2:], self._block, strict=True))
        offset = tuple(lo % size for (lo, _), size in zip(box[-2:], self._block, strict=True))
        return dequantise_fp8(values.read(box), scales.read((*box[:-2], *met)), self._block, self._dtype, offset)

    def _mxfp4_box(self, name: str, blocks: LazyArray, scales: LazyArray, box: Box) -> np.ndarray:
        """A box [E, R, C] of the stored order: whole groups of 32 columns are dequantised, and cut."""
        *lead, (lo, hi) = box
        met = (*lead, (lo // 32, -(-hi // 32)))
        scales_ExRxG = scales.read(met)
        if (scales_ExRxG == _E8M0_NAN).any():
            self._fail(f"{self._quantised[name][1]} holds scales that are no numbers (255); download it again")
        value_ExCxR = dequantise_mxfp4(blocks.read((*met, (0, 16))), scales_ExRxG, self._dtype)
        return value_ExCxR.swapaxes(1, 2)[..., lo % 32 : lo % 32 + hi - lo]


def _is_scale(name: str) -> bool:
    return name.endswith((_FP8_SCALE, "activation_scale"))


def dequantise_fp8(
    values: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, int] | None,
    dtype: Any = np.float32,
    offset: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """FP8 values [..., R, C] times one scale a block of the last two axes, or (block None) one for all.

    Args:
      offset: where in the first block the first of the values lies.
    """
    if block is None:
        return (values.astype(np.float32) * scales.astype(np.float32).reshape(())).astype(dtype)
    out = np.empty(values.shape, dtype)
    height, width = block
    columns = slice(offset[1], offset[1] + values.shape[-1])
    # A row of blocks at a time: what is held in float32 stays small.
    for lead in np.ndindex(*values.shape[:-2]):
        for i, scales_of_row in enumerate(scales[lead]):
            rows = slice(max(0, i * height - offset[0]), (i + 1) * height - offset[0])
            factor = np.repeat(scales_of_row.astype(np.float32), width)[columns]
            out[lead][rows] = values[lead][rows].astype(np.float32) * factor
    return out


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Bytes [E, R, G, 16] with scales [E, R, G] -> [E, G * 32, R], a view of [E, R, G * 32]."""
    experts, rows, groups, _ = blocks.shape
    out_ExRxC = np.empty((experts, rows, groups * 32), dtype)
    some = max(1, _NUMBERS_AT_ONCE // (groups * 32))
    for expert, start in itertools.product(range(experts), range(0, rows, some)):
        at = expert, slice(start, start + some)
        pairs_RxGx16x2 = np.stack([blocks[at] & 0xF, blocks[at] >> 4], axis=-1)
        exponent_RxG = scales[at].astype(np.int32) - _E8M0_BIAS
        numbers = np.ldexp(_E2M1_VALUES[pairs_RxGx16x2], exponent_RxG[..., None, None])
        out_ExRxC[at] = numbers.reshape(-1, groups * 32)
    return out_ExRxC.swapaxes(1, 2)
