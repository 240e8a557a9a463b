"""Each process reads what its devices hold, once, and holds little of it: quantised or not, on any mesh."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from family_cases import golden_family
from flax import nnx
from golden_cases import ArrayReader
from safetensors.numpy import save_file

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.lazy_arrays import STEP_BYTES, LazyArray, as_lazy, box_slices
from dflash_jax.checkpoints.placement import HOST_BYTES, load_params, pieces, to_devices
from dflash_jax.checkpoints.quantised import DequantisingReader, Quantisation, dequantise_fp8, dequantise_mxfp4
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.checkpoints.target_names import target_placements
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer
from dflash_jax.sharding import make_mesh, named_sharding

MESHES = {
    "data 2 x expert 2 x tensor 2": {"data": 2, "expert": 2, "tensor": 2},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "expert 4": {"expert": 4},
}


class Recording:
    """A reader that counts how often each entry of each tensor is read."""

    def __init__(self, reader):
        self._reader, self.source = reader, reader.source
        self.counts = {name: np.zeros(reader.shape(name), np.int32) for name in reader.names()}

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def read(self, name):
        tensor = as_lazy(self._reader.read(name))

        def read_box(box):
            self.counts[name][box_slices(box)] += 1
            return tensor.read(box)

        return LazyArray(tensor.shape, tensor.dtype, read_box)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3", "gpt_oss", "gemma4_text", "llama4_text"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_on_every_mesh_the_same_numbers_each_read_once(name, mesh):
    """Replicated parameters too are read once, for all devices that hold them."""
    hf, weights = golden_family(name)
    config = target_config_from_hf(hf)
    _, abstract = abstract_model(Transformer, config, jnp.float32)
    placements = target_placements(config, False, weights)
    alone = load_params(abstract, placements, ArrayReader(weights))
    recording = Recording(ArrayReader(weights))
    spread = load_params(abstract, placements, recording, mesh=make_mesh(**mesh))
    for (path, ours), (_, theirs) in zip(nnx.to_flat_state(spread), nnx.to_flat_state(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(ours.get_value()), np.asarray(theirs.get_value()), err_msg=str(path))
    for tensor, count in recording.counts.items():
        assert (count == 1).all(), tensor


def experts_of(devices: list[int], layout: dict[str, int], *, stacked: bool):
    """(entries read once of each tensor's [E, ...], all) when only these of eight devices belong to the process."""
    mesh = make_mesh(**layout)
    num, d, f = 8, 6, 4
    make = common.stacked_experts if stacked else common.experts
    rng, counts = np.random.default_rng(0), {}
    logical = {num: "experts", d: "embed", f: "mlp"}
    for place in make(("moe",), "x", num, d, f):
        arrays = {tensor.name: rng.normal(size=tensor.shape).astype(np.float32) for tensor in place.tensors}
        recording = Recording(ArrayReader(arrays))
        value = place.join(*(recording.read(tensor.name) for tensor in place.tensors))
        wanted = place.join(*arrays.values())
        sharding = named_sharding(mesh, [logical.get(size) for size in value.shape], value.shape)
        ours = [mesh.devices.flat[i] for i in devices]
        for box in pieces(value.shape, sharding, ours):
            np.testing.assert_array_equal(value.read(box), wanted[box_slices(box)])
        counts[place.path[-1]] = recording.counts
    return counts


@pytest.mark.parametrize("stacked", [True, False])
def test_two_of_eight_devices_read_their_experts_only(stacked):
    """Devices 2 and 3 of (expert 4, tensor 2) hold experts 2 and 3, of which each has half of the channels."""
    for kind, counts in experts_of([2, 3], {"expert": 4, "tensor": 2}, stacked=stacked).items():
        for name, count in counts.items():
            of_expert = count if stacked else np.broadcast_to(count, (1, *count.shape))
            first = 0 if stacked else int(name.split(".")[1])
            for e, entries in enumerate(of_expert, first):
                assert (entries == (e in (2, 3))).all(), (kind, name)
    # One of them alone: half of the channels of gate and of up, half of the columns of down.
    for kind, counts in experts_of([2], {"expert": 4, "tensor": 2}, stacked=stacked).items():
        read = sum(int(count.sum()) for count in counts.values())
        assert read * 8 == sum(count.size for count in counts.values()), kind


def test_pieces_of_a_process_are_those_of_its_devices():
    mesh = make_mesh(data=2, tensor=4)
    layout = named_sharding(mesh, ("vocab", None), (16, 3))
    found = pieces((16, 3), layout, list(mesh.devices.flat)[4:6])
    assert {box: len(devices) for box, devices in found.items()} == {((0, 4), (0, 3)): 1, ((4, 8), (0, 3)): 1}
    assert {len(devices) for devices in pieces((16, 3), layout).values()} == {2}
    value = to_devices(as_lazy(np.arange(48.0).reshape(16, 3)), np.float32, layout)
    assert value.sharding == layout
    np.testing.assert_array_equal(np.asarray(value), np.arange(48.0).reshape(16, 3))


@pytest.mark.parametrize("block", [(4, 3), (128, 128), None])
def test_boxes_of_fp8_wherever_they_begin(tmp_path, block):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(2, 10, 7)).astype(ml_dtypes.float8_e4m3fn)
    shape = (1,) if block is None else (2, -(-10 // block[0]), -(-7 // block[1]))
    scales = rng.normal(size=shape).astype(np.float32)
    save_file({"a": values, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    lazy = DequantisingReader(SafetensorsReader(tmp_path), Quantisation("fp8", block), np.float32).read("a")
    wanted = dequantise_fp8(values, scales, block)
    np.testing.assert_array_equal(np.asarray(lazy), wanted)
    for rows in ((0, 10), (3, 4), (2, 9), (4, 8)):
        for columns in ((0, 7), (1, 2), (2, 7), (3, 6)):
            box = ((1, 2), rows, columns)
            np.testing.assert_array_equal(lazy.read(box), wanted[box_slices(box)], err_msg=str(box))


def test_boxes_of_mxfp4_wherever_they_begin(tmp_path):
    rng = np.random.default_rng(2)
    blocks, scales = rng.integers(256, size=(3, 5, 2, 16), dtype=np.uint8), rng.integers(120, 130, size=(3, 5, 2))
    stored = {"a_blocks": blocks, "a_scales": scales.astype(np.uint8)}
    save_file(stored, tmp_path / "model.safetensors")
    lazy = DequantisingReader(SafetensorsReader(tmp_path), Quantisation("mxfp4"), np.float32).read("a")
    wanted = dequantise_mxfp4(*stored.values())
    np.testing.assert_array_equal(np.asarray(lazy), wanted)
    for columns in ((0, 64), (5, 6), (30, 34), (32, 64), (33, 63)):
        box = ((1, 3), columns, (2, 5))
        np.testing.assert_array_equal(lazy.read(box), wanted[box_slices(box)], err_msg=str(box))


BIG = {
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_experts": 256, "num_experts_per_tok": 4, "dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip


def write_big(directory: pathlib.Path, *, fp8: bool) -> None:
    """More than 400 MB in bfloat16, half of it as FP8, nearly all in experts that are stored one by one."""
    stored, block = {}, (128, 128)
    numbers = np.random.default_rng(0).integers(0, 0x40, size=512 * 256, dtype=np.uint8)
    for place in target_placements(target_config_from_hf(BIG), False):
        for tensor in place.tensors:
            if fp8 and ".experts." in tensor.name:
                stored[tensor.name] = numbers.reshape(tensor.shape).view(ml_dtypes.float8_e4m3fn)
                stored[f"{tensor.name}_scale_inv"] = np.full([n // 128 for n in tensor.shape], 0.5, np.float32)
            else:
                stored[tensor.name] = np.full(tensor.shape, 0.01, ml_dtypes.bfloat16)
    save_file(stored, directory / "model.safetensors")
    quantisation = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}} if fp8 else {}
    (directory / "config.json").write_text(json.dumps({**BIG, **quantisation}))


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_memory_of_the_host_is_bounded(tmp_path, fp8):
    """A fresh process loads on eight devices; what numpy and Python held at most is counted.

    Device memory is host memory here, so the process's own (anonymous) memory may grow by the parameters and the
    bound together.
    """
    write_big(tmp_path, fp8=fp8)
    script = pathlib.Path(__file__).with_name("load_measured.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    piece = (256 // 2) * 512 * 2 * (256 // 2) * 2  # gate and up of half of the experts, half of the channels
    assert found["parameters"] > 400e6
    assert found["numpy_peak"] < piece + HOST_BYTES
    assert found["anonymous_growth"] < found["parameters"] + piece + HOST_BYTES
    assert found["mapped_left"] < STEP_BYTES
