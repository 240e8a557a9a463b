"""The one map between Hugging Face tensor names of a dense target and its parameter tree."""

from __future__ import annotations

import re

import numpy as np

from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity, transposed
from dflash_jax.config import TargetConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ROTARY_BUFFER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def target_placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    """Every parameter of `models.transformer.Transformer`, with the tensors it comes from.

    Args:
      own_head: whether the tree has `head_DxV`; where the configuration ties the head, it is then filled
        with the transposed embedding table.
    """
    d, v = config.hidden_size, config.vocab_size
    placements = [
        identity(("embedding_VxD",), EMBEDDING, (v, d)),
        identity(("norm", "scale"), "model.norm.weight", (d,)),
    ]
    if own_head or not config.tie_embeddings:
        placements.append(transposed(("head_DxV",), EMBEDDING if config.tie_embeddings else HEAD, (v, d)))
    for i in range(config.num_layers):
        placements += _layer(config, ("layers", i), f"model.layers.{i}")
    return tuple(placements)


def is_harmless(config: TargetConfig, name: str) -> bool:
    """Stored tensors that carry nothing of the model.

    Rotary frequencies that old versions saved as buffers (they are computed from the configuration), and
    the head of a checkpoint whose configuration ties it to the table.
    """
    return bool(_ROTARY_BUFFER.fullmatch(name)) or (name == HEAD and config.tie_embeddings)


def _layer(config: TargetConfig, path: Path, prefix: str) -> list[Placement]:
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    n, g = config.num_heads, config.num_kv_heads
    attention, mlp = (*path, "attention"), (*path, "mlp")
    qkv = [f"{prefix}.self_attn.{x}_proj" for x in "qkv"]
    rows = (n * h, g * h, g * h)
    gate_up = [f"{prefix}.mlp.{x}_proj" for x in ("gate", "up")]

    placements = [
        identity((*path, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", (d,)),
        identity((*path, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", (d,)),
        Placement(
            (*attention, "qkv_DxGxRxH"),
            tuple(StoredTensor(f"{name}.weight", (r, d)) for name, r in zip(qkv, rows, strict=True)),
            lambda *xs: _join_groups(xs, g, h).transpose(3, 0, 1, 2),
            lambda x: _split_groups(x.transpose(1, 2, 3, 0)),
        ),
        Placement(
            (*attention, "out_GxRxHxD"),
            (StoredTensor(f"{prefix}.self_attn.o_proj.weight", (d, n * h)),),
            lambda x: x.T.reshape(g, n // g, h, d),
            lambda x: (x.reshape(n * h, d).T,),
        ),
        Placement(
            (*mlp, "gate_up_Dx2xF"),
            tuple(StoredTensor(f"{name}.weight", (f, d)) for name in gate_up),
            lambda gate, up: np.stack([gate, up]).transpose(2, 0, 1),
            lambda x: (x[:, 0].T, x[:, 1].T),
        ),
        transposed((*mlp, "down_FxD"), f"{prefix}.mlp.down_proj.weight", (d, f)),
    ]
    if config.qk_norm:
        placements += [
            identity((*attention, f"{x}_norm", "scale"), f"{prefix}.self_attn.{x}_norm.weight", (h,)) for x in "qk"
        ]
    if config.qkv_bias:
        placements.append(
            Placement(
                (*attention, "qkv_bias_GxRxH"),
                tuple(StoredTensor(f"{name}.bias", (r,)) for name, r in zip(qkv, rows, strict=True)),
                lambda *xs: _join_groups(xs, g, h)[..., 0],
                lambda x: tuple(y[:, 0] for y in _split_groups(x[..., None])),
            )
        )
    if config.out_bias:
        placements.append(identity((*attention, "out_bias_D"), f"{prefix}.self_attn.o_proj.bias", (d,)))
    if config.mlp_bias:
        placements += [
            Placement(
                (*mlp, "gate_up_bias_2xF"),
                tuple(StoredTensor(f"{name}.bias", (f,)) for name in gate_up),
                lambda gate, up: np.stack([gate, up]),
                lambda x: (x[0], x[1]),
            ),
            identity((*mlp, "down_bias_D"), f"{prefix}.mlp.down_proj.bias", (d,)),
        ]
    return placements


def _join_groups(rows: tuple[np.ndarray, ...], num_groups: int, head_dim: int) -> np.ndarray:
    """q [N*H, D], k and v [G*H, D] (or the same without D) -> [G, R, H, D or 1]: each group's q heads, k, v."""
    return np.concatenate(
        [x.reshape(num_groups, x.shape[0] // (num_groups * head_dim), head_dim, -1) for x in rows], axis=1
    )


def _split_groups(x_GxRxHxD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `_join_groups`."""
    d = x_GxRxHxD.shape[-1]
    parts = x_GxRxHxD[:, :-2], x_GxRxHxD[:, -2:-1], x_GxRxHxD[:, -1:]
    return tuple(x.reshape(-1, d) for x in parts)
