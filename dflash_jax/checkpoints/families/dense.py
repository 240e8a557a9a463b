"""Llama, Mistral, Qwen2 / Qwen2.5 and Qwen3, where dense.

Biases: Llama's and Qwen3's `attention_bias` gives q, k, v and o one; Qwen2 has them on q, k and v
always; `mlp_bias` is Llama's. Sliding layers: all of Mistral's when `sliding_window` is set; Qwen's from
`max_window_layers` on when `use_sliding_window` is true; an explicit `layer_types` decides otherwise.

The defaults are those of the configuration classes of transformers 5. Two are easily missed: Mistral
slides over 4096 tokens unless sliding_window is null, and Qwen3 has heads of 128 whatever the hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, TargetConfig

# num_key_value_heads and head_dim: None means num_attention_heads and hidden_size / num_attention_heads.
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN2 = {
    **LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS = {
    "llama": LLAMA,
    "mistral": {
        **LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": QWEN2,
    "qwen3": {**QWEN2, "head_dim": 128},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REFUSED = {
    "num_experts": "this family is dense; mixtures of experts have a model_type of their own",
    "num_local_experts": "this family is dense; mixtures of experts have a model_type of their own",
    "n_routed_experts": "this family is dense; mixtures of experts have a model_type of their own",
    "text_config": "this is a multimodal configuration; only the pure text models of this family are supported",
    "attn_logit_softcapping": "this family has no soft-capped attention",
    "final_logit_softcapping": "this family does not cap its logits",
    "attention_sinks": "this family has no attention sinks",
}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse(_REFUSED)
    fields.silu()
    for name, families in (("attention_bias", ("llama", "qwen3")), ("mlp_bias", ("llama",))):
        if hf.get(name) and family not in families:
            raise ConfigError(f"{name} is true, but {family} models have no such biases")
    window, layer_types = _sliding(fields)
    attention_bias = bool(hf.get("attention_bias"))
    return TargetConfig(
        **fields.basic(),
        head_dim=fields.head_dim(),
        rope=rope_config_from_hf(fields.for_rope()),
        layer_types=layer_types,
        sliding_window=window,
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    family = config.family
    hf = common.basic_to_hf(config, _ARCHITECTURES[family])
    if family == "mistral":
        hf["sliding_window"] = config.sliding_window if SLIDING in config.layer_types else None
    if family in ("qwen2", "qwen3"):
        hf.update(qwen_window_to_hf(config))
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = config.out_bias
    if family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    return [
        *common.pre_norms(config, path, prefix),
        *common.attention(config, i, (*path, "attention"), f"{prefix}.self_attn"),
        *common.mlp(
            (*path, "mlp"), f"{prefix}.mlp", config.hidden_size, config.intermediate_size, bias=config.mlp_bias
        ),
    ]


def qwen_window(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    """(sliding_window, layer_types) by Qwen's rule: use_sliding_window, max_window_layers, layer_types."""
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window") else None
    explicit = fields.hf.get("layer_types")
    if explicit is not None:
        return window, tuple(explicit)
    first = fields.get("max_window_layers")
    layers = range(fields.size("num_hidden_layers"))
    return window, tuple(SLIDING if window is not None and i >= first else FULL for i in layers)


def qwen_window_to_hf(config: TargetConfig) -> dict[str, Any]:
    """The fields that `qwen_window` reads."""
    return {
        "use_sliding_window": SLIDING in config.layer_types,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
    }


def _sliding(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    """(sliding_window, layer_types), by the rules of the family."""
    family, hf, layers = fields.family, fields.hf, fields.size("num_hidden_layers")
    if family in ("qwen2", "qwen3"):
        return qwen_window(fields)
    window = None
    if family == "mistral":
        window = fields.optional_size("sliding_window")
    elif hf.get("sliding_window"):
        warnings.warn(
            f"sliding_window {hf['sliding_window']} is ignored: llama models attend to everything", stacklevel=4
        )
    return window, one_kind(fields, FULL if window is None else SLIDING, layers)


def one_kind(fields: Fields, kind: str, layers: int) -> tuple[str, ...]:
    """The layer types of a family whose layers are all alike; an explicit `layer_types` must say the same."""
    explicit = fields.hf.get("layer_types")
    if explicit is not None and tuple(explicit) != (kind,) * layers:
        raise ConfigError(
            f"layer_types is {list(explicit)}, but {fields.family} models have layers of one kind, {kind}"
        )
    return (kind,) * layers
