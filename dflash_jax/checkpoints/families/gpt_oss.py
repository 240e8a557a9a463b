"""gpt-oss: attention sinks, sliding and full layers in turn, biases everywhere, experts with a clipped SwiGLU.

Experts are stored together, [in, out], the columns of gate and up alternating; as MXFP4 in the published
files (`quantised` makes ordinary tensors of them). The router's softmax is over the chosen experts only,
which is the softmax over all of them, normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, SLIDING, MoeConfig, TargetConfig

DEFAULT_THETA = 150_000.0
DEFAULTS = {
    "gpt_oss": {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }
}
# What a configuration without any rotary scaling means.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.silu()
    fields.only("attention_bias", (True,))
    fields.only("swiglu_limit", (7.0,))  # transformers has no other
    layers = fields.size("num_hidden_layers")
    explicit = hf.get("layer_types")
    rope = fields.for_rope()
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        rope["rope_scaling"] = _YARN
    return TargetConfig(
        **fields.basic(),
        head_dim=fields.head_dim(),
        rope=rope_config_from_hf(rope, default_theta=DEFAULT_THETA),
        layer_types=tuple(explicit or (FULL if i % 2 else SLIDING for i in range(layers))),
        sliding_window=fields.optional_size("sliding_window"),
        attention_sinks=True,
        qkv_bias=True,
        out_bias=True,
        activation="clipped_swiglu",
        activation_limit=fields.positive("swiglu_limit"),
        moe=MoeConfig(
            num_experts=fields.size("num_local_experts"),
            experts_per_token=fields.size("num_experts_per_tok"),
            intermediate_size=fields.size("intermediate_size"),
            layers=tuple(range(layers)),
            router_bias=True,
            expert_bias=True,
        ),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    return {
        **common.basic_to_hf(config, "GptOssForCausalLM"),
        "attention_bias": True,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "swiglu_limit": config.activation_limit,
    }


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, n, g = config.hidden_size, config.num_heads, config.num_kv_heads
    e, f = config.moe.num_experts, config.moe.intermediate_size
    attention, moe, stored = (*path, "attention"), (*path, "moe"), f"{prefix}.mlp"
    return [
        *common.pre_norms(config, path, prefix),
        *common.attention(config, i, attention, f"{prefix}.self_attn"),
        Placement(
            (*attention, "sinks_GxR"),
            (StoredTensor(f"{prefix}.self_attn.sinks", (n,)),),
            lambda x: x.reshape(g, n // g),
            lambda x: (x.reshape(n),),
        ),
        transposed((*moe, "router_DxE"), f"{stored}.router.weight", (e, d)),
        identity((*moe, "router_bias_E"), f"{stored}.router.bias", (e,)),
        Placement(
            (*moe, "gate_up_Ex2xDxF"),
            (StoredTensor(f"{stored}.experts.gate_up_proj", (e, d, 2 * f)),),
            lambda x: x.reshape(e, d, f, 2).transpose(0, 3, 1, 2),
            lambda x: (x.transpose(0, 2, 3, 1).reshape(e, d, 2 * f),),
        ),
        Placement(
            (*moe, "gate_up_bias_Ex2xF"),
            (StoredTensor(f"{stored}.experts.gate_up_proj_bias", (e, 2 * f)),),
            lambda x: x.reshape(e, f, 2).swapaxes(1, 2),
            lambda x: (x.swapaxes(1, 2).reshape(e, 2 * f),),
        ),
        identity((*moe, "down_ExFxD"), f"{stored}.experts.down_proj", (e, f, d)),
        identity((*moe, "down_bias_ExD"), f"{stored}.experts.down_proj_bias", (e, d)),
    ]
