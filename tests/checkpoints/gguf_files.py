"""Writes small GGUF files for tests, laid out as llama.cpp's converter lays them out."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Kind

from dflash_jax.checkpoints.gguf_reader import hf_name
from dflash_jax.config import TargetConfig

_NAMES = [
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    *(
        f"blk.{i}.{part}.{leaf}"
        for i in range(4)
        for part in (
            *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
            *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        )
        for leaf in ("weight", "bias")
    ),
]
GGUF_NAME = {hf_name(name): name for name in _NAMES}


def halves_to_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's order of q and k rows to that of llama files: row i of the first half, row i of the second, ..."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def architecture_fields(architecture: str, config: TargetConfig) -> dict[str, Any]:
    """The architecture's metadata of a configuration with the plain rotary embedding."""
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
    }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def byte_level_fields(backend: tokenizers.Tokenizer, pre: str, merges: list) -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE tokenizer."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.ggml.eot_token_id": vocabulary["</s>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def write_gguf(
    path: pathlib.Path,
    architecture: str,
    metadata: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    kinds: Mapping[str, Kind] | Kind = Kind.F32,
    raw: Mapping[str, tuple[Kind, np.ndarray]] | None = None,
) -> pathlib.Path:
    """Writes weights given under Hugging Face names; norms and biases stay float32 whatever `kinds` says.

    Args:
      raw: tensors under their GGUF names that are written as they are: (type, bytes or floats).
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    heads = {
        "q_proj": metadata.get(f"{architecture}.attention.head_count"),
        "k_proj": metadata.get(f"{architecture}.attention.head_count_kv"),
    }
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, value in weights.items():
        for projection, count in heads.items():
            if architecture == "llama" and f".{projection}." in name:
                value = halves_to_pairs(value, count)
        kind = kinds if isinstance(kinds, Kind) else kinds.get(name, Kind.F32)
        kind = kind if value.ndim == 2 else Kind.F32
        writer.add_tensor(GGUF_NAME[name], gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    for name, (kind, value) in (raw or {}).items():
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Blocks of the K types, packed by hand from integers: the package reads these types but does not write them.


def _scale_bytes(scale: int, minimum: int) -> np.ndarray:
    """Twelve bytes with the same 6-bit scale and minimum (both below 16) for all eight sub-blocks."""
    both = scale | minimum << 4
    return np.array([scale] * 4 + [minimum] * 4 + [both] * 4, np.uint8)


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _rows(codes: np.ndarray, pack: Any) -> np.ndarray:
    """Packs [rows, n * 256] codes block by block."""
    blocks = codes.reshape(-1, 256)
    return np.stack([pack(block) for block in blocks]).reshape(codes.shape[0], -1)


def pack_q4_k(codes: np.ndarray, d: float, dmin: float) -> np.ndarray:
    """Codes 0..15; a weight is d * code - dmin."""

    def pack(block: np.ndarray) -> np.ndarray:
        pairs = block.reshape(4, 2, 32).astype(np.uint8)
        return np.concatenate([_half(d), _half(dmin), _scale_bytes(1, 1), (pairs[:, 0] | pairs[:, 1] << 4).ravel()])

    return _rows(codes, pack)


def pack_q5_k(codes: np.ndarray, d: float, dmin: float) -> np.ndarray:
    """Codes 0..31; a weight is d * code - dmin. Bit j of high byte i is the fifth bit of code 32 j + i."""

    def pack(block: np.ndarray) -> np.ndarray:
        pairs = (block.reshape(4, 2, 32) & 15).astype(np.uint8)
        high = (block.reshape(8, 32) >> 4 << np.arange(8)[:, None]).sum(0).astype(np.uint8)
        low = (pairs[:, 0] | pairs[:, 1] << 4).ravel()
        return np.concatenate([_half(d), _half(dmin), _scale_bytes(1, 1), high, low])

    return _rows(codes, pack)


def pack_q6_k(codes: np.ndarray, d: float) -> np.ndarray:
    """Codes 0..63; a weight is d * (code - 32)."""

    def pack(block: np.ndarray) -> np.ndarray:
        quarters = block.reshape(2, 4, 32).astype(np.uint8)
        low = quarters & 15
        low = np.concatenate([low[:, 0] | low[:, 2] << 4, low[:, 1] | low[:, 3] << 4], axis=1)
        high = (quarters >> 4 << (2 * np.arange(4, dtype=np.uint8))[:, None]).sum(1).astype(np.uint8)
        return np.concatenate([low.ravel(), high.ravel(), np.ones(16, np.uint8), _half(d)])

    return _rows(codes, pack)
