"""Any checkpoint that `load_target` reads -> an Orbax checkpoint that it reads faster, on any mesh.

    python -m dflash_jax.checkpoints.convert --source=DIR --out=DIR

Weights are dequantised, fused and regrouped once; what is written lies as the program keeps it, in `--dtype` (by
default what the source names), with configuration and tokenizer beside it: `load_target(OUT)` and
`config.target.source = OUT` take it. A run that was killed goes on with the parts that are not written yet when it is
started again with the same flags; it refuses if the source has changed meanwhile.

    python -m dflash_jax.checkpoints.convert --source=DIR --mesh=fsdp=2,expert=8,tensor=4 --dry_run

prints how the parameters would lie on a mesh, of devices that need not be there, and the bytes each of them holds.
Names, shapes and types of all tensors are checked, no weights are read. Without `--dry_run`, `--mesh` says over which
devices a part is spread while it is converted (all processes of a pod run the command together).
"""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dflash_jax import command_line, sharding
from dflash_jax.checkpoints import converted
from dflash_jax.checkpoints.converted import MANIFEST, ConvertedWeights, Manifest
from dflash_jax.checkpoints.export_target import write_text_side
from dflash_jax.checkpoints.layout import layout, mesh_sizes, readable, table
from dflash_jax.checkpoints.load_target import OpenCheckpoint, open_checkpoint
from dflash_jax.checkpoints.placement import CheckpointError, Placement, Progress, check_tensors, fill_params
from dflash_jax.checkpoints.spelling import log_skipped
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.config import ConfigError
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer

# What goes beside the weights as it is.
_TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.*",
)  # fmt: skip
_HEAD_BYTES, _SAMPLE_BYTES, _SAMPLES = 2**20, 2**16, 16


def convert(
    source: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Converts a checkpoint, or goes on converting it.

    A part (a layer, or what is outside of layers) is on the devices while it is written; the host holds what
    `placement` says, and what Orbax writes from.

    Args:
      source, dtype: as `load_target` takes them.
      out: a directory that does not exist, is empty, or is an unfinished conversion of the same source.
      mesh: what a part is spread over meanwhile; it says nothing about the mesh that it is loaded on later.
      progress: called as progress(done, total, part) with bytes.

    Returns:
      The directory.

    Raises:
      CheckpointError: the source is converted already or does not fit its configuration; the directory holds
        something else, or a conversion of another source or dtype.
      ConfigError: the architecture or a feature of it is not supported.
    """
    opened, out = open_checkpoint(source, dtype=dtype, progress=progress), pathlib.Path(out).expanduser()
    abstract, placements = _plan(opened)
    manifest = Manifest(
        opened.source, fingerprint(opened), jnp.dtype(opened.dtype).name, converted.group_contents(abstract)
    )
    needed = _prepare(out, manifest)
    _wait_for_all("looked")  # before anything is written
    if needed:
        if jax.process_index() == 0:
            converted.remove_unfinished(out)
            converted.write_manifest(out, manifest)  # before anything else: from now on this run can be gone on with
            _write_text_side(out, opened)
        _wait_for_all("prepared")
        _write_groups(out, opened, abstract, placements, mesh, progress)
        _wait_for_all("written")
        if jax.process_index() == 0:
            converted.write_manifest(out, Manifest(**{**vars(manifest), "complete": True}))
        _wait_for_all("complete")
    return out


def dry_run(source: str | pathlib.Path, mesh: str, *, dtype: Any = None) -> str:
    """The layout of a checkpoint's parameters on a mesh such as "data=2,tensor=4", for people; see `layout`.

    Raises:
      CheckpointError, ConfigError: as `load_target`, except for what only the weights themselves can show.
    """
    opened, sizes = open_checkpoint(source, dtype=dtype), mesh_sizes(mesh)
    if isinstance(opened.weights, ConvertedWeights):
        _, abstract = abstract_model(Transformer, opened.config, opened.dtype)
    else:
        abstract, _ = _plan(opened)
    return table(layout(abstract, sizes), sizes)


def fingerprint(opened: OpenCheckpoint) -> str:
    """Of the files of a checkpoint: names, sizes, heads, and samples of the weights; and of its configuration.

    Hashing terabytes whole would take longer than converting them. Training changes every number that it reaches, so
    samples from all over a file tell one state of a model from another.
    """
    digest = hashlib.sha256()
    for path in opened.files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * (i + 1) // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    if opened.directory is not None:
        digest.update((opened.directory / "config.json").read_bytes())
    return digest.hexdigest()


def _plan(opened: OpenCheckpoint) -> tuple[nnx.State, tuple[Placement, ...]]:
    """(abstract parameters, their placements) after the tensors are checked."""
    if isinstance(opened.weights, ConvertedWeights):
        raise CheckpointError(f"{opened.source} is converted already; to change its dtype, convert its own source")
    _, abstract = abstract_model(Transformer, opened.config, opened.dtype)
    names = frozenset(opened.weights.names())
    log_skipped(opened.source, names)
    placements = target_placements(opened.config, False, names)
    check_tensors(placements, opened.weights, lambda name: is_harmless(opened.config, name, names))
    return abstract, placements


def _prepare(out: pathlib.Path, manifest: Manifest) -> bool:
    """Whether there is anything to do; makes the directory, and refuses one with something else in it."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"--out {out} is a file, must be a directory")
    if not (out / MANIFEST).is_file():
        if out.is_dir() and any(out.iterdir()):
            raise CheckpointError(f"--out {out} holds files and no conversion; choose another directory")
        out.mkdir(parents=True, exist_ok=True)
        return True
    found = converted.read_manifest(out)
    for what, theirs, ours in (
        ("dtype", found.dtype, manifest.dtype),
        ("source", (found.source, found.fingerprint), (manifest.source, manifest.fingerprint)),
        ("parameters", found.groups, manifest.groups),
    ):
        if what == "source" and theirs[1] != ours[1]:
            changed = f"{theirs[0]} in another state than {ours[0]} has now" if theirs[0] == ours[0] else theirs[0]
            raise CheckpointError(f"{out} is a conversion of {changed}; remove it, or choose another --out")
        if what != "source" and theirs != ours:
            shown = f" {theirs}, not {ours}" if what == "dtype" else ""
            raise CheckpointError(f"{out} was begun with other {what}{shown}; remove it, or choose another --out")
    return not found.complete or not all(converted.is_written(out, group) for group in manifest.groups)


def _write_text_side(out: pathlib.Path, opened: OpenCheckpoint) -> None:
    if opened.directory is None:
        write_text_side(out, opened.config, opened.dtype, opened.eos_token_ids, opened.tokenizer)
        return
    for pattern in _TEXT_FILES:
        for path in opened.directory.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out / path.name)


