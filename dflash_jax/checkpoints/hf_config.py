"""`config.json` of dense targets in Hugging Face's format to `TargetConfig` and back.

A field that the file leaves out has the default of its family's configuration class in transformers; the
table below is that of version 5. Two defaults are easily missed: Mistral slides over 4096 tokens unless
sliding_window is null, and Qwen3 has heads of 128 whatever the hidden size.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.rope_config import rope_config_from_hf, rope_config_to_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, TargetConfig

# num_key_value_heads and head_dim: None means num_attention_heads and hidden_size / num_attention_heads.
_LLAMA = {
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
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields that change the model in a way that is not implemented, and why, unless they are absent or null.
_REFUSED = {
    "quantization_config": "quantised weights are not read; load the unquantised checkpoint or a GGUF file",
    "num_experts": "mixtures of experts are not supported",
    "num_local_experts": "mixtures of experts are not supported",
    "n_routed_experts": "mixtures of experts are not supported",
    "text_config": "this is a multimodal configuration; only pure text models are supported",
    "attn_logit_softcapping": "soft-capped attention is not supported",
    "final_logit_softcapping": "no supported family caps its logits",
    "attention_sinks": "attention sinks are not supported",
}


def target_config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    """Reads the decoded `config.json` of a Llama, Mistral, Qwen2 / Qwen2.5 or Qwen3 model.

    Biases: Llama's and Qwen3's `attention_bias` gives q, k, v and o one; Qwen2 has them on q, k and v
    always; `mlp_bias` is Llama's. Sliding layers: all of Mistral's when `sliding_window` is set; Qwen's from
    `max_window_layers` on when `use_sliding_window` is true; an explicit `layer_types` decides otherwise.

    Raises:
      ConfigError: the family or a field of it is not supported, or fields contradict each other.
    """
    family = hf.get("model_type")
    if family not in DEFAULTS:
        raise ConfigError(f"model_type is {family!r}; supported are {', '.join(DEFAULTS)}")
    for name, why in _REFUSED.items():
        if hf.get(name) is not None:
            raise ConfigError(f"{name} is set in this {family} configuration: {why}")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act is {hf['hidden_act']!r}; only silu is supported")
    for name, families in (("attention_bias", ("llama", "qwen3")), ("mlp_bias", ("llama",))):
        if hf.get(name) and family not in families:
            raise ConfigError(f"{name} is true, but {family} models have no such biases")

    heads, layers = _size(hf, family, "num_attention_heads"), _size(hf, family, "num_hidden_layers")
    hidden = _size(hf, family, "hidden_size")
    head_dim = _size(hf, family, "head_dim", optional=True)
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim")
        head_dim = hidden // heads
    window, layer_types = _sliding(hf, family, layers)
    attention_bias = bool(hf.get("attention_bias"))
    return TargetConfig(
        family=family,
        vocab_size=_size(hf, family, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(hf, family, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_size(hf, family, "num_key_value_heads", optional=True) or heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(hf, family, "rms_norm_eps"),
        rope=rope_config_from_hf({"max_position_embeddings": DEFAULTS[family]["max_position_embeddings"], **hf}),
        max_positions=_size(hf, family, "max_position_embeddings"),
        layer_types=layer_types,
        sliding_window=window,
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        tie_embeddings=_flag(hf, family, "tie_word_embeddings"),
    )


def target_config_to_hf(config: TargetConfig) -> dict[str, Any]:
    """A `config.json` that `target_config_from_hf` and transformers read as `config`.

    Raises:
      ConfigError: the configuration has something that its family can not express.
    """
    family = config.family
    if family not in DEFAULTS:
        raise ConfigError(f"family is {family!r}; Hugging Face configurations are written for {', '.join(DEFAULTS)}")
    sliding = SLIDING in config.layer_types
    hf = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **rope_config_to_hf(config.rope),
    }
    if family == "mistral":
        hf["sliding_window"] = config.sliding_window if sliding else None
    if family in ("qwen2", "qwen3"):
        hf.update(
            use_sliding_window=sliding,
            sliding_window=config.sliding_window,
            layer_types=list(config.layer_types),
        )
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = config.out_bias
    if family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    expressed = target_config_from_hf(hf)
    for field in dataclasses.fields(TargetConfig):
        ours, theirs = getattr(config, field.name), getattr(expressed, field.name)
        if ours != theirs and not (field.name == "sliding_window" and not sliding):
            raise ConfigError(f"a {family} config.json can not express {field.name} = {ours!r}")
    return hf


def _sliding(hf: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """(sliding_window, layer_types), by the rules of the family."""
    if family == "llama":
        if hf.get("sliding_window"):
            warnings.warn(
                f"sliding_window {hf['sliding_window']} is ignored: llama models attend to everything", stacklevel=3
            )
        window, sliding = None, [False] * layers
    else:
        window = _size(hf, family, "sliding_window", optional=True)
        if family == "mistral":
            sliding = [window is not None] * layers
        else:
            window = window if _flag(hf, family, "use_sliding_window") else None
            first = _default(hf, family, "max_window_layers")
            sliding = [window is not None and i >= first for i in range(layers)]
    by_rule = tuple(SLIDING if x else FULL for x in sliding)
    explicit = hf.get("layer_types")
    if explicit is None:
        return window, by_rule
    explicit = tuple(explicit)
    if family in ("llama", "mistral") and explicit != by_rule:
        raise ConfigError(f"layer_types is {list(explicit)}, but {family} models have layers of one kind, {by_rule[0]}")
    return window, explicit


def _default(hf: Mapping[str, Any], family: str, name: str) -> Any:
    """The field, or its family's default where it is absent (not where it is null)."""
    return hf.get(name, DEFAULTS[family].get(name))


def _size(hf: Mapping[str, Any], family: str, name: str, optional: bool = False) -> int | None:
    value = _default(hf, family, name)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}, must be a positive whole number")
    return value


def _positive(hf: Mapping[str, Any], family: str, name: str) -> float:
    value = _default(hf, family, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is {value!r}, must be a positive number")
    return float(value)


def _flag(hf: Mapping[str, Any], family: str, name: str) -> bool:
    value = _default(hf, family, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be true or false")
    return value
