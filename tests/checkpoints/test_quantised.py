"""FP8 and MXFP4 checkpoints: the numbers, by formulas of the tests' own and by transformers', and strictness."""

from __future__ import annotations

import json
import math
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from family_cases import golden_family
from flax import nnx
from golden_cases import GOLDEN
from safetensors.numpy import save_file

from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError, check_tensors
from dflash_jax.checkpoints.quantised import (
    DequantisingReader,
    Quantisation,
    dequantise_fp8,
    dequantise_mxfp4,
    quantisation_from_hf,
)
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.config import ConfigError

FP8 = ml_dtypes.float8_e4m3fn
FP8_MAX = 448.0
_CODES = {
    np.dtype(FP8): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint8): "U8",
}


def write(directory: pathlib.Path, arrays: dict[str, np.ndarray]) -> SafetensorsReader:
    """A safetensors file byte by byte: the library writes no eight-bit floats from numpy."""
    header, data = {}, b""
    for name, array in arrays.items():
        start, data = len(data), data + np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": _CODES[array.dtype], "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return SafetensorsReader(directory)


def quantise_fp8(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Each block scaled so that its largest entry becomes the largest FP8 number."""
    rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    values, scales = np.empty(weight.shape, FP8), np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(weight[at]).max() / FP8_MAX
            values[at] = (weight[at] / scales[i, j]).astype(FP8)
    return values, scales


def e2m1(code: int) -> float:
    """The number of four bits: sign, exponent of two bits with bias 1, mantissa of one bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -size if sign else size


@pytest.mark.parametrize(("shape", "block"), [((24, 32), (8, 16)), ((130, 70), (128, 32)), ((5, 7), (128, 128))])
def test_fp8_blocks(shape, block):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values, scales = quantise_fp8(weight, block)
    found = dequantise_fp8(values, scales, block)
    for i, j in np.ndindex(*shape):
        assert found[i, j] == np.float32(values[i, j]) * scales[i // block[0], j // block[1]]
    # Three bits of mantissa: within 1/16 of each number, or half of the smallest subnormal, 2 ** -10.
    assert (np.abs(found - weight) <= np.abs(weight) / 16 + scales.max() * 2.0**-10).all()


def test_fp8_of_stacked_experts_and_one_scale():
    rng = np.random.default_rng(1)
    pairs = [quantise_fp8(rng.normal(size=(12, 20)).astype(np.float32), (8, 16)) for _ in range(3)]
    values, scales = (np.stack(x) for x in zip(*pairs, strict=True))
    found = dequantise_fp8(values, scales, (8, 16))
    for e, (value, scale) in enumerate(pairs):
        np.testing.assert_array_equal(found[e], dequantise_fp8(value, scale, (8, 16)))
    for scale in (np.array(0.25, np.float32), np.array([0.25], ml_dtypes.bfloat16)):
        np.testing.assert_array_equal(dequantise_fp8(values, scale, None), values.astype(np.float32) / 4)


def test_mxfp4_is_the_formula():
    rng = np.random.default_rng(2)
    blocks = rng.integers(256, size=(2, 5, 3, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, size=(2, 5, 3), dtype=np.uint8)
    found = dequantise_mxfp4(blocks, scales)
    assert found.shape == (2, 96, 5)
    for e, r, g, b in np.ndindex(*blocks.shape):
        byte, factor = int(blocks[e, r, g, b]), math.ldexp(1.0, int(scales[e, r, g]) - 127)
        assert found[e, g * 32 + 2 * b, r] == e2m1(byte & 15) * factor
        assert found[e, g * 32 + 2 * b + 1, r] == e2m1(byte >> 4) * factor
    # Every number is exact in bfloat16.
    np.testing.assert_array_equal(dequantise_mxfp4(blocks, scales, ml_dtypes.bfloat16).astype(np.float32), found)


def test_numbers_of_transformers():
    with np.load(GOLDEN / "quantised.npz") as file:
        fp8 = dequantise_fp8(file["fp8"].view(FP8), file["fp8_scale"], (4, 8))
        np.testing.assert_array_equal(fp8, file["fp8_out"])
        np.testing.assert_array_equal(dequantise_mxfp4(file["blocks"], file["scales"]), file["mxfp4_out"])


# Whole checkpoints.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_fp8_checkpoint_is_loaded_as_its_dequantised_one(tmp_path, dtype):
    hf, weights = golden_family("qwen3")
    block, stored, plain = (16, 16), {}, {}
    for name, weight in weights.items():
        if "_proj" in name:
            values, scales = quantise_fp8(weight.astype(np.float32), block)
            stored[name], stored[f"{name}_scale_inv"] = values, scales.astype(ml_dtypes.bfloat16)
            plain[name] = dequantise_fp8(values, stored[f"{name}_scale_inv"], block)
        else:
            stored[name] = plain[name] = weight
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    write(tmp_path / "fp8", stored)
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(hf))
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({**hf, "quantization_config": quantisation}))
    found, wanted = (load_target(tmp_path / name, dtype=dtype).params for name in ("fp8", "plain"))
    for (path, ours), (_, theirs) in zip(nnx.to_flat_state(found), nnx.to_flat_state(wanted), strict=True):
        assert ours.get_value().dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(ours.get_value()), np.asarray(theirs.get_value()), err_msg=str(path))


