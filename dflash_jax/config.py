"""Frozen configurations of models and runs.

Experiment files speak `ml_collections.ConfigDict`; the program speaks these dataclasses. The change of
language happens once, at the boundary (`from_config_dict`), so that a jitted function may take any of
them as a static, hashable argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

FULL = "full_attention"
SLIDING = "sliding_attention"

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that can not be right: names the field, the value and the way out."""


def from_config_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds dataclass `cls` from a mapping, refusing unknown and missing fields by name.

    Raises:
      ConfigError: a key of `values` is no field of `cls`, or a field without default is missing.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {unknown[0]!r}; it knows {', '.join(sorted(fields))}")
    missing = sorted(
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values
    )
    if missing:
        raise ConfigError(f"{cls.__name__} needs the field {missing[0]!r}, which is not set")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is one of default, linear, llama3, yarn.

    `factor` and the fields after it are read by the scaled kinds only. `attention_factor` multiplies
    cos and sin (YaRN); None means the kind's own rule.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(f"rope kind {self.kind!r} is not supported; supported are default, linear, llama3, yarn")
        if self.kind in ("llama3", "yarn") and not self.original_max_positions:
            raise ConfigError(f"rope kind {self.kind!r} needs original_max_position_embeddings, which is not set")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A dense decoder-only target: Llama, Mistral, Qwen2/2.5 and Qwen3 differ only in these fields.

    `layer_types` has one of `full_attention` and `sliding_attention` a layer; a sliding layer sees key
    position k from query position q iff 0 <= q - k < sliding_window.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    final_logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_attention(self)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (block-diffusion transformer conditioned on tapped target layers).

    `block_size` counts the anchor: block_size - 1 tokens are drafted. `target_layer_ids` are 0-based
    decoder layers of the target whose *output* residual stream is tapped. `causal` overrides, for every
    layer, whether a block slot sees later slots; None means the format's rule: sliding layers causal,
    full layers two-sided. `attention_bias` covers q, k, v and the output projection. `embedding_scale` and
    `final_logit_softcap` are None where the target's apply; 1.0 and 0.0 mean none at all.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    max_positions: int
    sliding_window: int | None = None
    causal: bool | None = None
    attention_bias: bool = False
    embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_attention(self)
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}, must be at least 2 (the anchor and one drafted token)")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}, must lie in [0, {self.vocab_size}): the mask is "
                "embedded with the target's own table, which is never resized"
            )
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty: a DFlash drafter needs at least one tapped layer")
        for tap in self.target_layer_ids:
            if not 0 <= tap < self.num_target_layers:
                raise ConfigError(
                    f"target_layer_ids holds {tap}, must lie in [0, {self.num_target_layers}): ids are "
                    "0-based decoder layers of the target, negative ids are not accepted"
                )
        if tuple(sorted(set(self.target_layer_ids))) != self.target_layer_ids:
            raise ConfigError(
                f"target_layer_ids {self.target_layer_ids} must be strictly ascending: fc concatenates the "
                "taps in id order"
            )

    def layer_is_causal(self, layer: int) -> bool:
        """Whether slot i of a block sees only slots <= i in this layer (both in training and serving)."""
        return self.layer_types[layer] == SLIDING if self.causal is None else self.causal


def check_attention(config: TargetConfig | DrafterConfig) -> None:
    """Checks the fields that target and drafter share.

    Raises:
      ConfigError: heads do not group, head_dim is odd, or layer_types contradict the other fields.
    """
    name = type(config).__name__
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{name}: num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}")
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"{name}: head_dim is {config.head_dim}, rotary embedding needs an even number >= 2")
    if len(config.layer_types) != config.num_layers:
        raise ConfigError(f"{name}: layer_types has {len(config.layer_types)} entries for {config.num_layers} layers")
    for kind in config.layer_types:
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"{name}: layer type {kind!r} is not supported; supported are {FULL}, {SLIDING}")
    if SLIDING in config.layer_types and not config.sliding_window:
        raise ConfigError(f"{name}: layer_types has {SLIDING} but sliding_window is {config.sliding_window}")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's default taps: evenly spaced from layer 1 to layer num_target_layers - 3.

    Rounds half to even, as the reference does. Source: z-lab/dflash, build_target_layer_ids.

    Raises:
      ConfigError: the target is too shallow for the rule (it would repeat, turn back or leave the range).
    """
    if num_taps == 1:
        ids = (num_target_layers // 2,)
    else:
        ids = tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if ids != tuple(sorted(set(ids))) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise ConfigError(
            f"the default rule gives taps {ids} for {num_target_layers} target layers and {num_taps} taps; "
            "set target_layer_ids explicitly"
        )
    return ids
