"""A drafter's checkpoint from one format to another; its numbers stay as they are, bit by bit.

    python -m dflash_jax.checkpoints.convert_drafter --source=DIR --out=DIR --format=speculators --target=DIR

Formats: `zlab` (config.json with every field where old and new readers look for it; what training exports),
`zlab_old` (spelled as z-lab's first checkpoints), `speculators` (vllm-project/speculators: taps counted from the
embedding, a table and a head of its own, d2t and t2d). The format of the source is seen from its config.json. What the
asked format can not hold is refused by name, and nothing is written.

`--target` is what `load_target` takes. It is needed to write `speculators`, whose table and head are the target's, and
to read it, since it does not say how many layers the target has. Two tensors of the target are read, not the model.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from dflash_jax import command_line
from dflash_jax.checkpoints.converted import ConvertedWeights
from dflash_jax.checkpoints.drafter_config import OURS, drafter_config_to_hf, old_spelling
from dflash_jax.checkpoints.drafter_names import drafter_placements
from dflash_jax.checkpoints.export_drafter import README, check_replaceable, write_drafter
from dflash_jax.checkpoints.hub import is_hub_name
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.load_drafter import drafter_directory, own_matrix, same_numbers
from dflash_jax.checkpoints.load_target import OpenCheckpoint, open_checkpoint
from dflash_jax.checkpoints.open_drafter import (
    OWN_HEAD,
    OWN_TABLE,
    SPECULATORS,
    ZLAB,
    ZLAB_OLD,
    OpenDrafter,
    open_drafter,
)
from dflash_jax.checkpoints.placement import CheckpointError, Progress, check_tensors
from dflash_jax.checkpoints.speculators_config import speculators_config
from dflash_jax.checkpoints.target_names import target_placements
from dflash_jax.config import ConfigError

FORMATS = (ZLAB, ZLAB_OLD, SPECULATORS)


def convert_drafter(
    source: str | pathlib.Path,
    out: str | pathlib.Path,
    to: str,
    *,
    target: str | pathlib.Path | None = None,
    verifier: str | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Writes a drafter in another format.

    Args:
      source: what `load_drafter` takes.
      out: must not exist, be empty, or hold an earlier export and nothing else.
      to: one of FORMATS.
      target: what `load_target` takes; see the top of this file.
      verifier: where readers of `speculators` find the target; by default `target`, if that is a directory or a hub
        name.

    Returns:
      The directory.

    Raises:
      ConfigError: the format can not hold a field, or something that it needs is not given.
      CheckpointError: the source or the target can not be read, they do not fit each other, or the drafter has a table
        or head of its own and the format has none.
    """
    if to not in FORMATS:
        raise ConfigError(f"format is {to!r}, must be one of {', '.join(FORMATS)}")
    out = pathlib.Path(out).expanduser()
    check_replaceable(out)
    opened_target = None if target is None else open_checkpoint(target, progress=progress)
    opened = open_drafter(
        drafter_directory(source, progress), None if opened_target is None else opened_target.config
    )  # fmt: skip
    check_tensors(drafter_placements(opened.config), opened.weights, opened.beside)
    wanted = [tensor.name for placement in drafter_placements(opened.config) for tensor in placement.tensors]
    tensors = {name: opened.weights.read(name).read() for name in wanted}
    dtype = tensors["fc.weight"].dtype
    ids_U = opened.draft_to_target
    if to == SPECULATORS:
        if opened_target is None:
            raise ConfigError("--target is not set: the speculators format holds the target's table and head")
        size = opened.config.vocab_size if ids_U is None else len(ids_U)
        name = _verifier(opened_target, verifier)
        values = speculators_config(opened.config, dtype.name, size, name, _architectures(opened_target))
        tensors |= _vocabulary(opened, opened_target, dtype)
        if ids_U is not None:
            allowed_V = np.zeros(opened.config.vocab_size, np.bool_)
            allowed_V[ids_U] = True
            tensors |= {"d2t": ids_U.astype(np.int64) - np.arange(size), "t2d": allowed_V}
        ids_U = None  # they are among the tensors
    else:
        if opened.own:
            _check_shared(opened, opened_target, to)
        values = drafter_config_to_hf(opened.config, dtype.name)
        values = old_spelling(values) if to == ZLAB_OLD else values
    if opened.training:
        values[OURS] = {**values.get(OURS, {}), "training": dict(opened.training)}
    card = opened.directory / README
    write_drafter(out, values, tensors, ids_U, card.read_text(encoding="utf-8") if card.is_file() else None)
    return out


