"""The whole way: train.py on the tiny variant, and the numbers it reports."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import logging

import dflash_jax
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.config import ConfigError
from dflash_jax.data import regenerate
from dflash_jax.drafters.contract import Drafter
from dflash_jax.training import acceptance, loop, watch
from dflash_jax.training.adapter import configured_drafter
from dflash_jax.training.data_only import make_data
from dflash_jax.training.dry_run import byte_tokenizer, tiny_target
from dflash_jax.training.metrics import MetricsWriter, summarise
from tests.training import toy

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "configs/smollm2_135m_dflash.py"


def get_config(variant=""):
    spec = importlib.util.spec_from_file_location("experiment", ROOT / CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)


def script(*arguments):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": os.environ.get("DFLASH_JAX_TEST_CACHE", "")}
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tiny")
    done = script(f"--config={CONFIG}:tiny", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr[-3000:]
    return workdir, done.stderr


def test_the_tiny_variant_runs_from_prompts_to_export(tiny_run):
    workdir, log = tiny_run
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    train = [x for x in lines if x["kind"] == "train"]
    tau = [x["tau"] for x in lines if x["kind"] == "eval"]
    assert [x["step"] for x in train] == [10, 20, 30, 40] and len(tau) == 2
    assert train[-1]["loss"] < 0.8 * train[0]["loss"]
    assert min(tau) >= 1.0 and max(tau) <= 4.0
    assert {"accuracy", "accuracy_1", "chain_tau", "grad_norm", "learning_rate", "blocks_per_s"} <= set(train[0])
    assert "step 10 epoch" in log and "\r" not in log  # log lines, not a bar, where there is no terminal
    assert list((workdir / "tensorboard").iterdir())
    assert json.loads((workdir / "config.json").read_text())["drafter"]["block_size"] == 4

    target = tiny_target()
    drafter = dflash_jax.load_drafter(workdir / "export", target)
    assert isinstance(drafter, Drafter) and drafter.shared.head_DxV.shape == (32, 200)
    prompts = [target.tokenizer.encode("What is rain?")]
    plain = dflash_jax.generate(target, None, prompts, max_tokens=12)[0]
    drafted = dflash_jax.generate(target, drafter, prompts, max_tokens=12)[0]
    assert plain.token_ids == drafted.token_ids


def test_data_can_be_made_before(tmp_path, monkeypatch):
    config = get_config("tiny")
    make_data(config, tmp_path)
    made = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert made == ["features-1-3", "greedy"] and not (tmp_path / "checkpoints").exists()
    monkeypatch.setattr(regenerate, "answers", None)  # nothing is left to answer
    make_data(config, tmp_path)
    with pytest.raises(TypeError):
        make_data(config, tmp_path / "other")


def test_a_field_that_does_not_exist_is_refused_before_anything_runs(tmp_path):
    done = script(f"--config={CONFIG}:tiny", f"--workdir={tmp_path}", "--config.optimizer.lr=1")
    assert done.returncode != 0 and "lr" in done.stderr and not list(tmp_path.iterdir())


def test_every_variant_builds():
    for variant in ("", "natural", "tiny"):
        config = get_config(variant)
        assert config.drafter.mask_token_id in (16, 2)
    with pytest.raises(ValueError, match="'huge' is unknown"):
        get_config("huge")


def test_the_recipe_fits_the_real_target():
    """Layers, taps and mask of the recipe against SmolLM2's architecture, without its weights."""
    config = get_config()
    architecture = toy.target_config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, max_positions=8192, layer_types=("full_attention",) * 30,
    )  # fmt: skip
    draft = configured_drafter(config.drafter, architecture)
    assert draft.target_layer_ids == (1, 8, 15, 22, 28) and draft.layer_types == ("full_attention",) * 3


def test_b36_a_mask_that_ends_answers_or_pads_is_refused_before_training(tmp_path):
    config = get_config("tiny")
    config.drafter.mask_token_id = 0
    with pytest.raises(ConfigError, match=r"mask_token_id is 0, which is an end of text.* Set drafter\.mask_token_id"):
        loop.train(config, tmp_path, target=tiny_target())
    padded = dataclasses.replace(toy.target(), tokenizer=types.SimpleNamespace(pad_token_id=toy.MASK))
    with pytest.raises(ConfigError, match=f"mask_token_id is {toy.MASK}, which is padding"):
        loop.train(toy.experiment(), tmp_path, target=padded, data=toy.data())
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def test_b36_a_drafter_to_go_on_from_must_have_this_mask(tmp_path):
    _, params = toy.drafter(toy.drafter_config())
    made = export_drafter(tmp_path / "made", toy.drafter_config(mask_token_id=5), params)
    config = toy.experiment()
    config.drafter.update(init_from=str(made), init_layers=())
    config.drafter.update(sliding_window=6, num_full_layers=1)
    with pytest.raises(ConfigError, match="has mask_token_id = 5, this run has 3"):
        loop.train(config, tmp_path / "run", target=toy.target(), data=toy.data())


