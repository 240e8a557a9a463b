"""Frozen configurations of models and runs.

Experiment files speak `ml_collections.ConfigDict`; the program speaks these dataclasses. The change of
language happens once, at the boundary (`from_config_dict`), so that a jitted function may take any of
them as a static, hashable argument.
"""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dflash_jax import field_types

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"  # sees its own aligned chunk only
LINEAR = "linear_attention"  # a recurrent state instead of keys and values
ACTIVATIONS = ("silu", "gelu_tanh", "clipped_swiglu")

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that can not be right: names the field, the value and the way out."""


def from_config_dict(cls: type[T], values: Mapping[str, Any], section: str = "") -> T:
    """Builds dataclass `cls` from a mapping, refusing unknown and missing fields and other types by name.

    Args:
      section: what `values` is called in the config, for messages; the name of `cls` where it is left out.

    Raises:
      ConfigError: `values` is no mapping, a key of it is no field of `cls`, a field without default is missing, or a
        value is not of its field's type (see `field_types.fits`).
    """
    if not hasattr(values, "items"):
        raise ConfigError(f"{section or cls.__name__} is {values!r}, must be a section with fields of its own")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(
            f"{section or cls.__name__} has no field {unknown[0]!r}; it knows {', '.join(sorted(fields))}"
        )
    missing = sorted(
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values
    )
    if missing:
        raise ConfigError(f"{section or cls.__name__} needs the field {missing[0]!r}, which is not set")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    check_types(given, typing.get_type_hints(cls), section or cls.__name__)
    return cls(**given)


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Any], section: str) -> None:
    """Refuses values that are not of their field's type.

    Args:
      kinds: annotation by field; fields without one are not looked at. A ConfigDict counts as a mapping.

    Raises:
      ConfigError: names the first, its value and what it must be.
    """
    for name, value in values.items():
        plain = value.to_dict() if hasattr(value, "to_dict") else value
        if name in kinds and not field_types.fits(plain, kinds[name]):
            raise ConfigError(f"{section}.{name} is {plain!r}, must be {field_types.described(kinds[name])}")


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
class MoeConfig:
    """Mixture of experts in place of the dense MLP of some decoder layers.

    A token's expert scores are softmax or sigmoid of the router's logits in float32; the highest
    `experts_per_token` are chosen and weighted by their scores.

    Attributes:
      intermediate_size: of one expert.
      layers: decoder layers that have experts; the others are dense.
      scoring: "softmax" or "sigmoid", over all experts.
      normalise: the chosen weights are divided by their sum. (A softmax over the chosen logits alone is the
        softmax over all of them, normalised.)
      scale: factor on the weights, after normalising.
      num_groups, groups_per_token: experts are chosen inside the best `groups_per_token` of `num_groups` equal
        groups only; a group is as good as its best expert ("max") or its two best together ("top2"), by
        `group_score`.
      selection_bias: a learned bias a expert is added to its score where experts and groups are chosen, not in
        the weights (DeepSeek-V3).
      router_bias, expert_bias: the router's and the experts' products have biases (gpt-oss).
      weigh_input: the weight multiplies the expert's input instead of its output (Llama 4).
      shared_intermediate_size: of an expert that every token goes through; 0 for none.
      shared_gate: the shared expert's output is scaled by a sigmoid gate of the token.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[int, ...]
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "max"
    selection_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    weigh_input: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(f"experts_per_token is {self.experts_per_token}, must lie in [1, {self.num_experts}]")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"expert scoring is {self.scoring!r}, must be 'softmax' or 'sigmoid'")
        if self.group_score not in ("max", "top2"):
            raise ConfigError(f"group_score is {self.group_score!r}, must be 'max' or 'top2'")
        if self.num_experts % self.num_groups or not 1 <= self.groups_per_token <= self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts in {self.num_groups} groups, {self.groups_per_token} groups a token: "
                "groups must be equal in size and the number chosen must lie in [1, groups]"
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.groups_per_token:
            raise ConfigError(
                f"experts_per_token is {self.experts_per_token}, but the {self.groups_per_token} chosen groups hold "
                f"only {self.num_experts // self.num_groups * self.groups_per_token} experts"
            )


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): keys and values are made of one cached latent a token.

    A head's query and key have `nope_dim` channels made from the latent and `rope_dim` rotated ones, the key's
    rotated part being common to all heads; its value has `value_dim`. `q_rank` is the rank of the query's
    own latent, None where queries are projected directly.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet layers (Yang et al., 2024): a matrix state of key_dim x value_dim a value head.

    Each key head serves num_value_heads / num_key_heads value heads. `conv_width` is the taps of the causal
    depthwise convolution in front of q, k and v.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"{self.num_value_heads} linear value heads are no multiple of {self.num_key_heads} key heads"
            )
        if self.conv_width < 2:
            raise ConfigError(f"the convolution of linear attention has width {self.conv_width}, must be at least 2")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target. Families differ in these fields only.

    Attributes:
      layer_types: one of FULL, SLIDING, CHUNKED and LINEAR a layer. A sliding layer sees key position k from
        query position q iff 0 <= q - k < sliding_window, a chunked one iff k <= q lies in the same aligned
        chunk of attention_chunk positions.
      full_num_kv_heads, full_head_dim: of full layers, where they differ from the others' (Gemma 4).
      full_value_is_key: full layers have no value projection: the unrotated, unnormed key is the value.
      rotary_dim: leading channels of a head that are rotated; None: all of them.
      full_rotary_dim: the same of full layers, where it differs; the frequencies are those of the whole head
        (the angles beyond it are zero), as Gemma 4's proportional kind has it.
      rope: of full layers, and of all where `rope_sliding` is None.
      nope_layers: layers without rotary embedding.
      attention_scale: factor on the scores; None: head_dim ** -0.5.
      attention_softcap: cap * tanh(score / cap) before the softmax.
      attention_sinks: a learned logit a head joins every softmax and carries no value (gpt-oss).
      attention_gate: the attention's output is multiplied by sigmoid(gate), a channel each (Qwen3-Next).
      attention_temperature: (floor, scale): queries of layers in nope_layers are multiplied by
        1 + scale * log(1 + floor((position + 1) / floor)) (Llama 4).
      qk_norm: RMSNorm with a learned scale on each head's q and k, before rotation.
      qk_unit_norm: the same without a scale, after rotation, in rotated layers only (Llama 4).
      v_norm: RMSNorm without a scale on each head's v.
      norm_offset: added to the scale of every RMSNorm; 1 where checkpoints store scales around zero.
      post_norms: each block's output is normed again before it is added (sandwich).
      layer_scale: each layer's output is multiplied by a learned number.
      activation: of the MLP and the experts.
      activation_limit: clipped_swiglu only.
      moe, latent, delta: see their classes; None where the target has none.
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
    attention_chunk: int | None = None
    full_num_kv_heads: int | None = None
    full_head_dim: int | None = None
    full_value_is_key: bool = False
    rotary_dim: int | None = None
    full_rotary_dim: int | None = None
    rope_sliding: RopeConfig | None = None
    nope_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_temperature: tuple[float, float] | None = None
    qk_norm: bool = False
    qk_unit_norm: bool = False
    v_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    layer_scale: bool = False
    activation: str = "silu"
    activation_limit: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    final_logit_softcap: float | None = None
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None

    def __post_init__(self) -> None:
        check_attention(self, (FULL, SLIDING, CHUNKED, LINEAR))
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {self.activation!r}, must be one of {', '.join(ACTIVATIONS)}")
        if CHUNKED in self.layer_types and not self.attention_chunk:
            raise ConfigError(f"layer_types has {CHUNKED} but attention_chunk is {self.attention_chunk}")
        if (LINEAR in self.layer_types) != (self.delta is not None):
            raise ConfigError(f"layer_types {self.layer_types} and delta {self.delta} contradict each other")
        if self.moe is not None and not all(0 <= i < self.num_layers for i in self.moe.layers):
            raise ConfigError(f"moe.layers {self.moe.layers} must lie in [0, {self.num_layers})")

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """(KV heads, head dim) of a layer with grouped-query attention."""
        if self.layer_types[layer] != FULL:
            return self.num_kv_heads, self.head_dim
        return self.full_num_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of a layer."""
        return self.rope if self.rope_sliding is None or self.layer_types[layer] == FULL else self.rope_sliding


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (block-diffusion transformer conditioned on tapped target layers).

    `block_size` counts the anchor: block_size - 1 tokens are drafted. `target_layer_ids` are 0-based
    decoder layers of the target whose *output* residual stream is tapped. `causal` overrides, for every
    layer, whether a block slot sees later slots; None means the format's rule: sliding layers causal,
    full layers two-sided. `attention_bias` covers q, k, v and the output projection. `embedding_scale` and
    `final_logit_softcap` are None where the target's apply; 1.0 and 0.0 mean none at all.

    `target_hidden_size` is None for a drafter whose width is the target's, which reads the target's table and head as
    they are. A number (the target's width, which may be the drafter's too) says that the drafter has projections of
    its own between the two: table to trunk and trunk to head.

    `markov_rank` is the rank of a Markov head (`drafters.dflash.MarkovHead`): each drafted token then shifts the logits
    of the next one. 0: none, slots are drafted independently of each other.
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
    target_hidden_size: int | None = None
    markov_rank: int = 0

    def __post_init__(self) -> None:
        check_attention(self)
        if not field_types.fits(self.markov_rank, int) or self.markov_rank < 0:
            raise ConfigError(
                f"markov_rank is {self.markov_rank!r}, must be a whole number: at least 1, or 0 for no Markov head"
            )
        if self.target_hidden_size is not None and self.target_hidden_size < 1:
            raise ConfigError(
                f"target_hidden_size is {self.target_hidden_size}, must be at least 1 (None: the drafter's own width)"
            )
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

    @property
    def target_width(self) -> int:
        """Hidden size of the target: of its taps, its table and its head."""
        return self.hidden_size if self.target_hidden_size is None else self.target_hidden_size

    def layer_is_causal(self, layer: int) -> bool:
        """Whether slot i of a block sees only slots <= i in this layer (both in training and serving)."""
        return self.layer_types[layer] == SLIDING if self.causal is None else self.causal


def check_attention(config: TargetConfig | DrafterConfig, kinds: Sequence[str] = (FULL, SLIDING)) -> None:
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
        if kind not in kinds:
            raise ConfigError(f"{name}: layer type {kind!r} is not supported; supported are {', '.join(kinds)}")
    if SLIDING in config.layer_types and not config.sliding_window:
        raise ConfigError(f"{name}: layer_types has {SLIDING} but sliding_window is {config.sliding_window}")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's default taps: evenly spaced from layer 1 to layer num_target_layers - 3.

    Rounds half to even, as the reference does. Source: z-lab/dflash, build_target_layer_ids.

    Raises:
      ConfigError: the target is too shallow for the rule (it would repeat, turn back or leave the range).
    """
    if num_taps < 1:
        raise ConfigError(f"target_layer_ids is {num_taps}, must be a number of taps, at least 1, or the layers' ids")
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


def check_output_file(flag: str, path: str | pathlib.Path | None) -> None:
    """Refuses a file that can not be written in the end, before anything is done for it; None is none.

    Raises:
      ConfigError: names the flag.
    """
    if path is not None:
        parent = pathlib.Path(path).absolute().parent
        if not parent.is_dir() or pathlib.Path(path).is_dir():
            raise ConfigError(f"--{flag} is {str(path)!r}, which can not be a file: {parent} must exist")
