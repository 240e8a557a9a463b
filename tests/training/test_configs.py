"""Every experiment of configs/ that trains: its full size is laid out, and its tiny variant takes one real step."""

import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.data import prompts
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.data.responses import Sample
from dflash_jax.decoding.abstract import laid_out
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.transformer import Transformer
from dflash_jax.serving.config import read_config, trains
from dflash_jax.training.adapter import configured_drafter
from dflash_jax.training.corpus import TrainingData
from dflash_jax.training.dry_run import byte_tokenizer
from dflash_jax.training.loop import train

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "base")
TRAINING = [name for name in NAMES if trains(importlib.import_module(f"configs.{name}").get_config())]
# Parameters of target and drafter in billions, by the makers' own count where they give one.
SIZES = {
    "qwen3_4b": (4.02, 0.54), "qwen3_8b": (8.19, 1.05), "llama31_8b": (8.03, 1.17), "qwen35_27b": (26.9, 1.73),
    "gpt_oss_20b": (20.9, 0.80), "qwen35_397b_a17b": (396.3, 1.05), "deepseek_v3": (671.0, 2.83),
}  # fmt: skip


def load(name, variant=""):
    module = importlib.import_module(f"configs.{name}")
    return module.get_config(*([variant] if variant else []))


def texts(rows, length=24):
    """Batches of random bytes, the second half of each row an answer."""
    rng = np.random.default_rng(0)
    answer_S = np.arange(length) >= length // 2
    samples = [Sample(str(i), rng.integers(3, 259, length).astype(np.int32), answer_S) for i in range(rows)]
    return TrainingData(make_iterator(samples, batch_size=rows, seq_len=length, seed=0), samples, {})


def billions(params):
    return sum(x.size for x in jax.tree.leaves(params)) / 1e9


def test_these_train():
    assert {*SIZES, "smollm2_135m_dflash", "smollm2_135m_ablations"} == set(TRAINING)


@pytest.mark.parametrize("name", SIZES)
def test_full_size_is_what_it_says(name):
    config = load(name)
    said = " ".join(importlib.import_module(f"configs.{name}").__doc__.split())
    assert f"--config=configs/{name}.py" in said and "not yet run" in said
    settings = read_config(config)
    target, _ = read_architectures(settings.target.source, settings.target.architecture)
    drafter = configured_drafter(config.drafter, target)
    sizes = [billions(laid_out(None, *what, jnp.bfloat16)[1]) for what in ((Transformer, target), (DFlash, drafter))]
    assert sizes == pytest.approx(SIZES[name], rel=0.02)
    assert settings.mesh.size > 1 and config.data.batch_size % (config.mesh.data * config.mesh.fsdp) == 0


@pytest.mark.parametrize("name", TRAINING)
def test_one_step_of_the_tiny_variant(name, tmp_path):
    config = load(name, "tiny")
    config.step.num_anchors = 4
    config.evaluation.prompts = {}  # decoding with drafters is tested elsewhere
    config.optimizer.total_steps, config.optimizer.warmup_steps = 1, 0
    done = train(config, tmp_path, data=texts(config.data.batch_size), evaluate=None)
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert done.step == line["step"] == 1
    assert np.isfinite(line["loss"]) and line["grad_norm"] > 0
    assert (done.export / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "") for name in TRAINING), ("smollm2_135m_dflash", "natural"), ("smollm2_135m_dflash", "h200")],
)
def test_as_many_prompts_are_asked_for_as_there_are(name, variant):
    """Of the sources that are the same on every machine; functions of installed packages are not."""
    config = load(name, variant)
    asked = [(config.data.natural, "train"), (config.evaluation.prompts, "heldout")]
    asked += [(answers.prompts, "train") for answers in config.data.answers.values()]
    for counts, split in asked:
        for source, count in counts.items():
            if not source.startswith("code"):
                assert prompts.load(source, config.data.seed, count, split)


@pytest.mark.parametrize(("name", "variant"), [("qwen3_8b", ""), ("smollm2_135m_dflash", "h200")])
def test_the_number_of_one_source_is_no_other_ones(name, variant):
    config = load(name, variant)
    before = {**config.data.answers.greedy.prompts, **config.data.natural}
    config.data.answers.greedy.prompts.code = 7  # as --config.data.answers.greedy.prompts.code=7 does
    assert {**config.data.answers.greedy.prompts, **config.data.natural} == before | {"code": 7}


@pytest.mark.parametrize("name", TRAINING)
def test_answers_evaluation_and_serving_render_prompts_alike(name):
    """Else the best drafter would be chosen on text of another kind than it is trained and served on."""

    def options(config):
        sections = [config[name] for name in ("data", "evaluation", "generation") if name in config]
        return [dict(section.get("chat_template_kwargs") or {}) for section in sections]

    first, *others = options(load(name))
    assert len(others) >= 1 and all(other == first for other in others)
    for given in options(load(name, "tiny")):  # what the random target's template does not read would be refused
        assert encode_prompt(byte_tokenizer(), [{"role": "user", "content": "Hello?"}], **given)