def _write_groups(
    out: pathlib.Path,
    opened: OpenCheckpoint,
    abstract: nnx.State,
    placements: tuple[Placement, ...],
    mesh: Mesh | None,
    progress: Progress | None,
) -> None:
    by_path = {placement.path: placement for placement in placements}
    groups = converted.by_group(abstract)
    sizes = {
        group: sum(v.get_value().size * v.get_value().dtype.itemsize for _, v in members.values())
        for group, members in groups.items()
    }
    written = {group for group in groups if converted.is_written(out, group)}
    _wait_for_all("listed")  # all processes skip the same parts
    done, total = sum(sizes[group] for group in written), sum(sizes.values())
    for group, members in groups.items():
        if group in written:
            continue
        if progress is not None:
            progress(done, total, group)
        part = nnx.from_flat_state(list(members.values()))
        filled = fill_params(part, [by_path[path] for path, _ in members.values()], opened.weights, mesh=mesh)
        arrays = dict(nnx.to_flat_state(filled))
        converted.write_group(out, group, {name: arrays[path].get_value() for name, (path, _) in members.items()})
        done += sizes[group]
    if progress is not None:
        progress(total, total, "converted")


def _wait_for_all(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"convert: {what}")


def _log_progress() -> Progress:
    """Lines with the speed since this run began."""
    start: list[tuple[float, int]] = []

    def progress(done: int, total: int, what: str) -> None:
        if total <= 1:
            logging.info("%s", what)
            return
        start.append((time.monotonic(), done))
        speed = (done - start[0][1]) / max(1e-9, time.monotonic() - start[0][0])
        logging.info(
            "%5.1f%% %s of %s, %s/s: %s",
            100 * done / total, readable(done), readable(total), readable(int(speed)), what,
        )  # fmt: skip

    return progress


def main(argv: list[str]) -> None:
    del argv
    values = flags.FLAGS
    if values.dry_run:
        print(dry_run(values.source, values.mesh, dtype=values.dtype))
        return
    if values.out is None:
        raise ConfigError("--out is not set: the directory to write to (or --dry_run, to see the layout only)")
    mesh = None
    if values.mesh:
        try:
            mesh = sharding.make_mesh(**mesh_sizes(values.mesh))
        except ValueError as error:
            raise ConfigError(f"mesh is {values.mesh!r}: {error}") from error
    out = convert(values.source, values.out, dtype=values.dtype, mesh=mesh, progress=_log_progress())
    logging.info("%s is complete: load_target(%r)", out, str(out))


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "What load_target takes: a directory, a .gguf file, pypi:..., owner/name.")
    flags.DEFINE_string("out", None, "The directory to write; goes on with what is there.")
    flags.DEFINE_string("dtype", None, "float32, bfloat16 or float16; by default what the source names.")
    flags.DEFINE_string("mesh", "", "Sizes of mesh axes, such as fsdp=2,expert=8,tensor=4; by default one device.")
    flags.DEFINE_bool("dry_run", False, "Print the layout on the mesh and the bytes a device, and end.")
    flags.mark_flag_as_required("source")
    command_line.run(main)
