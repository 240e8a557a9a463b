"""The moving average of the parameters (B96): once an update, float32, in the checkpoint's one transaction."""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint._src.serialization import jax_array_handlers

from dflash_jax import load_drafter
from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh
from dflash_jax.training.checkpointing import Checkpoints, flatten
from dflash_jax.training.loop import train
from dflash_jax.training.losses import LossSums
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer, moving_average
from dflash_jax.training.run_config import RunConfig
from dflash_jax.training.step import Frozen, StepConfig, init_state, make_train_step
from tests.training import toy


def to_one() -> optax.GradientTransformation:
    """An optimiser that sets every parameter to 1, whatever the gradient."""
    return optax.chain(
        optax.stateless(lambda updates, params: jax.tree.map(lambda x: 1.0 - x, params)),
        optax.scale_by_schedule(lambda count: 1.0),
    )


def one_slot(params, key, frozen, batch) -> LossSums:
    """A loss of one supervised slot a row."""
    del key, frozen
    zero, rows = jnp.zeros(()), jnp.float32(len(batch["length_B"]))
    count_J = jnp.zeros((1,), jnp.int32)
    loss = rows * params["w"].get_value().sum()
    return LossSums(loss, rows, {"hard": zero}, rows, rows, count_J, count_J, count_J, zero, rows)


def test_b96_the_average_moves_once_an_optimiser_step():
    config = OptimizerConfig(ema_decay=0.9)
    step = make_train_step(StepConfig(1, 2, accumulation=2), one_slot, to_one(), config)
    params = nnx.State({"w": nnx.Param(jnp.zeros((1, 1)))})
    state = init_state(params, to_one(), 0, None, ema=True)
    batch, path, averages = (
        {"length_B": jnp.ones((4,), jnp.int32), "tokens_BxS": jnp.ones((4, 1), jnp.int32)},
        [0.0],
        [0.0],
    )
    for _ in range(2):
        state, metrics = step(state, Frozen(None), batch)
        assert metrics["sums"].denominator == 4  # both halves of the batch were summed
        path.append(float(state.params["w"].get_value()[0, 0]))
        averages.append(float(state.ema["w"].get_value()[0, 0]))
    assert path == [0.0, 1.0, 1.0]
    np.testing.assert_allclose(averages, [0.0, 0.1, 0.19], rtol=1e-6)  # .3439 if it moved with each half


def test_b96_a_skipped_step_leaves_the_average_alone():
    def broken(params, key, frozen, batch):
        sums = one_slot(params, key, frozen, batch)
        return sums.replace(loss=sums.loss * batch["factor_B"].sum())

    step = make_train_step(StepConfig(1, 2), broken, to_one(), OptimizerConfig(ema_decay=0.9))
    state = init_state(nnx.State({"w": nnx.Param(jnp.zeros((1, 1)))}), to_one(), 0, None, ema=True)
    for factor, expected in ((np.nan, 0.0), (1.0, 0.1)):
        batch = {
            "length_B": jnp.ones((1,)),
            "tokens_BxS": jnp.ones((1, 1), jnp.int32),
            "factor_B": jnp.asarray([factor]),
        }
        state, metrics = step(state, Frozen(None), batch)
        assert bool(metrics["finite"]) == np.isfinite(factor)
        np.testing.assert_allclose(state.ema["w"].get_value(), expected, rtol=1e-6)


def test_b96_a_slow_average_of_bfloat16_parameters_still_moves():
    params = {"w": jnp.full((8,), 3.0, jnp.bfloat16)}
    average = {"w": jnp.full((8,), 2.0)}
    move = jax.jit(lambda average: moving_average(average, params, 0.9999))
    for _ in range(1000):
        average = move(average)
    assert average["w"].dtype == jnp.float32
    np.testing.assert_allclose(average["w"], 3.0 - 0.9999**1000, rtol=1e-4)


def test_b96_masters_of_bfloat16_parameters_are_averaged_in_float32():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy.drafter(toy.drafter_config())[1])
    state = init_state(narrow, make_optimizer(OptimizerConfig()), 0, None, ema=True)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.ema))} == {jnp.dtype("float32")}


def test_the_average_lies_where_its_parameters_lie():
    optimizer = make_optimizer(OptimizerConfig(ema_decay=0.9))
    state = init_state(toy.drafter(toy.drafter_config())[1], optimizer, 0, make_mesh(4, 2), ema=True)
    for parameter, average in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.ema), strict=True):
        assert average.sharding == parameter.sharding
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.ema))


def test_a_state_and_a_decay_that_disagree_are_refused():
    params = nnx.State({"w": nnx.Param(jnp.zeros((1, 1)))})
    batch = {"length_B": jnp.ones((1,)), "tokens_BxS": jnp.ones((1, 1), jnp.int32)}
    for decay, ema in ((0.9, False), (0.0, True)):
        step = make_train_step(StepConfig(1, 2), one_slot, to_one(), OptimizerConfig(ema_decay=decay))
        with pytest.raises(ValueError, match=f"optimizer.ema_decay is {decay}"):
            step(init_state(params, to_one(), 0, None, ema=ema), Frozen(None), batch)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5, float("nan")])