def mxfp4_experts() -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(configuration, stored tensors, dequantised experts) of a gpt-oss whose experts are MXFP4."""
    hf, weights = golden_family("gpt_oss")
    hf = {**hf, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    rng, stored, experts = np.random.default_rng(3), {}, {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            shape = weight.shape[0], 64, weight.shape[1] // 32
        elif name.endswith("experts.down_proj"):
            shape = weight.shape[0], weight.shape[2], 1
        elif name.endswith("gate_up_proj_bias"):
            stored[name] = np.zeros((weight.shape[0], 64), np.float32)
            continue
        else:
            stored[name] = weight
            continue
        stored[f"{name}_blocks"] = rng.integers(256, size=(*shape, 16), dtype=np.uint8)
        stored[f"{name}_scales"] = rng.integers(118, 122, size=shape, dtype=np.uint8)
        experts[name] = dequantise_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    return hf, stored, experts


def test_an_mxfp4_checkpoint_has_the_tensors_of_the_plain_one(tmp_path):
    hf, stored, experts = mxfp4_experts()
    config = target_config_from_hf(hf)
    reader = DequantisingReader(write(tmp_path, stored), quantisation_from_hf(hf), np.float32)
    check_tensors(target_placements(config, own_head=False), reader, lambda name: is_harmless(config, name))
    for name, value in experts.items():
        assert reader.dtype(name) == "U8"
        np.testing.assert_array_equal(reader.read(name), value)
    # Rows of gate and up alternate in the blocks as the columns do in the plain tensor.
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (placement,) = (p for p in target_placements(config, False) if p.path == ("layers", 0, "moe", "gate_up_Ex2xDxF"))
    gate_up_Ex2xDxF = placement.join(reader.read(name))
    rows = dequantise_mxfp4(stored[f"{name}_blocks"][:, 1::2], stored[f"{name}_scales"][:, 1::2])
    np.testing.assert_array_equal(gate_up_Ex2xDxF[:, 1], rows)


ONE = np.ones((4, 8), FP8)
SCALE = np.ones((2, 1), np.float32)
BYTES, POWERS = np.zeros((1, 2, 3, 16), np.uint8), np.zeros((1, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        ({"a.weight": ONE}, "a.weight is FP8 but has no a.weight_scale_inv"),
        ({"a.weight_scale_inv": SCALE}, "a.weight_scale_inv belongs to no FP8 tensor"),
        ({"a.weight": ONE.astype(np.float32), "a.weight_scale_inv": SCALE}, "belongs to no FP8 tensor"),
        ({"a.weight": ONE, "a.weight_scale_inv": SCALE.T}, r"has shape \(1, 2\), but blocks of \(2, 8\).*\(2, 1\)"),
        ({"a.weight": ONE, "a.weight_scale_inv": SCALE.astype(np.uint8)}, "type U8, no scale's type"),
        ({"a.weight": ONE[0], "a.weight_scale_inv": SCALE}, r"shape \(8,\); blocks need two axes"),
        ({"a.weight": ONE.astype(ml_dtypes.float8_e5m2), "a.weight_scale_inv": SCALE}, "type F8_E5M2"),
    ],
)
def test_fp8_is_strict(tmp_path, stored, match):
    with pytest.raises(CheckpointError, match=match):
        DequantisingReader(write(tmp_path, stored), Quantisation("fp8", (2, 8)), np.float32)


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        ({"a_blocks": BYTES}, "a_blocks is there without a_scales"),
        ({"a_scales": POWERS}, "a_scales is there without a_blocks"),
        ({"a_blocks": BYTES, "a_scales": POWERS, "a": SCALE}, "both a and a_blocks"),
        ({"a_blocks": BYTES, "a_scales": POWERS[:, :1]}, r"its scales \(1, 1, 3\)"),
        ({"a_blocks": BYTES[..., :8], "a_scales": POWERS}, r"needed are \[E, R, G, 16\]"),
        ({"a_blocks": BYTES.astype(np.float32), "a_scales": POWERS}, "a_blocks has type F32"),
    ],
)
def test_mxfp4_is_strict(tmp_path, stored, match):
    with pytest.raises(CheckpointError, match=match):
        DequantisingReader(write(tmp_path, stored), Quantisation("mxfp4"), np.float32)


def test_scales_that_are_no_numbers(tmp_path):
    stored = {"a_blocks": BYTES, "a_scales": np.full_like(POWERS, 255)}
    reader = DequantisingReader(write(tmp_path, stored), Quantisation("mxfp4"), np.float32)
    with pytest.raises(CheckpointError, match="a_scales holds scales that are no numbers"):
        np.asarray(reader.read("a"))


def test_one_scale_a_tensor_and_skipped_activation_scales(tmp_path):
    stored = {
        "a.weight": ONE, "a.weight_scale_inv": np.array(0.5, np.float32), "a.activation_scale": np.ones(1, np.float32),
        "b.weight": SCALE,
    }  # fmt: skip
    reader = DequantisingReader(write(tmp_path, stored), Quantisation("fp8", None), np.float16)
    assert set(reader.names()) == {"a.weight", "b.weight"}
    assert reader.shape("a.weight") == (4, 8)
    assert reader.readable("a.weight")
    value = reader.read("a.weight")
    assert value.dtype == np.float16
    np.testing.assert_array_equal(value, np.full((4, 8), 0.5))
    np.testing.assert_array_equal(reader.read("b.weight"), SCALE)


def test_scales_that_are_powers_of_two(tmp_path):
    stored = {"a.weight": ONE, "a.weight_scale_inv": np.array([[0.25], [4.0]], ml_dtypes.float8_e8m0fnu)}
    reader = DequantisingReader(write(tmp_path, stored), Quantisation("fp8", (2, 8)), np.float32)
    np.testing.assert_array_equal(reader.read("a.weight"), np.repeat([[0.25], [4.0]], 2, axis=0) * np.ones((4, 8)))


def test_without_a_quantization_config_such_weights_are_refused(tmp_path):
    reader = write(tmp_path, {"a.weight": ONE})
    assert not reader.readable("a.weight")


def test_configurations():
    def read(values):
        return quantisation_from_hf({"quantization_config": values})

    assert quantisation_from_hf({}) is None
    assert read({"quant_method": "fp8", "weight_block_size": [128, 128]}) == Quantisation("fp8", (128, 128))
    assert read({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}).block is None
    assert quantisation_from_hf({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}).method == "mxfp4"
    for values, match in (
        ({"quant_method": "awq"}, "quant_method 'awq'; fp8 and mxfp4 are dequantised on load"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ("fp8", "must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=match):
            read(values)
