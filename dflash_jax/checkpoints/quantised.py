"""Quantised weights in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.config import ConfigError


def check_quantisation(hf: Mapping[str, Any]) -> None:
    """Refuses a `quantization_config` whose weights can not be dequantised on load."""
    if hf.get("quantization_config") is not None:
        raise ConfigError(
            "quantization_config is set: quantised weights are not read; load the unquantised checkpoint or a GGUF file"
        )