def test_metrics_are_means_over_the_whole_window():
    one = {"loss": 6.0, "denominator": 2.0, "objective": {"hard": 4.0, "acceptance": 2.0}, "weight": 8.0,
           "label_weight": 1.0, "count_J": np.asarray([4, 2]), "correct_J": np.asarray([2, 1]),
           "agree_J": np.asarray([1, 0]), "chain": 3, "blocks": 4}  # fmt: skip
    two = {"loss": 1.0, "denominator": 5.0, "objective": {"hard": 0.0, "acceptance": 0.0}, "weight": 2.0,
           "label_weight": 3.0, "count_J": np.asarray([1, 0]), "correct_J": np.asarray([1, 0]),
           "agree_J": np.asarray([0, 0]), "chain": 1, "blocks": 1}  # fmt: skip
    steps = [
        {"sums": type("Sums", (), values), "grad_norm": norm, "learning_rate": 0.1, "real_tokens": norm / 4}
        for values, norm in ((one, 1.0), (two, 3.0))
    ]
    result = summarise(steps)
    assert result["loss"] == pytest.approx(1.0) and result["hard"] == pytest.approx(1.0)
    assert result["acceptance"] == pytest.approx(2 / 10)
    assert result["accuracy"] == pytest.approx(4 / 7) and result["accuracy_1"] == pytest.approx(3 / 5)
    assert result["accuracy_2"] == pytest.approx(1 / 2) and result["agreement"] == pytest.approx(1 / 7)
    assert result["chain_tau"] == pytest.approx(1.8) and result["grad_norm"] == 2.0
    assert result["real_tokens"] == pytest.approx(0.5)


def test_metrics_written_again_after_a_resume_stand_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (5, 10, 15):
        writer.write(step, "train", {"loss": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 20, "ki')  # a killed run's last line
    again = MetricsWriter(tmp_path, 10)
    again.write(15, "train", {"loss": 1.5})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(x["step"], x["loss"]) for x in lines] == [(5, 5.0), (10, 10.0), (15, 1.5)]


@pytest.mark.parametrize("again", [False, True])
def test_an_evaluation_that_is_repeated_stands_once(tmp_path, again):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        for kind in ("train", "eval"):
            writer.write(5, kind, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('3\n{"step": "x", "kind": "train"}\n')  # not lines of a run
    with contextlib.closing(MetricsWriter(tmp_path, 5, evaluates_again=again)) as writer:
        writer.write(5 if again else 6, "eval", {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    both, last = [(5, "train"), (5, "eval")], (6, "eval")
    assert [(x["step"], x["kind"]) for x in lines] == (both if again else [*both, last])
    assert lines[-1]["loss"] == 2.0


def test_metrics_of_another_process_are_not_written(tmp_path):
    writer = MetricsWriter(tmp_path, enabled=False)
    writer.write(5, "train", {"loss": 1.0})
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_gap_between_training_and_serving_is_said_aloud(caplog):
    logger = logging.get_absl_logger()
    logger.addHandler(caplog.handler)
    try:
        watch.warn_if_apart(1.9, 2.2)
        watch.warn_if_apart(1.02, 1.1)
        assert not caplog.records
        watch.warn_if_apart(1.02, 3.1)
        assert "tau is 1.02" in caplog.text and "3.10" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_the_byte_tokenizer_is_a_whole_tokenizer():
    tokenizer = byte_tokenizer()
    text = "naïve 東京\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 259 and tokenizer.eos_token_id == 0
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_evaluation_refuses_prompts_that_are_all_too_long():
    with pytest.raises(ConfigError, match="max_prompt_tokens is 3"):
        acceptance.open_evaluation({"prompts": {"instruction": 2}, "max_prompt_tokens": 3}, tiny_target())
    assert acceptance.open_evaluation({}, tiny_target()) is None
