"""A target that no process has whole: two processes with two devices each against one with four, and one device."""

import types

import jax
import numpy as np
import pytest

from dflash_jax import load_drafter, sharding
from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh
from dflash_jax.training import from_config, processes
from tests.training import one_of_spread, toy, two_processes
from tests.training.two_processes import arrays, kill_behind, lines, same_bit_by_bit, wait_for

MESHES = {"fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2}, "tensor=4": {"tensor": 4}}


def start_two(workdir, *options):
    return two_processes.start_two("tests.training.one_of_spread", workdir, *map(str, options))


def same_run(ours, theirs):
    """Losses and states of two runs agree to 1e-5."""
    assert [(x["step"], x["kind"]) for x in lines(ours)] == [(x["step"], x["kind"]) for x in lines(theirs)]
    assert len(lines(ours)) == one_of_spread.STEPS + 2
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        if one["kind"] == "eval":
            assert one["rounds"] == other["rounds"] and one["tau"] == other["tau"]
            continue
        for name in ("loss", "grad_norm", "accuracy", "chain_tau", "blocks"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
    mine, other = (arrays(workdir, one_of_spread.STEPS) for workdir in (ours, theirs))
    assert mine.keys() == other.keys()
    for path, value in other.items():
        np.testing.assert_allclose(mine[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made_before") / "answers"
    one_of_spread.store(directory)
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory, answers):
    """The workdir of one process with one device."""
    workdir = tmp_path_factory.mktemp("alone")
    one_of_spread.run(workdir, answers, {})
    return workdir


@pytest.fixture(scope="module")
def two(tmp_path_factory, answers):
    """The workdir of two processes, on the first mesh."""
    workdir = tmp_path_factory.mktemp("two")
    wait_for(start_two(workdir, answers, "fsdp=2,tensor=2"))
    return workdir


@pytest.mark.slow  # processes that share two cores wait for each other
def test_two_processes_train_as_one_and_as_one_device(two, alone, answers, tmp_path):
    one_of_spread.run(tmp_path, answers, MESHES["fsdp=2,tensor=2"])
    same_run(two, tmp_path)
    same_run(two, alone)
    assert {p.name for p in two.iterdir()} == {p.name for p in tmp_path.iterdir()}
    drafters = [load_drafter(workdir / "export", toy.target(), dtype="float32") for workdir in (two, alone)]
    for a, b in zip(*(jax.tree.leaves(d.params) for d in drafters), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)  # stored in bfloat16


@pytest.mark.slow
def test_heads_and_channels_over_processes_which_read_the_same_rows(alone, answers, tmp_path):
    wait_for(start_two(tmp_path, answers, "tensor=4"))
    same_run(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "mesh"), [("mixture", {"expert": 4}), ("hybrid", {"fsdp": 2, "expert": 2})])
def test_experts_over_processes(target, mesh, answers, tmp_path):
    """Losses, parameters and accepted drafts of a mixture are those of one device; hybrid: with recurrent layers."""
    spread, alone = tmp_path / "spread", tmp_path / "alone"
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    wait_for(start_two(spread, answers, axes, target))
    one_of_spread.run(alone, answers, {}, target)
    same_run(spread, alone)


@pytest.mark.slow
def test_killed_and_started_again_bit_by_bit(two, answers, tmp_path):
    started = start_two(tmp_path, answers, "fsdp=2,tensor=2", "hang")
    kill_behind(started, tmp_path, 2)
    assert not (tmp_path / "checkpoints" / "4").exists()
    wait_for(start_two(tmp_path, answers, "fsdp=2,tensor=2"))
    same_bit_by_bit(tmp_path, two, one_of_spread.STEPS)  # the evaluation that was killed is made up for


@pytest.mark.parametrize(
    ("shape", "processes_of", "whole"),
    [
        ((2, 2, 1, 1), [0, 0, 1, 1], True),
        ((4, 1, 1, 1), [0, 0, 1, 1], True),
        ((1, 2, 1, 2), [0, 0, 1, 1], False),
        ((1, 1, 1, 4), [0, 0, 1, 1], False),
        ((2, 2, 1, 1), [0, 1, 0, 1], False),  # as many parts, but laid across
        ((1, 4, 1, 1), [0, 0, 0, 0], True),
    ],
)
def test_which_meshes_leave_the_target_whole_on_each_process(monkeypatch, shape, processes_of, whole):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    devices = np.array([types.SimpleNamespace(process_index=p) for p in processes_of], object).reshape(shape)
    mesh = types.SimpleNamespace(devices=devices, shape=dict(zip(sharding.AXES, shape, strict=True)))
    assert sharding.whole_on_each_process(mesh) is whole
    assert processes.row_share(mesh) == ((1, 2) if whole else (0, 1))


def spread_config(**changes):
    config = toy.experiment()
    config.mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    config.data = {"batch_size": 4, "seq_len": 24, "features": False, "stores": ("made before",)}
    with config.unlocked():
        for field, value in changes.items():
            section, _, name = field.partition("__")
            config[section][name] = value
    return config


def test_what_needs_a_target_of_its_own_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def check(config, **given):
        from_config.check_without_own_target(config, **{"evaluation": True, **given})

    check(spread_config())
    for config, message in (
        (
            spread_config(evaluation__prompts={"code": 2}),
            "evaluation.cost_repeats is 20.* set it to 0.*mesh.data=2 and mesh.fsdp=4",
        ),
        (spread_config(drafter__init_target="other"), "drafter.init_target is 'other'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(config)
    check(spread_config(evaluation__prompts={"code": 2}, evaluation__cost_repeats=0))
    check(spread_config(evaluation__prompts={"code": 2}), evaluation=False)


def test_what_one_process_has_is_read_where_it_lies():
    params = toy.target(mesh=make_mesh(1, 4)).params
    assert processes.whole(params, make_mesh(1, 4)) is params
