"""Stopping and going on: nothing that the next step depends on may be lost."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh
from dflash_jax.training.checkpointing import Checkpoints, check_fingerprint, flatten
from dflash_jax.training.loop import train
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import init_state
from dflash_jax.training.watch import TrainingDiverged
from tests.training import toy

STEPS, config = toy.STEPS, toy.experiment


def losses(workdir) -> dict[int, float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [x["step"] for x in lines if x["kind"] == "train"]
    assert len(steps) == len(set(steps)), "a step is logged twice"
    return {x["step"]: (x["loss"], x["learning_rate"]) for x in lines if x["kind"] == "train"}


def final_arrays(workdir, step=STEPS) -> dict[str, np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    loaded = ocp.training.Checkpointer(workdir / "checkpoints").load_checkpointables(step)
    return {path: np.asarray(x) for path, x in loaded["state"].items()}


def run(workdir, seen=None, evaluate=None, **options):
    data = toy.data()
    result = train(config(**options), workdir, target=toy.target(), data=data, evaluate=evaluate)
    if seen is not None:
        seen += data.batches.seen
    return result


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    seen = []
    run(workdir, seen)
    return workdir, seen, losses(workdir), final_arrays(workdir)


# Stops after 10 steps like a machine that is switched off: in a process of its own.
FIRST_HALF = """
import sys
sys.path.insert(0, {root!r})
from tests.training import test_resume
test_resume.run(test_resume.pathlib.Path({workdir!r}), {options})
"""


def in_new_process(workdir, options="", wait=True):
    root = str(pathlib.Path(__file__).parents[2])
    code = FIRST_HALF.format(root=root, workdir=str(workdir), options=options)
    process = subprocess.Popen(
        [sys.executable, "-c", "import tests.conftest" + code], cwd=root, stderr=subprocess.PIPE, text=True
    )
    if wait:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    return process


def test_b78_b79_ten_steps_and_ten_in_a_new_process_equal_twenty(straight, tmp_path):
    _, ids, expected_losses, expected = straight
    in_new_process(tmp_path, "stop_after=10")
    assert set(losses(tmp_path)) == set(range(1, 11))
    seen = []
    result = run(tmp_path, seen)
    assert result.step == STEPS
    assert losses(tmp_path) == expected_losses  # bit-equal, learning rates too
    assert seen == ids[len(ids) - len(seen) :] and len(seen) == 10 * 4
    arrays = final_arrays(tmp_path)
    assert set(arrays) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(arrays[path], value, err_msg=path)


def test_b78_muon_and_a_loss_of_the_whole_law_go_on_bit_by_bit(tmp_path):
    def go(workdir, **options):
        changed, data = config(**options), toy.data()
        changed.loss = {"objective": {"acceptance": 1.0, "hard": 0.5}, "weighting": "dpace", "chunk_slots": 24}
        changed.step.remat, changed.step.scan_target = "layers", True
        changed.optimizer.kind = "muon"
        train(changed, workdir, target=toy.target(), data=data)

    go(tmp_path / "straight")
    go(tmp_path / "halves", stop_after=9)
    go(tmp_path / "halves")
    expected = losses(tmp_path / "straight")
    assert losses(tmp_path / "halves") == expected and expected[STEPS][0] < expected[1][0]
    arrays = final_arrays(tmp_path / "halves")
    for path, value in final_arrays(tmp_path / "straight").items():
        np.testing.assert_array_equal(arrays[path], value, err_msg=path)


def test_b78_an_evaluation_in_between_changes_nothing(straight, tmp_path):
    _, _, expected_losses, expected = straight
    taus = iter([1.25, 1.75, 1.5])
    calls = []

    def evaluate(target, drafter):
        calls.append(np.asarray(drafter.params["fc_TDxD"].get_value()))
        jax.random.normal(jax.random.key(0), ())
        return {"tau": next(taus)}

    result = run(tmp_path, evaluate=evaluate, eval_every=7, save_every=7)
    assert losses(tmp_path) == expected_losses
    for path, value in final_arrays(tmp_path).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    assert result.best == {"step": 14, "tau": 1.75} and result.evaluation == {"tau": 1.5}
    assert json.loads((tmp_path / "best.json").read_text()) == result.best
    from dflash_jax import load_drafter

    best = load_drafter(tmp_path / "best", toy.target(), dtype="float32")
    saved = np.asarray(best.params["fc_TDxD"].get_value())
    np.testing.assert_allclose(saved, calls[1], rtol=1e-2)  # exported in bfloat16
    assert best.shared.head_DxV.shape == (toy.HIDDEN, 32)


def test_b78_when_the_minutes_are_over_the_run_ends_and_goes_on(straight, tmp_path):
    _, _, expected_losses, expected = straight
    ended = run(tmp_path, max_minutes=1e-9, evaluate=lambda target, drafter: {"tau": 1.5})
    assert (ended.step, ended.evaluation["tau"]) == (1, 1.5) and (ended.export / "config.json").exists()
    assert run(tmp_path).step == STEPS
    assert losses(tmp_path) == expected_losses
    for path, x in final_arrays(tmp_path).items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)


def test_b79_every_sample_once_an_epoch(straight):
    _, ids, _, _ = straight
    epochs = [ids[i : i + 12] for i in range(0, 72, 12)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 12 for e in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_b79_stopped_in_the_middle(straight, tmp_path, how):
    _, ids, expected_losses, expected = straight
    process = in_new_process(tmp_path, "save_every=5", wait=False)
    try:
        deadline = time.monotonic() + 240
        while not any((tmp_path / "checkpoints").glob("[0-9]*/commit_success.txt")):
            assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
            time.sleep(0.01)
    finally:
        process.send_signal(how)
        process.communicate()
    if how == signal.SIGTERM and process.returncode:  # unless it was done already
        assert process.returncode == 128 + signal.SIGTERM
    seen = []
    run(tmp_path, seen)
    assert losses(tmp_path) == expected_losses
    assert seen == ids[len(ids) - len(seen) :]
    for path, value in final_arrays(tmp_path).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c, d: c.drafter.update(block_size=6), "drafter.block_size = 4, this run has 6"),
        (lambda c, d: c.optimizer.update(learning_rate=1e-3), "optimizer.learning_rate = 0.003"),
        (lambda c, d: c.step.update(num_anchors=4), "step.num_anchors = 5"),
        (lambda c, d: c.loss.update(gamma=2.0), "step.loss.gamma = 4.0"),
        (lambda c, d: d.facts.update(rows=13), "data.rows = 12, this run has 13"),
        (lambda c, d: c.update(seed=4), "seed = 3, this run has 4"),
    ],
)
def test_b78_resuming_with_another_configuration_names_the_field(straight, change, field):
    workdir, _, _, _ = straight
    changed, data = config(), toy.data()
    change(changed, data)
    with pytest.raises(ConfigError, match=field):
        train(changed, workdir, target=toy.target(), data=data)


def test_resuming_a_finished_run_takes_no_step(straight, tmp_path):
    workdir, _, expected_losses, _ = straight
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    seen = []
    assert run(copy, seen).step == STEPS
    assert seen == [] and losses(copy) == expected_losses


def state_on(mesh, learning_rate=1e-3):
    _, params = toy.drafter(toy.drafter_config())
    optimizer = make_optimizer(OptimizerConfig(learning_rate=learning_rate))
    return init_state(params, optimizer, 5, mesh)


def test_b80_a_checkpoint_is_restored_on_another_mesh(tmp_path):
    saved = state_on(make_mesh(4, 2))
    facts = {"fingerprint": {"a": 1, "b": [1, 2], "c": None}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, {"position": 3, "nested": {"x": [1, "two"]}}, facts)
    for mesh in (None, make_mesh(1, 2), make_mesh(8, 1)):
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.facts(0) == facts
            like = state_on(mesh)
            state, data_state = checkpoints.restore(0, like)
        assert data_state == {"position": 3, "nested": {"x": [1, "two"]}}
        for path, leaf in flatten(state).items():
            np.testing.assert_array_equal(leaf, flatten(saved)[path], err_msg=path)
            assert leaf.sharding.is_equivalent_to(flatten(like)[path].sharding, leaf.ndim), path


def test_b80_what_does_not_fit_is_named_by_its_path(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_on(None), {}, {})
        wide = toy.drafter(toy.drafter_config(intermediate_size=40))[1]
        like = init_state(wide, make_optimizer(OptimizerConfig()), 5, None)
        with pytest.raises(ConfigError, match=r"\['mlp'\].*\['down_FxD'\].*float32\[32, 16\] there, float32\[40, 16\]"):
            checkpoints.restore(0, like)
        deep = toy.drafter(toy.drafter_config(num_layers=3, layer_types=("full_attention",) * 3))[1]
        like = init_state(deep, make_optimizer(OptimizerConfig()), 5, None)
        with pytest.raises(ConfigError, match=r"\['layers'\]\[2\].* is missing in the checkpoint"):
            checkpoints.restore(0, like)


def test_checkpoints_keep_the_latest(tmp_path):
    state = state_on(None)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state.replace(step=jax.numpy.int32(step)), {}, {})
        checkpoints.save(state.replace(step=jax.numpy.int32(3)), {}, {})  # a second time: nothing to do
        assert checkpoints.latest == 3
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_fingerprints_that_agree_pass_and_unknown_fields_do_not():
    check_fingerprint({"a": {"b": [1, 2]}}, {"a": {"b": (1, 2)}}, "x")
    check_fingerprint({"data": {"seed": 1, "processes": 2}}, {"data": {"seed": 1}}, "x")  # decides nothing
    with pytest.raises(ConfigError, match=r"a\.c = 'unset', this run has 1"):
        check_fingerprint({"a": {}}, {"a": {"c": 1}}, "x")


def test_a_loss_that_is_not_finite_stops_the_run_with_its_samples(tmp_path):
    class Broken(toy.Recorded):
        """Sample 7 comes with states that are no numbers."""

        def __next__(self):
            batch = super().__next__()
            rows, length = batch["tokens_BxS"].shape
            bad = np.where(batch["id_B"] == 7, np.nan, 1.0).astype(np.float32)[:, None, None]
            taps = np.broadcast_to(bad, (rows, length, 2 * toy.HIDDEN))
            return batch | {"taps_BxSxTD": taps, "hidden_BxSxD": np.ones((rows, length, toy.HIDDEN), np.float32)}

    data = toy.data()
    data.batches = Broken(data.batches)
    with pytest.raises(TrainingDiverged) as caught:
        train(config(), tmp_path, target=toy.target(), data=data)
    number, ids = re.search(r"step (\d+): .*Samples of the batch: \[([\d, ]+)\]", str(caught.value)).groups()
    assert "7" in ids.split(", ")
    assert str(tmp_path / "checkpoints" / number) in str(caught.value)
    # What was saved is the last good state, behind the bad batch: the same call goes on with the next one.
    state = final_arrays(tmp_path, int(number))
    assert all(np.isfinite(x).all() for x in state.values()) and state[".step"] == int(number)
    more = toy.data()
    seen = data.batches.seen[: 4 * int(number)]
    run_on = train(config(stop_after=int(number) + 1), tmp_path, target=toy.target(), data=more)
    assert run_on.step == int(number) + 1
    everything = toy.data().batches
    expected = [i for _ in range(int(number) + 1) for i in next(everything)["id_B"].tolist()]
    assert seen + more.batches.seen == expected
