"""One update: how a batch is cut does not matter, what is frozen stays, what is not finite changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import ConfigError
from dflash_jax.models.target import place
from dflash_jax.sharding import make_mesh
from dflash_jax.training.initialise import Statistics, coordinate_units
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer, schedule
from dflash_jax.training.step import Frozen, StepConfig, init_state, make_loss, make_train_step, put_batch
from tests.training import toy

CONFIG = toy.drafter_config()
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
TARGET = toy.target()
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, total_steps=100, weight_decay=0.1)
UNIT = coordinate_units(PARAMS, CONFIG, Statistics(tap_rms=(4.0, 0.5)))
LOSS = LossConfig({"hard": 0.3, "forward_kl": 0.7}, gamma=3.0, chunk_slots=24)


def uneven_batch():
    """Eight rows with 1 to 60 supervised tokens behind the anchors, one of them with none."""
    ends = (8, 70, 10, 9, 40, 5, 20, 30)
    return toy.batch(rows=8, length=70, starts=(5,) * 8, ends=ends)


@functools.cache
def step_function(accumulation=1, mesh=None, loss_config=LOSS):
    config = StepConfig(6, CONFIG.block_size, loss_config, accumulation)
    loss = make_loss(config, GRAPHDEF, CONFIG, TARGET.config)
    return make_train_step(config, loss, make_optimizer(OPTIMIZER, UNIT), OPTIMIZER, UNIT, mesh)


def frozen(mesh=None):
    shared = shared_weights(TARGET)
    return Frozen(shared if mesh is None else jax.device_put(shared, jax.sharding.NamedSharding(mesh, jax.P())))


def update(batch, accumulation=1, mesh=None, steps=1, loss_config=LOSS):
    optimizer = make_optimizer(OPTIMIZER, UNIT)
    state = init_state(place(PARAMS, mesh), optimizer, 0, mesh)
    for _ in range(steps):
        state, metrics = step_function(accumulation, mesh, loss_config)(state, frozen(mesh), put_batch(batch, mesh))
    return state, metrics


def assert_same_update(ours, theirs, rtol=1e-5):
    (state, metrics), (expected, expected_metrics) = ours, theirs
    for name in ("loss", "denominator", "label_weight", "count_J", "correct_J", "chain", "blocks"):
        np.testing.assert_allclose(
            getattr(metrics["sums"], name), getattr(expected_metrics["sums"], name), rtol=rtol, err_msg=name
        )
    for name, total in expected_metrics["sums"].objective.items():
        np.testing.assert_allclose(metrics["sums"].objective[name], total, rtol=rtol, err_msg=name)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=rtol)
    # The first moment is the clipped gradient itself (times 0.1): Adam's step would hide its size.
    moments, expected_moments = state.opt_state[2].mu, expected.opt_state[2].mu
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(moments), jax.tree.leaves(expected_moments), strict=True
    ):
        scale = max(float(jnp.abs(b).max()), 1e-6)
        np.testing.assert_allclose(
            np.asarray(a) / scale, np.asarray(b) / scale, atol=10 * rtol, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_b75_the_update_does_not_depend_on_how_the_batch_is_cut(accumulation):
    batch = uneven_batch()
    whole = update(batch)
    assert_same_update(update(batch, accumulation), whole)
    order = np.argsort(batch["length_B"])
    assert_same_update(update({k: x[order] for k, x in batch.items()}, accumulation), whole)


def test_b75_nor_with_weights_from_confidence():
    """Their denominator is the number of blocks, wherever they lie."""
    batch, loss_config = uneven_batch(), LossConfig({"acceptance": 1.0, "hard": 0.5}, "dpace", chunk_slots=24)
    whole = update(batch, loss_config=loss_config)
    sums = whole[1]["sums"]
    assert sums.denominator == sums.blocks and sums.weight > 1.2 * sums.blocks
    assert_same_update(update(batch, 4, loss_config=loss_config), whole)
    assert_same_update(update(batch, 2, make_mesh(4, 2), loss_config=loss_config), whole)


def test_b75_the_denominator_is_the_sum_of_slot_weights():
    batch = toy.batch(rows=1, length=24, starts=(5,), ends=(8,))  # anchors 5 and 6: slots 6, 7 and 7
    _, metrics = update({k: np.repeat(x, 8, 0) for k, x in batch.items()})
    np.testing.assert_allclose(metrics["sums"].denominator, 8 * (2 + np.exp(-1 / 3)), rtol=1e-6)


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_b76_a_mesh_gives_the_update_of_one_device(data, tensor):
    batch = uneven_batch()
    mesh = make_mesh(data, tensor)
    state, metrics = update(batch, mesh=mesh)
    assert_same_update((state, metrics), update(batch))
    kernel = state.params["layers"][0]["mlp"]["down_FxD"].get_value()
    assert kernel.sharding.spec[0] == ("tensor" if tensor > 1 else None) or kernel.sharding.spec == jax.P(
        "tensor", None
    )
    moment = state.opt_state[2].mu["layers"][0]["mlp"]["down_FxD"].get_value()
    assert moment.sharding.is_equivalent_to(kernel.sharding, kernel.ndim)
    assert metrics["sums"].loss.sharding.is_fully_replicated


def test_b76_accumulation_on_a_mesh():
    batch = uneven_batch()
    assert_same_update(update(batch, 2, make_mesh(4, 2)), update(batch))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="7 rows does not divide over 4"):
        put_batch({k: x[:7] for k, x in uneven_batch().items()}, make_mesh(4, 1))
    with pytest.raises(ConfigError, match="accumulation 2 does not divide the batch of 7 rows"):
        update({k: x[:7] for k, x in uneven_batch().items()}, accumulation=2)


def test_b26_the_targets_table_and_head_never_change():
    held = frozen()
    before = jax.tree.map(np.asarray, held)
    optimizer = make_optimizer(OPTIMIZER, UNIT)
    state = init_state(PARAMS, optimizer, 0, None)
    start = jax.tree.map(np.asarray, state.params)
    for _ in range(10):
        state, _ = step_function()(state, held, put_batch(uneven_batch(), None))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, held), before)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))]
    assert not any("embedding" in p or "head" in p for p in paths)
    for (path, now), then in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(start), strict=True
    ):
        assert not np.array_equal(now, then), f"{jax.tree_util.keystr(path)} did not train"


def test_b70_an_empty_batch_changes_nothing_but_the_step_counter():
    batch = uneven_batch()
    empty = batch | {"loss_mask_BxS": np.zeros_like(batch["loss_mask_BxS"])}
    trained, _ = update(batch)
    before = jax.tree.map(np.asarray, (trained.params, trained.opt_state))
    after, metrics = step_function()(trained, frozen(), put_batch(empty, None))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (after.params, after.opt_state)), before)
    assert after.step == 2 and metrics["finite"] and metrics["sums"].loss == 0 and metrics["grad_norm"] == 0


def test_a_batch_that_is_not_finite_changes_nothing_and_says_so():
    batch = uneven_batch()
    broken = batch | {"taps_BxSxTD": batch["taps_BxSxTD"].copy()}
    broken["taps_BxSxTD"][1, 3] = np.nan
    trained, _ = update(batch)
    before = jax.tree.map(np.asarray, (trained.params, trained.opt_state))
    after, metrics = step_function()(trained, frozen(), put_batch(broken, None))
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (after.params, after.opt_state)), before)


def test_learning_from_a_small_batch():
    _, first = update(uneven_batch())
    _, last = update(uneven_batch(), steps=60)
    assert last["sums"].loss < 0.5 * first["sums"].loss


def test_bfloat16_compute_keeps_masters_gradients_and_sums_in_float32():
    config = StepConfig(6, CONFIG.block_size, LOSS, compute_dtype="bfloat16")
    loss = make_loss(config, GRAPHDEF, CONFIG, TARGET.config)
    optimizer = make_optimizer(OPTIMIZER, UNIT)
    step = make_train_step(config, loss, optimizer, OPTIMIZER, UNIT)
    state, metrics = step(init_state(PARAMS, optimizer, 0, None), frozen(), put_batch(uneven_batch(), None))
    _, exact = update(uneven_batch())
    for leaf, same in zip(jax.tree.leaves(metrics["sums"]), jax.tree.leaves(exact["sums"]), strict=True):
        assert leaf.dtype == same.dtype
    moments = {jnp.dtype(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state[2].mu))}
    assert moments == {jnp.dtype("float32")}
    # No sum is rounded on its way: this one has digits that bfloat16 has not.
    assert exact["sums"].denominator != exact["sums"].denominator.astype(jnp.bfloat16)
    np.testing.assert_allclose(metrics["sums"].denominator, exact["sums"].denominator, rtol=1e-6)
    np.testing.assert_allclose(metrics["sums"].loss, exact["sums"].loss, rtol=3e-2)


@pytest.mark.parametrize("remat", ["dots", "layers"])
def test_computing_layers_again_changes_no_number(remat):
    batch = put_batch(uneven_batch(), None)

    def gradient(remat):
        loss = make_loss(StepConfig(6, CONFIG.block_size, LOSS, remat=remat), GRAPHDEF, CONFIG, TARGET.config)
        return jax.jit(jax.value_and_grad(lambda params: loss(params, jax.random.key(0), frozen(), batch).loss))(PARAMS)

    value, grads = gradient(remat)
    expected, expected_grads = gradient("none")
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected_grads)


def test_computing_layers_again_keeps_less_for_the_backward_pass():
    """Bytes that lie between the passes, as traced; what is made of it is the backend's (XLA on CPU saves nothing)."""
    config = toy.drafter_config(num_layers=6, layer_types=("full_attention",) * 6)
    graphdef, params = toy.drafter(config)
    batch = put_batch(toy.batch(rows=2, length=80, starts=(4, 4), ends=(80, 80)), None)

    def kept(remat):
        loss = make_loss(StepConfig(64, config.block_size, LOSS, remat=remat), graphdef, config, TARGET.config)

        def backward(params):
            return jax.vjp(lambda params: loss(params, jax.random.key(0), frozen(), batch).loss, params)[1]

        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(backward, params)))

    none, dots, layers = (kept(remat) for remat in ("none", "dots", "layers"))
    assert layers < 0.5 * dots and dots < 0.5 * none, (none, dots, layers)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_units_are_a_change_of_coordinates(kind):
    """Dividing taps by their size, and training fc on them, is the same as scaling fc with the units."""
    scale = np.repeat(np.asarray([4.0, 0.5], np.float32), toy.HIDDEN)
    batch = uneven_batch()
    scaled = batch | {"taps_BxSxTD": batch["taps_BxSxTD"] / scale[None, None]}
    config = StepConfig(6, CONFIG.block_size, LOSS)
    loss = make_loss(config, GRAPHDEF, CONFIG, TARGET.config)
    optimizer_config = dataclasses.replace(OPTIMIZER, kind=kind)

    def train(params, unit, batch):
        optimizer = make_optimizer(optimizer_config, unit)
        step = make_train_step(config, loss, optimizer, optimizer_config, unit)
        state = init_state(params, optimizer, 0, None)
        for _ in range(3):
            state, metrics = step(state, frozen(), put_batch(batch, None))
        return np.asarray(state.params["fc_TDxD"].get_value()), metrics["grad_norm"]

    in_units, norm = train(PARAMS, UNIT, batch)
    ordinary = jax.tree.map(lambda x: x, PARAMS)
    ordinary["fc_TDxD"] = ordinary["fc_TDxD"].replace(PARAMS["fc_TDxD"].get_value() * scale[:, None])
    coordinates, ordinary_norm = train(ordinary, None, scaled)
    np.testing.assert_allclose(norm, ordinary_norm, rtol=1e-5)
    np.testing.assert_allclose(in_units * scale[:, None], coordinates, rtol=1e-4, atol=1e-5)


