"""Gemma 2, 3 and 4: configurations and names, both ways, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import transformers
from family_cases import assert_there_and_back, golden_family, parameters

from dflash_jax.checkpoints.families.gemma import DEFAULTS
from dflash_jax.checkpoints.hf_config import target_config_from_hf, target_config_to_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, RopeConfig

GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
# Fields of the defaults are left out in the published file.
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16", "enable_moe_block": False,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504, "layer_types": ([SLIDING] * 5 + [FULL]) * 10, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4,
        "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False, "vocab_size": 262144,
    },
}  # fmt: skip
PUBLISHED = {"9B": GEMMA2_9B, "27B": GEMMA3_27B, "31B": GEMMA4_31B}
TINY = {"num_hidden_layers": 4, "rope_theta": 10_000.0}


def read(family: str, **fields):
    base = {**TINY, "hidden_size_per_layer_input": 0} if family == "gemma4_text" else TINY
    return target_config_from_hf({"model_type": family, **base, **fields})


def test_gemma2():
    config = target_config_from_hf(GEMMA2_9B)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (42, 3584, 16, 8)
    assert config.layer_types == (SLIDING, FULL) * 21
    assert config.sliding_window == 4096
    assert config.attention_scale == 1 / 16
    assert (config.attention_softcap, config.final_logit_softcap) == (50.0, 30.0)
    assert config.embedding_scale == 3584**0.5
    assert (config.norm_offset, config.post_norms, config.qk_norm, config.activation) == (1.0, True, False, "gelu_tanh")
    assert config.tie_embeddings
    assert config.rope == RopeConfig(10_000.0)


def test_gemma3():
    config = target_config_from_hf(GEMMA3_27B)
    assert config.family == "gemma3_text"
    assert config.layer_types == ((SLIDING,) * 5 + (FULL,)) * 10 + (SLIDING,) * 2
    assert config.attention_scale == 168**-0.5
    assert config.rope == RopeConfig(1_000_000.0, "linear", 8.0)
    assert config.rope_sliding == RopeConfig(10_000.0)
    assert (config.attention_softcap, config.final_logit_softcap) == (None, None)
    assert (config.norm_offset, config.qk_norm, config.vocab_size) == (1.0, True, 262208)


def test_gemma4():
    config = target_config_from_hf(GEMMA4_31B)
    assert config.family == "gemma4_text"
    assert config.kv_shape(0) == (16, 256)
    assert config.kv_shape(5) == (4, 512)
    assert config.full_value_is_key
    assert config.full_rotary_dim == 128
    assert config.rotary_dim is None
    assert (config.rope, config.rope_sliding) == (RopeConfig(1_000_000.0), RopeConfig(10_000.0))
    assert (config.attention_scale, config.final_logit_softcap) == (1.0, 30.0)
    assert (config.norm_offset, config.qk_norm, config.v_norm, config.layer_scale) == (0.0, True, True, True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back_and_through_transformers(name):
    hf = PUBLISHED[name]
    config = target_config_from_hf(hf)
    ours = target_config_to_hf(config)
    assert target_config_from_hf(ours) == config
    # What transformers makes of the published file, and of ours, says the same.
    assert target_config_from_hf(transformers.AutoConfig.for_model(**hf).to_dict()) == config
    assert target_config_from_hf(transformers.AutoConfig.for_model(**ours).to_dict()) == config


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family):
    empty = {"hidden_size_per_layer_input": 0} if family == "gemma4_text" else {}
    hf = transformers.AutoConfig.for_model(family, **empty)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert target_config_from_hf({"model_type": family, **empty}) == target_config_from_hf(hf.to_dict())


@pytest.mark.parametrize("scalar", [144, 168, 224, 256, 12.5])
def test_attention_scale_there_and_back(scalar):
    config = read("gemma2", query_pre_attn_scalar=scalar)
    assert target_config_to_hf(config)["query_pre_attn_scalar"] == scalar


def test_layer_patterns():
    assert read("gemma2").layer_types == (SLIDING, FULL, SLIDING, FULL)
    assert read("gemma3_text", sliding_window_pattern=3).layer_types == (SLIDING, SLIDING, FULL, SLIDING)
    assert read("gemma3_text", _sliding_window_pattern=2).layer_types == (SLIDING, FULL, SLIDING, FULL)
    assert read("gemma3_text", layer_types=[FULL, SLIDING, FULL, FULL]).layer_types == (FULL, SLIDING, FULL, FULL)
    with pytest.warns(UserWarning, match="last layer of a Gemma 4"):
        assert read("gemma4_text").layer_types == (SLIDING, SLIDING, SLIDING, FULL)


def test_gemma3_in_the_new_spelling():
    by_kind = {SLIDING: {"rope_type": "default", "rope_theta": 5.0}, FULL: {"rope_type": "linear", "factor": 2.0}}
    config = read("gemma3_text", rope_parameters={**by_kind, "rope_type": "default", "rope_theta": None})
    assert config.rope_sliding == RopeConfig(5.0)
    assert config.rope == RopeConfig(1_000_000.0, "linear", 2.0)
    with pytest.raises(ConfigError, match="needs a mapping for sliding_attention"):
        read("gemma3_text", rope_parameters={"rope_type": "default", "rope_theta": 5.0})


def test_gemma4_without_keys_as_values():
    config = read("gemma4_text", num_hidden_layers=6, attention_k_eq_v=False, num_global_key_value_heads=2)
    assert config.full_num_kv_heads is None
    assert config.kv_shape(5) == (4, 512)
    assert not config.full_value_is_key
    assert target_config_from_hf(target_config_to_hf(config)) == config


def test_gemma4_in_the_spelling_of_transformers_5():
    overrides = {"05": {"head_dim": 64, "num_key_value_heads": 1}}
    config = read("gemma4_text", num_hidden_layers=6, attention_k_eq_v=True, per_layer_config=overrides)
    assert config.kv_shape(0) == (4, 256)
    assert config.kv_shape(5) == (1, 64)


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 256}, "per-layer embeddings"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "share the keys and values"),
        ("gemma4_text", {"enable_moe_block": True}, "experts beside the dense MLP"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4_text", {"rope_parameters": {FULL: {}}}, "needs a mapping for sliding_attention"),
        ("gemma4_text", {"per_layer_config": {"03": {"head_dim": 64}}, "num_hidden_layers": 12}, "per_layer_config is"),
        (
            "gemma4_text",
            {"per_layer_config": {"5": {"hidden_size": 64}}, "num_hidden_layers": 6},
            "per_layer_config is",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma2", {"attention_bias": True}, "attention_bias is set"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("gemma3n", {}, "per-layer embeddings"),
        ("gemma", {}, "first Gemma"),
    ],
)
def test_refusals(family, fields, match):
    with pytest.raises(ConfigError, match=match):
        read(family, **fields)


def test_gemma4_default_has_per_layer_embeddings():
    """The field's default is 256: a file that leaves it out has them."""
    with pytest.raises(ConfigError, match="hidden_size_per_layer_input is 256"):
        target_config_from_hf({"model_type": "gemma4_text"})


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gemma4_text"])
def test_names_there_and_back(name):
    config = assert_there_and_back(name)
    assert target_config_from_hf(target_config_to_hf(config)) == config


