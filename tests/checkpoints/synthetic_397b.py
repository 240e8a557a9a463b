"""A checkpoint with the tensor names, nesting and proportions of Qwen3.5-397B-A17B, at any depth and width.

The names and shapes are written down here as the published model has them (its modules in transformers), not taken
from the name map that is tested with them.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FULL = {
    "hidden_size": 4096, "vocab_size": 248320, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
}  # fmt: skip
CUT = {
    "hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def config(**cut: int) -> dict[str, Any]:
    """config.json; without arguments, of the model as it is published."""
    text = {**FULL, **cut}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    rotated = text["head_dim"] // 8  # pairs: a quarter of the channels
    sections = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1},
        "text_config": {
            **text, "model_type": "qwen3_5_moe_text", "attn_output_gate": True, "dtype": "bfloat16",
            "full_attention_interval": 4, "hidden_act": "silu", "max_position_embeddings": 262144,
            "layer_types": kinds * (text["num_hidden_layers"] // 4), "mamba_ssm_dtype": "float32",
            "rms_norm_eps": 1e-06, "eos_token_id": 1,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": sections, "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default",
            },
        },
    }  # fmt: skip


def tensors(hf: dict[str, Any], *, text_only: bool = False) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, stored type) of every tensor: decoder, head, a vision tower cut to a block, the MTP head."""
    c = hf["text_config"]
    d, v, e, f = c["hidden_size"], c["vocab_size"], c["num_experts"], c["moe_intermediate_size"]
    shared = c["shared_expert_intermediate_size"]
    heads, kv, h = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values, value_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]

    def full_attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{prefix}.q_proj.weight", (2 * heads * h, d), "BF16"  # a head's query, then its gate
        yield f"{prefix}.k_proj.weight", (kv * h, d), "BF16"
        yield f"{prefix}.v_proj.weight", (kv * h, d), "BF16"
        yield f"{prefix}.o_proj.weight", (d, heads * h), "BF16"
        yield f"{prefix}.q_norm.weight", (h,), "BF16"
        yield f"{prefix}.k_norm.weight", (h,), "BF16"

    def mlp_around_experts(prefix: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{prefix}.gate.weight", (e, d), "BF16"
        yield f"{prefix}.shared_expert.gate_proj.weight", (shared, d), "BF16"
        yield f"{prefix}.shared_expert.up_proj.weight", (shared, d), "BF16"
        yield f"{prefix}.shared_expert.down_proj.weight", (d, shared), "BF16"
        yield f"{prefix}.shared_expert_gate.weight", (1, d), "BF16"

    yield "model.language_model.embed_tokens.weight", (v, d), "BF16"
    for i, kind in enumerate(c["layer_types"]):
        prefix = f"model.language_model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", (d,), "BF16"
        yield f"{prefix}.post_attention_layernorm.weight", (d,), "BF16"
        if kind == "linear_attention":
            linear = f"{prefix}.linear_attn"
            yield f"{linear}.in_proj_qkv.weight", (2 * key + values * value_dim, d), "BF16"
            yield f"{linear}.in_proj_z.weight", (values * value_dim, d), "BF16"
            yield f"{linear}.in_proj_b.weight", (values, d), "BF16"
            yield f"{linear}.in_proj_a.weight", (values, d), "BF16"
            channels = 2 * key + values * value_dim
            yield f"{linear}.conv1d.weight", (channels, 1, c["linear_conv_kernel_dim"]), "BF16"
            yield f"{linear}.dt_bias", (values,), "BF16"
            yield f"{linear}.A_log", (values,), "F32"
            yield f"{linear}.norm.weight", (value_dim,), "F32"
            yield f"{linear}.out_proj.weight", (d, values * value_dim), "BF16"
        else:
            yield from full_attention(f"{prefix}.self_attn")
        yield from mlp_around_experts(f"{prefix}.mlp")
        yield f"{prefix}.mlp.experts.gate_up_proj", (e, 2 * f, d), "BF16"
        yield f"{prefix}.mlp.experts.down_proj", (e, d, f), "BF16"
    yield "model.language_model.norm.weight", (d,), "BF16"
    yield "lm_head.weight", (v, d), "BF16"
    if text_only:
        return
    for name in ("patch_embed.proj.bias", "pos_embed.weight", "blocks.0.attn.qkv.weight", "merger.linear_fc1.weight"):
        yield f"model.visual.{name}", (8,), "BF16"
    yield "mtp.fc.weight", (d, 2 * d), "BF16"
    yield "mtp.pre_fc_norm_hidden.weight", (d,), "BF16"
    yield from full_attention("mtp.layers.0.self_attn")
    yield from mlp_around_experts("mtp.layers.0.mlp")
    for i in range(e):  # one by one, other than those of the decoder
        yield f"mtp.layers.0.mlp.experts.{i}.gate_proj.weight", (f, d), "BF16"
        yield f"mtp.layers.0.mlp.experts.{i}.up_proj.weight", (f, d), "BF16"
        yield f"mtp.layers.0.mlp.experts.{i}.down_proj.weight", (d, f), "BF16"


def write_cut(directory: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """The model cut in depth and width (`CUT`), with random weights, in two shards with an index."""
    hf, rng = config(**CUT), np.random.default_rng(seed)
    shards: dict[str, dict[str, np.ndarray]] = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    for i, (name, shape, kind) in enumerate(tensors(hf)):
        if name.endswith("A_log"):
            value = np.log(rng.uniform(1, 16, shape))
        elif len(shape) == 1:
            value = rng.normal(size=shape) * 0.1
        else:
            value = rng.normal(size=shape) * shape[-1] ** -0.5
        stored = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}[kind]
        shards[sorted(shards)[i % 2]][name] = value.astype(stored)
    for shard, content in shards.items():
        save_file(content, directory / shard)
    weight_map = {name: shard for shard, content in shards.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


def write_hollow(directory: pathlib.Path, hf: dict[str, Any], shard_bytes: int = 8 * 10**9) -> pathlib.Path:
    """A checkpoint without weights: right headers, then holes, which take no space on the disk."""
    shards: list[dict[str, Any]] = [{}]
    ends, weight_map = [0], {}
    for name, shape, kind in tensors(hf):
        size = math.prod(shape) * {"BF16": 2, "F32": 4}[kind]
        if ends[-1] and ends[-1] + size > shard_bytes:
            shards.append({})
            ends.append(0)
        shards[-1][name] = {"dtype": kind, "shape": shape, "data_offsets": [ends[-1], ends[-1] + size]}
        ends[-1] += size
        weight_map[name] = f"model-{len(shards):05d}.safetensors"
    for i, (header, end) in enumerate(zip(shards, ends, strict=True), 1):
        text = json.dumps(header).encode()
        with (directory / f"model-{i:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(hf))
    return directory
