"""The one map between Hugging Face tensor names of a target and its parameter tree, by family."""

from __future__ import annotations

from dflash_jax.checkpoints.families import FAMILIES
from dflash_jax.checkpoints.placement import Placement
from dflash_jax.config import TargetConfig


def target_placements(config: TargetConfig, own_head: bool) -> tuple[Placement, ...]:
    """Every parameter of `models.transformer.Transformer`, with the tensors it comes from.

    Args:
      own_head: whether the tree has `head_DxV`; where the configuration ties the head, it is then filled
        with the transposed embedding table.
    """
    return FAMILIES[config.family].placements(config, own_head)


def is_harmless(config: TargetConfig, name: str) -> bool:
    """Stored tensors that carry nothing of the model, and are skipped."""
    return FAMILIES[config.family].is_harmless(config, name)