def test_the_four_norms_of_a_layer():
    hf, weights = golden_family("gemma2")
    layer = parameters(target_config_from_hf(hf), weights)["layers"][1]
    for ours, theirs in (
        ("attention_norm", "input_layernorm"),
        ("attention_post_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    ):
        np.testing.assert_array_equal(layer[ours]["scale"][...], weights[f"model.layers.1.{theirs}.weight"])


def test_gemma4_layers_with_and_without_values():
    hf, weights = golden_family("gemma4_text")
    layers = parameters(target_config_from_hf(hf), weights)["layers"]
    assert layers[0]["attention"]["qkv_DxGxRxH"].shape == (32, 2, 2 + 2, 8)
    full_DxGxRxH = np.asarray(layers[1]["attention"]["qkv_DxGxRxH"][...])
    assert full_DxGxRxH.shape == (32, 1, 4 + 1, 16)
    np.testing.assert_array_equal(full_DxGxRxH[:, 0, 4].T, weights["model.layers.1.self_attn.k_proj.weight"])
    np.testing.assert_array_equal(full_DxGxRxH[:, 0, 2].T, weights["model.layers.1.self_attn.q_proj.weight"][32:48])
    np.testing.assert_array_equal(layers[1]["layer_scale_1"][...], weights["model.layers.1.layer_scalar"])
