"""Llama 4's decoder: chunked layers with rotary embedding, full layers without, experts in some or all layers.

Rotary channels are stored interleaved (pairs of neighbours) and kept half-split, queries and keys alike.
`intermediate_size` is the width of an expert and of the shared expert, `intermediate_size_mlp` that of the dense
layers. An expert's input is multiplied by the sigmoid of its router logit, and nothing is normalised.

The defaults are those of the configuration class of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import CHUNKED, FULL, ConfigError, MoeConfig, TargetConfig

DEFAULTS = {
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
}
# Multimodal model_type -> that of its text_config.
WRAPPERS = {"llama4": "llama4_text"}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse({"attention_bias": "biases of the attention's projections are not supported"})
    fields.silu()
    basic = fields.basic()
    layers = basic["num_layers"]
    rotated = _rotated(fields, layers)
    explicit = hf.get("layer_types")
    rope = fields.for_rope()
    if not any((rope.get(name) or {}).get("rope_theta") for name in ("rope_parameters", "rope_scaling")):
        rope["rope_theta"] = fields.positive("rope_theta")
    return TargetConfig(
        **{**basic, "intermediate_size": fields.size("intermediate_size_mlp")},
        head_dim=fields.head_dim(),
        rope=rope_config_from_hf(rope),
        layer_types=tuple(explicit or (CHUNKED if x else FULL for x in rotated)),
        attention_chunk=fields.optional_size("attention_chunk_size"),
        nope_layers=tuple(i for i in range(layers) if not rotated[i]),
        # A number in some files (4), where any but zero means true.
        attention_temperature=(
            (fields.positive("floor_scale"), fields.positive("attn_scale"))
            if fields.get("attn_temperature_tuning")
            else None
        ),
        qk_unit_norm=fields.flag("use_qk_norm"),
        moe=_moe(fields, layers),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    moe, temperature = config.moe, config.attention_temperature
    hf = {
        **common.basic_to_hf(config, "Llama4ForCausalLM"),
        "intermediate_size_mlp": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "no_rope_layers": [int(i not in config.nope_layers) for i in range(config.num_layers)],
        "attention_chunk_size": config.attention_chunk,
        "attn_temperature_tuning": temperature is not None,
        "use_qk_norm": config.qk_unit_norm,
        "moe_layers": [] if moe is None else list(moe.layers),
    }
    if temperature is not None:
        floor, hf["attn_scale"] = temperature
        if floor != round(floor):
            raise ConfigError(f"a llama4_text config.json can not express attention_temperature = {temperature!r}")
        hf["floor_scale"] = round(floor)
    if moe is not None:
        hf.update(
            intermediate_size=moe.intermediate_size,
            num_local_experts=moe.num_experts,
            num_experts_per_tok=moe.experts_per_token,
        )
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _rotated(fields: Fields, layers: int) -> list[bool]:
    """Which layers have rotary embedding; an empty list means the rule, as null does."""
    explicit = fields.get("no_rope_layers")
    if not explicit:
        interval = fields.size("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(layers)]
    if len(explicit) < layers or any(x not in (0, 1) for x in explicit):
        raise ConfigError(
            f"no_rope_layers is {explicit!r}, must have 1 (rotary embedding) or 0 (none) for each of {layers} layers"
        )
    return [bool(x) for x in explicit[:layers]]


def _moe(fields: Fields, layers: int) -> MoeConfig | None:
    if fields.get("moe_layers") is None:
        step = fields.size("interleave_moe_layer_step")
        sparse = tuple(range(step - 1, layers, step))
    else:
        sparse = fields.indices("moe_layers", layers)
    if not sparse:
        return None
    return MoeConfig(
        num_experts=fields.size("num_local_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("intermediate_size"),
        layers=sparse,
        scoring="sigmoid",
        normalise=False,
        weigh_input=True,
        shared_intermediate_size=fields.size("intermediate_size"),
    )


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, moe = config.hidden_size, config.moe
    placed = [
        *common.pre_norms(config, path, prefix),
        *_attention(config, i, (*path, "attention"), f"{prefix}.self_attn"),
    ]
    feed_forward = f"{prefix}.feed_forward"
    if moe is None or i not in moe.layers:
        return placed + common.mlp((*path, "mlp"), feed_forward, d, config.intermediate_size)
    e, f = moe.num_experts, moe.intermediate_size
    return [
        *placed,
        transposed((*path, "moe", "router_DxE"), f"{feed_forward}.router.weight", (e, d)),
        Placement(
            (*path, "moe", "gate_up_Ex2xDxF"),
            (StoredTensor(f"{feed_forward}.experts.gate_up_proj", (e, d, 2 * f)),),
            lambda x: x.reshape(e, d, 2, f).swapaxes(1, 2),
            lambda x: (x.swapaxes(1, 2).reshape(e, d, 2 * f),),
        ),
        identity((*path, "moe", "down_ExFxD"), f"{feed_forward}.experts.down_proj", (e, f, d)),
        *common.mlp((*path, "moe", "shared"), f"{feed_forward}.shared_expert", d, moe.shared_intermediate_size),
    ]


def _attention(config: TargetConfig, layer: int, path: Path, prefix: str) -> list[Placement]:
    """The usual attention, but for the order of the channels of queries and keys."""
    qkv, *others = common.attention(config, layer, path, prefix)
    h = config.head_dim

    def halves(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, h // 2, 2, x.shape[-1]).transpose(0, 2, 1, 3).reshape(x.shape)

    def pairs(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, 2, h // 2, x.shape[-1]).transpose(0, 2, 1, 3).reshape(x.shape)

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v = qkv.split(x)
        return pairs(q), pairs(k), v

    return [Placement(qkv.path, qkv.tensors, lambda q, k, v: qkv.join(halves(q), halves(k), v), split), *others]
