"""Rotary embedding fields of Hugging Face configurations, old and new spelling, to `RopeConfig` and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import ConfigError, RopeConfig

DEFAULT_THETA = 10_000.0

# Hugging Face name -> field of RopeConfig, and the kinds that read it.
_FIELDS = {
    "factor": ("factor", ("linear", "llama3", "yarn")),
    "original_max_position_embeddings": ("original_max_positions", ("llama3", "yarn")),
    "low_freq_factor": ("low_freq_factor", ("llama3",)),
    "high_freq_factor": ("high_freq_factor", ("llama3",)),
    "beta_fast": ("beta_fast", ("yarn",)),
    "beta_slow": ("beta_slow", ("yarn",)),
    "attention_factor": ("attention_factor", ("yarn",)),
    "mscale": ("mscale", ("yarn",)),
    "mscale_all_dim": ("mscale_all_dim", ("yarn",)),
    "truncate": ("truncate", ("yarn",)),
}
# Multimodal rotary sections: all sections of a text token have the same position, so they are plain rotary.
_NO_EFFECT_ON_TEXT = ("mrope_section", "mrope_interleaved")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def rope_config_from_hf(hf: Mapping[str, Any], *, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    """Reads the rotary embedding of a Hugging Face `config.json`.

    The base is `rope_parameters["rope_theta"]` (new), else `rope_scaling["rope_theta"]`, else the top-level
    `rope_theta` (old), else `default_theta` with a warning. Kind and scaling come from `rope_parameters`,
    else from `rope_scaling`. A stale value under a lower spelling is overruled, never mixed in. Llama 3 and
    YaRN scale from `original_max_position_embeddings`: of that mapping, else of the top level, else from
    `max_position_embeddings`, as Hugging Face does.

    Args:
      hf: the decoded configuration, of a target or of a drafter.
      default_theta: the base where no field names one.

    Raises:
      ConfigError: the kind is not supported, a field it needs is missing, or a field has no meaning here.
    """
    new, old = _mapping(hf, "rope_parameters"), _mapping(hf, "rope_scaling")
    name, values = ("rope_parameters", new) if new else ("rope_scaling", old)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "mrope":
        kind = "default"
    if kind not in ("default", *_NEEDED):
        raise ConfigError(f"{name} has rope_type {kind!r}; supported are default, {', '.join(_NEEDED)}")
    for key, value in {**values, "partial_rotary_factor": _partial(hf, values)}.items():
        if key in ("rope_type", "type", "rope_theta", *_FIELDS, *_NO_EFFECT_ON_TEXT) or value is None:
            continue
        if key == "partial_rotary_factor" and float(value) == 1.0:
            continue
        raise ConfigError(f"{name} sets {key} = {value!r}, which is not supported: heads are rotated whole")
    fields = {
        field: values[key] for key, (field, kinds) in _FIELDS.items() if kind in kinds and values.get(key) is not None
    }
    for key in _NEEDED.get(kind, ()):
        if _FIELDS[key][0] not in fields:
            raise ConfigError(f"{name} has rope_type {kind!r} but no {key}, which that type needs")
    if kind in ("llama3", "yarn") and "original_max_positions" not in fields:
        top = hf.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
        if top is not None:
            fields["original_max_positions"] = int(top)
    return RopeConfig(theta=_theta(hf, new, old, default_theta), kind=kind, **fields)


def rope_config_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The fields of a Hugging Face configuration for `rope`, in all spellings that readers look for.

    Returns `rope_theta`, `rope_parameters` and `rope_scaling`; the last is None for the default kind, as old
    readers expect, and repeats the base for readers that take it from there.
    """
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    for key, (field, kinds) in _FIELDS.items():
        value = getattr(rope, field)
        if rope.kind in kinds and value is not None:
            parameters[key] = value
    scaling = None if rope.kind == "default" else dict(parameters)
    return {"rope_theta": rope.theta, "rope_parameters": parameters, "rope_scaling": scaling}


def _mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = hf.get(name)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {values!r}, must be a mapping")
    for key, value in values.items():
        if isinstance(value, Mapping):
            raise ConfigError(
                f"{name} gives {key} a rotary embedding of its own; one embedding for all layers is needed"
            )
    return values


def _partial(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    inner = values.get("partial_rotary_factor")
    return hf.get("partial_rotary_factor") if inner is None else inner


def _theta(hf: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any], default: float) -> float:
    for values in (new, old, hf):
        value = values.get("rope_theta")
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"rope_theta is {value!r}, must be a positive number")
            return float(value)
    warnings.warn(
        f"the configuration names no rope_theta (rope_parameters, rope_scaling or top level); {default:g} is used",
        stacklevel=3,
    )
    return default
