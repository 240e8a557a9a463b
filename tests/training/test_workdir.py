"""What is damaged or taken in a workdir: said by name, with the way out, before a step is compiled."""

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError, MoeConfig, TargetConfig
from dflash_jax.models.target import random_target
from dflash_jax.training import loop
from dflash_jax.training.checkpointing import check_fingerprint
from dflash_jax.training.loop import train
from dflash_jax.training.step import StepConfig
from dflash_jax.training.workdir import held, read_best
from tests.training import toy

OPTIONS = {"save_every": 1, "stop_after": 2}


def run(workdir, **options):
    return train(toy.experiment(**OPTIONS | options), workdir, target=toy.target(), data=toy.data())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    run(workdir)
    return workdir


@pytest.fixture
def workdir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def empty_the_arrays(checkpoint):
    files = [file for file in (checkpoint / "state").rglob("*") if file.is_file() and file.parent.name == "d"]
    assert files
    for file in files:
        file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [
        lambda at: (at / "_CHECKPOINT_METADATA").unlink(),
        lambda at: (at / "_CHECKPOINT_METADATA").write_text("{"),
        lambda at: (at / "state" / "_METADATA").unlink(),
        lambda at: (at / "state" / "_METADATA").write_text("nothing"),
        lambda at: shutil.rmtree(at / "data"),
        lambda at: shutil.rmtree(at / "state"),
        empty_the_arrays,
    ],
    ids=["no metadata", "cut metadata", "no array names", "cut array names", "no data position", "no state", "arrays"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(workdir, damage):
    newest = workdir / "checkpoints" / "2"
    damage(newest)
    with pytest.raises(CheckpointError, match=r"checkpoints/2 is damaged .*; delete this folder, .* from step 1"):
        run(workdir)


def test_without_the_damaged_checkpoint_the_run_goes_on(workdir):
    shutil.rmtree(workdir / "checkpoints" / "2")
    assert run(workdir).step == 2
    shutil.rmtree(workdir / "checkpoints" / "1")
    shutil.rmtree(workdir / "checkpoints" / "2" / "data")
    with pytest.raises(CheckpointError, match="begins at step 0, there is no other checkpoint"):
        run(workdir)


@pytest.mark.parametrize("text", ["", '{"step": 2', "[]", '{"step": 2}', '{"step": 2, "tau": "high"}'])
def test_a_damaged_best_evaluation_is_named(workdir, text):
    (workdir / "best.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"best\.json .*delete the file"):
        run(workdir)
    (workdir / "best.json").unlink()
    assert read_best(workdir)["step"] == 0


@pytest.mark.parametrize("place", ["file", "file/inside", "/proc/none"])
def test_a_workdir_that_can_not_be_made_is_named(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"workdir .*{place} is no folder, or lies in none"), held(tmp_path / place):
        pass


@pytest.mark.parametrize("content", [None, b"abcde"])
def test_a_lost_or_damaged_draft_vocabulary_is_named(workdir, content):
    file = workdir / "draft_vocab.safetensors"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"draft_vocab\.safetensors is .*copy the file of .*export"):
        run(workdir)
    shutil.copy(workdir / "export" / file.name, file)
    assert run(workdir).step == 2


def test_a_run_saved_before_a_field_was_added_goes_on(workdir):
    """The facts of a checkpoint as an older program wrote them: without fields that have defaults today."""
    facts = workdir / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
    written = json.loads(facts.read_text())
    saved = written["custom_metadata"]["fingerprint"]
    assert saved["target"].pop("dtype") == "float32"
    assert saved["step"].pop("scan_target") is False and saved["step"]["loss"].pop("teacher_dtype") == "float32"
    assert saved["target"]["config"].pop("norm_offset") == 0.0 and saved["optimizer"].pop("momentum") == 0.95
    facts.write_text(json.dumps(written))
    changed = toy.experiment(**OPTIONS)
    changed.step.scan_target = True
    with pytest.raises(ConfigError, match=r"step\.scan_target = False, this run has True"):
        train(changed, workdir, target=toy.target(), data=toy.data())
    assert run(workdir).step == 2


def test_only_defaults_stand_for_fields_that_were_not_saved():
    kinds = {"step": StepConfig, "target.config": TargetConfig}
    check_fingerprint({"step": {}}, {"step": {"accumulation": 1, "loss": {"gamma": None}}}, "x", kinds)
    with pytest.raises(ConfigError, match=r"step\.num_anchors = 'unset', this run has 4"):
        check_fingerprint({"step": {}}, {"step": {"num_anchors": 4}}, "x", kinds)
    # A part that was None had no fields, whatever their defaults are today.
    assert MoeConfig.__dataclass_fields__["shared_intermediate_size"].default == 0
    with pytest.raises(ConfigError, match=r"target\.config\.moe\.shared_intermediate_size = 'unset', this run has 0"):
        dense, sparse = ({"target": {"config": {"moe": moe}}} for moe in (None, {"shared_intermediate_size": 0}))
        check_fingerprint(dense, sparse, "x", kinds)


@pytest.mark.parametrize("name", ["best", "export"])
def test_a_file_that_an_export_would_not_replace_is_named_before_training(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=rf"{name} holds notes\.txt, which is no part of an export"):
        run(tmp_path)
    assert not (tmp_path / "checkpoints").exists() and (tmp_path / name / "notes.txt").read_text() == "mine"


HOLDER = """
import pathlib, sys
from dflash_jax.training.workdir import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_on_a_workdir_is_refused_while_the_first_lives(tmp_path):
    workdir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(workdir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = sorted(workdir.iterdir())
        with pytest.raises(ConfigError, match=rf"workdir {workdir} is in use by another run \(process {holder.pid} on"):
            run(workdir)
        assert sorted(workdir.iterdir()) == before
    finally:
        holder.kill()
        holder.communicate()
    with held(workdir):  # the system has let go of it
        assert "process" in (workdir / ".lock").read_text()
    with pytest.raises(KeyError), held(workdir):
        raise KeyError
    with held(workdir):  # and so has a run that failed
        pass


def test_a_finished_run_that_is_run_again_is_evaluated_again_and_logged_once(workdir):
    for tau in (1.5, 1.25):
        result = train(
            toy.experiment(**OPTIONS),
            workdir,
            target=toy.target(),
            data=toy.data(),
            evaluate=lambda *_, tau=tau: {"tau": tau},
        )
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert [(x["step"], x["kind"]) for x in lines] == [(1, "train"), (2, "train"), (2, "eval")]
        assert lines[-1]["tau"] == tau and result.best == {"step": 2, "tau": 1.5}
    run(workdir)  # without an evaluation the one that is there stays
    assert json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])["tau"] == 1.25


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(tmp_path):
    """The checkpoint of its step was written before: a resumed run would else go on behind it."""

    def killed(target, drafter):
        raise KeyboardInterrupt

    options = {"save_every": 1, "eval_every": 1, "stop_after": 3}
    with pytest.raises(KeyboardInterrupt):
        train(toy.experiment(**options), tmp_path, target=toy.target(), data=toy.data(), evaluate=killed)
    calls = []
    for _ in range(2):
        train(
            toy.experiment(**options), tmp_path, target=toy.target(), data=toy.data(),
            evaluate=lambda *_: calls.append(1) or {"tau": 1.5},
        )  # fmt: skip
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [x["step"] for x in lines if x["kind"] == "eval"] == [1, 2, 3]
    assert len(calls) == 4  # the last one once more


def test_the_best_of_a_run_that_left_no_checkpoint_is_not_this_ones(tmp_path):
    (tmp_path / "best.json").write_text('{"step": 50, "tau": 3.5}')  # of another config, stopped before it saved
    result = train(
        toy.experiment(**OPTIONS), tmp_path, target=toy.target(), data=toy.data(), evaluate=lambda *_: {"tau": 1.5}
    )
    assert result.best == {"step": 2, "tau": 1.5} == read_best(tmp_path)
    assert (tmp_path / "best" / "config.json").exists()


def test_a_best_drafter_whose_export_a_kill_prevented_is_exported_at_the_resume(tmp_path, monkeypatch):
    options = {"save_every": 1, "eval_every": 1, "stop_after": 3}
    taus = {"calls": [], 1: 2.5, 2: 1.5, 3: 1.25}

    def evaluate(target, drafter):
        taus["calls"].append(int(drafter.source.rpartition(" ")[2]))
        return {"tau": taus[taus["calls"][-1]]}

    def go():
        return train(toy.experiment(**options), tmp_path, target=toy.target(), data=toy.data(), evaluate=evaluate)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "export_drafter", killed)
        with pytest.raises(KeyboardInterrupt):
            go()
    assert go().best == {"step": 1, "tau": 2.5}
    assert taus["calls"] == [1, 1, 2, 3]
    assert json.loads((tmp_path / "best" / "config.json").read_text())["dflash_jax"]["training"]["step"] == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["kind"] == "eval"] == [1, 2, 3]


def test_a_best_drafter_that_a_kill_left_none_of_does_not_bar_the_next(tmp_path):
    taus = iter((2.5, 1.5))

    def go(steps):
        config = toy.experiment(save_every=1, eval_every=1, stop_after=steps)
        return train(config, tmp_path, target=toy.target(), data=toy.data(), evaluate=lambda *_: {"tau": next(taus)})

    assert go(1).best == {"step": 1, "tau": 2.5}
    shutil.rmtree(tmp_path / "best")
    assert go(2).best == {"step": 2, "tau": 1.5} and (tmp_path / "best" / "config.json").exists()


def test_a_target_in_another_dtype_is_another_run(workdir):
    other = random_target(toy.target_config(), dtype=jnp.bfloat16)
    with pytest.raises(ConfigError, match=r"target\.dtype = 'float32', this run has 'bfloat16'"):
        train(toy.experiment(**OPTIONS), workdir, target=other, data=toy.data())
