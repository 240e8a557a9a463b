"""How long a round must take on a chip, and what that says of the speedup by a drafter.

    seconds = max(flops / peak, bytes / bandwidth) + link bytes / link bandwidth + layers * seconds a layer
    speedup = tau * seconds(plain, one token) / seconds(round of a block)

The first three are counted from the parameters' shapes and layouts, a device's own part of each. The last is what no
count shows: starting kernels, waiting for the slowest device of a sum, the host. It is 0 unless it is given, and the
time then is a lower bound.

Counted are matrix products, attention and the delta rule; every weight once a call, of experts those that are chosen
by someone if all are equally likely (tokens that resemble each other choose fewer); keys, values and states of the
context; the logits, written and read. Not counted: activations between layers (they stay on the chip), norms,
embedding rows, the sums that pick a token from a vocabulary in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import CHUNKED, LINEAR, SLIDING, DrafterConfig, TargetConfig
from dflash_jax.decoding.abstract import laid_out
from dflash_jax.drafters.dflash import TABLES, DFlash
from dflash_jax.kernels.kv_cache import LayerSpec
from dflash_jax.models.transformer import Transformer, layer_specs

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX calls a device.

    Attributes:
      hbm: bytes of memory. bandwidth: of it, bytes a second.
      flops: dense bf16 operations a second.
      link: bytes a second that it can send to its neighbours, all links together, one way.
      source: where the numbers are from.
    """

    hbm: float
    bandwidth: float
    flops: float
    link: float
    source: str


