"""Mixtral: Mistral with experts in every layer: block_sparse_moe.experts.{e}.w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import common, dense
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, SLIDING, MoeConfig, TargetConfig

DEFAULT_THETA = 1e6
DEFAULTS = {
    "mixtral": {
        **dense.DEFAULTS["mistral"],
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }
}
_REFUSED = {
    "attention_bias": "this family has no such biases",
    "mlp_bias": "this family has no such biases",
    "shared_expert_intermediate_size": "this family has no shared expert",
}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse(_REFUSED)
    fields.silu()
    window, layers = fields.optional_size("sliding_window"), fields.size("num_hidden_layers")
    return TargetConfig(
        **fields.basic(),
        head_dim=fields.head_dim(),
        rope=rope_config_from_hf(fields.for_rope(), default_theta=DEFAULT_THETA),
        layer_types=dense.one_kind(fields, FULL if window is None else SLIDING, layers),
        sliding_window=window,
        moe=MoeConfig(
            num_experts=fields.size("num_local_experts"),
            experts_per_token=fields.size("num_experts_per_tok"),
            intermediate_size=fields.size("intermediate_size"),
            layers=tuple(range(layers)),
        ),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    return {
        **common.basic_to_hf(config, "MixtralForCausalLM"),
        "sliding_window": config.sliding_window if SLIDING in config.layer_types else None,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
    }


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, moe, stored = config.hidden_size, config.moe, f"{prefix}.block_sparse_moe"
    return [
        *common.pre_norms(config, path, prefix),
        *common.attention(config, i, (*path, "attention"), f"{prefix}.self_attn"),
        transposed((*path, "moe", "router_DxE"), f"{stored}.gate.weight", (moe.num_experts, d)),
        *common.experts(
            (*path, "moe"), f"{stored}.experts", moe.num_experts, d, moe.intermediate_size, ("w1", "w3", "w2")
        ),
    ]
