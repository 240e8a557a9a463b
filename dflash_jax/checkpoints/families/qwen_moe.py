"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B) and Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder).

Layer i has experts where (i + 1) is a multiple of `decoder_sparse_step` and i is not in `mlp_only_layers`.
Qwen2-MoE has a shared expert behind a sigmoid gate. Sliding layers: all of Qwen3-MoE's when
`use_sliding_window` is true; of Qwen2-MoE's every second below `max_window_layers`, or what `layer_types` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import common, dense
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, MoeConfig, TargetConfig

_COMMON = {
    **dense.QWEN2,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
DEFAULTS = {
    "qwen2_moe": {
        **_COMMON,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    "qwen3_moe": {
        **_COMMON,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
}
_ARCHITECTURES = {"qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_REFUSED = {
    "qwen2_moe": {"attention_bias": "the biases of this family are called qkv_bias"},
    "qwen3_moe": {"shared_expert_intermediate_size": "this family has no shared expert"},
}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse({**_REFUSED[family], "mlp_bias": "this family has no such biases"})
    fields.silu()
    window, layer_types = _sliding(fields)
    attention_bias = family == "qwen3_moe" and fields.flag("attention_bias")
    shared = family == "qwen2_moe"
    return TargetConfig(
        **fields.basic(),
        head_dim=fields.head_dim(),
        rope=rope_config_from_hf(fields.for_rope()),
        layer_types=layer_types,
        sliding_window=window,
        qk_norm=family == "qwen3_moe",
        qkv_bias=attention_bias or (family == "qwen2_moe" and fields.flag("qkv_bias")),
        out_bias=attention_bias,
        moe=MoeConfig(
            num_experts=_num_experts(fields),
            experts_per_token=fields.size("num_experts_per_tok"),
            intermediate_size=fields.size("moe_intermediate_size"),
            layers=sparse_layers(fields),
            normalise=fields.flag("norm_topk_prob"),
            shared_intermediate_size=fields.size("shared_expert_intermediate_size") if shared else 0,
            shared_gate=shared,
        ),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    moe, family = config.moe, config.family
    hf = {
        **common.basic_to_hf(config, _ARCHITECTURES[family]),
        **dense.qwen_window_to_hf(config),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if i not in moe.layers],
        "moe_intermediate_size": moe.intermediate_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "norm_topk_prob": moe.normalise,
    }
    if family == "qwen2_moe":
        hf.update(qkv_bias=config.qkv_bias, shared_expert_intermediate_size=moe.shared_intermediate_size)
    else:
        hf.update(attention_bias=config.out_bias)
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def sparse_layers(fields: Fields) -> tuple[int, ...]:
    """The layers with experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step")
    dense_layers = fields.indices("mlp_only_layers", layers)
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense_layers)


def _num_experts(fields: Fields) -> int:
    """`num_experts`; files written by transformers 5 may spell it num_local_experts."""
    other = fields.hf.get("num_local_experts")
    if other is None:
        return fields.size("num_experts")
    if fields.hf.get("num_experts", other) != other:
        raise ConfigError(f"num_experts is {fields.hf['num_experts']!r} but num_local_experts is {other!r}")
    return fields.size("num_local_experts")


def _sliding(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    layers = fields.size("num_hidden_layers")
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window") else None
    if fields.family == "qwen3_moe":
        return window, dense.one_kind(fields, FULL if window is None else SLIDING, layers)
    explicit = fields.hf.get("layer_types")
    if explicit is not None:
        return window, tuple(explicit)
    below = fields.get("max_window_layers")
    return window, tuple(SLIDING if window and i % 2 == 0 and i < below else FULL for i in range(layers))


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, moe, stored = config.hidden_size, config.moe, f"{prefix}.mlp"
    placed = [
        *common.pre_norms(config, path, prefix),
        *common.attention(config, i, (*path, "attention"), f"{prefix}.self_attn"),
    ]
    if i not in moe.layers:
        return placed + common.mlp((*path, "mlp"), stored, d, config.intermediate_size)
    path = (*path, "moe")
    placed.append(transposed((*path, "router_DxE"), f"{stored}.gate.weight", (moe.num_experts, d)))
    placed += common.experts(path, f"{stored}.experts", moe.num_experts, d, moe.intermediate_size)
    if moe.shared_intermediate_size:
        placed += common.mlp((*path, "shared"), f"{stored}.shared_expert", d, moe.shared_intermediate_size)
    if moe.shared_gate:
        placed.append(transposed((*path, "shared_gate_Dx1"), f"{stored}.shared_expert_gate.weight", (1, d)))
    return placed
