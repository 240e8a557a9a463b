"""`config.json` of DFlash drafters (z-lab format, old and new spelling) to `DrafterConfig` and back.

Where a field may stand in two places, the first one named here wins:

    block_size, mask_token_id, target_layer_ids, num_target_layers, input_embedding_scale,
    output_multiplier, final_logit_softcapping    dflash_config, then top level
    is_causal (top level), then dflash_config.causal, then the kind of each layer
    rotary embedding                              see `rope_config_from_hf`
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from dflash_jax.checkpoints.rope_config import rope_config_from_hf, rope_config_to_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, DrafterConfig, TargetConfig, default_target_layer_ids

# Fields of drafters that are DFlash in name only: each needs a module that DFlash does not have, so loading
# such a checkpoint as plain DFlash would run and accept almost nothing.
_OTHER_METHODS = {
    "DFlash 2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "DSpark": (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "attention_mode",
    ),
    "Domino": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
    "MiMo": ("use_swa", "swa_window_size", "attention_sink_bias", "attention_value_scale"),
    "EAGLE-style taps": ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
    "a quantised checkpoint": ("quantization_config", "compression_config"),
}
_ARCHITECTURE = "DFlashDraftModel"
OURS = "dflash_jax"  # the key of config.json for what is of this program's making
# Modules that z-lab's drafters do not have, by the field under OURS that says so: projections between the trunk and a
# target of another width, and a Markov head (DSpark's predicts one position further). No other program runs them, and
# their architecture has a name of its own so that none tries.
_MODULES = {"target_hidden_size": "Projected", "markov_rank": "Markov"}


def _with_modules(fields: Collection[str]) -> str:
    modules = "".join(name for field, name in _MODULES.items() if field in fields)
    return _ARCHITECTURE.replace("Draft", f"{modules}Draft")


_WITH_MODULES = tuple(map(_with_modules, (("target_hidden_size",), ("markov_rank",), _MODULES)))
_DFLASH_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "projector_type",
    "sample_from_anchor",
)


def drafter_config_from_hf(hf: Mapping[str, Any], target_config: TargetConfig | None = None) -> DrafterConfig:
    """Reads the decoded `config.json` of a z-lab DFlash drafter.

    Taps default to z-lab's rule (`default_target_layer_ids`) for as many taps as the drafter has layers.
    Layers are full unless `layer_types` says otherwise, or `use_sliding_window` with `max_window_layers`.

    Args:
      hf: the configuration.
      target_config: the target it is to draft for. Given, the result is bound to it (`bind_to_target`), and
        `num_target_layers` may be missing.

    Raises:
      ConfigError: a field is missing, contradicts another or the target, or belongs to a method or format
        that is not supported. The message names the field.
    """
    inner = hf.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"dflash_config is {inner!r}, must be a mapping")
    _refuse_other_formats(hf, inner)

    modules = _modules(hf)
    num_layers = _count(hf, "num_hidden_layers")
    num_heads = _count(hf, "num_attention_heads")
    hidden_size = _count(hf, "hidden_size")
    num_target_layers = _either(hf, inner, "num_target_layers")
    if num_target_layers is None:
        if target_config is None:
            raise ConfigError("num_target_layers is not set: it says how many decoder layers the target has")
        num_target_layers = target_config.num_layers
    num_target_layers = _integer("num_target_layers", num_target_layers)

    taps = _either(hf, inner, "target_layer_ids")
    if taps is None:
        target_layer_ids = default_target_layer_ids(num_target_layers, num_layers)
    elif isinstance(taps, list | tuple):
        target_layer_ids = tuple(_integer("target_layer_ids", tap) for tap in taps)
    else:
        raise ConfigError(f"target_layer_ids is {taps!r}, must be a list of 0-based target layers")

    block_size = _either(hf, inner, "block_size")
    if block_size is None:
        raise ConfigError("block_size is not set, neither at top level nor in dflash_config; no size is assumed")
    mask_token_id = _either(hf, inner, "mask_token_id")
    if mask_token_id is None:
        raise ConfigError(
            "mask_token_id is not set, neither in dflash_config nor at top level; a guess (padding, end of text) "
            "would draft from the wrong embedding"
        )

    window = hf.get("sliding_window")
    config = DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=_count(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(hf, "num_key_value_heads") if hf.get("num_key_value_heads") is not None else num_heads,
        head_dim=_head_dim(hf, hidden_size, num_heads),
        rms_norm_eps=_positive(hf, "rms_norm_eps"),
        rope=rope_config_from_hf(hf),
        vocab_size=_count(hf, "vocab_size"),
        block_size=_integer("block_size", block_size),
        mask_token_id=_integer("mask_token_id", mask_token_id),
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        layer_types=_layer_types(hf, num_layers),
        max_positions=_count(hf, "max_position_embeddings"),
        sliding_window=None if window is None else _integer("sliding_window", window),
        causal=_causal(hf, inner),
        attention_bias=bool(hf.get("attention_bias") or False),
        embedding_scale=_factor(hf, inner, "input_embedding_scale"),
        output_multiplier=_factor(hf, inner, "output_multiplier", 1.0),
        final_logit_softcap=_softcap(hf, inner),
        **modules,
    )
    if config.num_target_layers - 1 in config.target_layer_ids:
        warnings.warn(
            f"target_layer_ids holds the last layer ({config.num_target_layers - 1}). Its residual stream is tapped "
            "before the final norm; drafters trained on Hugging Face hidden states saw it after that norm",
            stacklevel=2,
        )
    return config if target_config is None else bind_to_target(config, target_config)


def bind_to_target(config: DrafterConfig, target_config: TargetConfig) -> DrafterConfig:
    """Checks that a drafter fits a target, and takes over what it leaves to the target.

    `embedding_scale` and `final_logit_softcap` that the drafter does not set become the target's, so that the
    draft path embeds and caps as the target does.

    Raises:
      ConfigError: hidden size, vocabulary or number of layers differ.
    """
    width = "hidden_size" if config.target_hidden_size is None else "target_hidden_size"
    for field, other in ((width, "hidden_size"), ("vocab_size", "vocab_size"), ("num_target_layers", "num_layers")):
        mine, its = getattr(config, field), getattr(target_config, other)
        if mine != its:
            raise ConfigError(
                f"the drafter's {field} is {mine}, the target's {other} is {its}: it was made for another target. An "
                "adapter for this one can be trained on its layers: drafter.trunk = 'frozen' of train.py"
            )
    scale, cap = config.embedding_scale, config.final_logit_softcap
    if scale is None and target_config.embedding_scale != 1.0:
        scale = target_config.embedding_scale
    if cap is None:
        cap = target_config.final_logit_softcap
    return dataclasses.replace(config, embedding_scale=scale, final_logit_softcap=cap)


def old_spelling(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What `drafter_config_to_hf` returns as z-lab's first checkpoints spell it.

    That is: the block size at top level, rotary fields as `rope_theta` and `rope_scaling`, mask and taps alone in
    `dflash_config`.

    Raises:
      ConfigError: a field says something that readers of the old spelling do not look for; it is named.
    """
    inner = dict(hf["dflash_config"])
    inner |= hf.get(OURS, {})  # modules that those readers do not have
    kept = {name: inner.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    for name, value in inner.items():
        if name != "block_size":
            raise ConfigError(
                f"{name} is {value}, which the old spelling of z-lab's format can not hold: its readers would leave it "
                "out; export to zlab"
            )
    left_out = ("rope_parameters", "mask_token_id", "dtype")
    return {name: value for name, value in hf.items() if name not in left_out} | {"dflash_config": kept}


def drafter_config_to_hf(config: DrafterConfig, dtype_name: str) -> dict[str, Any]:
    """The z-lab `config.json` for a drafter, with every field that readers look for in two places in both.

    Args:
      dtype_name: name of the dtype of the weights, such as "bfloat16".
    """
    sliding = SLIDING in config.layer_types
    dflash: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    extra: dict[str, Any] = {}
    if config.causal is not None:
        dflash["causal"] = extra["is_causal"] = config.causal
    if config.embedding_scale is not None:
        dflash["input_embedding_scale"] = config.embedding_scale
    if config.output_multiplier != 1.0:
        dflash["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcap is not None:
        dflash["final_logit_softcapping"] = config.final_logit_softcap
    return {
        **_architecture(config),
        "model_type": "qwen3",
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        **rope_config_to_hf(config.rope),
        "layer_types": list(config.layer_types),
        # Hugging Face drops the window unless the flag is set.
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "dflash_config": dflash,
        **extra,
    }


def own_modules(config: DrafterConfig) -> dict[str, int]:
    """The fields that give a drafter modules which only this program knows, where they are set."""
    return {field: getattr(config, field) for field in _MODULES if getattr(config, field)}


def _architecture(config: DrafterConfig) -> dict[str, Any]:
    ours = own_modules(config)
    if ours:
        return {"architectures": [_with_modules(ours)], OURS: ours}
    return {"architectures": [_ARCHITECTURE], "auto_map": {"AutoModel": f"dflash.{_ARCHITECTURE}"}}


def _modules(hf: Mapping[str, Any]) -> dict[str, int]:
    """The fields of `_MODULES` that a configuration sets."""
    ours = hf.get(OURS) or {}
    if not isinstance(ours, Mapping):
        raise ConfigError(f"{OURS} is {ours!r}, must be a mapping")
    found = {field: _count(ours, field) for field in _MODULES if ours.get(field) is not None}
    named = [name for name in hf.get("architectures") or () if name in _WITH_MODULES]
    if named != [_with_modules(found)] and (found or named):
        has = (
            " and ".join(f"{OURS}.{field} is {ours[field]!r}" for field in found)
            or f"{OURS} has no {' or '.join(_MODULES)}"
        )
        raise ConfigError(
            f"architectures is {hf.get('architectures')!r} and {has}: the architecture "
            f"{_with_modules(found) if found else named[0]} and that field belong together"
        )
    return found


def _refuse_other_formats(hf: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    projector = _either(hf, inner, "projector_type")
    if projector not in (None, "dflash"):
        raise ConfigError(f"projector_type is {projector!r}, which is not supported; plain DFlash sets none")
    architectures = hf.get("architectures")
    if architectures and not {_ARCHITECTURE, *_WITH_MODULES} & set(architectures):
        raise ConfigError(f"architectures is {architectures!r}, supported is {[_ARCHITECTURE]!r}")
    model_type = hf.get("model_type", "qwen3")
    if model_type not in ("qwen3", "llama"):
        raise ConfigError(f"model_type is {model_type!r}; drafters with qwen3 layers are supported (qwen3, llama)")
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act is {activation!r}, supported is 'silu'")
    for method, fields in _OTHER_METHODS.items():
        for field in fields:
            if _either(hf, inner, field) not in (None, False):
                raise ConfigError(f"{field} is set: that belongs to {method}, which is not supported")
    if _either(hf, inner, "sample_from_anchor"):
        raise ConfigError(
            "sample_from_anchor is true: slot k would predict the token after its position; supported is false, "
            "where slot k predicts the token at its own position"
        )
    for field in inner:
        if field not in _DFLASH_FIELDS and inner[field] is not None:
            raise ConfigError(
                f"dflash_config has the field {field!r}, unknown here; known are {', '.join(_DFLASH_FIELDS)}"
            )


def _either(hf: Mapping[str, Any], inner: Mapping[str, Any], field: str) -> Any:
    value = inner.get(field)
    return hf.get(field) if value is None else value


def _integer(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ConfigError(f"{field} holds {value!r}, must be an integer")
    return int(value)


def _count(hf: Mapping[str, Any], field: str) -> int:
    if hf.get(field) is None:
        raise ConfigError(f"{field} is not set")
    value = _integer(field, hf[field])
    if value < 1:
        raise ConfigError(f"{field} is {value}, must be at least 1")
    return value


def _positive(hf: Mapping[str, Any], field: str) -> float:
    value = hf.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{field} is {value!r}, must be a positive number")
    return float(value)


def _factor(hf: Mapping[str, Any], inner: Mapping[str, Any], field: str, default: float | None = None) -> float | None:
    value = _either(hf, inner, field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{field} is {value!r}, must be a positive number")
    return float(value)


def _softcap(hf: Mapping[str, Any], inner: Mapping[str, Any]) -> float | None:
    value = _either(hf, inner, "final_logit_softcapping")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"final_logit_softcapping is {value!r}, must be a number (0: no cap)")
    return max(float(value), 0.0)


def _head_dim(hf: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if hf.get("head_dim") is not None:
        return _integer("head_dim", hf["head_dim"])
    if hidden_size % num_heads:
        raise ConfigError(
            f"head_dim is not set and hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _layer_types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    explicit = hf.get("layer_types")
    flag = hf.get("use_sliding_window")
    if explicit is not None:
        if not isinstance(explicit, list | tuple):
            raise ConfigError(f"layer_types is {explicit!r}, must be a list with one kind a layer")
        if SLIDING in explicit and hf.get("sliding_window") is not None and flag is False:
            warnings.warn(
                f"layer_types has {SLIDING} and sliding_window is {hf['sliding_window']}, but use_sliding_window is "
                "false: the window is used here; Hugging Face readers drop it",
                stacklevel=3,
            )
        return tuple(explicit)
    if flag:
        first = _integer("max_window_layers", hf.get("max_window_layers", num_layers))
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return (FULL,) * num_layers


def _causal(hf: Mapping[str, Any], inner: Mapping[str, Any]) -> bool | None:
    for field, value in (("is_causal", hf.get("is_causal")), ("dflash_config.causal", inner.get("causal"))):
        if value is not None:
            if not isinstance(value, bool):
                raise ConfigError(f"{field} is {value!r}, must be true or false")
            return value
    return None
