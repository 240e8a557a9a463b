"""The one map between z-lab tensor names of a DFlash drafter and its parameter tree."""

from __future__ import annotations

import numpy as np

from dflash_jax.checkpoints.placement import Path, Placement, StoredTensor, identity, transposed
from dflash_jax.config import DrafterConfig

# A drafter that brings one of these was not trained on the target's table or head.
OWN_EMBEDDING_OR_HEAD = (
    "embed_tokens.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
)


def drafter_placements(config: DrafterConfig) -> tuple[Placement, ...]:
    """Every parameter of `drafters.dflash.DFlash`, with the stored tensors it is made of.

    Stored are 3 tensors for the whole, two more where it has projections (which are of this program's making), two more
    where it has a Markov head (named as DSpark's), and 11 a layer (15 with attention_bias); matrices as [out, in].
    """
    d, e, width = config.hidden_size, config.target_hidden_size, len(config.target_layer_ids) * config.target_width
    placements = [
        transposed(("fc_TDxD",), "fc.weight", (d, width)),
        identity(("hidden_norm", "scale"), "hidden_norm.weight", (d,)),
        identity(("norm", "scale"), "norm.weight", (d,)),
    ]
    if e is not None:
        placements += [
            transposed(("embed_projection_ExD",), "embed_projection.weight", (d, e)),
            transposed(("head_projection_DxE",), "head_projection.weight", (e, d)),
        ]
    if config.markov_rank:
        table = (config.vocab_size, config.markov_rank)
        placements += [
            identity(("markov", f"{name}_VxR"), f"markov_head.markov_{name}.weight", table) for name in ("w1", "w2")
        ]
    for i in range(config.num_layers):
        placements += _layer(config, ("layers", i), f"layers.{i}")
    return tuple(placements)


def _layer(config: DrafterConfig, path: Path, prefix: str) -> list[Placement]:
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    n, g = config.num_heads, config.num_kv_heads
    attention, mlp = (*path, "attention"), (*path, "mlp")
    query, key, value, out = (f"{prefix}.self_attn.{x}_proj" for x in "qkvo")

    placements = [
        identity((*path, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", (d,)),
        identity((*path, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", (d,)),
        identity((*attention, "q_norm", "scale"), f"{prefix}.self_attn.q_norm.weight", (h,)),
        identity((*attention, "k_norm", "scale"), f"{prefix}.self_attn.k_norm.weight", (h,)),
        Placement(
            (*attention, "q_DxGxRxH"),
            (StoredTensor(f"{query}.weight", (n * h, d)),),
            lambda q: q.T.reshape(d, g, n // g, h),
            lambda x: (x.reshape(d, n * h).T,),
        ),
        Placement(
            (*attention, "kv_DxGx2xH"),
            (StoredTensor(f"{key}.weight", (g * h, d)), StoredTensor(f"{value}.weight", (g * h, d))),
            lambda k, v: np.stack([k.T.reshape(d, g, h), v.T.reshape(d, g, h)], axis=2),
            lambda x: (x[:, :, 0].reshape(d, g * h).T, x[:, :, 1].reshape(d, g * h).T),
        ),
        Placement(
            (*attention, "out_GxRxHxD"),
            (StoredTensor(f"{out}.weight", (d, n * h)),),
            lambda x: x.T.reshape(g, n // g, h, d),
            lambda x: (x.reshape(n * h, d).T,),
        ),
        Placement(
            (*mlp, "gate_up_Dx2xF"),
            tuple(StoredTensor(f"{prefix}.mlp.{x}_proj.weight", (f, d)) for x in ("gate", "up")),
            lambda gate, up: np.stack([gate.T, up.T], axis=1),
            lambda x: (x[:, 0].T, x[:, 1].T),
        ),
        transposed((*mlp, "down_FxD"), f"{prefix}.mlp.down_proj.weight", (d, f)),
    ]
    if config.attention_bias:
        placements += [
            Placement(
                (*attention, "q_bias_GxRxH"),
                (StoredTensor(f"{query}.bias", (n * h,)),),
                lambda q: q.reshape(g, n // g, h),
                lambda x: (x.reshape(n * h),),
            ),
            Placement(
                (*attention, "kv_bias_Gx2xH"),
                (StoredTensor(f"{key}.bias", (g * h,)), StoredTensor(f"{value}.bias", (g * h,))),
                lambda k, v: np.stack([k.reshape(g, h), v.reshape(g, h)], axis=1),
                lambda x: (x[:, 0].reshape(g * h), x[:, 1].reshape(g * h)),
            ),
            identity((*attention, "out_bias_D"), f"{out}.bias", (d,)),
        ]
    return placements
