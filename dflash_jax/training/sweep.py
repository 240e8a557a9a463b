"""Runs of one config with different fields: printed as commands, or run one after another.

    python -m dflash_jax.training.sweep --config=configs/smollm2_135m_ablations.py --workdir=runs/ablations
    python -m dflash_jax.training.sweep --config=configs/smollm2_135m_ablations.py --workdir=runs/ablations --run

The config file defines `sweep(variant)` beside `get_config(variant)`: {name: {field: value}}, a point a name, whose
fields replace the config's. Each point is a run of train.py in WORKDIR/name; all of them share WORKDIR/data, so that
answers are made once, and states once for each choice of taps. The same command goes on where it was stopped: finished
points are left alone, a point that was stopped is resumed. `--only=REGEX` takes some of them, `--config.FIELD=VALUE`
changes all. At the end, and with `--table` at once, the results stand in WORKDIR/summary.md and summary.json, the best
tau first.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from dflash_jax import command_line
from dflash_jax.config import ConfigError
from dflash_jax.evaluation.report import table
from dflash_jax.training.workdir import read_best

Points = Mapping[str, Mapping[str, Any]]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_SHARED = "data.directory"
_COLUMNS = {
    "best tau": "best_tau", "at step": "best_step", "tau per answer": "tau_per_answer",
    "predicted speedup": "predicted_speedup", "chain tau": "chain_tau", "accuracy": "accuracy", "loss": "loss",
}  # fmt: skip


def read_sweep(config: str) -> Points:
    """The points that a config file defines.

    Args:
      config: the file, and where it has one a colon and the variant.

    Raises:
      ConfigError: it defines none, or a name that is no folder's.
    """
    path, _, variant = config.partition(":")
    spec = importlib.util.spec_from_file_location("swept_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "sweep"):
        raise ConfigError(f"{path} defines no sweep(variant): a function that returns {{name: {{field: value}}}}")
    try:
        points = module.sweep(variant)
    except ValueError as error:
        raise ConfigError(f"{path} has no such sweep: {error}") from error
    if not isinstance(points, Mapping) or not points:
        raise ConfigError(f"sweep() of {path} returns {points!r}, must be {{name: {{field: value}}}}")
    for name in points:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"sweep() of {path} has the name {name!r}, must be letters, digits, '-', '_' and '.'")
    return points


def check_point(name: str, fields: Mapping[str, Any], config: ConfigDict) -> None:
    """Refuses a field that the config has not, and a value that a command line can not give it.

    Raises:
      ConfigError: names the point and the field.
    """
    for field, value in fields.items():
        node: Any = config
        *parents, last = field.split(".")
        for part in parents:
            node = node[part] if isinstance(node, ConfigDict) and part in node else None
        if not isinstance(node, ConfigDict) or last not in node:
            raise ConfigError(f"point {name!r} sets {field}, which the config does not have")
        now = node[last]
        if isinstance(now, ConfigDict):
            raise ConfigError(f"point {name!r} sets {field}, a whole section; set its fields ({', '.join(now)})")
        number = isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool)
        if now is not None and type(value) is not type(now) and not number:
            raise ConfigError(f"point {name!r} sets {field} to {value!r}, the config has {now!r} of another type there")


def command(
    train: pathlib.Path, config: str, workdir: pathlib.Path, name: str, fields: Mapping[str, Any], given: Sequence[str]
) -> list[str]:
    """The command of a point.

    Args:
      config: as --config had it, with its variant. given: flags --config.FIELD=VALUE for all points.
    """
    placed = any(arg.startswith(f"--config.{_SHARED}=") for arg in given)
    shared = [] if placed else [f"--config.{_SHARED}={workdir / 'data'}"]
    own = [f"--config.{field}={value}" for field, value in fields.items()]
    return [sys.executable, str(train), f"--config={config}", f"--workdir={workdir / name}", *shared, *given, *own]


def result(workdir: pathlib.Path) -> dict[str, Any]:
    """What a point has come to: its state ("done", "stopped" or "not run") and its last and best numbers."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return {"state": "not run"}
    last: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # half written when it was killed
            continue
        last[values["kind"]] = values
    found = {**last.get("train", {}), **last.get("eval", {}), "state": "done" if is_done(workdir) else "stopped"}
    best = read_best(workdir)
    if best["step"]:
        found |= {"best_tau": best["tau"], "best_step": best["step"]}
    return found