_CLOUD = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
# Google gives ICI as the sum of both directions; half of it is one way. Of NVLink the same.
CHIPS = {
    "v5e": Chip(16 * GIB, 819e9, 197e12, 200e9, _CLOUD + "v5e"),
    "v5p": Chip(95 * GIB, 2765e9, 459e12, 600e9, _CLOUD + "v5p"),
    "v6e": Chip(32 * GIB, 1638e9, 918e12, 400e9, _CLOUD + "v6e"),
    # A chip of two devices: 192 GiB, 7380 GB/s, 2307 TFLOPs, ICI 1200 GB/s both ways.
    "tpu7x": Chip(96 * GIB, 3690e9, 1153.5e12, 300e9, _CLOUD + "tpu7x"),
    "h100": Chip(80e9, 3.35e12, 989e12, 450e9, _NVIDIA + "h100/"),
    "h200": Chip(141e9, 4.8e12, 989e12, 450e9, _NVIDIA + "h200/"),
    "b200": Chip(180e9, 8e12, 2250e12, 900e9, _NVIDIA + "dgx-b200/"),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in one round."""

    flops: float
    bytes: float
    link_bytes: float = 0.0
    layers: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def seconds(work: Work, chip: Chip, layer_seconds: float = 0.0) -> float:
    """The formula at the head of this file."""
    link = work.link_bytes / chip.link
    return max(work.flops / chip.flops, work.bytes / chip.bandwidth) + link + work.layers * layer_seconds


def speedup(tau: float, plain_seconds: float, round_seconds: float) -> float:
    """Of a drafter, given how long a round takes with and without it."""
    return tau * plain_seconds / round_seconds


def chosen_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """The expected share of experts that some token chooses, all being equally likely."""
    return 1.0 - (1.0 - experts_per_token / num_experts) ** tokens


def device_bytes(tree: Any) -> int:
    """Bytes of arrays or abstract arrays on one device."""
    return sum(math.prod(shard_shape(x)) * itemsize(x) for x in jax.tree.leaves(tree))


def itemsize(x: Any) -> int:
    """Bytes of an element; PRNG keys are two words."""
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize


def shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of one device's part."""
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who shares the work: the devices of a mesh, or without one `parts` devices, tensor parallel."""

    mesh: Mesh | None = None
    parts: int = 1

    def rows(self, batch: int) -> float:
        """Rows of the batch that one device works on."""
        return batch / sharding.data_parallel_size(self.mesh)

    def cut(self, *axes: str) -> int:
        """Devices along these mesh axes together."""
        return self.parts if self.mesh is None else sharding.axis_size(self.mesh, axes)

    def heads(self, count: int) -> float:
        """So many heads' part of one device; all of them where they can not be dealt out."""
        parts = self.cut(sharding.TENSOR)
        return count if count % parts else count / parts


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Elements and bytes of parameters that a device multiplies with: of experts, and of everything else."""

    dense: float = 0.0
    dense_bytes: float = 0.0
    experts: float = 0.0
    expert_bytes: float = 0.0


@functools.cache
def parameter_sizes(
    make: type[nnx.Module], config: TargetConfig | DrafterConfig, dtype: jnp.dtype, placement: Placement
) -> Sizes:  # fmt: skip
    """What a call of the module reads. Of a table only some rows, unless it is the head too.

    A Markov head's output side, which is bound to the draft vocabulary, counts with the head (`drafter_work`).
    """
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(Sizes)), 0.0)
    _, params = laid_out(placement.mesh, make, config, dtype)
    for path, variable in nnx.to_flat_state(params):
        if path[-1] in TABLES or (path[-1] == "embedding_VxD" and not config.tie_embeddings):
            continue
        is_expert = "experts" in variable.get_metadata("axes")
        kind = ("experts", "expert_bytes") if is_expert else ("dense", "dense_bytes")
        for field, value in zip(kind, _used(variable.get_value(), placement), strict=True):
            sizes[field] += value
    return Sizes(**sizes)


def _used(x: Any, placement: Placement) -> tuple[float, float]:
    """(elements, bytes) of a device's part; what fsdp cut is gathered before it is used."""
    size = math.prod(shard_shape(x)) / (1 if placement.mesh else placement.parts)
    if placement.mesh is not None:
        cut = [name for entry in x.sharding.spec if entry for name in ([entry] if isinstance(entry, str) else entry)]
        size *= placement.mesh.shape[sharding.FSDP] if sharding.FSDP in cut else 1
    return size, size * itemsize(x)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a round is asked to do.

    Attributes:
      batch: rows. block: tokens of each, 1 without a drafter. context: committed tokens of each.
      dtype: of parameters, activations and cache; bfloat16 where None.
    """

    batch: int
    block: int
    context: int
    dtype: jnp.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(jnp.bfloat16 if self.dtype is None else self.dtype))


def target_work(target: TargetConfig, load: Load, placement: Placement) -> Work:
    """A call of the target over every row's block."""
    sizes, moe = parameter_sizes(Transformer, target, load.dtype, placement), target.moe
    tokens = placement.rows(load.batch) * load.block
    flops, read = 2 * tokens * sizes.dense, sizes.dense_bytes
    if moe is not None:
        flops += 2 * tokens * sizes.experts * moe.experts_per_token / moe.num_experts
        read += sizes.expert_bytes * chosen_experts(moe.num_experts, moe.experts_per_token, tokens)
    width = tokens * target.hidden_size
    attention = all_reduce(width * load.dtype.itemsize, placement.cut(sharding.TENSOR))
    everyone = placement.cut(sharding.TENSOR, sharding.EXPERT)
    dense, experts = (all_reduce(width * size, everyone) for size in (load.dtype.itemsize, 4))  # experts in float32
    sparse = 0 if moe is None else len(moe.layers)
    both = moe is not None and moe.shared_intermediate_size > 0  # the shared expert's sum besides
    link = target.num_layers * attention + (target.num_layers - sparse) * dense
    link += sparse * (experts + (dense if both else 0))
    rest = _attention(target, layer_specs(target), load, placement) + _logits(tokens, target.vocab_size, everyone)
    return Work(flops, read, link, target.num_layers) + rest


def drafter_work(target: TargetConfig, drafter: DrafterConfig, load: Load, placement: Placement) -> Work:
    """Proposing a block for every row and absorbing one; the head is the target's, read once more."""
    sizes = parameter_sizes(DFlash, drafter, load.dtype, placement)
    tokens = placement.rows(load.batch) * load.block
    everyone = placement.cut(sharding.TENSOR, sharding.EXPERT)
    head = (target.hidden_size + drafter.markov_rank) * target.vocab_size / everyone
    # A Markov head is walked slot by slot, and read each time but the first, which `head` counts.
    walked = max(load.block - 2, 0) * drafter.markov_rank * target.vocab_size / everyone
    width = tokens * drafter.hidden_size * load.dtype.itemsize
    link = all_reduce(width, placement.cut(sharding.TENSOR)) + all_reduce(width, everyone)
    specs = (LayerSpec(drafter.num_kv_heads, drafter.head_dim),) * drafter.num_layers
    rest = _attention(drafter, specs, load, placement) + _logits(tokens, target.vocab_size, everyone)
    own = Work(
        2 * tokens * (sizes.dense + head), sizes.dense_bytes + (head + walked) * load.dtype.itemsize,
        drafter.num_layers * link, drafter.num_layers,
    )  # fmt: skip
    return own + rest


def round_work(target: TargetConfig, drafter: DrafterConfig | None, load: Load, placement: Placement) -> Work:
    """A whole round on one device."""
    work = target_work(target, load, placement)
    return work if drafter is None else work + drafter_work(target, drafter, load, placement)


def _attention(
    config: TargetConfig | DrafterConfig, specs: Sequence[LayerSpec], load: Load, placement: Placement
) -> Work:  # fmt: skip
    """Attention over the context, and recurrent states."""
    rows, size = placement.rows(load.batch), load.dtype.itemsize
    heads = placement.heads(config.num_heads)
    flops = read = 0.0
    for kind, spec in zip(config.layer_types, specs, strict=True):
        if kind == LINEAR:
            delta = spec.delta
            values = delta.num_value_heads // delta.num_key_heads * placement.heads(delta.num_key_heads)
            state = rows * values * delta.key_dim * delta.value_dim
            flops += 2 * 3 * load.block * state  # what the state knows of k, what it gives for q, and the write
            read += 2 * 4 * state  # float32, read and written
            continue
        reach = load.context
        if kind == SLIDING:
            reach = min(reach, config.sliding_window)
        elif kind == CHUNKED:
            reach = min(reach, config.attention_chunk)
        k, v = spec.widths
        flops += 2 * rows * load.block * heads * reach * (k + (v or k))
        read += rows * reach * placement.heads(spec.num_kv_heads) * (k + v) * size
    return Work(flops, read)


def _logits(tokens: float, vocab: int, parts: int) -> Work:
    """Float32, written and read once."""
    return Work(0.0, 2 * 4 * tokens * vocab / parts)


def all_reduce(size: float, devices: int) -> float:
    """Bytes that a device sends to add up arrays of this size: a ring scatters the sums, then gathers them."""
    return 2 * size * (devices - 1) / devices
