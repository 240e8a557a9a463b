"""Targets without some layers or channels: what is left is what it was, and is read back from its directory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_runs import family_case, run
from flax import nnx

from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.prune import without_layers
from dflash_jax.checkpoints.prune_width import narrowed
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


def with_silent_channels(hidden: tuple[int, ...], mlp: tuple[int, ...]):
    """A target that writes nothing to these hidden channels, and in whose MLPs these channels do nothing."""
    target = random_target(family_case("qwen3").target.config, seed=3)

    def silenced(path, variable):
        axes, value = variable.get_metadata("axes"), variable.get_value()
        if "embed" in axes:
            value = jnp.moveaxis(jnp.moveaxis(value, axes.index("embed"), 0).at[jnp.asarray(hidden)].set(0.0), 0,
                                 axes.index("embed"))  # fmt: skip
        if "mlp" in axes:
            value = jnp.moveaxis(jnp.moveaxis(value, axes.index("mlp"), 0).at[jnp.asarray(mlp)].set(0.0), 0,
                                 axes.index("mlp"))  # fmt: skip
        return path, variable.replace(value)

    flat = [silenced(path, variable) for path, variable in nnx.to_flat_state(target.params)]
    return dataclasses.replace(target, params=nnx.from_flat_state(flat))


def test_channels_that_carry_nothing_go_and_nothing_changes(tmp_path):
    target = with_silent_channels((1, 5, 6), (0, 2, 3, 7))
    config = target.config
    ids = np.arange(3, 15)
    small = narrowed(
        target, hidden_size=config.hidden_size - 3, intermediate_size=config.intermediate_size - 4, token_S=ids
    )
    assert small.config.hidden_size == config.hidden_size - 3
    assert small.config.intermediate_size == config.intermediate_size - 4
    wide, states = run(target, ids, len(ids))
    narrow, fewer = run(small, ids, len(ids))
    kept = [d for d in range(config.hidden_size) if d not in (1, 5, 6)]
    np.testing.assert_allclose(fewer, np.asarray(states)[..., kept], atol=2e-4)
    np.testing.assert_allclose(narrow, wide, atol=2e-4)
    read = load_target(export_target(tmp_path / "narrow", small), dtype="float32")
    assert read.config == dataclasses.replace(small.config, sliding_window=read.config.sliding_window)
    jax.tree.map(np.testing.assert_array_equal, read.params, small.params)


def test_the_channels_that_carry_most_are_kept():
    target = random_target(family_case("qwen3").target.config, seed=3)
    loud = target.params["embedding_VxD"].get_value().at[:, 4].mul(30.0)
    target.params["embedding_VxD"].set_value(loud)
    small = narrowed(target, hidden_size=1, token_S=range(3, 9))
    np.testing.assert_array_equal(small.params["embedding_VxD"].get_value()[:, 0], loud[:, 4])
    one = narrowed(target, intermediate_size=1)
    mlp, theirs = one.params["layers"][0]["mlp"], target.params["layers"][0]["mlp"]
    worth = np.linalg.norm(theirs["gate_up_Dx2xF"].get_value(), axis=0).prod(0)
    worth *= np.linalg.norm(theirs["down_FxD"].get_value(), axis=1)
    np.testing.assert_array_equal(mlp["down_FxD"].get_value()[0], theirs["down_FxD"].get_value()[worth.argmax()])


def test_what_is_not_narrowed():
    target = family_case("qwen3").target
    with pytest.raises(ConfigError, match="--hidden_size needs a text"):
        narrowed(target, hidden_size=8)
    with pytest.raises(ConfigError, match="--intermediate_size is 0, must lie in"):
        narrowed(target, intermediate_size=0)
    with pytest.raises(ConfigError, match="has experts"):
        narrowed(family_case("mixtral").target, intermediate_size=8)
