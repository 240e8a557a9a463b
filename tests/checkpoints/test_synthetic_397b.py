"""Qwen3.5-397B-A17B end to end: its checkpoint's names and shapes, cut in depth and width, loaded and decoded from."""

from __future__ import annotations

import functools
import math
import pathlib
import re
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx
from synthetic_397b import config, tensors, write_cut, write_hollow

from dflash_jax import generate
from dflash_jax.checkpoints.convert import convert, dry_run
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.models.target import Target
from dflash_jax.sharding import make_mesh
from dflash_jax.training.initialise import drafter_config

MESH = {"data": 2, "expert": 2, "tensor": 2}
PROMPTS = [[5, 9, 2], list(range(10, 29)), [7], [30, 40, 50, 60, 70, 80]]


@functools.cache
def loaded(on_mesh: bool, converted: bool = False) -> Target:
    """In float32, so that greedy answers of different programs are equal and not only near."""
    mesh = make_mesh(**MESH) if on_mesh else None
    with tempfile.TemporaryDirectory() as directory:
        source = write_cut(pathlib.Path(directory))
        if converted:
            source = convert(source, pathlib.Path(directory) / "converted", dtype="float32")
        return load_target(source, dtype="float32", mesh=mesh)


@functools.cache
def answers(on_mesh: bool, drafted: bool) -> list[tuple[int, ...]]:
    target = loaded(on_mesh)
    drafter = None
    if drafted:
        shape = drafter_config(target.config, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=(0, 2))
        drafter = random_drafter(shape, target, seed=1)
    results = generate(target, drafter, PROMPTS, max_tokens=12, stop_token_ids=())
    return [tuple(result.token_ids) for result in results]


def test_the_published_model_has_397_billion_parameters():
    hf = config()
    assert round(sum(math.prod(shape) for _, shape, _ in tensors(hf, text_only=True)) / 1e9) == 396
    active = sum(
        math.prod(shape) * (10 / 512 if ".experts." in name else 1) for name, shape, _ in tensors(hf, text_only=True)
    )
    assert 16e9 < active < 18e9


@pytest.mark.parametrize("converted", [False, True])
def test_on_eight_devices_the_same_parameters(converted):
    one, eight = loaded(False), loaded(True, converted)
    for (path, a), (_, b) in zip(nnx.to_flat_state(eight.params), nnx.to_flat_state(one.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=str(path))
    moe = eight.params["layers"][0]["moe"]
    down_ExFxD = moe["down_ExFxD"].get_value()
    assert down_ExFxD.sharding.spec[:2] == ("expert", "tensor")
    assert down_ExFxD.addressable_shards[0].data.size * 4 == down_ExFxD.size
    assert len(jax.tree.leaves(one.params)) == len(jax.tree.leaves(eight.params))


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "data 2 x expert 2 x tensor 2"])
def test_drafted_answers_are_the_plain_ones(on_mesh):
    assert answers(on_mesh, True) == answers(on_mesh, False)
    assert answers(on_mesh, False) == answers(False, False)
    assert len({a[-4:] for a in answers(False, False)}) > 1  # rows that say different things


def test_layout_of_the_whole_model_without_its_weights(tmp_path):
    """Every name and shape of the published checkpoint fits; 64 devices hold nearly an even share."""
    text = dry_run(write_hollow(tmp_path, config()), "fsdp=2,expert=8,tensor=4")
    total = sum(math.prod(shape) for _, shape, _ in tensors(config(), text_only=True))
    assert f"parameters: {total:,}" in text
    held = int(re.search(r"bytes a device: ([\d,]+)", text)[1].replace(",", ""))
    # Above the even share: heads are cut by tensor and fsdp only, so all expert shards hold attention.
    assert 1.2 < held / (2 * total / 64) < 1.25
    experts = r"layers/\*/moe/down_ExFxD +60  512 x 1024 x 4096 +bfloat16  512/expert, 1024/tensor, 4096/fsdp"
    assert re.search(experts, text)