def is_done(workdir: pathlib.Path) -> bool:
    """Whether a point has run to its end: the export is its last deed."""
    return (workdir / "export" / "config.json").exists()


def summary(workdir: pathlib.Path, points: Points) -> tuple[dict[str, Any], str]:
    """(results by point, a Markdown table of them), the best tau first."""
    results = {name: {"fields": dict(fields), **result(workdir / name)} for name, fields in points.items()}
    order = sorted(results, key=lambda name: -results[name].get("best_tau", float("-inf")))
    rows = []
    for name in order:
        found = results[name]
        changed = ", ".join(f"{field} = {value}" for field, value in found["fields"].items()) or "-"
        rows.append([name, changed, found["state"], *(_number(found.get(key)) for key in _COLUMNS.values())])
    return {name: results[name] for name in order}, "\n".join(
        table(["point", "changed", "state", *_COLUMNS], rows)
    ) + "\n"


def _number(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def write_summary(workdir: pathlib.Path, points: Points) -> str:
    """Writes summary.json and summary.md; returns the table."""
    workdir.mkdir(parents=True, exist_ok=True)
    results, text = summary(workdir, points)
    (workdir / "summary.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (workdir / "summary.md").write_text(text, encoding="utf-8")
    return text


def run(commands: Mapping[str, Sequence[str]], workdir: pathlib.Path) -> list[str]:
    """Runs the points that are not done, one after another; the names of those that failed."""
    failed = []
    for i, (name, words) in enumerate(commands.items(), 1):
        if is_done(workdir / name):
            logging.info("point %d of %d, %s: done before", i, len(commands), name)
            continue
        logging.info("point %d of %d, %s: %s", i, len(commands), name, shlex.join(words))
        status = subprocess.run(words, check=False).returncode
        if status:
            logging.error("point %s ended with status %d; the others go on", name, status)
            failed.append(name)
    return failed


def main(argv: list[str]) -> None:
    del argv
    values = flags.FLAGS
    workdir, train = pathlib.Path(values.workdir), pathlib.Path(values.train)
    if not train.is_file():
        raise ConfigError(f"--train is {train}, which is no file here; run this where train.py lies, or name it")
    source = values["config"].config_filename  # with its variant
    points = read_sweep(source)
    try:
        points = {name: fields for name, fields in points.items() if re.search(values.only, name)}
    except re.error as error:
        raise ConfigError(f"--only is {values.only!r}, which is no regular expression: {error}") from error
    if not points:
        raise ConfigError(f"--only is {values.only!r}, which no point of the sweep matches")
    for name, fields in points.items():
        check_point(name, fields, values.config)
    given = [f"--config.{field}={value}" for field, value in values["config"].override_values.items()]
    commands = {name: command(train, source, workdir, name, fields, given) for name, fields in points.items()}
    if values.table:
        print(write_summary(workdir, points))
        return
    if not values.run:
        print("\n".join(shlex.join(["python", *words[1:]]) for words in commands.values()))
        return
    failed = run(commands, workdir)
    print(write_summary(workdir, points))
    if failed:
        command_line.fail(f"{len(failed)} of {len(commands)} points failed: {', '.join(failed)}; see their logs above")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "An experiment that defines sweep().", lock_config=True)
    flags.DEFINE_string("workdir", None, "A folder for a folder of each point.")
    flags.DEFINE_string("train", "train.py", "Where train.py lies.")
    flags.DEFINE_string("only", "", "A regular expression; points whose name it finds are taken.")
    flags.DEFINE_bool("run", False, "Run the points instead of printing their commands.")
    flags.DEFINE_bool("table", False, "Only write and print the table of what is there.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main)
