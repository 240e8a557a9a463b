"""This program beside PyTorch on the same weights and prompts, prompt by prompt in one run.

    python benchmarks/compare_torch.py --config=configs/benchmark_smollm2.py --workdir=DIR --torch_python=PYTHON \\
        --config.drafter=asset:smollm2-135m-dflash

The drafter must be one that the reference implementation has the modules for: no Markov head, no projections.
PYTHON is an interpreter with torch, transformers and the package `dflash` (`pip install dflash_jax[parity]`); by
default the one that runs this. The target is exported to DIR, so both sides hold the same numbers, and a worker
process runs PyTorch: both stay loaded, one works at a time. Compared are

    plain, dflash-K          this program, the drafter with its own (pruned) draft vocabulary
    dflash-whole-K           this program, the drafter over the whole vocabulary
    hf-generate, hf-loop     plain decoding by Hugging Face transformers (see torch_worker.py)
    torch-dflash-K           the reference implementation of DFlash, whole vocabulary: must give the tokens and the
                             acceptance lists of dflash-whole-K in float32

`--limit`, `--tasks`, `--block_sizes` and `--dtype` are as in dflash_jax.evaluation.benchmark. The exit status is 1 if
in float32 the two implementations of DFlash disagree, or an answer of this program is not plain decoding's.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

from absl import flags, logging

from dflash_jax import command_line
from dflash_jax.checkpoints.drafter_config import own_modules
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import drafter_directory, load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.config import ConfigError, DrafterConfig
from dflash_jax.evaluation.benchmark import define_flags, override, write_report
from dflash_jax.evaluation.methods import Method, RemoteMethod, Worker
from dflash_jax.evaluation.runner import BenchmarkConfig, describe, own_methods, run, select_prompts

WORKER = pathlib.Path(__file__).with_name("torch_worker.py")


def check_python(python: str) -> None:
    """Refuses an interpreter that can not run the worker, before anything is loaded.

    Raises:
      ConfigError: says what it lacks.
    """
    probe = [python, "-c", "import torch, transformers, dflash.model"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--torch_python is {python!r}, which can not be run: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"--torch_python is {python!r}, which can not run the worker ({reason}); in an environment of its own: "
            "pip install torch transformers dflash==0.1.0"
        )


def check_drafter(source: str, config: DrafterConfig) -> None:
    """Refuses a drafter with modules that the reference implementation does not have.

    Raises:
      ConfigError: names the module.
    """
    for field, value in own_modules(config).items():
        raise ConfigError(
            f"drafter is {source!r}, which has {field} = {value}: the reference implementation of DFlash has no such "
            "module; name a drafter that it can load, such as --config.drafter=asset:smollm2-135m-dflash"
        )


def compare(config: BenchmarkConfig, workdir: pathlib.Path, python: str) -> dict[str, Any]:
    """One dtype after another; returns {dtype: report of `runner.run`} and writes it."""
    reports = {}
    for dtype in config.dtypes:
        logging.info("== %s", dtype)
        target = load_target(config.target, dtype=dtype)
        drafter = load_drafter(config.drafter, target, draft_vocab=config.draft_vocab)
        check_drafter(config.drafter, drafter.config)
        exported = workdir / dtype / "target"
        if not exported.exists():
            export_target(exported, target)
        whole = load_drafter(config.drafter, target, draft_vocab=False)
        prompts = select_prompts(
            config.tasks, target.tokenizer, target.config.max_positions, config.chat_template_kwargs
        )
        command = [
            python, str(WORKER), f"--target={exported}", f"--drafter={drafter_directory(config.drafter)}",
            f"--dtype={dtype}",
        ]  # fmt: skip
        logging.info("starting %s", " ".join(command))
        with Worker(command) as worker:
            methods, peers = own_methods(target, drafter, config.block_sizes), {}
            methods += own_methods(target, whole, config.block_sizes, "dflash-whole")[1:]
            methods += [_remote(f"hf-{name}", worker, name, 1, target) for name in ("generate", "loop")]
            for k in config.block_sizes:
                methods.append(_remote(f"torch-dflash-{k}", worker, f"dflash-{k}", k, target))
                peers[f"dflash-whole-{k}"] = f"torch-dflash-{k}"
            setup = describe(target, drafter, config.max_tokens, methods)
            setup |= {"torch": worker.greeting["versions"], "torch_threads": worker.greeting["threads"]}
            setup["chat_template_kwargs"] = dict(config.chat_template_kwargs)
            reports[dtype] = run(
                workdir / dtype, target, setup, methods, prompts, config.max_tokens,
                peers=peers, overhead_rounds=config.overhead_rounds,
            )  # fmt: skip
        write_report(workdir, reports)
    return reports


def _remote(name: str, worker: Worker, method: str, block_size: int, target: Any) -> Method:
    return RemoteMethod(name, worker, method, block_size, target.eos_token_ids)


def disagreements(report: dict[str, Any]) -> list[str]:
    """Where a float32 run contradicts the reference; empty where all is well."""
    found = []
    for task, numbers in report["tasks"].items():
        for name, method in numbers["methods"].items():
            peer = method["peer"]
            if peer and (peer["same_tokens"], peer["same_acceptance"]) != (peer["of"], peer["of"]):
                found.append(
                    f"{task}: {name} and {peer['name']} share tokens on {peer['same_tokens']} and acceptance lists on "
                    f"{peer['same_acceptance']} of {peer['of']} prompts"
                )
    if report["unexplained"]:
        found.append(f"{report['unexplained']} answers are not plain decoding's")
    return found


def main(argv: list[str]) -> None:
    del argv
    use_compilation_cache()
    values = flags.FLAGS
    config = override(
        values.config, limit=values.limit, tasks=values.tasks, block_sizes=values.block_sizes, dtype=values.dtype
    )
    check_python(values.torch_python)
    workdir = pathlib.Path(values.workdir)
    reports = compare(config, workdir, values.torch_python)
    print((workdir / "report.md").read_text(encoding="utf-8"))
    wrong = disagreements(reports["float32"]) if "float32" in reports else []
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_string("torch_python", sys.executable, "An interpreter with torch, transformers and dflash.")
    command_line.run(main)
