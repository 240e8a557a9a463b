"""Gemma 2, Gemma 3 and Gemma 4: their decoders, of the text models and of the multimodal ones.

Norms are sandwiched, embeddings scaled by sqrt(hidden_size), and sliding layers alternate with full ones in a
fixed pattern unless `layer_types` says it. Gemma 2 and 3 store norm scales around zero, Gemma 4 around one.
Gemma 3's and 4's sliding layers have a rotary base of their own. Gemma 4's full layers have wider heads,
rotate only the first frequencies of a head ("proportional") and may use their keys as values
(`attention_k_eq_v`).

The defaults are those of the configuration classes of transformers 5.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity
from dflash_jax.checkpoints.rope_config import rope_config_from_hf, rope_config_to_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, RopeConfig, TargetConfig

_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA4 = {
    **_GEMMA3,
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
DEFAULTS = {"gemma2": _GEMMA2, "gemma3_text": _GEMMA3, "gemma4_text": _GEMMA4}
# Multimodal model_type -> that of its text_config.
WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}

_ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
_REFUSED = {
    "attention_bias": "biases of the attention's projections are not supported",
    "enable_moe_block": "Gemma 4's experts beside the dense MLP are not supported",
}

is_harmless = common.is_harmless


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse(_REFUSED)
    fields.only("hidden_activation", ("gelu_pytorch_tanh",))
    # Gemma 4's "vision" concerns image tokens only: text stays causal.
    fields.only("use_bidirectional_attention", (None, False, "vision") if family == "gemma4_text" else (None, False))
    particular = {"gemma2": _gemma2, "gemma3_text": _gemma3, "gemma4_text": _gemma4}[family](fields)
    basic = fields.basic()
    return TargetConfig(
        **basic,
        head_dim=fields.size("head_dim"),
        layer_types=_layer_types(fields),
        sliding_window=fields.optional_size("sliding_window"),
        post_norms=True,
        activation="gelu_tanh",
        embedding_scale=basic["hidden_size"] ** 0.5,
        final_logit_softcap=_optional_positive(fields, "final_logit_softcapping"),
        **particular,
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    hf = {
        **common.basic_to_hf(config, _ARCHITECTURES[config.family]),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "final_logit_softcapping": config.final_logit_softcap,
    }
    if config.family != "gemma4_text":
        hf["query_pre_attn_scalar"] = _scalar(config.attention_scale)
        hf["attn_logit_softcapping"] = config.attention_softcap
    if config.family == "gemma2":
        return hf
    sliding, full = (rope_config_to_hf(rope)["rope_parameters"] for rope in (config.rope_sliding, config.rope))
    if config.family == "gemma3_text":
        # Beside the new spelling that of older readers, whose scaling is the full layers'.
        hf.update(rope_theta=config.rope.theta, rope_local_base_freq=config.rope_sliding.theta)
        hf["rope_parameters"] = {SLIDING: sliding, FULL: full}
        return hf
    for name in ("rope_theta", "rope_scaling"):
        del hf[name]
    head_dim = config.full_head_dim or config.head_dim
    if config.full_rotary_dim is not None:
        full.update(rope_type="proportional", partial_rotary_factor=config.full_rotary_dim / head_dim)
    hf.update(
        rope_parameters={SLIDING: sliding, FULL: full},
        global_head_dim=head_dim,
        num_global_key_value_heads=config.full_num_kv_heads,
        attention_k_eq_v=config.full_value_is_key,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _gemma2(fields: Fields) -> dict[str, Any]:
    return {**_scores(fields), "rope": rope_config_from_hf(fields.for_rope())}


def _gemma3(fields: Fields) -> dict[str, Any]:
    """Old spelling: rope_theta and rope_scaling are the full layers', rope_local_base_freq the sliding ones'."""
    if fields.hf.get("rope_parameters") is not None:
        sliding, full = _ropes_by_kind(fields)
        sliding.setdefault("rope_theta", _GEMMA3["rope_local_base_freq"])
        full.setdefault("rope_theta", _GEMMA3["rope_theta"])
    else:
        sliding = {"rope_theta": fields.positive("rope_local_base_freq")}
        full = {**(fields.hf.get("rope_scaling") or {}), "rope_theta": fields.positive("rope_theta")}
    return {
        **_scores(fields),
        "qk_norm": True,
        "rope": _rope(fields, full),
        "rope_sliding": _rope(fields, sliding),
    }


def _gemma4(fields: Fields) -> dict[str, Any]:
    for name, why in (
        ("hidden_size_per_layer_input", "per-layer embeddings (Gemma 4 E2B, E4B and their kin) are not supported"),
        ("num_kv_shared_layers", "layers that share the keys and values of earlier ones are not supported"),
    ):
        if fields.count(name):
            raise ConfigError(f"{name} is {fields.get(name)} in this gemma4_text configuration: {why}")
    head_dim, kv_heads = fields.size("head_dim"), fields.size("num_key_value_heads")
    value_is_key = fields.flag("attention_k_eq_v")
    overrides = _full_layers(fields)
    if overrides is not None:
        full_head_dim, full_kv_heads = overrides.get("head_dim", head_dim), overrides.get("num_key_value_heads")
    else:
        full_head_dim = fields.size("global_head_dim")
        # The number of the full layers' KV heads is read where their keys are the values, only.
        full_kv_heads = fields.optional_size("num_global_key_value_heads") if value_is_key else None
    sliding, full = _ropes_by_kind(fields)
    rotary_dim = None
    if full.get("rope_type") == "proportional":
        rotary_dim = 2 * int(full.pop("partial_rotary_factor", 1.0) * full_head_dim // 2)
        full["rope_type"] = "linear" if full.get("factor", 1.0) != 1.0 else "default"
    return {
        "attention_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_scale": True,
        "norm_offset": 0.0,
        "full_head_dim": None if full_head_dim == head_dim else full_head_dim,
        "full_num_kv_heads": None if full_kv_heads == kv_heads else full_kv_heads,
        "full_value_is_key": value_is_key,
        "full_rotary_dim": None if rotary_dim == full_head_dim else rotary_dim,
        "rope": _rope(fields, full),
        "rope_sliding": _rope(fields, sliding),
    }


def _full_layers(fields: Fields) -> Mapping[str, int] | None:
    """What `per_layer_config`, the spelling that transformers 5 writes, says of all full layers; None without it."""
    by_layer = fields.hf.get("per_layer_config")
    if by_layer is None:
        return None
    full = {i for i, kind in enumerate(_layer_types(fields)) if kind == FULL}
    different = [dict(values) for values in by_layer.values()]
    known = {"head_dim", "num_key_value_heads"}
    if {int(i) for i in by_layer} != full or any(x != different[0] or not set(x) <= known for x in different):
        raise ConfigError(
            f"per_layer_config is {by_layer!r}; supported are head_dim and num_key_value_heads, the same for every "
            f"layer of full attention ({sorted(full)}) and none for others"
        )
    return different[0] if different else {}


def _scores(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    return {
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": _optional_positive(fields, "attn_logit_softcapping"),
        "norm_offset": 1.0,
    }


def _ropes_by_kind(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sliding, full) of `rope_parameters`, which has a mapping for each kind of layer."""
    parameters = fields.get("rope_parameters")
    by_kind = parameters if isinstance(parameters, Mapping) else {}
    found = [by_kind.get(kind) for kind in (SLIDING, FULL)]
    if not all(isinstance(x, Mapping) for x in found):
        raise ConfigError(
            f"rope_parameters is {parameters!r}; {fields.family} needs a mapping for {SLIDING} and one for {FULL} in it"
        )
    sliding, full = (dict(x) for x in found)
    return sliding, full


