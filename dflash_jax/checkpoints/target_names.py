"""The one map between Hugging Face tensor names of a target and its parameter tree, by family."""

from __future__ import annotations

from collections.abc import Collection

from dflash_jax.checkpoints.families import FAMILIES, WRAPPERS
from dflash_jax.checkpoints.placement import Placement
from dflash_jax.checkpoints.spelling import other_modality, spelled, text_name
from dflash_jax.config import TargetConfig


def target_placements(config: TargetConfig, own_head: bool, names: Collection[str] = ()) -> tuple[Placement, ...]:
    """Every parameter of `models.transformer.Transformer`, with the tensors it comes from.

    Args:
      own_head: whether the tree has `head_DxV`; where the configuration ties the head, it is then filled
        with the transposed embedding table.
      names: of a checkpoint's tensors. The decoder may be nested in a multimodal model in it, and its experts
        one by one or stacked. Without names, the spelling that is written: a text model.
    """
    placements = FAMILIES[config.family].placements(config, own_head)
    return spelled(placements, names) if names else placements


def is_harmless(config: TargetConfig, name: str, names: Collection[str] = ()) -> bool:
    """Stored tensors that carry nothing of the target, and are skipped.

    Args:
      names: of all tensors of the checkpoint, which say how the decoder is nested in it.
    """
    if config.family in WRAPPERS.values() and other_modality(name):
        return True
    return FAMILIES[config.family].is_harmless(config, text_name(name, names), names)
