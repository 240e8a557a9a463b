"""From a config's `data` section to batches, by one process and by two."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.config import ConfigError
from dflash_jax.data import regenerate as regeneration
from dflash_jax.data.responses import ResponseStore
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.training.corpus import DataConfig, open_training_data
from dflash_jax.training.dry_run import tiny_target
from dflash_jax.training.initialise import drafter_config
from tests.training import corpus_of_two


def in_two_processes(workdir, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.corpus_of_two", workdir, str(i), port, *options],
            cwd=pathlib.Path(__file__).parents[2], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    found = []
    for process in started:
        out, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
        found.append(json.loads(out.splitlines()[-1]))
    return found


def first_epoch(rows):
    return sorted(row for row in map(tuple, rows) if row[1] == 0)


@pytest.mark.slow  # two processes that share two cores
def test_two_processes_answer_and_compute_their_shares_and_read_each_sample_once(tmp_path):
    one = corpus_of_two.rows(corpus_of_two.run(tmp_path / "one"))
    two = in_two_processes(tmp_path / "two")
    ours, theirs = first_epoch([*two[0], *two[1]]), first_epoch(one)
    assert [row[0] for row in ours] == [row[0] for row in theirs] and len(ours) == 10
    np.testing.assert_allclose([row[2] for row in ours], [row[2] for row in theirs], rtol=1e-2)
    data = tmp_path / "two" / "data"
    shares = [len(ResponseStore(data / name)) for name in ("greedy", "greedy.part-1")]
    assert sum(shares) == 10 and min(shares) > 0
    features = data / "features-1-3"
    indexes = [features / "index.jsonl", features / "part-1" / "index.jsonl"]
    before = [file.read_bytes() for file in indexes]
    assert all(before)
    # One process goes on with what two have made: nothing is left to do, and it reads the same samples.
    alone = first_epoch(corpus_of_two.rows(corpus_of_two.run(tmp_path / "two")))
    assert [row[0] for row in alone] == [row[0] for row in theirs]
    assert [file.read_bytes() for file in indexes] == before
    assert [len(ResponseStore(data / name)) for name in ("greedy", "greedy.part-1")] == shares


@pytest.mark.slow
def test_two_processes_that_share_a_target_answer_and_compute_in_step(tmp_path):
    """Answers, features and batches are those of one device, also where some were lost."""
    one, mesh = tmp_path / "one", tmp_path / "mesh"
    expected = first_epoch(corpus_of_two.rows(corpus_of_two.run(one)))
    stored = {r.id: r for r in ResponseStore(one / "data" / "greedy").rows()}
    for _ in range(2):
        found = in_two_processes(mesh, "spread")
        assert found[0] == found[1]  # every row on both
        ours = first_epoch(found[0])
        assert [row[0] for row in ours] == [row[0] for row in expected] and len(ours) == 10
        np.testing.assert_allclose([row[2] for row in ours], [row[2] for row in expected], rtol=1e-2)
        data = mesh / "data"
        assert {r.id: r for r in ResponseStore(data / "greedy").rows()} == stored and len(stored) == 10
        assert not (data / "greedy.part-1").exists()
        parts = [data / "features-1-3", data / "features-1-3" / "part-1"]
        lines = [(part / "index.jsonl").read_bytes().splitlines(keepends=True) for part in parts]
        assert all(lines)
        answers = data / "greedy" / "responses.jsonl"
        answers.write_bytes(b"".join(answers.read_bytes().splitlines(keepends=True)[:6]) + b'{"id": "half')
        (parts[0] / "index.jsonl").write_bytes(b"".join(lines[0][:-1]))


def test_a_drafter_answers_faster_and_not_otherwise(tmp_path, monkeypatch):
    target = tiny_target()
    config = drafter_config(target.config, num_layers=1, block_size=4, mask_token_id=2, target_layer_ids=(1, 3))
    params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(0)))[1]
    export_drafter(tmp_path / "drafter", config, params)
    calls, true_answers = [], regeneration.answers

    def spy(target, drafter, *arguments):
        calls.append(drafter)
        return true_answers(target, drafter, *arguments)

    monkeypatch.setattr(regeneration, "answers", spy)
    rows = {}
    for name in ("", str(tmp_path / "drafter")):
        section = {"prompts": {"instruction": 4}, "max_new_tokens": 8, "drafter": name}
        workdir = tmp_path / ("with" if name else "without")
        values = {"batch_size": 2, "seq_len": 192, "features": False, "answers": {"a": section}}
        open_training_data(values, target, (1, 3), workdir)
        rows[name] = {r.id: r for r in ResponseStore(workdir / "data" / "a").rows()}
    plain, drafted = rows.values()
    assert plain == drafted and len(plain) == 4
    assert calls[0] is None and calls[-1].config.block_size == 4


@pytest.mark.parametrize("multi_turn", [False, True])
def test_a_run_reads_the_prompts_that_it_asks_for_from_stores_that_hold_more(tmp_path, multi_turn):
    """Runs share a data directory (sweeps do): what one has asked for must not train another."""
    target = tiny_target()

    def opened(count):
        answers = {"prompts": {"instruction": count}, "max_new_tokens": 8, "batch_size": 4, "multi_turn": multi_turn}
        section = {
            "batch_size": 2, "seq_len": 256, "features": False, "answers": {"greedy": answers},
            "natural": {"tasks_natural": count}, "directory": str(tmp_path / "data"),
        }  # fmt: skip
        return open_training_data(section, target, (1, 3), tmp_path)

    few, more, again = opened(2), opened(5), opened(2)
    assert len(few.samples) <= 4 < len(more.samples)  # an answer of one token is no sample
    assert again.facts == few.facts and [s.id for s in again.samples] == [s.id for s in few.samples]


def test_bad_sections_are_named():
    with pytest.raises(ConfigError, match="neither answers, natural nor stores"):
        DataConfig(4, 32)
    with pytest.raises(ConfigError, match="workers is -1"):
        DataConfig(4, 32, natural=(("a.jsonl", None),), workers=-1)
    with pytest.raises(ConfigError, match="keep_out is 'mbpp', must be 'human_eval' or ''"):
        DataConfig(4, 32, natural=(("a.jsonl", None),), keep_out="mbpp")
