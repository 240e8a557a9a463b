"""Qwen3-Next and Qwen3.5: configurations and names, both ways, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import transformers
from family_cases import assert_same_bytes, assert_there_and_back, exported, golden_family, parameters

from dflash_jax.checkpoints.families.qwen_next import DEFAULTS
from dflash_jax.checkpoints.hf_config import target_config_from_hf, target_config_to_hf
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.config import FULL, LINEAR, ConfigError, DeltaConfig, MoeConfig, RopeConfig

MROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
    "rope_type": "default",
}  # fmt: skip
LINEAR_FIELDS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
}  # fmt: skip
QWEN3_NEXT_80B_A3B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    **LINEAR_FIELDS, "linear_num_value_heads": 32, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": {
        **LINEAR_FIELDS, "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 16, "max_position_embeddings": 262144, "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text", "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_parameters": MROPE, "vocab_size": 248320,
    },
}  # fmt: skip
QWEN35_397B_A17B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
    "text_config": {
        **LINEAR_FIELDS, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 4096, "linear_num_value_heads": 64, "layer_types": ([LINEAR] * 3 + [FULL]) * 15,
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 1024,
        "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 60,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_parameters": MROPE,
        "shared_expert_intermediate_size": 1024, "vocab_size": 248320,
    },
}  # fmt: skip
PUBLISHED = {"80B-A3B": QWEN3_NEXT_80B_A3B, "27B": QWEN35_27B, "397B-A17B": QWEN35_397B_A17B}


def read(family: str = "qwen3_next", **fields):
    return target_config_from_hf({"model_type": family, "num_hidden_layers": 4, "rope_theta": 1e4, **fields})


def test_qwen3_next():
    config = target_config_from_hf(QWEN3_NEXT_80B_A3B)
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 12
    assert config.delta == DeltaConfig(16, 32, 128, 128, 4)
    assert config.moe == MoeConfig(512, 10, 512, tuple(range(48)), shared_intermediate_size=512, shared_gate=True)
    assert (config.rotary_dim, config.rope) == (64, RopeConfig(1e7))
    assert (config.attention_gate, config.qk_norm, config.norm_offset) == (True, True, 1.0)


def test_qwen35_dense():
    config = target_config_from_hf(QWEN35_27B)
    assert config.family == "qwen3_5_text"
    assert config.moe is None
    assert config.delta == DeltaConfig(16, 48, 128, 128, 4)
    assert config.layer_types.count(FULL) == 16
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (24, 4, 256, 64)
    assert (config.intermediate_size, config.max_positions) == (17408, 262144)
    assert config.rope == RopeConfig(1e7)


def test_qwen35_experts():
    config = target_config_from_hf(QWEN35_397B_A17B)
    assert config.family == "qwen3_5_moe_text"
    assert config.moe == MoeConfig(512, 10, 1024, tuple(range(60)), shared_intermediate_size=1024, shared_gate=True)
    assert config.delta.num_value_heads == 64


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
    hf = transformers.AutoConfig.for_model(family).to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert target_config_from_hf({"model_type": family}) == target_config_from_hf(hf)


def test_dense_layers():
    assert read(mlp_only_layers=[1]).moe.layers == (0, 2, 3)
    assert read(decoder_sparse_step=2, mlp_only_layers=[1]).moe.layers == (3,)
    dense = read(num_experts=0)
    assert dense.moe is None
    assert target_config_from_hf(target_config_to_hf(dense)) == dense
    sparse = read(decoder_sparse_step=2, norm_topk_prob=False)
    assert not sparse.moe.normalise
    assert target_config_from_hf(target_config_to_hf(sparse)) == sparse


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_target_may_have_full_attention_alone(family):
    config = read(family, full_attention_interval=1, num_hidden_layers=3)
    assert config.layer_types == (FULL,) * 3 and config.delta is None
    assert target_config_from_hf(target_config_to_hf(config)) == config
    assert not any("linear_attn" in t.name for p in target_placements(config, own_head=False) for t in p.tensors)


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotary_in_every_spelling(fields):
    assert read(**fields).rotary_dim == 128
    assert read().rotary_dim == 64
    assert read(partial_rotary_factor=1.0).rotary_dim is None


def test_yarn_keeps_the_partial_rotary():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = read("qwen3_5_text", rope_parameters={**yarn, "partial_rotary_factor": 0.5})
    assert (config.rope.kind, config.rotary_dim) == ("yarn", 128)
    assert target_config_from_hf(target_config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("qwen3_next", {"attention_bias": True}, "attention_bias is set"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is false"),
        ("qwen3_5_text", {"partial_rotary_factor": 0.001}, "rotates 0 channels"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "32 linear value heads are no multiple of 3"),
        ("qwen3_5", {}, "text_config is None"),
        ("qwen3_5", {"text_config": {"model_type": "qwen3_5_moe_text"}}, "text_config has model_type"),
    ],
)
def test_refusals(family, fields, match):
    with pytest.raises(ConfigError, match=match):
        read(family, **fields)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_names_there_and_back(name):
    config = assert_there_and_back(name)
    assert target_config_from_hf(target_config_to_hf(config)) == config


def test_query_and_gate_of_a_head():
    hf, weights = golden_family("qwen3_next")
    attention = parameters(target_config_from_hf(hf), weights)["layers"][1]["attention"]
    heads_Nx2xHxD = weights["model.layers.1.self_attn.q_proj.weight"].reshape(4, 2, 16, 32)
    for n in range(4):
        np.testing.assert_array_equal(attention["qkv_DxGxRxH"][:, n // 2, n % 2].T, heads_Nx2xHxD[n, 0])
        np.testing.assert_array_equal(attention["gate_DxGxRxH"][:, n // 2, n % 2].T, heads_Nx2xHxD[n, 1])


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_channels_of_a_key_head(name):
    """[q, k, v, z] of key head g, by the reference's order of channels, in both ways of storing them."""
    hf, weights = golden_family(name)
    config = target_config_from_hf(hf)
    attention, prefix = parameters(config, weights)["layers"][0]["attention"], "model.layers.0.linear_attn"
    d, p, h = 32, 8, config.delta.value_dim
    conv = weights[f"{prefix}.conv1d.weight"][:, 0]
    for g in range(2):
        values = slice(32 + 2 * g * h, 32 + 2 * (g + 1) * h)  # behind 2 x 8 channels of q and of k
        qkv = [slice(g * p, (g + 1) * p), slice(16 + g * p, 16 + (g + 1) * p), values]
        np.testing.assert_array_equal(attention["conv_WxGxC"][:, g].T, np.concatenate([conv[x] for x in qkv]))
        if name == "qwen3_next":
            rows = weights[f"{prefix}.in_proj_qkvz.weight"].reshape(2, -1, d)[g]
            ba = weights[f"{prefix}.in_proj_ba.weight"].reshape(2, 2, 2, d)[g]
        else:
            rows = np.concatenate([weights[f"{prefix}.in_proj_qkv.weight"][x] for x in qkv])
            rows = np.concatenate([rows, weights[f"{prefix}.in_proj_z.weight"][2 * g * h : 2 * (g + 1) * h]])
            ba = np.stack([weights[f"{prefix}.in_proj_{x}.weight"][2 * g : 2 * g + 2] for x in "ba"])
        np.testing.assert_array_equal(attention["qkvz_DxGxC"][:, g].T, rows)
        np.testing.assert_array_equal(attention["ba_DxGx2xR"][:, g].transpose(1, 2, 0), ba)


