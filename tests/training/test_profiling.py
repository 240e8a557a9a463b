"""Traces by config, peak memory where a backend tells it, Weights & Biases where it is asked for."""

import importlib.machinery
import importlib.util
import json
import sys
import types

import jax
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.training import loop, profiling
from dflash_jax.training.loop import train
from dflash_jax.training.metrics import MetricsWriter, check_wandb
from dflash_jax.training.profiling import Profile, peak_device_bytes
from dflash_jax.training.run_config import RunConfig
from tests.training import toy


@pytest.mark.parametrize("steps", [(3,), (0, 2), (4, 0), (1, 2, 3)])
def test_steps_that_can_not_be_traced_are_refused(steps):
    with pytest.raises(ConfigError, match=r"run\.profile_steps is .* must be \(first step, number of steps\)"):
        RunConfig(profile_steps=steps)


def test_the_steps_asked_for_are_traced(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda where: calls.append(("start", where)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))

    def run(steps, first, last):
        calls.clear()
        with Profile(tmp_path, steps) as profile:
            for step in range(first, last + 1):
                profile.before(step)
                calls.append(step)
                profile.after(step, None)
        return calls

    start = ("start", str(tmp_path))
    assert run((2, 2), 1, 5) == [1, start, 2, 3, "stop", 4, 5]
    assert run((4, 9), 1, 5) == [1, 2, 3, start, 4, 5, "stop"]  # the run ends first
    assert run((1, 1), 1, 2) == [start, 1, "stop", 2]
    assert run((2, 2), 3, 4) == [3, 4] and run((), 1, 2) == [1, 2]


def test_a_run_leaves_its_trace(tmp_path):
    train(toy.experiment(profile_steps=(2, 1), stop_after=3), tmp_path, target=toy.target(), data=toy.data())
    assert [path.stat().st_size > 1000 for path in (tmp_path / "profile").rglob("*.xplane.pb")] == [True]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and "peak_device_bytes" not in lines[-1]  # CPU does not tell


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    def devices(*stats):
        made = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
        monkeypatch.setattr(profiling.jax, "local_devices", lambda: made)

    devices({"peak_bytes_in_use": 7, "bytes_in_use": 9}, {"peak_bytes_in_use": 11})
    assert peak_device_bytes() == 11
    devices(None, {})
    assert peak_device_bytes() is None


def test_peak_memory_is_logged_where_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "peak_device_bytes", lambda: 3_000_000_000)
    train(toy.experiment(stop_after=1), tmp_path, target=toy.target(), data=toy.data())
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["peak_device_bytes"] == 3e9


class Recorder(types.ModuleType):
    """What the program calls of wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.inits, self.logged, self.finished = [], [], 0

    def init(self, **arguments):
        self.inits.append(arguments)
        self.id = arguments["id"] or "made-up"
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


def test_wandb_gets_the_numbers_and_goes_on_under_the_same_id(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    options = {"project": "drafters", "entity": "", "tags": ["a"]}
    check_wandb(options)
    for first in (0, 1):
        writer = MetricsWriter(tmp_path, first, wandb=options, config={"seed": 3})
        writer.write(first + 1, "eval", {"tau": 1.5, "histogram": [0, 3, None], "note": "text"})
        writer.close()
    assert recorder.logged[0] == {"eval/tau": 1.5, "eval/histogram_0": 0, "eval/histogram_1": 3, "step": 1}
    assert recorder.logged[1]["step"] == 2 and recorder.finished == 2
    first, second = recorder.inits
    assert first["project"] == "drafters" and first["tags"] == ["a"] and "entity" not in first
    assert first["config"] == {"seed": 3} and first["id"] is None and second["id"] == "made-up"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_without_a_project_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    for options in ({}, {"project": "", "entity": None}):
        check_wandb(options)
        writer = MetricsWriter(tmp_path, wandb=options)
        writer.write(1, "train", {"loss": 1.0})
        writer.close()
    with pytest.raises(ConfigError, match=r"run\.wandb has entity but no project"):
        check_wandb({"entity": "me"})


def test_wandb_that_is_not_installed_is_said_before_anything_runs(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(
        ConfigError, match=r"run\.wandb\.project is 'drafters', but wandb is not installed: pip install"
    ):
        train(toy.experiment(wandb={"project": "drafters"}), tmp_path, target=toy.target(), data=toy.data())
    assert not list(tmp_path.iterdir())
