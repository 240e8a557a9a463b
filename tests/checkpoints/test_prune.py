"""A target without some layers says what the remaining layers say, and is read back from its directory."""

import dataclasses

import jax
import numpy as np
import pytest
from family_runs import family_case, run
from flax import nnx

from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.prune import without_layers
from dflash_jax.config import ConfigError
from dflash_jax.models.target import random_target


def test_the_first_layers_of_a_target_are_a_target(tmp_path):
    case = family_case("qwen3")
    layers = case.target.config.num_layers
    pruned = without_layers(case.target, [layers - 1])
    ids = np.asarray(case.ids)
    _, states = run(pruned, ids, len(ids))
    np.testing.assert_allclose(states, case.layers[: layers - 1], atol=1e-4)
    read = load_target(export_target(tmp_path / "pruned", pruned), dtype="float32")
    assert read.config == dataclasses.replace(pruned.config, sliding_window=read.config.sliding_window)
    jax.tree.map(np.testing.assert_array_equal, read.params, pruned.params)


def test_a_layer_in_the_middle_goes_and_the_rest_keeps_its_order():
    target = random_target(family_case("qwen3").target.config, seed=3)
    pruned = without_layers(target, [0])
    assert pruned.config.num_layers == target.config.num_layers - 1
    for new in range(pruned.config.num_layers):
        ours, theirs = pruned.params["layers"][new], target.params["layers"][new + 1]
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert len(nnx.to_flat_state(pruned.params)) < len(nnx.to_flat_state(target.params))


def test_what_is_refused():
    target = family_case("qwen3").target
    everything = range(target.config.num_layers)
    with pytest.raises(ConfigError, match="--drop names every layer"):
        without_layers(target, list(everything))
    with pytest.raises(ConfigError, match="--drop holds -1"):
        without_layers(target, [-1])
    with pytest.raises(ConfigError, match="names some layers by number"):
        without_layers(family_case("mixtral").target, [0])
