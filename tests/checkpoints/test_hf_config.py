"""Configurations of dense targets: family defaults, sliding layers, biases, rotary fields, refusals."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import transformers

from dflash_jax.checkpoints.families.dense import DEFAULTS
from dflash_jax.checkpoints.hf_config import target_config_from_hf, target_config_to_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, RopeConfig, TargetConfig
from dflash_jax.models.layers import rope_frequencies

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


def read(family: str, **fields) -> TargetConfig:
    return target_config_from_hf({"model_type": family, **TINY, **fields})


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family):
    """An empty configuration is the class's default one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = target_config_from_hf({"model_type": family})
    hf = transformers.AutoConfig.for_model(family)
    assert config.vocab_size == hf.vocab_size
    assert config.hidden_size == hf.hidden_size
    assert config.intermediate_size == hf.intermediate_size
    assert config.num_layers == hf.num_hidden_layers
    assert config.num_heads == hf.num_attention_heads
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.max_positions == hf.max_position_embeddings
    assert config.tie_embeddings == hf.tie_word_embeddings
    assert config.sliding_window == getattr(hf, "sliding_window", None)
    assert config.rope.theta == hf.rope_parameters["rope_theta"]


def test_head_dim():
    assert read("llama").head_dim == 8
    assert read("llama", head_dim=16).head_dim == 16
    assert read("qwen3").head_dim == 128
    with pytest.raises(ConfigError, match="hidden_size 30 is no multiple of num_attention_heads 4"):
        read("llama", hidden_size=30)


def test_key_value_heads_default_to_all_heads():
    assert read("llama", num_key_value_heads=None).num_kv_heads == 4