def test_b96_decays_outside_zero_to_one_are_refused(decay):
    with pytest.raises(ConfigError, match=rf"optimizer.ema_decay is {decay}, must lie in \[0, 1\)"):
        OptimizerConfig(ema_decay=decay)


def test_b96_exporting_an_average_that_is_not_kept_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run.export_weights is 'mean', must be 'raw' or 'ema'"):
        RunConfig(export_weights="mean")
    config = toy.experiment(export_weights="ema")
    config.optimizer.ema_decay = 0.0
    with pytest.raises(ConfigError, match=r"run.export_weights is 'ema', but optimizer.ema_decay is 0"):
        train(config, tmp_path, target=toy.target(), data=toy.data())


def run(workdir, evaluate=None, **options):
    return train(toy.experiment(**options), workdir, target=toy.target(), data=toy.data(), evaluate=evaluate)


def arrays(workdir, step):
    from orbax.checkpoint import v1 as ocp

    stored = ocp.training.Checkpointer(workdir / "checkpoints").load_checkpointables(step)["state"]
    return {path: np.asarray(x) for path, x in stored.items()}


def part(stored, name):
    """{path below it: array} of one field of the state."""
    return {path.removeprefix(name): x for path, x in stored.items() if path.startswith(name)}


def fc_of(weights):
    return next(x for path, x in weights.items() if path.startswith("['fc_TDxD']"))


def test_b96_the_average_is_resumed_exactly_and_exported_when_asked_for(tmp_path):
    measured = []

    def evaluate(target, drafter):
        measured.append(np.asarray(drafter.params["fc_TDxD"].get_value()))
        return {"tau": 1.0 + len(measured)}

    run(tmp_path / "straight", evaluate, export_weights="ema", stop_after=12)
    run(tmp_path / "resumed", stop_after=5)  # saved while raw weights are exported: both are in it all the same
    run(tmp_path / "resumed", export_weights="raw", stop_after=12)
    expected, stored = arrays(tmp_path / "straight", 12), arrays(tmp_path / "resumed", 12)
    assert stored.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(stored[path], value, err_msg=path)
    raw, average = part(stored, ".params"), part(stored, ".ema")
    assert raw.keys() == average.keys() and len(raw) > 10
    for path, value in raw.items():
        assert average[path].dtype == np.float32 and not np.array_equal(average[path], value), path

    for workdir, weights, record in (
        ("straight", average, {"step": 12, "weights": "ema", "ema_decay": 0.8}),
        ("resumed", raw, {"step": 12, "weights": "raw"}),
    ):
        config = json.loads((tmp_path / workdir / "export" / "config.json").read_text())
        assert config["dflash_jax"] == {"training": record}
        drafter = load_drafter(tmp_path / workdir / "export", toy.target(), dtype="float32")
        loaded = np.asarray(drafter.params["fc_TDxD"].get_value())
        np.testing.assert_array_equal(loaded, fc_of(weights).astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(measured[0], fc_of(average))  # what is measured is what is exported


def wait_for_writes(folder: pathlib.Path) -> None:
    """Until nothing is written any more: threads of a failed save may go on, which a crash would have ended."""
    before, now = None, ()
    while before != now:
        before, now = now, sorted(str(path) for path in folder.rglob("*"))
        time.sleep(0.3)


def test_b96_a_crash_between_parameters_and_average_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Parameters are on disk already when the average's write fails: the step does not exist."""
    optimizer = make_optimizer(OptimizerConfig(ema_decay=0.9))
    state = init_state(toy.drafter(toy.drafter_config())[1], optimizer, 0, None, ema=True)
    write = jax_array_handlers._async_serialize_replica_slices
    written = []

    async def write_then_fail(values, infos, args, **options):
        groups = [[], []]
        for value in zip(values, infos, args, strict=True):
            groups[value[1].name.startswith(".ema")].append(value)
        assert all(groups)
        await write(*zip(*groups[0], strict=True), **options)
        written.extend(info.name for _, info, _ in groups[0])
        raise OSError("no power")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state.replace(step=jnp.int32(1)), {"position": 1}, {})
    monkeypatch.setattr(jax_array_handlers, "_async_serialize_replica_slices", write_then_fail)
    with pytest.raises(OSError, match="no power"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state.replace(step=jnp.int32(2)), {"position": 2}, {})
    monkeypatch.undo()
    assert any(name.startswith(".params") for name in written)
    begun = [path for path in tmp_path.iterdir() if path.name.startswith("2")]
    assert sum(file.stat().st_size for path in begun for file in path.rglob("*") if file.is_file()) > 10_000
    wait_for_writes(tmp_path)

    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 1
        restored, position = checkpoints.restore(1, state)
        assert position == {"position": 1}
        for path, leaf in flatten(state.replace(step=jnp.int32(1))).items():
            np.testing.assert_array_equal(flatten(restored)[path], leaf, err_msg=path)
        checkpoints.save(state.replace(step=jnp.int32(2)), {"position": 2}, {})
        assert checkpoints.latest == 2
