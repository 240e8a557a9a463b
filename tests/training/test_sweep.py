"""Sweeps: points become commands that mean what they say; stopped, failed and finished points; the table."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from configs.smollm2_135m_ablations import get_config
from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.training.adapter import configured_drafter
from dflash_jax.training.losses import LossConfig
from dflash_jax.training.sweep import check_point, command, read_sweep, result, summary
from tests.training import toy

ROOT = pathlib.Path(__file__).parents[2]
ABLATIONS = "configs/smollm2_135m_ablations.py"
SMOLLM2 = toy.target_config(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=8192, layer_types=("full_attention",) * 30,
)  # fmt: skip
TINY = toy.target_config(vocab_size=259, hidden_size=32, intermediate_size=64)


def parsed(words):
    """The config that train.py would see of a command."""
    values, argv = flags.FlagValues(), ["train.py", *words]
    config_flags.DEFINE_config_file("config", None, flag_values=values, lock_config=True, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    values(argv)
    return values.config, pathlib.Path(values.workdir)


@pytest.mark.parametrize(("variant", "target"), [("", SMOLLM2), ("tiny", TINY)])
def test_every_ablation_is_a_command_that_train_understands(variant, target, monkeypatch):
    monkeypatch.chdir(ROOT)
    source = f"{ABLATIONS}:{variant}" if variant else ABLATIONS
    points, base = read_sweep(source), get_config(variant)
    seen = set()
    for name, fields in points.items():
        check_point(name, fields, base)
        words = command(pathlib.Path("train.py"), source, pathlib.Path("runs/x"), name, fields, ["--config.seed=5"])
        config, workdir = parsed(words[2:])
        assert workdir == pathlib.Path("runs/x") / name
        assert config.data.directory == "runs/x/data" and config.seed == 5
        for field, value in fields.items():
            node = config
            for part in field.split("."):
                node = node[part]
            assert node == value and type(node) is type(value), field
        with config.unlocked():
            config.data.directory, config.seed = base.data.directory, base.seed
        changed = config.to_json() != base.to_json()
        assert changed == bool(fields), name
        loss, draft = from_config_dict(LossConfig, config.loss), configured_drafter(config.drafter, target)
        assert len(config.drafter.init_layers) == draft.num_layers
        seen.add((repr(loss), repr(draft), config.drafter.draft_vocab_size, config.optimizer.total_steps))
    assert len(seen) == len(points)  # no two points are the same run


def test_the_ablations_are_those_that_were_asked_for():
    config = get_config()
    points = read_sweep(str(ROOT / ABLATIONS))
    of = lambda field, base: {base} | {p[field] for p in points.values() if field in p}  # noqa: E731
    assert of("drafter.num_layers", config.drafter.num_layers) == {1, 2, 4}
    assert {len(t) for t in of("drafter.target_layer_ids", config.drafter.target_layer_ids)} == {1, 3, 5}
    assert of("loss.gamma", config.loss.gamma) == {2.0, 4.0, 7.0}
    assert {"uniform", "dpace", "decay"} <= of("loss.weighting", config.loss.weighting)
    assert of("drafter.draft_vocab_size", config.drafter.draft_vocab_size) == {8192, 16384, 0}
    assert of("drafter.block_size", config.drafter.block_size) == {4, 6, 8}
    assert points["base"] == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter.layers": 3}, r"point 'p' sets drafter\.layers, which the config does not have"),
        ({"nothing.here.at": 3}, r"sets nothing\.here\.at, which the config does not have"),
        ({"seed.more": 3}, r"sets seed\.more, which the config does not have"),
        ({"drafter": {}}, r"sets drafter, a whole section; set its fields \(block_size"),
        ({"seed": None}, r"sets seed to None, the config has 3 of another type"),
        ({"drafter.block_size": 4.0}, r"sets drafter\.block_size to 4\.0, the config has 4 of another type"),
        ({"loss.gamma": True}, r"sets loss\.gamma to True"),
    ],
)
def test_fields_that_can_not_be_set_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        check_point("p", fields, toy.experiment())
    check_point("p", {"loss.gamma": 3, "seed": 4}, toy.experiment())  # an integer where a number is


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"defines no sweep\(variant\)"),
        ("def sweep(variant): raise ValueError('no variant')", r"config.py has no such sweep: no variant"),
        ("def sweep(variant): return []", r"returns \[\], must be"),
        ("def sweep(variant): return {'a/b': {}}", r"has the name 'a/b', must be letters"),
        ("def sweep(variant): return {'..': {}}", r"has the name '\.\.'"),
    ],
)
def test_sweeps_that_are_none_are_refused(tmp_path, text, message):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_sweep(str(tmp_path / "config.py"))


def lines(workdir, *values):
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in values))


def test_the_table_has_the_best_first(tmp_path):
    train = {"step": 20, "kind": "train", "loss": 1.25, "accuracy": 0.5, "chain_tau": 2.0}
    for name, tau in (("a", 1.5), ("b", 2.5)):
        lines(tmp_path / name, train, {"step": 20, "kind": "eval", "tau": tau - 0.25, "predicted_speedup": 1.125})
        (tmp_path / name / "best.json").write_text(json.dumps({"tau": tau, "step": 10}))
    (tmp_path / "b" / "export").mkdir()
    (tmp_path / "b" / "export" / "config.json").write_text("{}")
    lines(tmp_path / "c", train)
    with (tmp_path / "c" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "kind": "tr')  # killed while it wrote
    results, text = summary(tmp_path, {"a": {"x.y": 3}, "never": {}, "c": {}, "b": {}})
    assert list(results) == ["b", "a", "never", "c"]
    assert [found["state"] for found in results.values()] == ["done", "stopped", "not run", "stopped"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0][:5] == ["point", "changed", "state", "best tau", "at step"]
    assert rows[2] == ["b", "-", "done", "2.500", "10", "-", "1.125", "2.000", "0.500", "1.250"]
    assert rows[3][:2] == ["a", "x.y = 3"] and rows[4][3:] == ["-"] * 7
    assert result(tmp_path / "c")["loss"] == 1.25


CONFIG = """
from ml_collections import ConfigDict

