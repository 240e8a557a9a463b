"""Spellings of one decoder: as a text model or inside a multimodal one, experts one by one or stacked.

`families` know one spelling of each kind of target, the one that is written. A checkpoint's own is recognised
by the names in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging

from dflash_jax.checkpoints.families import common
from dflash_jax.checkpoints.placement import Placement
from dflash_jax.config import ConfigError

# Prefix of the decoder's tensors and name of its head, inside multimodal models: transformers 5 and most files,
# then files of transformers before 4.52 (Gemma 3) and Llama 4.
_NESTED = (
    ("model.language_model", "lm_head.weight"),
    ("language_model.model", "language_model.lm_head.weight"),
)
# What else such a checkpoint holds. Anything not named here is refused, not skipped.
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..+"
)
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(?:0\.(?:gate|down)_proj\.weight|(?:gate_up|down)_proj)")


def text_config(hf: Mapping[str, Any], text_model_type: str) -> Mapping[str, Any]:
    """The decoder's part of a multimodal `config.json`, under the model type of a text model.

    `tie_word_embeddings` beside `text_config` overrules the one inside it, as in transformers.

    Raises:
      ConfigError: there is no `text_config`, or it belongs to another kind of model.
    """
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"model_type is {hf['model_type']!r}, which is multimodal, but text_config is {text!r}")
    inner = text.get("model_type", text_model_type)
    if inner not in (text_model_type, hf["model_type"]):
        raise ConfigError(
            f"text_config has model_type {inner!r}; inside {hf['model_type']!r} it is {text_model_type!r}"
        )
    outer = {name: hf[name] for name in ("tie_word_embeddings", "quantization_config") if hf.get(name) is not None}
    return {**text, **outer, "model_type": text_model_type}


def spelled(placements: Sequence[Placement], names: Collection[str]) -> tuple[Placement, ...]:
    """The same parameters, made of tensors under the spelling that a checkpoint with these names has."""
    names = frozenset(names)
    rename = _nesting(names)
    return tuple(
        dataclasses.replace(
            p, tensors=tuple(dataclasses.replace(tensor, name=rename(tensor.name)) for tensor in p.tensors)
        )
        for p in _experts_as_in(placements, rename, names)
    )


def text_name(name: str, names: Collection[str]) -> str:
    """The name that a tensor of a checkpoint with these names has in a pure text model."""
    prefix, head = _found(names)
    if name == head:
        return common.HEAD
    return f"model.{name.removeprefix(f'{prefix}.')}" if name.startswith(f"{prefix}.") else name


def other_modality(name: str) -> bool:
    """Whether a tensor belongs to the part of a multimodal model that sees or hears."""
    return bool(_OTHER_MODALITIES.fullmatch(name))


def log_skipped(source: str, names: Collection[str]) -> None:
    """One line on what is left out of a multimodal checkpoint."""
    skipped = sorted(name for name in names if other_modality(name))
    if skipped:
        logging.info("%s: the text model only; %d tensors of other modalities are skipped, such as %s",
                     source, len(skipped), skipped[0])  # fmt: skip


def _found(names: Collection[str]) -> tuple[str, str]:
    for prefix, head in _NESTED:
        if f"{prefix}.embed_tokens.weight" in names:
            return prefix, head
    return "model", common.HEAD


def _nesting(names: Collection[str]) -> Callable[[str], str]:
    """A function from a text model's tensor names to the checkpoint's."""
    prefix, head = _found(names)

    def nested(name: str) -> str:
        return head if name == common.HEAD else f"{prefix}.{name.removeprefix('model.')}"

    return nested


def _experts_as_in(
    placements: Sequence[Placement], rename: Callable[[str], str], names: Collection[str]
) -> list[Placement]:
    """Exchanges experts stored one by one for stacked ones, or the reverse, where the checkpoint has the other."""
    out = []
    for p in placements:
        match = _EXPERTS.fullmatch(p.tensors[0].name)
        other = None
        if match and p.path[-1] in ("gate_up_Ex2xDxF", "down_ExFxD"):
            other = _other_spelling(p, match[1])
        out.append(other if other is not None and rename(other.tensors[0].name) in names else p)
    return out


def _other_spelling(p: Placement, prefix: str) -> Placement | None:
    """The other spelling of the same experts; None where the stored shapes are those of neither."""
    first, is_down = p.tensors[0].shape, p.path[-1] == "down_ExFxD"
    if len(first) == 2:
        num = len(p.tensors) if is_down else len(p.tensors) // 2
        hidden, ffn = first if is_down else first[::-1]
        both = common.stacked_experts(p.path[:-1], prefix, num, hidden, ffn)
    else:
        num, rows, columns = first
        hidden, ffn = (rows, columns) if is_down else (columns, rows // 2)
        both = common.experts(p.path[:-1], prefix, num, hidden, ffn)
    return next(x for x in both if x.path == p.path)
