"""Golden vectors of tests/golden/family_*.npz as checkpoints, read by the name map alone, without a model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_cases import GOLDEN

from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.placement import export_tensors
from dflash_jax.checkpoints.target_names import target_placements
from dflash_jax.config import TargetConfig


def golden_family(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json, weights under their Hugging Face names)."""
    with np.load(GOLDEN / f"family_{name}.npz") as file:
        weights = {key.removeprefix("w."): file[key] for key in file.files if key.startswith("w.")}
        return json.loads(str(file["config"])), weights


def parameters(config: TargetConfig, weights: Mapping[str, np.ndarray]) -> nnx.State:
    """The parameter tree that the name map makes; asserts that every weight is taken, whole and once."""
    flat, taken = [], dict.fromkeys(weights, 0)
    for placement in target_placements(config, False, weights):
        arrays = []
        for tensor in placement.tensors:
            assert weights[tensor.name].shape == tensor.shape, tensor.name
            arrays.append(tensor.take(weights[tensor.name]))
            taken[tensor.name] += arrays[-1].size
        flat.append((placement.path, nnx.Param(jnp.asarray(placement.join(*arrays)))))
    assert taken == {name: value.size for name, value in weights.items()}
    return nnx.from_flat_state(flat)


def exported(config: TargetConfig, params: nnx.State, names: Collection[str] = ()) -> dict[str, np.ndarray]:
    """What is written of a tree, in the spelling of `names`."""
    return dict(export_tensors(params, target_placements(config, False, names)))


def assert_same_bytes(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_there_and_back(name: str) -> TargetConfig:
    """A golden checkpoint through the name map, in its own spelling."""
    hf, weights = golden_family(name)
    config = target_config_from_hf(hf)
    assert_same_bytes(exported(config, parameters(config, weights), weights), weights)
    return config
