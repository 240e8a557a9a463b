"""What one device does in a training step, counted from shapes: flops, bytes of its memory, bytes it sends.

Counted are matrix products and attention: the frozen target once over all tokens where it runs in the step; of the
drafter, context products (fc, keys and values) over all tokens and the rest over all slots of all blocks, three times
for forward and backward (fc twice: nothing flows back to the target); the head over the slots that carry loss, for
logits and for the gradient with respect to its input, and a Markov head beside it, which trains. Recomputation
(`step.remat`) is not counted: these are the flops of a model-flops utilisation.

Bytes: weights once, the drafter's master weights and optimiser state read and written, logits in float32 written and
read. Activations are not counted. Bytes sent: what fsdp cut is gathered (of the drafter forward and backward), its
gradients are summed over all rows' devices, and the sums of tensor and expert parallel layers.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx

from dflash_jax import sharding
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decoding.abstract import laid_out
from dflash_jax.drafters.dflash import TABLES, DFlash
from dflash_jax.evaluation.roofline import (
    Chip,
    Load,
    Placement,
    Work,
    all_reduce,
    device_bytes,
    parameter_sizes,
    target_work,
)
from dflash_jax.models.transformer import Transformer

OPTIMISER_BYTES = 4 * (2 + 2 + 2 + 1)  # float32: master, two moments, each read and written, and the gradient


@dataclasses.dataclass(frozen=True)
class TrainingLoad:
    """A step's batch.

    Attributes:
      rows, tokens: of the whole batch, and of each row. anchors, block: blocks of each row, slots of each block.
      online: whether the target runs in the step.
      teacher: whether the loss needs the target's law at each slot, beside its token.
      draft_vocab: size of the head.
    """

    rows: int
    tokens: int
    anchors: int
    block: int
    online: bool
    teacher: bool
    draft_vocab: int


def training_work(target: TargetConfig, drafter: DrafterConfig, load: TrainingLoad, placement: Placement) -> Work:
    """A whole step on one device; activations and weights at work in bfloat16."""
    return (_target(target, load, placement) if load.online else Work(0.0, 0.0)) + _drafter(
        target, drafter, load, placement
    )


def step_seconds(work: Work, chip: Chip) -> tuple[float, float]:
    """(with everything overlapped, with nothing sent while anything is computed): the bounds of a step."""
    computing, sending = max(work.flops / chip.flops, work.bytes / chip.bandwidth), work.link_bytes / chip.link
    return max(computing, sending), computing + sending


def _target(target: TargetConfig, load: TrainingLoad, placement: Placement) -> Work:
    # A causal row is a block of all its tokens that sees half of them on average.
    call = Load(load.rows, load.tokens, load.tokens // 2)
    work = target_work(target, call, placement)
    tokens, everyone = placement.rows(load.rows) * load.tokens, placement.cut(sharding.TENSOR, sharding.EXPERT)
    head = target.hidden_size * target.vocab_size / everyone  # not run here, and its logits neither
    work += Work(-2 * tokens * head, -head * call.dtype.itemsize - 2 * 4 * tokens * target.vocab_size / everyone)
    sizes = parameter_sizes(Transformer, target, call.dtype, placement)
    return work + Work(0.0, 0.0, _gathered(sizes.dense_bytes + sizes.expert_bytes, placement))


def _drafter(target: TargetConfig, drafter: DrafterConfig, load: TrainingLoad, placement: Placement) -> Work:
    rows, dtype = placement.rows(load.rows), jnp.dtype(jnp.bfloat16)
    tokens, slots = rows * load.tokens, rows * load.anchors * load.block
    tensor, everyone = placement.cut(sharding.TENSOR), placement.cut(sharding.TENSOR, sharding.EXPERT)
    flops = 0.0
    for path, variable in nnx.to_flat_state(laid_out(None, DFlash, drafter, dtype)[1]):
        size = variable.get_value().size
        if path[-1] == "fc_TDxD":
            flops += 2 * 2 * tokens * size
        elif path[-1] == "kv_DxGx2xH":
            flops += 2 * 3 * (tokens + slots) * size
        elif path[-1] not in TABLES:
            flops += 2 * 3 * slots * size
    flops /= everyone  # nearly: what does not divide is whole on each device
    reach = load.tokens / 2 + load.block
    flops += 3 * 4 * slots * placement.heads(drafter.num_heads) * drafter.head_dim * reach * drafter.num_layers
    scored = rows * load.anchors * (load.block - 1)
    head = target.hidden_size * load.draft_vocab / everyone
    flops += 2 * (3 if load.teacher else 2) * scored * head
    # A Markov head's bias, and the gradients of both its sides.
    flops += 2 * 3 * scored * drafter.markov_rank * load.draft_vocab / everyone

    sizes = parameter_sizes(DFlash, drafter, dtype, placement)
    masters = device_bytes(laid_out(placement.mesh, DFlash, drafter, jnp.float32)[1]) / 4
    read = 3 * sizes.dense_bytes + OPTIMISER_BYTES * masters + head * dtype.itemsize
    read += 2 * 4 * (2 if load.teacher else 1) * scored * load.draft_vocab / everyone

    width = (tokens + slots) * drafter.hidden_size * dtype.itemsize
    sums = 2 * drafter.num_layers * (all_reduce(width, tensor) + all_reduce(width, everyone))
    gathers = 2 * _gathered(sizes.dense_bytes, placement) + _gathered(head * dtype.itemsize, placement)
    tables = len(TABLES) * drafter.markov_rank * drafter.vocab_size / everyone
    gradients = all_reduce(4 * (sizes.dense + tables), placement.cut(sharding.DATA, sharding.FSDP))
    return Work(flops, read, sums + gathers + gradients)


def _gathered(size: float, placement: Placement) -> float:
    """Bytes that a device sends (and receives) to gather arrays of this size that fsdp cut, around a ring."""
    parts = placement.cut(sharding.FSDP)
    return size * (parts - 1) / parts
