"""GGUF files: weights under Hugging Face names and layout, and the configuration in their metadata."""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Collection
from typing import Any

import gguf
import numpy as np

from dflash_jax.checkpoints.lazy_arrays import Box, LazyArray, box_shape, box_slices
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import FULL, ConfigError, RopeConfig, TargetConfig
from dflash_jax.models.layers import rope_frequencies

_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_NUMBERS_AT_ONCE = 2**20  # what is held of a tensor while it is dequantised stays small
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
# The llama.cpp converter stores Llama 3's scaling as one divisor per frequency only. The models that have it all
# share these three constants; the fourth, the factor, is the largest divisor.
_LLAMA3_ROPE = {"original_max_positions": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class GGUFFile:
    """A GGUF file as a `WeightReader` under Hugging Face names, with its decoded metadata.

    Query and key rows of llama files are stored for rotation of neighbouring pairs; they are brought back
    to the order for rotation of halves. Qwen files have that order already.

    Raises:
      CheckpointError: the file is no GGUF file or is cut short.
    """

    def __init__(self, path: str | pathlib.Path):
        self.source = str(path)
        try:
            reader = gguf.GGUFReader(str(path))
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no complete GGUF file: {error}") from error
        self.architecture = self.metadata.get("general.architecture")
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS}
        self._rope_factors = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        return self._tensors[name].tensor_type.name

    def readable(self, name: str) -> bool:
        return self.dtype(name) in _READABLE

    def read(self, name: str) -> LazyArray:
        """The tensor dequantised to float32, in Hugging Face's order of rows."""
        value = LazyArray(self.shape(name), np.float32, functools.partial(self._read_box, name))
        if self.architecture == "llama":
            if ".q_proj." in name:
                return pairs_to_halves(value, self.field("attention.head_count"))
            if ".k_proj." in name:
                return pairs_to_halves(value, self.field("attention.head_count_kv"))
        return value

    def _read_box(self, name: str, box: Box) -> np.ndarray:
        """Whole rows are dequantised, as blocks lie along them, some at a time, and cut."""
        tensor, shape = self._tensors[name], self.shape(name)
        if len(box) < 2:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)[box_slices(box)]
        (start, stop), columns = box[0], box_slices(box[1:])
        out = np.empty(box_shape(box), np.float32)
        some = max(1, _NUMBERS_AT_ONCE // math.prod(shape[1:]))
        for row in range(start, stop, some):
            data = tensor.data[row : min(stop, row + some)]
            value = gguf.quants.dequantize(data, tensor.tensor_type).reshape(-1, *shape[1:])
            out[row - start : row - start + some] = value[:, *columns]
        return out

    def rope_factors(self) -> np.ndarray | None:
        """Divisors of the rotary frequencies [head_dim / 2], if the file has them."""
        tensor = self._rope_factors
        return None if tensor is None else gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the architecture's own metadata, such as `attention.head_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def required(self, name: str) -> Any:
        """`field`, for what the model can not do without.

        Raises:
          ConfigError: the field is missing, or differs from layer to layer.
        """
        value = self.field(name)
        if value is None:
            raise ConfigError(f"{self.source} has no {self.architecture}.{name}")
        if isinstance(value, list):
            raise ConfigError(f"{self.source}: {self.architecture}.{name} differs from layer to layer, not supported")
        return value


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that is unknown keeps its own."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match.group(2) not in _BLOCK_NAMES:
        return name
    return f"model.layers.{match.group(1)}.{_BLOCK_NAMES[match.group(2)]}.{match.group(3)}"


def pairs_to_halves(rows: np.ndarray | LazyArray, num_heads: int) -> np.ndarray | LazyArray:
    """[N * H, ...] with heads ordered (0, H/2, 1, H/2 + 1, ...) -> heads ordered 0, 1, ..., H - 1."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def target_config_from_gguf(file: GGUFFile) -> TargetConfig:
    """The architecture that a GGUF file describes.

    The head is tied when the file has no `output.weight`; biases are there when their tensors are.

    Raises:
      ConfigError: the architecture, the rotary scaling or another feature is not supported.
    """
    architecture = file.architecture
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.source}: general.architecture is {architecture!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    for name in ("expert_count", "attention.sliding_window"):
        if file.field(name):
            raise ConfigError(f"{file.source}: {architecture}.{name} is {file.field(name)}, which is not supported")
    hidden, heads = file.required("embedding_length"), file.required("attention.head_count")
    head_dim = file.field("attention.key_length") or hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.field(name, head_dim) != head_dim:
            raise ConfigError(
                f"{file.source}: {architecture}.{name} is {file.field(name)}, only the head dim {head_dim} is supported"
            )
    names, layers = set(file.names()), file.required("block_count")
    return TargetConfig(
        family=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=file.required("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.field("attention.head_count_kv") or heads,
        head_dim=head_dim,
        rms_norm_eps=file.required("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, head_dim),
        max_positions=file.required("context_length"),
        layer_types=(FULL,) * layers,
        qk_norm=architecture == "qwen3",
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        out_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in names,
        tie_embeddings="lm_head.weight" not in names,
    )


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding table, which may be more than the tokenizer has tokens."""
    if "model.embed_tokens.weight" not in file.names():
        raise CheckpointError(f"{file.source} has no token_embd.weight; it holds no language model")
    return file.shape("model.embed_tokens.weight")[0]


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = float(file.field("rope.freq_base", 10_000.0))
    kind = file.field("rope.scaling.type", "none")
    factors = file.rope_factors()
    if factors is not None:
        if kind != "none":
            raise ConfigError(f"{file.source} has {ROPE_FACTORS} together with rope.scaling.type {kind!r}")
        return _llama3_rope(file, theta, head_dim, factors)
    if kind == "none" and file.field("rope.scale_linear"):  # spelling of old files
        return RopeConfig(theta, "linear", float(file.field("rope.scale_linear")))
    if kind == "none":
        return RopeConfig(theta)
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.source}: rope.scaling.type {kind!r} is not supported; supported are linear, yarn")
    factor = float(file.required("rope.scaling.factor"))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    attention = file.field("rope.scaling.attn_factor")
    if attention not in (None, 1.0):
        raise ConfigError(f"{file.source}: rope.scaling.attn_factor is {attention}, which is not supported")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=file.required("rope.scaling.original_context_length"),
        beta_fast=float(file.field("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(file.field("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int, factors: np.ndarray) -> RopeConfig:
    """Recognises Llama 3's scaling in a table of divisors; a table of any other law is refused."""
    if np.allclose(factors, 1.0):
        return RopeConfig(theta)
    rope = RopeConfig(theta, "llama3", float(factors.max()), **_LLAMA3_ROPE)
    plain, _ = rope_frequencies(RopeConfig(theta), head_dim)
    scaled, _ = rope_frequencies(rope, head_dim)
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
        raise ConfigError(f"{file.source}: {ROPE_FACTORS} does not follow Llama 3's scaling law; not supported")
    return rope
