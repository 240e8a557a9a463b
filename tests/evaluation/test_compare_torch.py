"""benchmarks/compare_torch.py: the same weights in this program and in PyTorch, interleaved in one run.

Needs torch, transformers and the PyPI package `dflash` (the extra `parity`), here or in the environment whose
interpreter DFLASH_JAX_TORCH_PYTHON names.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import jax.numpy as jnp
import pytest
from tiny_benchmark import MAX_TOKENS, golden_prompt, pair, prompts, setup

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.config import ConfigError
from dflash_jax.evaluation.methods import RemoteMethod, Worker, WorkerError
from dflash_jax.evaluation.runner import own_methods, run

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PYTHON = os.environ.get("DFLASH_JAX_TORCH_PYTHON", sys.executable)
sys.path.insert(0, str(BENCHMARKS))

import compare_torch  # noqa: E402


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    try:
        compare_torch.check_python(PYTHON)
    except ConfigError as error:
        pytest.skip(f"{error}; see this file's docstring")
    folder = tmp_path_factory.mktemp("exported")
    target, drafter = pair()
    export_target(folder / "target", target)
    export_drafter(folder / "drafter", drafter.config, drafter.params, dtype=jnp.float32)
    command = [PYTHON, str(compare_torch.WORKER), f"--target={folder / 'target'}", f"--drafter={folder / 'drafter'}"]
    with Worker([*command, "--dtype=float32", "--threads=1"]) as worker:
        yield worker


def test_greeting(worker):
    assert worker.greeting["versions"].keys() == {"torch", "transformers"} and worker.greeting["threads"] == 1


def test_b39_the_same_tokens_and_acceptance_lists(worker, tmp_path):
    """Plain decoding in two implementations and DFlash in two, float32, one run."""
    target, drafter = pair()
    methods = own_methods(target, drafter, (3, 4), "dflash-whole")
    remote = (("hf-generate", "generate", 1), ("hf-loop", "loop", 1), ("torch-dflash-4", "dflash-4", 4))
    methods += [RemoteMethod(name, worker, method, size) for name, method, size in remote]
    report = run(
        tmp_path, target, setup(methods), methods, prompts(), MAX_TOKENS, peers={"dflash-whole-4": "torch-dflash-4"},
        overhead_rounds=0,
    )  # fmt: skip
    task = report["tasks"]["all"]
    for name, method in task["methods"].items():
        assert method["identical"] == [4, 4], name
        assert method["prefill_s"] < method["seconds"], name
    ours, theirs = (task["methods"][name]["acceptance"] for name in ("dflash-whole-4", "torch-dflash-4"))
    assert ours == theirs and ours["tau"] > 1
    peer = task["methods"]["dflash-whole-4"]["peer"]
    assert (peer["same_tokens"], peer["same_acceptance"], peer["of"]) == (4, 4, 4)
    assert compare_torch.disagreements(report) == []


@pytest.mark.parametrize("method", ["generate", "loop", "dflash-4"])
def test_stops_and_limits(worker, method):
    answer = RemoteMethod("x", worker, method, None).answer(golden_prompt(), 12)
    stop = answer.token_ids[5]
    end = answer.token_ids.index(stop) + 1
    stopped = RemoteMethod("x", worker, method, None, (stop, 3)).answer(golden_prompt(), 12)
    assert (stopped.token_ids, stopped.finish_reason) == (answer.token_ids[:end], "stop")
    assert sum(stopped.acceptance) + 1 == end
    one = RemoteMethod("x", worker, method, None).answer(golden_prompt(), 1)
    assert (one.token_ids, one.acceptance) == (answer.token_ids[:1], [])
    assert 0 < one.first_token_s <= one.seconds


@pytest.mark.parametrize("method", ["beam", "dflash", "dflash-x"])
def test_unknown_methods_are_refused(worker, method):
    with pytest.raises(WorkerError, match=f"method {method!r} is unknown; known are generate, loop and dflash-K"):
        RemoteMethod("x", worker, method, None).answer([1], 1)


def test_interpreters_without_torch_are_refused():
    with pytest.raises(ConfigError, match=r"which can not be run"):
        compare_torch.check_python("/no/such/python")
    with pytest.raises(ConfigError, match=r"can not run the worker \(.*\); in an environment of its own: pip install"):
        compare_torch.check_python("false")


@pytest.mark.parametrize("field", ["markov_rank", "target_hidden_size"])
def test_drafters_with_modules_that_the_reference_has_not_are_refused(field):
    config = pair()[1].config
    compare_torch.check_drafter("one", config)
    with pytest.raises(ConfigError, match=f"drafter is 'one', which has {field} = 7"):
        compare_torch.check_drafter("one", dataclasses.replace(config, **{field: 7}))


def test_disagreements_are_named():
    peer = {"name": "torch-dflash-4", "same_tokens": 4, "same_acceptance": 3, "of": 4}
    report = {"tasks": {"x": {"methods": {"dflash-whole-4": {"peer": peer}}}}, "unexplained": 2}
    assert compare_torch.disagreements(report) == [
        "x: dflash-whole-4 and torch-dflash-4 share tokens on 4 and acceptance lists on 3 of 4 prompts",
        "2 answers are not plain decoding's",
    ]
