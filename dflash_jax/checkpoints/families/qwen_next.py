"""Qwen3-Next, Qwen3.5 (dense and experts): Gated DeltaNet layers between gated full-attention layers.

Qwen3.5 is published as a multimodal model; its decoder is read, and text has the same position in all three
sections of its rotary embedding, which makes that plain rotary. Norm scales are stored around zero, all but the
gated norm inside the linear layers.

A head's query and gate lie next to each other in q_proj. The input of a linear layer is stored in two ways:
Qwen3-Next keeps a key head's q, k, v and z together (in_proj_qkvz, in_proj_ba), Qwen3.5 has all heads' q, then
k, then v (in_proj_qkv), and z, b and a apart. The convolution's channels are ordered in the second way in both.

The defaults are those of the configuration classes of transformers 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Part, Path, Placement, StoredTensor, identity, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, LINEAR, ConfigError, DeltaConfig, MoeConfig, TargetConfig

_COMMON = {
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True}
DEFAULTS = {
    "qwen3_next": {
        **_COMMON,
        **_EXPERTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "qwen3_5_text": {
        **_COMMON,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {
        **_COMMON,
        **_EXPERTS,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}
# Multimodal model_type -> that of its text_config.
WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

_ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    if family == "qwen3_5_moe_text" and hf.get("intermediate_size") is None:
        # Has no dense layers, and most files do not give their width.
        hf = {**hf, "intermediate_size": hf.get("moe_intermediate_size", _EXPERTS["moe_intermediate_size"])}
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse({"attention_bias": "biases of the gated attention's projections are not supported"})
    fields.silu()
    if not hf.get("attn_output_gate", True):
        raise ConfigError("attn_output_gate is false: full attention without an output gate is not supported")
    head_dim = fields.size("head_dim")
    rotary_dim, rope = _rope(fields, head_dim)
    layer_types = _layer_types(fields)
    return TargetConfig(
        **fields.basic(),
        head_dim=head_dim,
        rope=rope,
        layer_types=layer_types,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        attention_gate=True,
        qk_norm=True,
        norm_offset=1.0,
        moe=None if family == "qwen3_5_text" else _moe(fields),
        delta=_delta(fields) if LINEAR in layer_types else None,
    )


def _delta(fields: Fields) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        conv_width=fields.size("linear_conv_kernel_dim"),
    )


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    family, delta, moe = config.family, config.delta, config.moe
    hf = common.basic_to_hf(config, _ARCHITECTURES[family])
    factor = (config.rotary_dim or config.head_dim) / config.head_dim
    hf["partial_rotary_factor"] = hf["rope_parameters"]["partial_rotary_factor"] = factor
    if hf["rope_scaling"] is not None:
        hf["rope_scaling"]["partial_rotary_factor"] = factor
    hf["layer_types"] = list(config.layer_types)
    if delta is not None:
        hf.update(
            linear_num_key_heads=delta.num_key_heads,
            linear_num_value_heads=delta.num_value_heads,
            linear_key_head_dim=delta.key_dim,
            linear_value_head_dim=delta.value_dim,
            linear_conv_kernel_dim=delta.conv_width,
        )
    if family == "qwen3_5_text":
        return hf
    if family == "qwen3_next":
        sparse = () if moe is None else moe.layers
        hf.update(decoder_sparse_step=1, mlp_only_layers=[i for i in range(config.num_layers) if i not in sparse])
    if moe is None:
        hf["num_experts"] = 0
        return hf
    hf.update(
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.intermediate_size,
        shared_expert_intermediate_size=moe.shared_intermediate_size,
        norm_topk_prob=moe.normalise,
    )
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def is_harmless(config: TargetConfig, name: str, names: Collection[str] = ()) -> bool:
    """Also the multi-token prediction head (`mtp.`), a drafter of its own that is not part of the target."""
    return name.startswith("mtp.") or common.is_harmless(config, name, names)


def _rope(fields: Fields, head_dim: int):
    """(rotated channels of a head, RopeConfig); the factor is inside the rotary mapping, else at the top."""
    hf = dict(fields.for_rope())
    factor = hf.pop("partial_rotary_factor", None)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(hf.get(name), Mapping):
            hf[name] = dict(hf[name])
            inner = hf[name].pop("partial_rotary_factor", None)
            factor = inner if inner is not None and (factor is None or name == "rope_parameters") else factor
    factor = fields.defaults["partial_rotary_factor"] if factor is None else factor
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"partial_rotary_factor is {factor!r}: of heads of {head_dim} it rotates {rotary_dim} channels, must be "
            "an even number of them"
        )
    return rotary_dim, rope_config_from_hf(hf)


def _layer_types(fields: Fields) -> tuple[str, ...]:
    explicit = fields.hf.get("layer_types")
    if explicit is not None:
        return tuple(explicit)
    interval = fields.size("full_attention_interval")
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(fields.size("num_hidden_layers")))


def _moe(fields: Fields) -> MoeConfig | None:
    layers: tuple[int, ...] = tuple(range(fields.size("num_hidden_layers")))
    if fields.family == "qwen3_next":
        dense, step = fields.indices("mlp_only_layers", len(layers)), fields.size("decoder_sparse_step")
        layers = tuple(i for i in layers if i not in dense and (i + 1) % step == 0 and fields.count("num_experts"))
    else:
        fields.only("norm_topk_prob", (True,))
    if not layers:
        return None
    return MoeConfig(
        num_experts=fields.size("num_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        layers=layers,
        normalise=fields.flag("norm_topk_prob"),
        shared_intermediate_size=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, moe = config.hidden_size, config.moe
    placed = common.pre_norms(config, path, prefix)
    if config.layer_types[i] == LINEAR:
        placed += _delta_net(config, (*path, "attention"), f"{prefix}.linear_attn")
    else:
        placed += _gated_attention(config, i, (*path, "attention"), f"{prefix}.self_attn")
    if moe is None or i not in moe.layers:
        return placed + common.mlp((*path, "mlp"), f"{prefix}.mlp", d, config.intermediate_size)
    moe_path, moe_prefix = (*path, "moe"), f"{prefix}.mlp"
    stored = common.experts if config.family == "qwen3_next" else common.stacked_experts
    return [
        *placed,
        transposed((*moe_path, "router_DxE"), f"{moe_prefix}.gate.weight", (moe.num_experts, d)),
        *stored(moe_path, f"{moe_prefix}.experts", moe.num_experts, d, moe.intermediate_size),
        *common.mlp((*moe_path, "shared"), f"{moe_prefix}.shared_expert", d, moe.shared_intermediate_size),
        transposed((*moe_path, "shared_gate_Dx1"), f"{moe_prefix}.shared_expert_gate.weight", (1, d)),
    ]


def _gated_attention(config: TargetConfig, layer: int, path: Path, prefix: str) -> list[Placement]:
    """q_proj holds each head's query, then its gate."""
    d, n = config.hidden_size, config.num_heads
    g, h = config.kv_shape(layer)

    def half(index: int) -> StoredTensor:
        return StoredTensor(f"{prefix}.q_proj.weight", (n * 2 * h, d), Part(n, index * h, (index + 1) * h))

    def split_qkv(x_DxGxRxH: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v = common.split_groups(x_DxGxRxH.transpose(1, 2, 3, 0))
        return q.reshape(n, h, d), k, v

    return [
        Placement(
            (*path, "qkv_DxGxRxH"),
            (half(0), *(StoredTensor(f"{prefix}.{x}_proj.weight", (g * h, d)) for x in "kv")),
            lambda q, k, v: common.join_groups((q.reshape(n * h, d), k, v), g, h).transpose(3, 0, 1, 2),
            split_qkv,
        ),
        Placement(
            (*path, "gate_DxGxRxH"),
            (half(1),),
            lambda gate: gate.reshape(g, n // g, h, d).transpose(3, 0, 1, 2),
            lambda x: (x.transpose(1, 2, 3, 0).reshape(n, h, d),),
        ),
        common.attention_out(path, f"{prefix}.o_proj.weight", (g, n // g, h, d)),
        *(identity((*path, f"{x}_norm", "scale"), f"{prefix}.{x}_norm.weight", (h,)) for x in "qk"),
    ]


def _delta_net(config: TargetConfig, path: Path, prefix: str) -> list[Placement]:
    d, delta = config.hidden_size, config.delta
    g, p, h, w = delta.num_key_heads, delta.key_dim, delta.value_dim, delta.conv_width
    r = delta.num_value_heads // g
    inputs = _fused_inputs if config.family == "qwen3_next" else _separate_inputs
    return [
        *inputs(path, prefix, d, g, r, p, h),
        Placement(
            (*path, "conv_WxGxC"),
            _by_kind(f"{prefix}.conv1d.weight", g, (p, p, r * h), (1, w)),
            lambda q, k, v: np.concatenate([x.reshape(g, -1, w) for x in (q, k, v)], axis=1).transpose(2, 0, 1),
            lambda x: _split_kinds(x.transpose(1, 2, 0), (p, p, r * h), (1, w)),
        ),
        *(
            Placement(
                (*path, ours),
                (StoredTensor(f"{prefix}.{theirs}", (g * r,)),),
                lambda x: x.reshape(g, r),
                lambda x: (x.reshape(g * r),),
            )
            for ours, theirs in (("a_log_GxR", "A_log"), ("dt_bias_GxR", "dt_bias"))
        ),
        identity((*path, "norm", "scale"), f"{prefix}.norm.weight", (h,)),
        common.attention_out(path, f"{prefix}.out_proj.weight", (g, r, h, d)),
    ]


def _fused_inputs(path: Path, prefix: str, d: int, g: int, r: int, p: int, h: int) -> list[Placement]:
    c = 2 * (p + r * h)
    return [
        Placement(
            (*path, "qkvz_DxGxC"),
            (StoredTensor(f"{prefix}.in_proj_qkvz.weight", (g * c, d)),),
            lambda x: x.reshape(g, c, d).transpose(2, 0, 1),
            lambda x: (x.transpose(1, 2, 0).reshape(g * c, d),),
        ),
        Placement(
            (*path, "ba_DxGx2xR"),
            (StoredTensor(f"{prefix}.in_proj_ba.weight", (g * 2 * r, d)),),
            lambda x: x.reshape(g, 2, r, d).transpose(3, 0, 1, 2),
            lambda x: (x.transpose(1, 2, 3, 0).reshape(g * 2 * r, d),),
        ),
    ]


def _separate_inputs(path: Path, prefix: str, d: int, g: int, r: int, p: int, h: int) -> list[Placement]:
    widths = (p, p, r * h, r * h)

    def split(x_DxGxC: np.ndarray) -> tuple[np.ndarray, ...]:
        *qkv, z = _split_kinds(x_DxGxC.transpose(1, 2, 0), widths, (d,))
        return *qkv, z[0]

    return [
        Placement(
            (*path, "qkvz_DxGxC"),
            (
                *_by_kind(f"{prefix}.in_proj_qkv.weight", g, widths[:3], (d,)),
                StoredTensor(f"{prefix}.in_proj_z.weight", (g * r * h, d)),
            ),
            lambda *xs: np.concatenate([x.reshape(g, -1, d) for x in xs], axis=1).transpose(2, 0, 1),
            split,
        ),
        Placement(
            (*path, "ba_DxGx2xR"),
            tuple(StoredTensor(f"{prefix}.in_proj_{x}.weight", (g * r, d)) for x in "ba"),
            lambda *xs: np.stack([x.reshape(g, r, d) for x in xs], axis=1).transpose(3, 0, 1, 2),
            lambda x: tuple(y.transpose(1, 2, 0).reshape(g * r, d) for y in (x[:, :, 0], x[:, :, 1])),
        ),
    ]


def _by_kind(name: str, g: int, widths: tuple[int, ...], rest: tuple[int, ...]) -> tuple[StoredTensor, ...]:
    """A tensor [sum(widths) * g, *rest] in one part a kind: all heads' q, all heads' k, all heads' v."""
    shape = (g * sum(widths), *rest)
    ends = np.cumsum([0, *widths]) * g
    return tuple(StoredTensor(name, shape, Part(1, int(start), int(stop))) for start, stop in itertools.pairwise(ends))


def _split_kinds(x_GxCxR: np.ndarray, widths: tuple[int, ...], rest: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """[G, sum(widths), rest] -> a [1, G * width, *rest] for each kind, as `_by_kind` takes them."""
    ends = np.cumsum([0, *widths])
    return tuple(x_GxCxR[:, start:stop].reshape(1, -1, *rest) for start, stop in itertools.pairwise(ends))