def _rope(fields: Fields, parameters: Mapping[str, Any]) -> RopeConfig:
    length = fields.size("max_position_embeddings")
    return rope_config_from_hf({"rope_parameters": parameters, "max_position_embeddings": length})


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Every `sliding_window_pattern`-th layer is full, or as said one by one; Gemma 4's last layer always is."""
    explicit, layers = fields.hf.get("layer_types"), fields.size("num_hidden_layers")
    if explicit is None:
        renamed = "_sliding_window_pattern" if "_sliding_window_pattern" in fields.hf else "sliding_window_pattern"
        pattern = fields.size(renamed)
        explicit = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
    kinds = tuple(explicit)
    if fields.family == "gemma4_text" and kinds and kinds[-1] == SLIDING:
        warnings.warn("the last layer of a Gemma 4 model has full attention; its layer type is ignored", stacklevel=4)
        kinds = (*kinds[:-1], FULL)
    return kinds


def _optional_positive(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.positive(name)


def _scalar(attention_scale: float) -> int | float:
    """query_pre_attn_scalar, whole where a whole number gives that very scale."""
    exact = attention_scale**-2
    return round(exact) if round(exact) ** -0.5 == attention_scale else exact


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d = config.hidden_size
    norms = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    placed = [identity((*path, ours, "scale"), f"{prefix}.{theirs}.weight", (d,)) for ours, theirs in norms.items()]
    attention_path, attention_prefix = (*path, "attention"), f"{prefix}.self_attn"
    if config.full_value_is_key and config.layer_types[i] == FULL:
        placed += _attention_without_values(config, i, attention_path, attention_prefix)
    else:
        placed += common.attention(config, i, attention_path, attention_prefix)
    if config.layer_scale:
        placed.append(identity((*path, "layer_scale_1"), f"{prefix}.layer_scalar", (1,)))
    return placed + common.mlp((*path, "mlp"), f"{prefix}.mlp", d, config.intermediate_size)


def _attention_without_values(config: TargetConfig, layer: int, path: Path, prefix: str) -> list[Placement]:
    """Queries and keys only: the keys are the values."""
    d, n = config.hidden_size, config.num_heads
    g, h = config.kv_shape(layer)
    return [
        Placement(
            (*path, "qkv_DxGxRxH"),
            (StoredTensor(f"{prefix}.q_proj.weight", (n * h, d)), StoredTensor(f"{prefix}.k_proj.weight", (g * h, d))),
            lambda q, k: common.join_groups((q, k), g, h).transpose(3, 0, 1, 2),
            lambda x: tuple(y.transpose(1, 2, 3, 0).reshape(-1, d) for y in (x[:, :, :-1], x[:, :, -1:])),
        ),
        common.attention_out(path, f"{prefix}.o_proj.weight", (g, n // g, h, d)),
        *(identity((*path, f"{x}_norm", "scale"), f"{prefix}.{x}_norm.weight", (h,)) for x in "qk"),
    ]