def stacked(weights: dict[str, np.ndarray], num: int) -> dict[str, np.ndarray]:
    """The same checkpoint with a layer's experts in two tensors, as Qwen3.5 is published."""
    out = {name: value for name, value in weights.items() if ".experts." not in name}
    for name in weights:
        if not name.endswith(".experts.0.gate_proj.weight"):
            continue
        prefix = name.removesuffix(".0.gate_proj.weight")
        gate, up, down = (
            np.stack([weights[f"{prefix}.{e}.{x}_proj.weight"] for e in range(num)]) for x in ("gate", "up", "down")
        )
        out |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    return out


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_experts_one_by_one_or_stacked(name):
    hf, weights = golden_family(name)
    config = target_config_from_hf(hf)
    apart, together = parameters(config, weights), parameters(config, stacked(weights, 6))
    for key in ("gate_up_Ex2xDxF", "down_ExFxD"):
        ours = together["layers"][0]["moe"][key][...]
        np.testing.assert_array_equal(ours, apart["layers"][0]["moe"][key][...])
    assert_same_bytes(exported(config, together, stacked(weights, 6)), stacked(weights, 6))
    assert_same_bytes(exported(config, together, weights), weights)
    # Written as published: Qwen3-Next one by one, Qwen3.5 stacked.
    published = weights if name == "qwen3_next" else stacked(weights, 6)
    assert_same_bytes(exported(config, apart), published)


def test_multi_token_prediction_is_skipped():
    config = target_config_from_hf(QWEN3_NEXT_80B_A3B)
    assert is_harmless(config, "mtp.layers.0.mlp.experts.3.down_proj.weight")
    assert is_harmless(config, "mtp.fc.weight")
    assert not is_harmless(config, "model.layers.48.input_layernorm.weight")


def test_every_tensor_of_the_397b():
    """Names and shapes that the published file has, by its layers' kinds."""
    config = target_config_from_hf(QWEN35_397B_A17B)
    nested = {"model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.experts.gate_up_proj"}
    stored = {t.name: t.shape for p in target_placements(config, False, nested) for t in p.tensors}
    prefix = "model.language_model.layers"
    assert stored["lm_head.weight"] == (248320, 4096)
    assert stored[f"{prefix}.0.mlp.experts.gate_up_proj"] == (512, 2048, 4096)
    assert stored[f"{prefix}.0.mlp.experts.down_proj"] == (512, 4096, 1024)
    assert stored[f"{prefix}.0.mlp.gate.weight"] == (512, 4096)
    assert stored[f"{prefix}.0.mlp.shared_expert_gate.weight"] == (1, 4096)
    assert stored[f"{prefix}.0.linear_attn.in_proj_qkv.weight"] == (2 * 2048 + 8192, 4096)
    assert stored[f"{prefix}.0.linear_attn.conv1d.weight"] == (2 * 2048 + 8192, 1, 4)
    assert stored[f"{prefix}.0.linear_attn.in_proj_z.weight"] == (8192, 4096)
    assert stored[f"{prefix}.0.linear_attn.in_proj_b.weight"] == (64, 4096)
    assert stored[f"{prefix}.3.self_attn.q_proj.weight"] == (2 * 32 * 256, 4096)
    assert stored[f"{prefix}.3.self_attn.k_proj.weight"] == (2 * 256, 4096)
    assert len(stored) == 3 + 45 * (2 + 9 + 7) + 15 * (2 + 6 + 7)
    total = sum(int(np.prod(shape)) for shape in stored.values())
    assert 390e9 < total < 400e9