def test_biases():
    def biases(config):
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases(read("llama")) == (False, False, False)
    assert biases(read("llama", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(read("qwen2")) == (True, False, False)
    assert biases(read("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(read("mistral", attention_bias=False)) == (False, False, False)
    for family, name in (("mistral", "attention_bias"), ("qwen2", "attention_bias"), ("qwen3", "mlp_bias")):
        with pytest.raises(ConfigError, match=name):
            read(family, **{name: True})


def test_mistral_slides_everywhere_unless_null():
    assert read("mistral").sliding_window == 4096
    assert read("mistral").layer_types == (SLIDING,) * 4
    assert read("mistral", sliding_window=8).sliding_window == 8
    assert read("mistral", sliding_window=None).layer_types == (FULL,) * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_slides_from_max_window_layers(family):
    assert read(family, sliding_window=8, max_window_layers=1).layer_types == (FULL,) * 4
    config = read(family, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert config.layer_types == (FULL, SLIDING, SLIDING, SLIDING)
    assert config.sliding_window == 8
    assert read(family, use_sliding_window=True, sliding_window=8).layer_types == (FULL,) * 4  # 28 by default
    kinds = [SLIDING, FULL, SLIDING, FULL]
    explicit = read(family, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert list(explicit.layer_types) == kinds


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("qwen3", {"layer_types": [SLIDING] * 4}, "sliding_window is None"),
        ("qwen3", {"layer_types": [FULL] * 3}, "3 entries for 4 layers"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("mistral", {"layer_types": [FULL] * 4}, "layers of one kind"),
        ("llama", {"layer_types": [FULL, SLIDING] * 2, "sliding_window": None}, "layers of one kind"),
    ],
)
def test_contradicting_layer_types_are_refused(family, fields, match):
    with pytest.raises(ConfigError, match=match):
        read(family, **fields)


def test_window_of_a_llama_is_ignored_loudly():
    with pytest.warns(UserWarning, match="sliding_window 8 is ignored"):
        assert read("llama", sliding_window=8).layer_types == (FULL,) * 4


# Rotary base and scaling.

SCHEMAS = {
    "A": {"rope_theta": 1e6},
    "B": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "C": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e4},
    "D": {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}},
    "E": {"rope_scaling": {"rope_theta": 1e6, "type": "default"}, "rope_theta": 1e4},
}


def read_rope(fields: dict, family: str = "qwen3") -> RopeConfig:
    hf = {"model_type": family, **TINY}
    del hf["rope_theta"]
    return target_config_from_hf({**hf, **fields}).rope


@pytest.mark.parametrize("schema", SCHEMAS)
def test_b28_one_base_from_every_schema(schema):
    frequency, factor = rope_frequencies(read_rope(SCHEMAS[schema]), 128)
    np.testing.assert_array_equal(frequency, 1e6 ** -(np.arange(0, 128, 2) / 128))
    assert factor == 1.0


def test_b28_no_field_at_all_warns():
    with pytest.warns(UserWarning, match="rope_theta"):
        assert read_rope({}).theta == 10_000.0


def test_b28_export_writes_both_schemas():
    hf = target_config_to_hf(read("qwen3", rope_theta=1e6))
    assert hf["rope_theta"] == hf["rope_parameters"]["rope_theta"] == 1e6
    for drop in ("rope_theta", "rope_parameters"):
        assert read_rope({k: v for k, v in hf.items() if k.startswith("rope") and k != drop}).theta == 1e6


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALINGS = [
    ({"linear": {"factor": 4.0}}, RopeConfig(1e6, "linear", 4.0)),
    ({"llama3": LLAMA3}, RopeConfig(1e6, "llama3", 8.0, 16, 1.0, 4.0)),
    (
        {"yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}},
        RopeConfig(1e6, "yarn", 4.0, original_max_positions=32, beta_fast=16.0),
    ),
    ({"yarn": {"factor": 4.0}}, RopeConfig(1e6, "yarn", 4.0, original_max_positions=128)),
]


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "rope"), SCALINGS)
def test_b28_scaling_in_old_and_new_spelling(scaling, rope, spelling):
    ((kind, values),) = scaling.items()
    if spelling == "rope_parameters":
        fields = {"rope_parameters": {"rope_type": kind, "rope_theta": 1e6, **values}, "rope_theta": 1e4}
    else:
        fields = {"rope_scaling": {spelling: kind, **values}, "rope_theta": 1e6}
    assert read_rope(fields, "llama") == rope


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
)
def test_rotary_fields_that_are_not_supported(fields, match):
    with pytest.raises(ConfigError, match=match):
        read("llama", **fields)


# Refusals.


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"text_config": {}}, "text_config"),
        ({"hidden_size": "32"}, "hidden_size is '32', must be a positive whole number"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"num_key_value_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
    ],
)
def test_refusals_name_the_field(fields, match):
    with pytest.raises(ConfigError, match=match):
        target_config_from_hf({"model_type": "llama", **TINY, **fields})


# And back.


@pytest.mark.parametrize(
    "config",
    [
        read("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        read("llama", rope_scaling={"rope_type": "llama3", **LLAMA3}),
        read("mistral", sliding_window=8, head_dim=16),
        read("mistral", sliding_window=None),
        read("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2),
        read("qwen3", attention_bias=True, rope_scaling={"type": "yarn", "factor": 4.0}),
    ],
    ids=lambda config: config.family,
)
def test_there_and_back(config):
    hf = target_config_to_hf(config)
    assert target_config_from_hf(hf) == config
    theirs = transformers.AutoConfig.for_model(**hf)
    assert theirs.rope_parameters["rope_type"] == config.rope.kind
    assert theirs.tie_word_embeddings == config.tie_embeddings
    if config.family.startswith("qwen"):
        assert tuple(theirs.layer_types) == config.layer_types


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("llama", {"family": "gemma"}, "gemma"),
        ("llama", {"qk_norm": True}, "qk_norm = True"),
        ("llama", {"qkv_bias": True}, "qkv_bias = True"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias = False"),
        ("llama", {"embedding_scale": 2.0}, "embedding_scale = 2.0"),
        ("llama", {"layer_types": (SLIDING,) * 4, "sliding_window": 8}, "layer_types"),
    ],
)
def test_what_a_family_can_not_express_is_refused(family, change, match):
    config = dataclasses.replace(read(family), **change)
    with pytest.raises(ConfigError, match=match):
        target_config_to_hf(config)
