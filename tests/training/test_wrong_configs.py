"""A config that can not be right is refused before a target is loaded and before anything is answered."""

import pytest

from configs import benchmark_smollm2, smollm2_135m, smollm2_135m_dflash
from dflash_jax.config import ConfigError
from dflash_jax.training import from_config, loop
from dflash_jax.training.compile_only import compile_only

NAN = float("nan")
INSTRUCTION = {"prompts": {"instruction": 2}}

WRONG = [
    ("seed", -1, "seed is -1"),
    ("mesh.data", 3, "data.batch_size is 4, must be a multiple of the 3 shards"),
    ("drafter.num_layers", "2", "drafter.num_layers is '2', must be a whole number"),
    ("drafter.num_layers", 3, r"drafter.init_layers \(3, 4\) must name drafter.num_layers = 3"),
    ("drafter.block_size", 1, "drafter.block_size is 1, must be at least 2"),
    ("drafter.trunk", "ice", "drafter.trunk is 'ice'"),
    ("drafter.draft_vocab_size", -1, "drafter.draft_vocab_size is -1"),
    ("drafter.taps", (1,), "drafter has no field 'taps'; it knows block_size"),
    ("data.batch_size", 0, "data.batch_size is 0, must be at least 1"),
    ("data.seq_len", 1, "data.seq_len is 1, must be at least 2"),
    ("data.features", "yes", "data.features is 'yes', must be True or False"),
    ("data.answers", {"greedy": {"prompts": {"poems": 3}}}, "prompt source 'poems' is unknown"),
    ("data.answers", {"greedy": {"prompts": {"json": 0}}}, "data.answers.greedy.prompts: json is 0"),
    ("data.answers", {"greedy": {"prompts": {}}}, "data.answers.greedy.prompts is empty"),
    ("data.answers", {"natural": INSTRUCTION}, "'natural' can not be the name of a store"),
    ("data.answers", {"features-1-3": INSTRUCTION}, "'features-1-3' can not be the name of a store"),
    ("data.answers", {"a": INSTRUCTION | {"top_p": 0}}, "top_p of data.answers.a is 0"),
    ("data.answers", {"a": INSTRUCTION | {"temperature": NAN}}, "data.answers.a.temperature is nan"),
    ("data.answers", {"a": INSTRUCTION | {"batch_size": 0}}, "data.answers.a.batch_size is 0"),
    ("data.answers", {"a": INSTRUCTION | {"beams": 2}}, "data.answers.a has no field 'beams'"),
    ("data.seed", -1, "data.seed is -1"),
    ("step.num_anchors", 1.5, "step.num_anchors is 1.5, must be a whole number"),
    ("step.accumulation", 3, "step.accumulation is 3, must divide data.batch_size = 4"),
    ("step.block_size", 3, "step.block_size is 3, but a step reads drafter.block_size"),
    ("loss.gamma", NAN, "loss.gamma is nan, must be a number or None"),
    ("loss.objective", 5, "loss.objective is 5, must be a name"),
    ("loss.objective", {"hard": "x"}, "loss.objective.hard is 'x'"),
    ("optimizer.learning_rate", float("inf"), "optimizer.learning_rate is inf"),
    ("optimizer.b2", 1.0, "optimizer.b2 is 1.0"),
    ("optimizer.eps", 0.0, "optimizer.eps is 0.0"),
    ("optimizer.weight_decay", -1.0, "optimizer.weight_decay is -1.0"),
    ("optimizer.final_fraction", 2.0, "optimizer.final_fraction is 2.0"),
    ("optimizer.warmup_steps", 1.5, "optimizer.warmup_steps is 1.5, must be a whole number"),
    ("run.log_every", "x", "run.log_every is 'x', must be a whole number"),
    ("run.stop_after", 0, "run.stop_after is 0"),
    ("optimizer.ema_decay", 0.0, "run.export_weights is 'ema', but optimizer.ema_decay is 0"),
    ("run.profile_steps", (1.5, 2), "run.profile_steps is"),
    ("evaluation.max_tokens", 1, "evaluation.max_tokens is 1, must be at least 2"),
    ("evaluation.block_size", 9, "evaluation.block_size is 9, must be at most drafter.block_size = 4"),
    ("evaluation.prompts", {"poems": 1}, "prompt source 'poems' is unknown"),
    ("optimiser", {"kind": "adamw"}, "a section 'optimiser'"),
]


def config_with(field, value):
    config = smollm2_135m_dflash.get_config("tiny")
    *sections, name = field.split(".")
    section = config[sections[0]] if sections else config
    if name in section:
        del section[name]
    section[name] = value
    return config


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=[f"{f}={v}"[:60] for f, v, _ in WRONG])
def test_wrong_fields_are_refused_before_anything_is_done(field, value, message, tmp_path, monkeypatch):
    def unexpected(*_):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(from_config, "configured_target", unexpected)
    with pytest.raises(ConfigError, match=message):
        loop.train(config_with(field, value), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("drafter.draft_vocab_size", 10**6, "drafter.draft_vocab_size is 1000000, must be at most 259"),
        ("drafter.init_layers", (3, 9), r"drafter.init_layers holds 9, must lie in \[0, 5\)"),
        ("drafter.target_layer_ids", 0, "target_layer_ids is 0, must be a number of taps"),
        ("drafter.init_from", "no/such/place/at/all", "drafter.init_from: no/such/place/at/all is no directory"),
        ("target.dtype", "bfloat16", "target.dtype is 'bfloat16', but random:tiny is made in float32"),
        ("data.seq_len", 4096, "data.seq_len is 4096, must be at most 1024"),
        ("data.answers", {"a": INSTRUCTION | {"drafter": "./nowhere"}}, "./nowhere is no directory"),
        ("data.answers", {"a": INSTRUCTION, "b": {"prompts": [("no.jsonl", 3)]}}, "no.jsonl"),
        ("evaluation.max_tokens", 1024, "evaluation.max_tokens is 1024, must be less than 1024"),
    ],
)
def test_what_does_not_suit_the_target_is_refused_before_it_answers(field, value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        loop.train(config_with(field, value), tmp_path)
    assert not list(tmp_path.rglob("responses.jsonl"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (smollm2_135m, "the config has no seed, data, step, .*: it is none that trains; one that does, such as"),
        (benchmark_smollm2, "the config has no seed, mesh, data, .*: it is none that trains"),
    ],
)
def test_configs_that_do_not_train_are_named_as_such(config, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        loop.train(config.get_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match="it is none that trains"):
        compile_only(config.get_config(), "v5e:2x2")


@pytest.mark.parametrize("name", ["num_layers", "block_size", "mask_token_id", "init_layers", "trunk"])
def test_missing_fields_of_the_drafter_are_named(name, tmp_path):
    config = smollm2_135m_dflash.get_config("tiny")
    del config.drafter[name]
    with pytest.raises(ConfigError, match=f"drafter needs the field '{name}'"):
        loop.train(config, tmp_path / "run")


def test_parts_of_a_batch_that_do_not_divide_over_the_mesh_are_refused(tmp_path):
    """Each device would hold, and compute, the whole part: right, and with nothing of what accumulation is for."""
    config = config_with("step.accumulation", 2)
    config.mesh.data = 4
    with pytest.raises(ConfigError, match=r"leaves each part 2 rows, .* the 4 shards .* a multiple of 8"):
        loop.train(config, tmp_path / "run")
