"""Llama 4: configurations and names, both ways, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from family_cases import assert_there_and_back, golden_family, parameters

from dflash_jax.checkpoints.hf_config import target_config_from_hf, target_config_to_hf
from dflash_jax.config import CHUNKED, FULL, ConfigError, MoeConfig, RopeConfig

TEXT = {
    "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "model_type": "llama4_text", "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "vocab_size": 202048,
}  # fmt: skip
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "tie_word_embeddings": False,
    "text_config": {
        **TEXT, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192, "interleave_moe_layer_step": 1,
        "max_position_embeddings": 262144, "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_local_experts": 16, "use_qk_norm": True,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
}  # fmt: skip
MAVERICK = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {
        **TEXT, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "no_rope_layers": [],
        "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False,
    },
}  # fmt: skip
PUBLISHED = {"Scout": SCOUT, "Maverick": MAVERICK}


def read(**fields):
    return target_config_from_hf({"model_type": "llama4_text", "num_hidden_layers": 4, **fields})


def test_scout():
    config = target_config_from_hf(SCOUT)
    assert config.family == "llama4_text"
    assert config.layer_types == (CHUNKED, CHUNKED, CHUNKED, FULL) * 12
    assert config.nope_layers == tuple(range(3, 48, 4))
    assert config.attention_chunk == 8192
    assert config.attention_temperature == (8192.0, 0.1)
    assert (config.qk_unit_norm, config.qk_norm) == (True, False)
    assert config.rope == RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    assert config.moe == MoeConfig(
        16, 1, 8192, tuple(range(48)), scoring="sigmoid", normalise=False, weigh_input=True,
        shared_intermediate_size=8192,
    )  # fmt: skip
    assert config.intermediate_size == 16384


def test_maverick():
    config = target_config_from_hf(MAVERICK)
    assert config.moe.layers == tuple(range(1, 48, 2))
    assert not config.qk_unit_norm
    assert config.nope_layers == tuple(range(3, 48, 4))
    assert config.rope == RopeConfig(500_000.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back_and_through_transformers(name):
    hf = PUBLISHED[name]
    config = target_config_from_hf(hf)
    ours = target_config_to_hf(config)
    assert target_config_from_hf(ours) == config
    # transformers 5 wants true where the published file has a number.
    text = {**hf["text_config"], "attn_temperature_tuning": True}
    assert target_config_from_hf(transformers.AutoConfig.for_model(**text).to_dict()) == config
    assert target_config_from_hf(transformers.AutoConfig.for_model(**ours).to_dict()) == config


def test_defaults_are_those_of_transformers():
    hf = transformers.AutoConfig.for_model("llama4_text").to_dict()
    assert target_config_from_hf({"model_type": "llama4_text"}) == target_config_from_hf(hf)


def test_layers():
    assert read(no_rope_layers=[0, 1, 0, 1]).layer_types == (FULL, CHUNKED, FULL, CHUNKED)
    assert read(no_rope_layer_interval=2).nope_layers == (1, 3)
    explicit = read(layer_types=[FULL] * 4, attention_chunk_size=None)
    assert (explicit.layer_types, explicit.attention_chunk) == ((FULL,) * 4, None)
    dense = read(moe_layers=[])
    assert dense.moe is None
    assert target_config_from_hf(target_config_to_hf(dense)) == dense
    assert read(moe_layers=[2]).moe.layers == (2,)
    assert read(attn_temperature_tuning=False).attention_temperature is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"attention_bias": True}, "attention_bias is set"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is"),
        ({"attention_chunk_size": None}, "attention_chunk is None"),
        ({"moe_layers": [4]}, "moe_layers is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_refusals(fields, match):
    with pytest.raises(ConfigError, match=match):
        read(**fields)


def test_names_there_and_back():
    config = assert_there_and_back("llama4_text")
    assert target_config_from_hf(target_config_to_hf(config)) == config


def test_rotated_pairs_become_halves():
    """Channels 2i and 2i + 1 of a stored head turn together; kept, they are i and i + 6 of 12."""
    hf, weights = golden_family("llama4_text")
    qkv_DxGxRxH = np.asarray(
        parameters(target_config_from_hf(hf), weights)["layers"][0]["attention"]["qkv_DxGxRxH"][...]
    )
    q, k, v = (weights[f"model.layers.0.self_attn.{x}_proj.weight"].reshape(-1, 12, 32) for x in "qkv")
    for kept, stored in ((qkv_DxGxRxH[:, 1, 0], q[2]), (qkv_DxGxRxH[:, 1, 2], k[1])):
        np.testing.assert_array_equal(kept[:, :6].T, stored[0::2])
        np.testing.assert_array_equal(kept[:, 6:].T, stored[1::2])
    np.testing.assert_array_equal(qkv_DxGxRxH[:, 1, 3].T, v[1])


def test_gate_comes_before_up():
    hf, weights = golden_family("llama4_text")
    moe = parameters(target_config_from_hf(hf), weights)["layers"][1]["moe"]
    stored_ExDx2F = weights["model.layers.1.feed_forward.experts.gate_up_proj"]
    np.testing.assert_array_equal(moe["gate_up_Ex2xDxF"][:, 0], stored_ExDx2F[..., :16])
    np.testing.assert_array_equal(moe["gate_up_Ex2xDxF"][:, 1], stored_ExDx2F[..., 16:])
