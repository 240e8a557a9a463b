"""The command: flags over config, from checkpoints on disk to report.json and report.md."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib

import pytest
from absl import flags
from ml_collections import ConfigDict

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import FULL, ConfigError, DrafterConfig
from dflash_jax.evaluation import benchmark
from dflash_jax.evaluation.tasks import TASKS
from dflash_jax.models.target import random_target
from dflash_jax.training.dry_run import tiny_target

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "benchmark_smollm2.py"


def shipped_config() -> ConfigDict:
    spec = importlib.util.spec_from_file_location("benchmark_smollm2", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def test_the_shipped_config():
    config = benchmark.override(shipped_config())
    assert config.tasks["humaneval"] == 0, "all of them"
    assert len(config.tasks) >= 4 and set(config.tasks) <= set(TASKS)
    assert config.dtypes == ("float32", "bfloat16") and config.max_tokens >= 256


def test_flags_replace_fields():
    config = benchmark.override(
        shipped_config(), limit=3, tasks=["gsm8k", "json"], block_sizes=["2", "5"], dtype=["bfloat16"]
    )
    assert dict(config.tasks) == {"gsm8k": 3, "json": 3}
    assert (list(config.block_sizes), list(config.dtypes)) == ([2, 5], ["bfloat16"])
    kept = benchmark.override(shipped_config(), tasks=["humaneval", "json"])
    assert dict(kept.tasks) == {"humaneval": 0, "json": 0}


def test_wrong_flags_are_refused():
    with pytest.raises(ConfigError, match="block_sizes is 'four', must be whole numbers"):
        benchmark.override(shipped_config(), block_sizes=["four"])
    with pytest.raises(ConfigError, match="no field 'taks'"):
        benchmark.override(ConfigDict(shipped_config().to_dict() | {"taks": {}}))
    with pytest.raises(ConfigError, match="no field 'generation'"):  # a config of serve.py
        benchmark.override(ConfigDict({"target": "x", "generation": {}}), limit=1, tasks=["json"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(target, drafter): folders of a random pair with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    small = tiny_target()
    config = dataclasses.replace(small.config, num_layers=2, layer_types=(FULL,) * 2)
    target = dataclasses.replace(random_target(config, 0), tokenizer=small.tokenizer, eos_token_ids=(0,))
    drafter = random_drafter(
        DrafterConfig(
            hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
            rms_norm_eps=1e-5, rope=config.rope, vocab_size=259, block_size=3, mask_token_id=2,
            target_layer_ids=(0,), num_target_layers=2, layer_types=(FULL,), max_positions=1024,
        ),
        target,
    )  # fmt: skip
    return (
        export_target(folder / "target", target),
        export_drafter(folder / "drafter", drafter.config, drafter.params),
    )


def test_from_checkpoints_to_a_report(checkpoints, tmp_path):
    config = ConfigDict(
        {
            "target": str(checkpoints[0]), "drafter": str(checkpoints[1]), "tasks": {"instruction": 3},
            "dtypes": ("float32",), "block_sizes": (3,), "max_tokens": 8, "overhead_rounds": 0,
        }
    )  # fmt: skip
    reports = benchmark.benchmark(benchmark.override(config), tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(reports))
    assert set(written) == {"float32"}
    report = written["float32"]
    assert report["setup"]["target"] == str(checkpoints[0]) and report["setup"]["max_tokens"] == 8
    assert report["tasks"]["instruction"]["methods"]["dflash-3"]["identical"] == [3, 3]
    text = (tmp_path / "report.md").read_text()
    assert f"### instruction: 3 prompts, prompt ids {report['prompt_hashes']['instruction']}" in text
    assert "3 of 3" in text
    assert not list(tmp_path.glob("*.part"))


def test_unexplained_differences_end_with_status_one(monkeypatch, tmp_path):
    (tmp_path / "report.md").write_text("tables")
    monkeypatch.setattr(benchmark, "use_compilation_cache", lambda: None)
    values = {"config": shipped_config(), "workdir": str(tmp_path), "limit": None, "tasks": None, "block_sizes": None}
    monkeypatch.setattr(flags, "FLAGS", type("Values", (), {**values, "dtype": None}))
    for unexplained in (0, 2):
        monkeypatch.setattr(benchmark, "benchmark", lambda *_, n=unexplained: {"float32": {"unexplained": n}})
        if unexplained:
            with pytest.raises(SystemExit, match="2 answers differ from plain decoding by more than a near tie"):
                benchmark.main([])
        else:
            benchmark.main([])
