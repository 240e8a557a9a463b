"""Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, gpt-oss: configurations and names, both ways.

The configurations are the published ones, cut to the fields that say something of the architecture.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import warnings

import numpy as np
import pytest
import transformers
from family_cases import golden_family

from dflash_jax.checkpoints.families import FAMILIES, REFUSED
from dflash_jax.checkpoints.hf_config import target_config_from_hf, target_config_to_hf
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.config import FULL, SLIDING, ConfigError, LatentConfig, MoeConfig, RopeConfig, TargetConfig

NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN15_MOE_A27B = {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94,
    "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": [SLIDING, FULL] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B = {
    **GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": [SLIDING, FULL] * 18,
}  # fmt: skip
PUBLISHED = {
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen1.5-MoE-A2.7B": QWEN15_MOE_A27B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}


def published(name: str, **changes) -> TargetConfig:
    return target_config_from_hf({**PUBLISHED[name], **changes})


def test_mixtral():
    config = published("Mixtral-8x7B")
    assert config.layer_types == (FULL,) * 32
    assert (config.num_kv_heads, config.head_dim, config.rope) == (8, 128, RopeConfig(1e6))
    assert config.moe == MoeConfig(8, 2, 14336, tuple(range(32)))
    assert published("Mixtral-8x7B", sliding_window=4096).layer_types == (SLIDING,) * 32


def test_qwen():
    config = published("Qwen3-30B-A3B")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 32, 4, 128)
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.moe == MoeConfig(128, 8, 768, tuple(range(48)))
    large = published("Qwen3-235B-A22B")
    assert (large.hidden_size, large.num_heads, large.moe.intermediate_size, len(large.moe.layers)) == (
        4096,
        64,
        1536,
        94,
    )
    old = published("Qwen1.5-MoE-A2.7B")
    assert old.moe == MoeConfig(
        60, 4, 1408, tuple(range(24)), normalise=False, shared_intermediate_size=5632, shared_gate=True
    )
    assert old.qkv_bias
    assert not old.qk_norm
    assert old.layer_types == (FULL,) * 24


def test_deepseek():
    config = published("DeepSeek-V3")
    assert config.latent == LatentConfig(512, 128, 64, 128, q_rank=1536)
    assert config.moe == MoeConfig(
        256, 8, 2048, tuple(range(3, 61)), scoring="sigmoid", scale=2.5, num_groups=8, groups_per_token=4,
        group_score="top2", selection_bias=True, shared_intermediate_size=2048,
    )  # fmt: skip
    # The factor that DeepSeek's technical reports give: the square of 0.1 * mscale_all_dim * ln(factor) + 1.
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_positions) == ("yarn", 40, 4096)
    lite = published("DeepSeek-V2-Lite")
    assert lite.latent == LatentConfig(512, 128, 64, 128)
    assert lite.moe == MoeConfig(64, 6, 1408, tuple(range(1, 27)), normalise=False, shared_intermediate_size=2816)
    assert published("DeepSeek-V3", rope_scaling=None).attention_scale is None
    assert published("DeepSeek-V3", first_k_dense_replace=61).moe is None


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_gpt_oss(name, layers, experts):
    config = published(name)
    assert config.layer_types == (SLIDING, FULL) * (layers // 2)
    assert (config.sliding_window, config.num_heads, config.num_kv_heads, config.head_dim) == (128, 64, 8, 64)
    assert config.moe == MoeConfig(experts, 4, 2880, tuple(range(layers)), router_bias=True, expert_bias=True)
    assert config.attention_sinks
    assert config.qkv_bias
    assert config.out_bias
    assert (config.activation, config.activation_limit) == ("clipped_swiglu", 7.0)
    assert config.rope == RopeConfig(150_000.0, "yarn", 32.0, 4096, truncate=False)
    # The family's own defaults say the same.
    bare = {key: PUBLISHED[name][key] for key in ("model_type", "num_hidden_layers", "num_local_experts")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert target_config_from_hf(bare) == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back(name):
    config = published(name)
    hf = target_config_to_hf(config)
    assert target_config_from_hf(json.loads(json.dumps(hf))) == config
    theirs = transformers.AutoConfig.for_model(**hf)
    original = transformers.AutoConfig.for_model(**PUBLISHED[name])
    for field in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "rms_norm_eps", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
        "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "kv_lora_rank", "v_head_dim",
        "shared_expert_intermediate_size", "attention_bias", "qkv_bias", "sliding_window", "max_position_embeddings",
    ):  # fmt: skip
        assert getattr(theirs, field, None) == getattr(original, field, None), field
    for field in ("rope_theta", "rope_type", "factor", "mscale", "mscale_all_dim", "beta_fast"):
        assert theirs.rope_parameters.get(field) == original.rope_parameters.get(field), field
    assert theirs.rope_parameters.get("truncate", True) == original.rope_parameters.get("truncate", True)


# No fields of transformers' classes, or fields that they overwrite by what they compute.
_NOT_COMPARED = {"scoring_func", "topk_method", "swiglu_limit", "mlp_only_layers", "head_dim", "sliding_window"}


@pytest.mark.parametrize("family", NAMES)
def test_defaults_are_those_of_transformers(family):
    hf = transformers.AutoConfig.for_model(family)
    for name, value in FAMILIES[family].DEFAULTS[family].items():
        if name not in _NOT_COMPARED and getattr(hf, name, None) is not None:
            assert getattr(hf, name) == (value or hf.num_attention_heads if name == "num_key_value_heads" else value), (
                name
            )


def test_experts_spelled_as_newer_files_do():
    hf = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert target_config_from_hf({**hf, "num_local_experts": 64}).moe.num_experts == 64
    with pytest.raises(ConfigError, match="num_experts is 128 but num_local_experts is 64"):
        published("Qwen3-30B-A3B", num_local_experts=64)


def test_sparse_layers():
    config = published("Qwen3-30B-A3B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.moe.layers == (1, 5)
    assert target_config_from_hf(target_config_to_hf(config)) == config
    with pytest.raises(ConfigError, match=r"mlp_only_layers is \[6\], must be a list of layers in \[0, 6\)"):
        published("Qwen3-30B-A3B", num_hidden_layers=6, mlp_only_layers=[6])


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "experts_per_token is 9"),
        ("Mixtral-8x7B", {"num_local_experts": "8"}, "num_local_experts is '8'"),
        ("Mixtral-8x7B", {"attention_bias": True}, "attention_bias is set"),
        ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 512}, "no shared expert"),
        ("Qwen3-30B-A3B", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("Qwen3-30B-A3B", {"norm_topk_prob": 1}, "norm_topk_prob is 1, must be true or false"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepSeek-V3", {"topk_group": 9}, "groups"),
        ("DeepSeek-V3", {"attention_bias": True}, "biases in latent attention"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ("DeepSeek-V3", {"index_topk": 2048}, "sparse attention"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave is false"),
        ("DeepSeek-V3", {"model_type": "deepseek_v32"}, "sparse attention"),
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias is False"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("gpt-oss-20b", {"layer_types": [FULL]}, "1 entries for 24 layers"),
    ],
)
def test_refusals(name, change, match):
    with pytest.raises(ConfigError, match=match):
        published(name, **change)


def test_no_family_is_both_served_and_refused():
    assert not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Mixtral-8x7B", {"scoring": "sigmoid"}),
        ("Qwen3-30B-A3B", {"shared_intermediate_size": 64}),
        ("DeepSeek-V3", {"group_score": "max"}),
        ("DeepSeek-V2-Lite", {"selection_bias": True}),
        ("gpt-oss-20b", {"router_bias": False}),
    ],
)
def test_what_a_family_can_not_express_is_refused(name, change):
    config = published(name)
    with pytest.raises(ConfigError, match="can not express moe"):
        target_config_to_hf(dataclasses.replace(config, moe=dataclasses.replace(config.moe, **change)))


# Names. What a whole model does with them is in tests/models/test_family_parity.py.


def family(name: str) -> tuple[TargetConfig, dict[str, np.ndarray]]:
    """(configuration, weights under their published names)."""
    hf, weights = golden_family(name)
    return target_config_from_hf(hf), weights


@pytest.mark.parametrize("name", NAMES)
def test_placements_take_every_tensor_and_give_it_back(name):
    config, weights = family(name)
    rebuilt = {key: np.full_like(value, np.nan) for key, value in weights.items()}
    for placement in target_placements(config, own_head=False):
        for tensor in placement.tensors:
            assert weights[tensor.name].shape == tensor.shape, tensor.name
        joined = placement.join(*(tensor.take(weights[tensor.name]) for tensor in placement.tensors))
        axes = placement.path[-1].rsplit("_", 1)[-1]
        assert joined.ndim == (1 if axes == "scale" else axes.count("x") + 1), placement.path
        for tensor, array in zip(placement.tensors, placement.split(joined), strict=True):
            tensor.take(rebuilt[tensor.name])[...] = array
    for key, value in weights.items():
        np.testing.assert_array_equal(rebuilt[key], value, err_msg=key)


def joined(name: str, layer: int, *path: str) -> np.ndarray:
    config, weights = family(name)
    (placement,) = (p for p in target_placements(config, False) if p.path == ("layers", layer, *path))
    return placement.join(*(tensor.take(weights[tensor.name]) for tensor in placement.tensors))


def test_experts_lie_in_their_places():
    _, weights = family("mixtral")
    gate_up_Ex2xDxF = joined("mixtral", 1, "moe", "gate_up_Ex2xDxF")
    down_ExFxD = joined("mixtral", 1, "moe", "down_ExFxD")
    for e in range(6):
        prefix = f"model.layers.1.block_sparse_moe.experts.{e}"
        np.testing.assert_array_equal(gate_up_Ex2xDxF[e, 0], weights[f"{prefix}.w1.weight"].T)
        np.testing.assert_array_equal(gate_up_Ex2xDxF[e, 1], weights[f"{prefix}.w3.weight"].T)
        np.testing.assert_array_equal(down_ExFxD[e], weights[f"{prefix}.w2.weight"].T)


def test_gates_and_ups_of_gpt_oss_alternate():
    _, weights = family("gpt_oss")
    stored = weights["model.layers.2.mlp.experts.gate_up_proj"]
    gate_up_Ex2xDxF = joined("gpt_oss", 2, "moe", "gate_up_Ex2xDxF")
    np.testing.assert_array_equal(gate_up_Ex2xDxF[:, 0], stored[..., ::2])
    np.testing.assert_array_equal(gate_up_Ex2xDxF[:, 1], stored[..., 1::2])
    bias_Ex2xF = joined("gpt_oss", 2, "moe", "gate_up_bias_Ex2xF")
    np.testing.assert_array_equal(bias_Ex2xF[:, 1], weights["model.layers.2.mlp.experts.gate_up_proj_bias"][:, 1::2])


def test_latent_projections_lie_in_their_places():
    config, weights = family("deepseek_v3")
    latent, heads, prefix = config.latent, config.num_heads, "model.layers.0.self_attn"
    p, v, r = latent.nope_dim, latent.value_dim, latent.rope_dim
    kv_b = weights[f"{prefix}.kv_b_proj.weight"]
    q_b = weights[f"{prefix}.q_b_proj.weight"]
    k_up_NxCxP = joined("deepseek_v3", 0, "attention", "k_up_NxCxP")
    v_up_NxCxV = joined("deepseek_v3", 0, "attention", "v_up_NxCxV")
    q_up_QxNxH = joined("deepseek_v3", 0, "attention", "q_up_QxNxH")
    halves = [*range(0, r, 2), *range(1, r, 2)]
    for n in range(heads):
        rows = kv_b[n * (p + v) : (n + 1) * (p + v)]
        np.testing.assert_array_equal(k_up_NxCxP[n], rows[:p].T)
        np.testing.assert_array_equal(v_up_NxCxV[n], rows[p:].T)
        rows = q_b[n * (p + r) : (n + 1) * (p + r)]
        np.testing.assert_array_equal(q_up_QxNxH[:, n, :p], rows[:p].T)
        np.testing.assert_array_equal(q_up_QxNxH[:, n, p:], rows[p:][halves].T)
    kv_down_DxC = joined("deepseek_v3", 0, "attention", "kv_down_DxC")
    kv_a = weights[f"{prefix}.kv_a_proj_with_mqa.weight"]
    np.testing.assert_array_equal(kv_down_DxC[:, latent.kv_rank :], kv_a[latent.kv_rank :][halves].T)


def test_multi_token_prediction_is_skipped_and_said(caplog):
    with caplog.at_level(logging.INFO):
        config = published("DeepSeek-V3")
    assert "multi-token prediction are not loaded" in caplog.text
    names = {f"model.layers.{i}.eh_proj.weight" for i in (27, 60, 61, 62)}
    assert is_harmless(config, "model.layers.61.eh_proj.weight", names)
    assert is_harmless(config, "model.layers.61.mlp.experts.255.down_proj.weight", names)
    assert not is_harmless(config, "model.layers.60.eh_proj.weight", names)
    assert not is_harmless(config, "model.layers.62.eh_proj.weight", names)
    assert not is_harmless(published("DeepSeek-V2-Lite"), "model.layers.27.eh_proj.weight", names)
    # A layer of the model that the configuration forgot is no layer for prediction.
    names = {"model.layers.61.mlp.gate.weight", "model.layers.61.input_layernorm.weight"}
    assert not any(is_harmless(config, name, names) for name in names)
