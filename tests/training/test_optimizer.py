"""Muon: each matrix made orthogonal on its own, at Adam's size; sharded and saved like any other state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import ConfigError
from dflash_jax.drafters.dflash import TABLES, DFlash
from dflash_jax.models.target import place
from dflash_jax.sharding import make_mesh
from dflash_jax.training.checkpointing import Checkpoints, flatten
from dflash_jax.training.initialise import Statistics, coordinate_units
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import MATRICES, OptimizerConfig, make_optimizer
from dflash_jax.training.step import Frozen, StepConfig, init_state, make_loss, make_train_step, put_batch
from tests.training import toy

CONFIG = toy.drafter_config(attention_bias=True, markov_rank=4)
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
TARGET = toy.target()
MUON = OptimizerConfig(kind="muon", learning_rate=1e-2, warmup_steps=0, total_steps=100, weight_decay=0.1)
ADAMW = dataclasses.replace(MUON, kind="adamw")
UNIT = coordinate_units(PARAMS, CONFIG, Statistics(tap_rms=(4.0, 0.5)))


def named(tree):
    """{keystr: array}"""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def random_gradient(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), PARAMS)


def first_update(config, gradient, unit=None, trainable=None):
    optimizer = make_optimizer(config, unit, trainable)
    return named(jax.jit(optimizer.update)(gradient, optimizer.init(PARAMS), PARAMS)[0])


def as_matrices(name, x):
    """A parameter as a list of matrices, written out case by case."""
    if name.startswith("q_"):
        return [x.reshape(x.shape[0], -1)]
    if name.startswith("kv_"):
        return [x[:, :, i].reshape(x.shape[0], -1) for i in range(2)]
    if name.startswith("out_"):
        return [x.reshape(-1, x.shape[-1])]
    if name.startswith("gate_up_"):
        return [x[:, i] for i in range(2)]
    return [x]


def orthogonalised(x):
    """Five quintic Newton-Schulz steps in float64."""
    x = x.astype(np.float64) / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_each_matrix_is_made_orthogonal_on_its_own_and_brought_to_adams_size():
    config = dataclasses.replace(MUON, weight_decay=0.0, clip_norm=1e9)
    gradient = random_gradient()
    update, seen = first_update(config, gradient), set()
    for path, given in named(gradient).items():
        name = path.split("'")[-2]
        if name not in MATRICES:
            continue
        seen.add(name)
        for got, g in zip(as_matrices(name, update[path]), as_matrices(name, given), strict=True):
            expected = -1e-2 * 0.2 * max(g.shape) ** 0.5 * orthogonalised(g)
            np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max(), err_msg=path)
            assert 0.1 < np.sqrt(np.mean(got**2)) / 1e-2 < 0.3, path
    assert seen == set(MATRICES) - {"embed_projection_ExD", "head_projection_DxE"}


def test_norm_scales_biases_and_tables_are_adams():
    gradient = random_gradient()
    muon, adam = first_update(MUON, gradient), first_update(ADAMW, gradient)
    others = [path for path in muon if path.split("'")[-2] not in MATRICES]
    assert all(any(name in path for path in others) for name in ("bias", "scale", *TABLES))
    for path in others:
        np.testing.assert_array_equal(muon[path], adam[path], err_msg=path)


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
def test_matrices_and_tables_decay_and_nothing_else(config):
    nothing = jax.tree.map(jnp.zeros_like, PARAMS)
    for path, update in first_update(config, nothing).items():
        decayed = path.split("'")[-2] in (*MATRICES, *TABLES)
        np.testing.assert_allclose(update, -1e-3 * named(PARAMS)[path] if decayed else 0.0, rtol=1e-5, err_msg=path)


def test_what_does_not_train_does_not_move():
    trains = jax.tree_util.tree_map_with_path(lambda path, _: "fc_TDxD" in jax.tree_util.keystr(path), PARAMS)
    gradient = jax.tree.map(lambda g, t: g if t else jnp.zeros_like(g), random_gradient(), trains)
    for path, update in first_update(MUON, gradient, trainable=trains).items():
        assert (np.abs(update).max() > 0) == ("fc_TDxD" in path), path


def test_projections_of_a_trunk_of_another_width_are_matrices_too():
    config = toy.drafter_config(target_hidden_size=24)
    params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(0)))[1]
    names = {path.split("'")[-2] for path in named(params)}
    assert {"embed_projection_ExD", "head_projection_DxE"} < names
    make_optimizer(MUON).init(params)


def test_a_matrix_that_is_not_known_is_named():
    params = nnx.State({"layers": nnx.State({"codebook_VxR": nnx.Param(jnp.zeros((4, 3)))})})
    with pytest.raises(ConfigError, match=r"matrix form of \['layers'\]\['codebook_VxR'\].*optimizer.MATRICES"):
        make_optimizer(MUON).init(params)


# In the step.


def batch():
    return toy.batch(rows=8, length=40, starts=(5,) * 8, ends=(8, 40, 10, 9, 33, 5, 20, 30))


def frozen(mesh=None):
    shared = shared_weights(TARGET)
    return Frozen(shared if mesh is None else jax.device_put(shared, jax.sharding.NamedSharding(mesh, jax.P())))


@functools.cache
def step_on(mesh):
    config = StepConfig(6, CONFIG.block_size, LossConfig("hard", chunk_slots=64))
    loss = make_loss(config, GRAPHDEF, CONFIG, TARGET.config)
    return make_train_step(config, loss, make_optimizer(MUON, UNIT), MUON, UNIT, mesh)


def fresh(mesh=None):
    return init_state(place(PARAMS, mesh), make_optimizer(MUON, UNIT), 0, mesh)


def trained(state, steps, mesh=None):
    for _ in range(steps):
        state, metrics = step_on(mesh)(state, frozen(mesh), put_batch(batch(), mesh))
    return state, metrics


def test_learns():
    _, first = trained(fresh(), 1)
    _, last = trained(fresh(), 40)
    assert last["sums"].loss < 0.7 * first["sums"].loss


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
def test_on_a_mesh_moments_lie_with_their_parameters_and_steps_are_the_same(axes):
    mesh = make_mesh(axes["data"], axes["tensor"], fsdp=axes.get("fsdp", 1))
    state, metrics = trained(fresh(mesh), 2, mesh)
    expected, expected_metrics = trained(fresh(), 2)
    np.testing.assert_allclose(metrics["sums"].loss, expected_metrics["sums"].loss, rtol=1e-4)
    moments = optax.tree.get_all_with_path(state.opt_state, "mu")
    layout = {
        jax.tree_util.keystr(path): x.sharding
        for _, tree in moments for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }  # fmt: skip
    assert set(layout) == set(named(PARAMS))  # each has one moment, Muon's or Adam's
    cut = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state.params):
        assert layout[jax.tree_util.keystr(path)].is_equivalent_to(x.sharding, x.ndim), path
        cut += not x.sharding.is_fully_replicated
    assert cut >= 4
    # Orthogonalising lifts what is small in a gradient, its rounding included.
    for path, value in named(expected.params).items():
        np.testing.assert_allclose(named(state.params)[path], value, atol=2e-4, err_msg=path)


def test_b78_saved_and_restored_it_goes_on_bit_by_bit(tmp_path):
    half, _ = trained(fresh(), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(half, {}, {})
        restored, _ = checkpoints.restore(2, fresh())
        mesh = make_mesh(2, 2, fsdp=2)
        elsewhere, _ = checkpoints.restore(2, fresh(mesh))
    for path, leaf in flatten(elsewhere).items():
        np.testing.assert_array_equal(leaf, flatten(restored)[path], err_msg=path)
    resumed, straight = flatten(trained(restored, 2)[0]), flatten(trained(fresh(), 4)[0])
    assert set(resumed) == set(straight)
    for path, leaf in straight.items():
        np.testing.assert_array_equal(resumed[path], leaf, err_msg=path)