def _target_matrices(opened: OpenCheckpoint, ids_U: np.ndarray | None, dtype: Any) -> dict[str, np.ndarray]:
    """The target's table [V, D] and head [U, D] under the names of speculators' format."""
    if isinstance(opened.weights, ConvertedWeights):
        raise CheckpointError(
            f"{opened.source} is a converted checkpoint; give --target the checkpoint that it was made of"
        )
    placements = {p.path: p for p in target_placements(opened.config, True, frozenset(opened.weights.names()))}
    found = {}
    for name, path in ((OWN_TABLE, "embedding_VxD"), (OWN_HEAD, "head_DxV")):
        placement = placements[(path,)]
        value = placement.join(*(tensor.take(opened.weights.read(tensor.name)) for tensor in placement.tensors))
        found[name] = np.asarray(value.read(dtype=dtype) if name == OWN_TABLE else value.T.read(dtype=dtype))
    if ids_U is not None:
        found[OWN_HEAD] = found[OWN_HEAD][ids_U]
    return found


def _vocabulary(opened: OpenDrafter, target: OpenCheckpoint, dtype: Any) -> dict[str, np.ndarray]:
    """Table and head: the drafter's own where it has them, else the target's."""
    own = {name: opened.weights.read(name).read() for name in opened.own}
    return own if len(own) == 2 else _target_matrices(target, opened.draft_to_target, dtype) | own


def _check_shared(opened: OpenDrafter, target: OpenCheckpoint | None, to: str) -> None:
    """Refuses a table or head that is not the target's, which the format would leave out."""
    assert target is not None  # a speculators checkpoint is not opened without
    theirs = _target_matrices(target, opened.draft_to_target, None)
    for name in opened.own:
        own = own_matrix(opened, name, None)
        if not same_numbers(own.T if name == OWN_HEAD else own, jnp.asarray(theirs[name])):
            raise CheckpointError(
                f"{opened.directory} has its own {name}, which is not the one of {target.source}; {to} holds none, "
                f"and its readers would draft with the target's. Give the target that it was made for, or keep "
                f"{SPECULATORS}"
            )


def _verifier(target: OpenCheckpoint, given: str | None) -> str:
    if given is not None:
        return given
    if target.directory is None or not (is_hub_name(target.source) or pathlib.Path(target.source).is_dir()):
        raise ConfigError(
            f"--verifier is not set: readers of the speculators format can not load {target.source}; name a directory "
            "or hub repository of the same target"
        )
    return target.source.partition("@")[0] if is_hub_name(target.source) else target.source


def _architectures(target: OpenCheckpoint) -> list[str]:
    return [] if target.directory is None else read_json(target.directory / "config.json").get("architectures") or []


def main(argv: list[str]) -> None:
    del argv
    values = flags.FLAGS
    out = convert_drafter(
        values.source, values.out, values.format, target=values.target, verifier=values.verifier
    )  # fmt: skip
    logging.info("%s is written, as %s", out, values.format)


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "What load_drafter takes: a directory, asset:NAME, owner/name on the hub.")
    flags.DEFINE_string("out", None, "The directory to write.")
    flags.DEFINE_enum("format", None, FORMATS, "The format to write.")
    flags.DEFINE_string("target", None, "What load_target takes; needed to read or write speculators.")
    flags.DEFINE_string("verifier", None, "Where readers of speculators find the target; by default --target.")
    flags.mark_flags_as_required(["source", "out", "format"])
    command_line.run(main)
