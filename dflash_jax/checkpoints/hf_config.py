"""`config.json` of targets in Hugging Face's format to `TargetConfig` and back, by family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.families import FAMILIES, REFUSED, WRAPPERS
from dflash_jax.checkpoints.quantised import quantisation_from_hf
from dflash_jax.checkpoints.spelling import text_config
from dflash_jax.config import SLIDING, ConfigError, TargetConfig


def target_config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    """Reads the decoded `config.json` of a target; `families` has one module a kind of model.

    Of a multimodal model, the decoder's part (`text_config`) is read; the target takes text only.

    A field that the file leaves out has the default of its family's configuration class in transformers 5.

    Raises:
      ConfigError: the family or a field of it is not supported, or fields contradict each other.
    """
    family = hf.get("model_type")
    if family in REFUSED:
        raise ConfigError(f"model_type is {family!r}: {REFUSED[family]}")
    if family in WRAPPERS:
        return target_config_from_hf(text_config(hf, WRAPPERS[family]))
    if family not in FAMILIES:
        raise ConfigError(f"model_type is {family!r}; supported are {', '.join((*FAMILIES, *WRAPPERS))}")
    quantisation_from_hf(hf)  # refuses what can not be dequantised
    return FAMILIES[family].config_from_hf(hf)


def target_config_to_hf(config: TargetConfig) -> dict[str, Any]:
    """A `config.json` that `target_config_from_hf` and transformers read as `config`.

    Raises:
      ConfigError: the configuration has something that its family can not express.
    """
    family = config.family
    if family not in FAMILIES:
        raise ConfigError(f"family is {family!r}; Hugging Face configurations are written for {', '.join(FAMILIES)}")
    hf = FAMILIES[family].config_to_hf(config)
    expressed = target_config_from_hf(hf)
    for field in dataclasses.fields(TargetConfig):
        ours, theirs = getattr(config, field.name), getattr(expressed, field.name)
        if ours != theirs and not (field.name == "sliding_window" and SLIDING not in config.layer_types):
            raise ConfigError(f"a {family} config.json can not express {field.name} = {ours!r}")
    return hf
