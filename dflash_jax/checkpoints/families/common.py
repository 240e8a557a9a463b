"""What the families share: reading fields of `config.json`, and the placements of the usual blocks.

A family module has four public functions, which `hf_config` and `target_names` dispatch to by model_type:

    config_from_hf(hf) -> TargetConfig            refuses by ConfigError what is not implemented
    config_to_hf(config) -> dict                  need not check: the dispatch reads the result back and compares
    placements(config, own_head) -> tuple         one Placement a parameter, mostly `whole_model(...)`
    is_harmless(config, name, names) -> bool      stored tensors that carry nothing of the model

`join` functions are made of stack, concatenate, reshape and transpose only, so that they work on lazy views.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity, transposed
from dflash_jax.checkpoints.rope_config import rope_config_to_hf
from dflash_jax.config import ConfigError, TargetConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ROTARY_BUFFER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Fields:
    """The fields of a configuration, with its family's defaults where they are absent (not where they are null)."""

    def __init__(self, hf: Mapping[str, Any], family: str, defaults: Mapping[str, Any]):
        self.hf = hf
        self.family = family
        self.defaults = defaults

    def get(self, name: str) -> Any:
        return self.hf.get(name, self.defaults.get(name))

    def size(self, name: str) -> int:
        """A whole number >= 1."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, must be a positive whole number")
        return value

    def optional_size(self, name: str) -> int | None:
        """A whole number >= 1, or None."""
        return None if self.get(name) is None else self.size(name)

    def count(self, name: str) -> int:
        """A whole number >= 0; null counts as 0."""
        return self.size(name) if self.get(name) else 0

    def positive(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} is {value!r}, must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, must be true or false")
        return value

    def indices(self, name: str, limit: int) -> tuple[int, ...]:
        """A list of layers in [0, limit); null counts as empty."""
        value = self.get(name) or ()
        if not isinstance(value, Sequence) or not all(type(i) is int and 0 <= i < limit for i in value):
            raise ConfigError(f"{name} is {value!r}, must be a list of layers in [0, {limit})")
        return tuple(value)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuses fields that change the model in a way that is not implemented, unless absent, null or false."""
        for name, why in reasons.items():
            if self.hf.get(name) not in (None, False):
                raise ConfigError(f"{name} is set in this {self.family} configuration: {why}")

    def only(self, name: str, supported: Sequence[Any]) -> Any:
        """The field, refused where it is none of the supported values."""
        value = self.get(name)
        if value not in supported:
            listed = ", ".join(map(repr, supported))
            raise ConfigError(f"{name} is {value!r} in this {self.family} configuration; supported: {listed}")
        return value

    def silu(self) -> None:
        """Refuses activations other than SiLU."""
        if self.hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError(f"hidden_act is {self.hf['hidden_act']!r}; only silu is supported")

    def head_dim(self) -> int:
        """`head_dim`, else hidden_size / num_attention_heads."""
        given = self.optional_size("head_dim")
        if given is not None:
            return given
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim")
        return hidden // heads

    def for_rope(self) -> dict[str, Any]:
        """The configuration with the default length, for `rope_config_from_hf`."""
        return {"max_position_embeddings": self.defaults["max_position_embeddings"], **self.hf}

    def basic(self) -> dict[str, Any]:
        """The arguments of TargetConfig that every family spells alike."""
        heads = self.size("num_attention_heads")
        return {
            "family": self.family,
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size("intermediate_size"),
            "num_layers": self.size("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.optional_size("num_key_value_heads") or heads,
            "rms_norm_eps": self.positive("rms_norm_eps"),
            "max_positions": self.size("max_position_embeddings"),
            "tie_embeddings": self.flag("tie_word_embeddings"),
        }


def basic_to_hf(config: TargetConfig, architecture: str) -> dict[str, Any]:
    """The fields of `Fields.basic` with the head dim, the activation SiLU and `config.rope`."""
    return {
        "architectures": [architecture],
        "model_type": config.family,
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


def is_harmless(config: TargetConfig, name: str, names: Collection[str] = ()) -> bool:
    """Stored tensors that carry nothing of the model, whatever the family.

    Rotary frequencies that old versions saved as buffers (they are computed from the configuration), and
    the head of a checkpoint whose configuration ties it to the table.

    Args:
      names: of all tensors of the checkpoint.
    """
    del names
    return bool(_ROTARY_BUFFER.fullmatch(name)) or (name == HEAD and config.tie_embeddings)


def whole_model(
    config: TargetConfig,
    own_head: bool,
    layer: Callable[[TargetConfig, int, Path, str], list[Placement]],
    prefix: str = "model",
) -> tuple[Placement, ...]:
    """Table, final norm, head and every layer.

    Args:
      own_head: whether the tree has `head_DxV` though the configuration ties it; it is then filled with the
        transposed table.
      layer: called as layer(config, i, path, prefix of its tensors).
      prefix: of the decoder's tensors.
    """
    d, v = config.hidden_size, config.vocab_size
    embedding = f"{prefix}.embed_tokens.weight"
    placed = [
        identity(("embedding_VxD",), embedding, (v, d)),
        identity(("norm", "scale"), f"{prefix}.norm.weight", (d,)),
    ]
    if own_head or not config.tie_embeddings:
        placed.append(transposed(("head_DxV",), embedding if config.tie_embeddings else HEAD, (v, d)))
    for i in range(config.num_layers):
        placed += layer(config, i, ("layers", i), f"{prefix}.layers.{i}")
    return tuple(placed)


def pre_norms(config: TargetConfig, path: Path, prefix: str) -> list[Placement]:
    """The norms in front of attention and MLP under their usual names."""
    shape = (config.hidden_size,)
    return [
        identity((*path, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", shape),
        identity((*path, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", shape),
    ]


def attention(config: TargetConfig, layer: int, path: Path, prefix: str) -> list[Placement]:
    """Grouped-query attention from q_proj, k_proj, v_proj and o_proj, their biases, and norms on q and k.

    Args:
      path, prefix: of the attention (ends in "attention", ".self_attn").
    """
    d, n = config.hidden_size, config.num_heads
    g, h = config.kv_shape(layer)
    qkv = [f"{prefix}.{x}_proj" for x in "qkv"]
    rows = (n * h, g * h, g * h)
    placed = [
        Placement(
            (*path, "qkv_DxGxRxH"),
            tuple(StoredTensor(f"{name}.weight", (r, d)) for name, r in zip(qkv, rows, strict=True)),
            lambda *xs: join_groups(xs, g, h).transpose(3, 0, 1, 2),
            lambda x: split_groups(x.transpose(1, 2, 3, 0)),
        ),
        attention_out(path, f"{prefix}.o_proj.weight", (g, n // g, h, d)),
    ]
    if config.qk_norm:
        placed += [identity((*path, f"{x}_norm", "scale"), f"{prefix}.{x}_norm.weight", (h,)) for x in "qk"]
    if config.qkv_bias:
        placed.append(
            Placement(
                (*path, "qkv_bias_GxRxH"),
                tuple(StoredTensor(f"{name}.bias", (r,)) for name, r in zip(qkv, rows, strict=True)),
                lambda *xs: join_groups(xs, g, h)[..., 0],
                lambda x: tuple(y[:, 0] for y in split_groups(x[..., None])),
            )
        )
    if config.out_bias:
        placed.append(identity((*path, "out_bias_D"), f"{prefix}.o_proj.bias", (d,)))
    return placed


def attention_out(path: Path, name: str, shape: tuple[int, int, int, int]) -> Placement:
    """The output projection: stored [D, N*H], kept [G, R, H, D]; `shape` is the latter."""
    g, r, h, d = shape
    return Placement(
        (*path, "out_GxRxHxD"),
        (StoredTensor(name, (d, g * r * h)),),
        lambda x: x.T.reshape(g, r, h, d),
        lambda x: (x.reshape(g * r * h, d).T,),
    )


def mlp(path: Path, prefix: str, hidden: int, ffn: int, *, bias: bool = False) -> list[Placement]:
    """A gated MLP from gate_proj, up_proj and down_proj; also a shared expert.

    Args:
      path, prefix: of the MLP (end in "mlp", ".mlp").
    """
    gate_up = [f"{prefix}.{x}_proj" for x in ("gate", "up")]
    placed = [
        Placement(
            (*path, "gate_up_Dx2xF"),
            tuple(StoredTensor(f"{name}.weight", (ffn, hidden)) for name in gate_up),
            lambda gate, up: np.stack([gate, up]).transpose(2, 0, 1),
            lambda x: (x[:, 0].T, x[:, 1].T),
        ),
        transposed((*path, "down_FxD"), f"{prefix}.down_proj.weight", (hidden, ffn)),
    ]
    if bias:
        placed += [
            Placement(
                (*path, "gate_up_bias_2xF"),
                tuple(StoredTensor(f"{name}.bias", (ffn,)) for name in gate_up),
                lambda gate, up: np.stack([gate, up]),
                lambda x: (x[0], x[1]),
            ),
            identity((*path, "down_bias_D"), f"{prefix}.down_proj.bias", (hidden,)),
        ]
    return placed


def experts(
    path: Path,
    prefix: str,
    num: int,
    hidden: int,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Placement]:
    """Experts that are stored one by one, as {prefix}.{e}.{name}.weight.

    Args:
      path, prefix: of the experts (end in "moe", ".experts").
      names: of an expert's gate, up and down matrix.
    """
    gate, up, down = ([f"{prefix}.{e}.{name}.weight" for e in range(num)] for name in names)
    return [
        Placement(
            (*path, "gate_up_Ex2xDxF"),
            tuple(StoredTensor(name, (ffn, hidden)) for name in (*gate, *up)),
            lambda *xs: np.stack(xs).reshape(2, num, ffn, hidden).transpose(1, 0, 3, 2),
            lambda x: tuple(x.transpose(1, 0, 3, 2).reshape(2 * num, ffn, hidden)),
        ),
        Placement(
            (*path, "down_ExFxD"),
            tuple(StoredTensor(name, (hidden, ffn)) for name in down),
            lambda *xs: np.stack(xs).transpose(0, 2, 1),
            lambda x: tuple(x.transpose(0, 2, 1)),
        ),
    ]


def stacked_experts(path: Path, prefix: str, num: int, hidden: int, ffn: int) -> list[Placement]:
    """Experts that are stored in one tensor each for gate and up, and down: {prefix}.gate_up_proj, .down_proj.

    Args:
      path, prefix: of the experts (end in "moe", ".experts").
    """
    return [
        Placement(
            (*path, "gate_up_Ex2xDxF"),
            (StoredTensor(f"{prefix}.gate_up_proj", (num, 2 * ffn, hidden)),),
            lambda x: x.reshape(num, 2, ffn, hidden).transpose(0, 1, 3, 2),
            lambda x: (x.transpose(0, 1, 3, 2).reshape(num, 2 * ffn, hidden),),
        ),
        Placement(
            (*path, "down_ExFxD"),
            (StoredTensor(f"{prefix}.down_proj", (num, hidden, ffn)),),
            lambda x: x.transpose(0, 2, 1),
            lambda x: (x.transpose(0, 2, 1),),
        ),
    ]


def join_groups(rows: Sequence[np.ndarray], num_groups: int, head_dim: int) -> np.ndarray:
    """q [N*H, D], k and v [G*H, D] (or the same without D) -> [G, R, H, D or 1]: each group's q heads, k, v."""
    return np.concatenate(
        [x.reshape(num_groups, x.shape[0] // (num_groups * head_dim), head_dim, -1) for x in rows], axis=1
    )


def split_groups(x_GxRxHxD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `join_groups`."""
    d = x_GxRxHxD.shape[-1]
    parts = x_GxRxHxD[:, :-2], x_GxRxHxD[:, -2:-1], x_GxRxHxD[:, -1:]
    return tuple(x.reshape(-1, d) for x in parts)
