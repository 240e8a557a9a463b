"""A target with stacked layers is the target: same states, whatever the pattern, on a mesh, differentiated or not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax import sharding
from dflash_jax.config import FULL, LINEAR, SLIDING, ConfigError, DeltaConfig, MoeConfig
from dflash_jax.models.scanned import LayerPlan, plan_layers, stack_layers
from dflash_jax.models.target import abstract_model, random_target
from dflash_jax.models.transformer import Transformer
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.sharding import make_mesh
from tests.training import toy

DELTA = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_width=3)
MOE = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=8, layers=tuple(range(1, 6)))
TARGETS = {
    "all alike": (toy.target_config(), LayerPlan(0, 1, 5)),
    "recurrences and attention": (
        toy.target_config(num_layers=6, layer_types=(LINEAR, LINEAR, FULL) * 2, delta=DELTA), LayerPlan(0, 3, 2),
    ),
    "dense, then experts of two kinds, then one left over": (
        toy.target_config(
            num_layers=6, layer_types=(FULL, SLIDING, FULL, SLIDING, FULL, FULL), sliding_window=5, moe=MOE
        ), LayerPlan(1, 2, 2),
    ),
}  # fmt: skip


def tokens(seed=0, rows=2, length=12):
    return jnp.asarray(np.random.default_rng(seed).integers(4, toy.VOCAB, (rows, length)), jnp.int32)


def assert_same(ours, theirs):
    for name in ("hidden_BxMxD", "taps_BxMxTD"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", TARGETS)
def test_states_are_those_of_the_layers_one_by_one(name):
    config, plan = TARGETS[name]
    target = random_target(config, 1)
    stacked = stack_layers(target.params, target.graphdef, None)
    assert stacked.plan == plan
    assert sum(x.size for x in jax.tree.leaves(stacked)) == sum(x.size for x in jax.tree.leaves(target.params))
    taps = tuple(i for i in (0, 2, 3, config.num_layers - 1))

    @jax.jit
    def both(params, stacked, token, position=None, document=None):
        model = nnx.merge(target.graphdef, params)
        return tuple(forward_rows(m, token, taps, position, document) for m in (model, (target.graphdef, stacked)))

    one_by_one, scanned = both(target.params, stacked, tokens())
    assert_same(scanned, one_by_one)
    position = jnp.asarray([[*range(5), *range(7)]] * 2)
    document = jnp.asarray([[0] * 5 + [1] * 7] * 2)
    one_by_one, scanned = both(target.params, stacked, tokens(), position, document)
    assert_same(scanned, one_by_one)


def test_on_a_mesh_stacked_layers_lie_as_each_did():
    config, plan = TARGETS["dense, then experts of two kinds, then one left over"]
    mesh = make_mesh(2, 2, expert=2)
    target = random_target(config, 1, mesh=mesh)
    stacked = stack_layers(target.params, target.graphdef, mesh)
    kernel = target.params["layers"][1]["moe"]["down_ExFxD"].get_value()
    all_kernels = stacked.stacked[0]["moe"]["down_ExFxD"].get_value()
    assert all_kernels.shape == (2, *kernel.shape)
    assert tuple(all_kernels.sharding.spec) == (None, *kernel.sharding.spec) and not kernel.sharding.is_fully_replicated
    alone = random_target(config, 1)
    expected = forward_rows(nnx.merge(alone.graphdef, alone.params), tokens(), (1, 3))
    with sharding.use(mesh):
        run = jax.jit(lambda stacked, token: forward_rows((target.graphdef, stacked), token, (1, 3)))
        assert_same(run(stacked, tokens()), expected)
    # Of shapes it gives shapes, laid out alike: what --compile_only compiles.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target.params)
    abstract = stack_layers(shapes, target.graphdef, mesh)
    assert abstract.plan == stacked.plan == plan
    for x, y in zip(jax.tree.leaves(abstract), jax.tree.leaves(stacked), strict=True):
        assert x.shape == y.shape and x.sharding.is_equivalent_to(y.sharding, y.ndim)


def test_a_deep_target_is_as_small_a_program_as_a_shallow_one():
    def size(num_layers, scanned):
        config = toy.target_config(num_layers=num_layers, layer_types=(FULL,) * num_layers)
        graphdef, params = abstract_model(Transformer, config, jnp.float32)
        model = stack_layers(params, graphdef, None) if scanned else params

        def run(model, token):
            return forward_rows(
                (graphdef, model) if scanned else nnx.merge(graphdef, model), token, (1, 3)
            ).hidden_BxMxD

        return len(jax.jit(run).lower(model, tokens()).as_text())

    assert size(24, True) < 1.1 * size(6, True) < size(24, False) / 3


def test_layers_without_a_pattern_are_refused():
    config = dataclasses.replace(toy.target_config(), num_layers=2, layer_types=(FULL, SLIDING), sliding_window=4)
    graphdef, params = abstract_model(Transformer, config, jnp.float32)
    with pytest.raises(ConfigError, match=r"2 layers repeat no pattern.*step.scan_target = False"):
        plan_layers(params, graphdef)
