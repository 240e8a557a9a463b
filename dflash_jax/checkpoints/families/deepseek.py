"""DeepSeek-V2 (and V2-Lite) and DeepSeek-V3 (and R1): latent attention, experts chosen inside groups.

V2 scores experts by a softmax and a group by its best expert; V3 by sigmoids, a group by its two best, with
a learned bias that counts in the choice only. Where YaRN has `mscale_all_dim`, the scores are scaled by the
square of 0.1 * mscale_all_dim * ln(factor) + 1 besides. Rotated channels are stored as neighbouring pairs and
kept as two halves. The layer behind the last one in V3's files predicts a second token; it is not loaded.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.families import common, dense
from dflash_jax.checkpoints.families.common import Fields
from dflash_jax.checkpoints.placement import Part, Path, Placement, StoredTensor, identity, transposed
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, ConfigError, LatentConfig, MoeConfig, RopeConfig, TargetConfig

_V2 = {
    **dense.LLAMA,
    "vocab_size": 102400,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "v_head_dim": 128,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}
_V3 = {
    **_V2,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
DEFAULTS = {"deepseek_v2": _V2, "deepseek_v3": _V3}
_ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
_TOPK_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
_REFUSED = {
    "attention_bias": "biases in latent attention are not supported",
    "mlp_bias": "biases in the MLP of this family are not supported",
    "index_topk": "sparse attention (an indexer that chooses keys) is not supported",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


def is_harmless(config: TargetConfig, name: str, names: Collection[str] = ()) -> bool:
    """Also the multi-token prediction of V3: one more layer behind the last, known by the projection that only such a
    layer has. Without it a layer there is one of the model, and num_hidden_layers too small."""
    if common.is_harmless(config, name):
        return True
    layer = _LAYER_NAME.match(name)
    behind = config.family == "deepseek_v3" and layer is not None and int(layer[1]) == config.num_layers
    return behind and f"{layer[0]}eh_proj.weight" in names


def config_from_hf(hf: Mapping[str, Any]) -> TargetConfig:
    family = hf["model_type"]
    fields = Fields(hf, family, DEFAULTS[family])
    fields.refuse(_REFUSED)
    fields.silu()
    if hf.get("rope_interleave") is False:
        raise ConfigError("rope_interleave is false; only checkpoints with neighbouring rotary pairs are read")
    basic, layers = fields.basic(), fields.size("num_hidden_layers")
    if basic["num_kv_heads"] != basic["num_heads"]:
        raise ConfigError(
            f"num_key_value_heads is {basic['num_kv_heads']}, but latent attention has as many as "
            f"num_attention_heads, {basic['num_heads']}"
        )
    if hf.get("num_nextn_predict_layers"):
        logging.getLogger(__name__).info(
            "num_nextn_predict_layers is %s: the layers for multi-token prediction are not loaded",
            hf["num_nextn_predict_layers"],
        )
    latent = LatentConfig(
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        q_rank=fields.optional_size("q_lora_rank"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    rope = rope_config_from_hf(fields.for_rope())
    return TargetConfig(
        **basic,
        head_dim=head_dim,
        rope=rope,
        layer_types=dense.one_kind(fields, FULL, layers),
        attention_scale=_attention_scale(rope, head_dim),
        latent=latent,
        moe=_moe(fields, layers),
    )


def _moe(fields: Fields, layers: int) -> MoeConfig | None:
    first = fields.count("first_k_dense_replace")
    if first >= layers:
        return None
    family = fields.family
    fields.only("scoring_func", (DEFAULTS[family]["scoring_func"],))
    if fields.hf.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq is {fields.hf['moe_layer_freq']!r}; only 1 is supported")
    method = fields.only("topk_method", _TOPK_METHODS[family])
    v3 = family == "deepseek_v3"
    if not v3 and fields.flag("norm_topk_prob"):
        raise ConfigError(
            "norm_topk_prob is true in this deepseek_v2 configuration: implementations disagree on its meaning, and "
            "no published V2 sets it"
        )
    grouped = method != "greedy"
    return MoeConfig(
        num_experts=fields.size("n_routed_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("moe_intermediate_size"),
        layers=tuple(range(first, layers)),
        scoring=fields.get("scoring_func"),
        normalise=fields.flag("norm_topk_prob"),
        scale=fields.positive("routed_scaling_factor"),
        num_groups=(fields.optional_size("n_group") or 1) if grouped else 1,
        groups_per_token=(fields.optional_size("topk_group") or 1) if grouped else 1,
        group_score="top2" if v3 else "max",
        selection_bias=v3,
        shared_intermediate_size=fields.size("moe_intermediate_size") * fields.count("n_shared_experts"),
    )


def _attention_scale(rope: RopeConfig, head_dim: int) -> float | None:
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return None
    return head_dim**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    family, latent, moe = config.family, config.latent, config.moe
    hf = common.basic_to_hf(config, _ARCHITECTURES[family])
    del hf["head_dim"]  # has another meaning here
    hf.update(
        kv_lora_rank=latent.kv_rank,
        q_lora_rank=latent.q_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        first_k_dense_replace=config.num_layers if moe is None else config.num_layers - len(moe.layers),
    )
    if family == "deepseek_v3":
        hf["num_nextn_predict_layers"] = 0
    if moe is None:
        return hf
    shared = moe.shared_intermediate_size // moe.intermediate_size
    hf.update(
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.intermediate_size,
        n_shared_experts=shared or None,
        norm_topk_prob=moe.normalise,
        routed_scaling_factor=moe.scale,
        n_group=moe.num_groups,
        topk_group=moe.groups_per_token,
        scoring_func=moe.scoring,
        topk_method="noaux_tc"
        if family == "deepseek_v3"
        else "group_limited_greedy"
        if moe.num_groups > 1
        else "greedy",
    )
    return hf


def placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    return common.whole_model(config, own_head, _layer)


def _layer(config: TargetConfig, i: int, path: Path, prefix: str) -> list[Placement]:
    d, moe, stored = config.hidden_size, config.moe, f"{prefix}.mlp"
    placed = [
        *common.pre_norms(config, path, prefix),
        *_attention(config, (*path, "attention"), f"{prefix}.self_attn"),
    ]
    if moe is None or i not in moe.layers:
        return placed + common.mlp((*path, "mlp"), stored, d, config.intermediate_size)
    path = (*path, "moe")
    placed.append(transposed((*path, "router_DxE"), f"{stored}.gate.weight", (moe.num_experts, d)))
    if moe.selection_bias:
        name = f"{stored}.gate.e_score_correction_bias"
        placed.append(identity((*path, "selection_bias_E"), name, (moe.num_experts,)))
    placed += common.experts(path, f"{stored}.experts", moe.num_experts, d, moe.intermediate_size)
    if moe.shared_intermediate_size:
        placed += common.mlp((*path, "shared"), f"{stored}.shared_experts", d, moe.shared_intermediate_size)
    return placed


def _attention(config: TargetConfig, path: Path, prefix: str) -> list[Placement]:
    latent, d, n = config.latent, config.hidden_size, config.num_heads
    c, p, r, v, q = latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim, latent.q_rank

    def queries(name: str, stored: str, width: int) -> Placement:
        return Placement(
            (*path, name),
            (StoredTensor(stored, (n * (p + r), width)),),
            lambda x: _to_halves(x.reshape(n, p + r, width), p).transpose(2, 0, 1),
            lambda x: (_to_pairs(x.transpose(1, 2, 0), p).reshape(n * (p + r), width),),
        )

    if q is None:
        placed = [queries("q_DxNxH", f"{prefix}.q_proj.weight", d)]
    else:
        placed = [
            transposed((*path, "q_down_DxQ"), f"{prefix}.q_a_proj.weight", (q, d)),
            identity((*path, "q_down_norm", "scale"), f"{prefix}.q_a_layernorm.weight", (q,)),
            queries("q_up_QxNxH", f"{prefix}.q_b_proj.weight", q),
        ]
    up = StoredTensor(f"{prefix}.kv_b_proj.weight", (n * (p + v), c))
    return [
        *placed,
        Placement(
            (*path, "kv_down_DxC"),
            (StoredTensor(f"{prefix}.kv_a_proj_with_mqa.weight", (c + r, d)),),
            lambda x: _to_halves(x[None], c)[0].T,
            lambda x: (_to_pairs(x.T[None], c)[0],),
        ),
        identity((*path, "kv_norm", "scale"), f"{prefix}.kv_a_layernorm.weight", (c,)),
        _shared((*path, "k_up_NxCxP"), up, Part(n, 0, p)),
        _shared((*path, "v_up_NxCxV"), up, Part(n, p, p + v)),
        Placement(
            (*path, "out_NxVxD"),
            (StoredTensor(f"{prefix}.o_proj.weight", (d, n * v)),),
            lambda x: x.T.reshape(n, v, d),
            lambda x: (x.reshape(n * v, d).T,),
        ),
    ]


def _shared(path: Path, tensor: StoredTensor, part: Part) -> Placement:
    """Each head's keys, or values, of the projection that makes both of the latent."""
    return Placement(
        path,
        (StoredTensor(tensor.name, tensor.shape, part),),
        lambda x: x.transpose(0, 2, 1),
        lambda x: (x.transpose(0, 2, 1),),
    )


def _to_halves(x_NxHxD: np.ndarray, start: int) -> np.ndarray:
    """Channels from `start` on: (x0, y0, x1, y1, ...) -> (x0, x1, ..., y0, y1, ...)."""
    kept, turned = x_NxHxD[:, :start], x_NxHxD[:, start:]
    n, r, d = turned.shape
    return np.concatenate([kept, turned.reshape(n, r // 2, 2, d).swapaxes(1, 2).reshape(n, r, d)], axis=1)


def _to_pairs(x_NxHxD: np.ndarray, start: int) -> np.ndarray:
    """The inverse of `_to_halves`."""
    kept, turned = x_NxHxD[:, :start], x_NxHxD[:, start:]
    n, r, d = turned.shape
    return np.concatenate([kept, turned.reshape(n, 2, r // 2, d).swapaxes(1, 2).reshape(n, r, d)], axis=1)