def get_config(variant=""):
    return ConfigDict({"seed": 0, "rate": 0.5, "data": {"directory": ""}})

def sweep(variant=""):
    return {"one": {"seed": 1}, "two": {"seed": 2, "rate": 1.5}, "three": {"seed": 3}}
"""
TRAIN = """
import json, pathlib, sys
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
workdir.mkdir(parents=True, exist_ok=True)
with (workdir.parent / "log").open("a") as log:
    log.write(workdir.name + " " + flags["config.data.directory"] + "\\n")
if flags["config.seed"] == "2" and not (workdir.parent / "mended").exists():
    sys.exit(3)
(workdir / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "eval", "tau": 1.0}))
(workdir / "best.json").write_text(json.dumps({"step": 1, "tau": float(flags["config.seed"])}))
(workdir / "export").mkdir()
(workdir / "export" / "config.json").write_text("{}")
"""


def test_a_failing_point_holds_nothing_up_and_finished_ones_are_left_alone(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN)
    root = tmp_path / "runs"

    def launch(*more, config=("--config=config.py",)):
        words = ["-m", "dflash_jax.training.sweep", *config, f"--workdir={root}", *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )  # fmt: skip

    printed = launch()
    assert printed.returncode == 0 and not root.exists()
    shown = printed.stdout.splitlines()
    assert len(shown) == 3 and shown[1].startswith("python train.py --config=config.py --workdir=")
    assert shown[1].endswith("--config.seed=2 --config.rate=1.5")
    apart = launch("--config.rate", "2.5", "--only=two", config=("--config", "config.py"))
    assert "--config=config.py " in apart.stdout and " --config.rate=2.5 --config.seed=2 " in apart.stdout
    refused = launch("--only=(")
    assert refused.returncode == 1 and "FATAL --only is '(', which is no regular expression" in refused.stderr

    first = launch("--run")
    assert first.returncode == 1 and "1 of 3 points failed: two" in first.stderr
    log = (root / "log").read_text().splitlines()
    assert log == [f"{name} {root / 'data'}" for name in ("one", "two", "three")]
    assert [line.split("|")[1].strip() for line in first.stdout.splitlines()[2:5]] == ["three", "one", "two"]
    (root / "mended").touch()
    second = launch("--run", "--only=t")
    assert second.returncode == 0, second.stderr
    assert (root / "log").read_text().splitlines() == [*log, f"two {root / 'data'}"]
    assert list(json.loads((root / "summary.json").read_text())) == ["three", "two"]
    nothing = launch("--run", "--only=four")
    assert nothing.returncode == 1 and "--only is 'four', which no point of the sweep matches" in nothing.stderr


@pytest.mark.slow
def test_two_tiny_points_from_prompts_to_the_table(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dflash_jax.training.sweep", f"--config={ABLATIONS}:tiny", f"--workdir={tmp_path}",
         "--run", "--only=^(taps-1|base)$", "--config.optimizer.total_steps=10"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "summary.json").read_text())
    assert set(results) == {"base", "taps-1"}
    assert all(found["state"] == "done" and found["best_tau"] >= 1.0 for found in results.values())
    assert {path.name for path in (tmp_path / "data").iterdir()} >= {"greedy", "features-1-3", "features-2"}