def test_schedule_warms_up_and_decays():
    rate = schedule(OptimizerConfig(learning_rate=2e-3, warmup_steps=10, total_steps=110, final_fraction=0.1))
    np.testing.assert_allclose([rate(0), rate(5), rate(10), rate(60), rate(110), rate(500)],
                               [0, 1e-3, 2e-3, 1.1e-3, 2e-4, 2e-4], rtol=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(learning_rate=0.0), "learning_rate is 0.0"),
        (lambda: OptimizerConfig(warmup_steps=10, total_steps=10), "warmup_steps is 10"),
        (lambda: OptimizerConfig(clip_norm=0.0), "clip_norm is 0.0"),
        (lambda: StepConfig(0, 4), "num_anchors is 0"),
        (lambda: StepConfig(4, 1), "block_size is 1"),
        (lambda: StepConfig(4, 4, accumulation=0), "accumulation is 0"),
        (lambda: StepConfig(4, 4, compute_dtype="float16"), "compute_dtype is 'float16'"),
        (lambda: StepConfig(4, 4, remat="some"), "step.remat is 'some', must be one of none, dots, layers"),
        (lambda: OptimizerConfig(kind="sgd"), "optimizer.kind is 'sgd'"),
        (lambda: OptimizerConfig(momentum=1.0), "optimizer.momentum is 1.0"),
        (lambda: make_loss(StepConfig(4, 6), GRAPHDEF, CONFIG, TARGET.config), "block_size 6 of the step exceeds"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
