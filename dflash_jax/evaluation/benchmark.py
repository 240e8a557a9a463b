"""Plain decoding beside DFlash on benchmark prompts.

    python -m dflash_jax.evaluation.benchmark --config=configs/benchmark_smollm2.py --workdir=DIR

writes DIR/DTYPE/records.jsonl while it runs (the same command on the same DIR goes on where it was stopped), and at
the end DIR/report.json and DIR/report.md. Nothing else should run on the machine meanwhile. `--limit=8` takes 8
prompts a task, `--tasks=humaneval,gsm8k`, `--block_sizes=4,5` and `--dtype=bfloat16` replace the config's; any other
field is set as `--config.max_tokens=128`.

The exit status is 1 if a DFlash answer differs from plain decoding by more than a near tie (see `near_ties`).
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from dflash_jax import command_line
from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.evaluation.report import markdown
from dflash_jax.evaluation.runner import BenchmarkConfig, describe, own_methods, run, select_prompts


def override(
    config: ConfigDict,
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    block_sizes: list[str] | None = None,
    dtype: list[str] | None = None,
) -> BenchmarkConfig:
    """The config with the command line's own flags applied, checked.

    Raises:
      ConfigError: a field is unknown or wrong.
    """
    values = config.to_dict()
    counts = values.get("tasks", {})
    if tasks:
        values["tasks"] = {name: counts.get(name, 0) for name in tasks}
    if limit is not None:
        values["tasks"] = dict.fromkeys(values.get("tasks", {}), limit)
    if block_sizes:
        wrong = [size for size in block_sizes if not size.isdigit()]
        if wrong:
            raise ConfigError(f"block_sizes is {','.join(block_sizes)!r}, must be whole numbers, as 4,5")
        values["block_sizes"] = [int(size) for size in block_sizes]
    if dtype:
        values["dtypes"] = dtype
    return from_config_dict(BenchmarkConfig, values)


def benchmark(config: BenchmarkConfig, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Runs a benchmark, one dtype after another; returns {dtype: report of `runner.run`} and writes it."""
    workdir = pathlib.Path(workdir)
    reports = {}
    for dtype in config.dtypes:
        logging.info("== %s", dtype)
        target = load_target(config.target, dtype=dtype)
        drafter = load_drafter(config.drafter, target, draft_vocab=config.draft_vocab)
        methods = own_methods(target, drafter, config.block_sizes)
        prompts = select_prompts(
            config.tasks, target.tokenizer, target.config.max_positions, config.chat_template_kwargs
        )
        setup = describe(target, drafter, config.max_tokens, methods)
        setup["chat_template_kwargs"] = dict(config.chat_template_kwargs)
        reports[dtype] = run(
            workdir / dtype, target, setup, methods, prompts, config.max_tokens,
            overhead_rounds=config.overhead_rounds,
        )  # fmt: skip
        write_report(workdir, reports)
    return reports


def write_report(workdir: pathlib.Path, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """report.json and report.md, each replaced as a whole."""
    pages = {
        "report.json": json.dumps(reports, indent=1, allow_nan=False) + "\n",
        "report.md": "\n".join(markdown(report) for report in reports.values()),
    }
    for name, text in pages.items():
        part = workdir / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, workdir / name)


def main(argv: list[str]) -> None:
    del argv
    use_compilation_cache()
    values = flags.FLAGS
    config = override(
        values.config, limit=values.limit, tasks=values.tasks, block_sizes=values.block_sizes, dtype=values.dtype
    )
    reports = benchmark(config, values.workdir)
    print((pathlib.Path(values.workdir) / "report.md").read_text(encoding="utf-8"))
    unexplained = sum(report["unexplained"] for report in reports.values())
    if unexplained:
        sys.exit(f"{unexplained} answers differ from plain decoding by more than a near tie: see report.json")


def define_flags() -> None:
    """Flags of this command and of its relatives in benchmarks/."""
    config_flags.DEFINE_config_file("config", None, "A benchmark of configs/.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Where records and the report go; goes on with what is there.")
    flags.DEFINE_integer("limit", None, "Prompts a task, evenly spread over it.", lower_bound=1)
    flags.DEFINE_list("tasks", None, "Names of tasks.")
    flags.DEFINE_list("block_sizes", None, "Run-time block sizes.")
    flags.DEFINE_list("dtype", None, "float32, bfloat16, or both.")
    flags.mark_flags_as_required(["config", "workdir"])


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
