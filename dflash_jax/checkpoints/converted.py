"""Converted checkpoints: a target's parameters as this program keeps them, in Orbax's format, for fast restarts.

    DIR/converted.json       what is here (`Manifest`): written first, and again when everything is there
    DIR/params/outside/      table, final norm and head
    DIR/params/layers.NNN/   one layer each
    DIR/config.json ...      configuration and tokenizer, in Hugging Face's layout

Each directory in params/ is an Orbax checkpoint of its own (OCDBT, uncompressed), which appears whole or not at all.
Arrays are stored in chunks of CHUNK_BYTES, so that a mesh of any shape reads little more than its own pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.placement import CheckpointError, Path, Progress, parameter_sharding

MANIFEST = "converted.json"
FORMAT = 1
OUTSIDE = "outside"
CHUNK_BYTES = 64 * 2**20
_PARAMS = "params"
_HEAD, _TABLE = ("head_DxV",), ("embedding_VxD",)
# Orbax holds at most this much beside the arrays; a single array may need more, which is then the limit.
_CONCURRENT_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint holds.

    Attributes:
      source: what was converted, for messages.
      fingerprint: of its files, see `convert.fingerprint`.
      dtype: that it was converted to: the default when it is loaded.
      groups: {group: {parameter: [dtype, shape]}}.
      complete: whether all groups are written.
    """

    source: str
    fingerprint: str
    dtype: str
    groups: Mapping[str, Mapping[str, Any]]
    complete: bool = False


def read_manifest(directory: pathlib.Path) -> Manifest:
    """The manifest of a directory that has one.

    Raises:
      CheckpointError: it is broken, or of a version that is not known.
    """
    path = directory / MANIFEST
    values = read_json(path, required=True)
    if values.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}, which this version reads; convert the source again")
    try:
        return Manifest(**values)
    except TypeError as error:
        raise CheckpointError(f"{path} is broken ({error}); remove {directory} and convert the source again") from error


def write_manifest(directory: pathlib.Path, manifest: Manifest) -> None:
    """Replaces the manifest as a whole."""
    part = directory / f"{MANIFEST}.part"
    part.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, directory / MANIFEST)


def group_of(path: Path) -> str:
    """The group of a parameter by its place in the tree."""
    return f"layers.{path[1]:03d}" if path[0] == "layers" else OUTSIDE


def name_in_group(path: Path) -> str:
    return ".".join(map(str, path[2:] if path[0] == "layers" else path))


def by_group(params: nnx.State) -> dict[str, dict[str, tuple[Path, nnx.Variable]]]:
    """{group: {name: (path, variable)}} of a tree, abstract or not."""
    groups: dict[str, dict[str, tuple[Path, nnx.Variable]]] = {}
    for path, variable in nnx.to_flat_state(params):
        groups.setdefault(group_of(path), {})[name_in_group(path)] = path, variable
    return groups


def group_contents(params: nnx.State) -> dict[str, dict[str, Any]]:
    """The manifest's `groups` of a tree."""
    return {
        group: {
            name: [jnp.dtype(v.get_value().dtype).name, list(v.get_value().shape)] for name, (_, v) in members.items()
        }
        for group, members in by_group(params).items()
    }


def is_written(directory: pathlib.Path, group: str) -> bool:
    """Whether a group is there, whole."""
    return (directory / _PARAMS / group).is_dir()


def write_group(directory: pathlib.Path, group: str, arrays: Mapping[str, jax.Array]) -> None:
    """Writes a group and returns when it is complete on disk. All processes of a program call this together."""
    with _orbax(max(x.nbytes for x in arrays.values())):
        ocp.save_pytree((directory / _PARAMS / group).absolute(), dict(arrays))


def remove_unfinished(directory: pathlib.Path) -> None:
    """Removes what a killed run left half written."""
    for path in (directory / _PARAMS).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)


class ConvertedWeights:
    """The parameters of a converted checkpoint.

    Raises:
      CheckpointError: the conversion was not finished, or a part of it is missing.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._manifest = read_manifest(directory)
        self.dtype = self._manifest.dtype
        missing = [group for group in self._manifest.groups if not is_written(directory, group)]
        if missing or not self._manifest.complete:
            raise CheckpointError(
                f"{directory}: the conversion is not complete, {len(missing)} of {len(self._manifest.groups)} parts "
                f"are missing; run it again (python -m dflash_jax.checkpoints.convert --source={self._manifest.source} "
                f"--out={directory}), it goes on where it was"
            )

    def restore(
        self, abstract_params: nnx.State, *, mesh: Mesh | None = None, progress: Progress | None = None
    ) -> nnx.State:
        """Fills an abstract tree, cast to its dtypes, laid out on the mesh: each process reads its own pieces.

        A head that the tree has beside a tied table is made of the table.

        Args:
          progress: called as progress(done, total, part) with bytes of parameters.

        Raises:
          CheckpointError: the tree has other parameters than the checkpoint, or a part can not be read.
        """
        groups = by_group(abstract_params)
        own_head = _HEAD[0] in groups[OUTSIDE] and _HEAD[0] not in self._manifest.groups.get(OUTSIDE, {})
        head = groups[OUTSIDE].pop(_HEAD[0])[1] if own_head else None
        self._check(groups)
        total = sum(v.get_value().size * v.get_value().dtype.itemsize for g in groups.values() for _, v in g.values())
        filled: dict[Path, nnx.Variable] = {}
        done = 0
        for group, members in groups.items():
            if progress is not None:
                progress(done, total, group)
            wanted = {name: _abstract(variable, mesh) for name, (_, variable) in members.items()}
            sizes = [math.prod(x.shape) * x.dtype.itemsize for x in wanted.values()]
            path = self.directory / _PARAMS / group
            try:
                with _orbax(max(sizes)):
                    arrays = jax.block_until_ready(ocp.load_pytree(path.absolute(), wanted))
            except (ValueError, OSError, KeyError) as error:
                raise CheckpointError(
                    f"{path} can not be read ({error}); remove it and run the conversion again, which writes it anew"
                ) from error
            for name, (at, variable) in members.items():
                filled[at] = variable.replace(arrays[name])
            done += sum(sizes)
        if head is not None:
            table_VxD = filled[_TABLE].get_value()
            filled[_HEAD] = head.replace(
                jax.jit(jnp.transpose, out_shardings=parameter_sharding(head, mesh))(table_VxD)
            )
        if progress is not None:
            progress(total, total, "weights loaded")
        return nnx.from_flat_state([(path, filled[path]) for path, _ in nnx.to_flat_state(abstract_params)])

    def _check(self, groups: Mapping[str, Mapping[str, tuple[Path, nnx.Variable]]]) -> None:
        ours = {
            (group, name): list(variable.get_value().shape)
            for group, members in groups.items()
            for name, (_, variable) in members.items()
        }
        theirs = {
            (group, name): shape
            for group, members in self._manifest.groups.items()
            for name, (_, shape) in members.items()
        }
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise CheckpointError(
                    f"{self.directory} holds {'.'.join(key)} with shape {theirs.get(key, 'none')}, this version of the "
                    f"model has {ours.get(key, 'none')}; remove it and convert {self._manifest.source} again"
                )


def _abstract(variable: nnx.Variable, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    layout = parameter_sharding(variable, mesh) or SingleDeviceSharding(jax.devices()[0])
    value = variable.get_value()
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=layout)


@contextlib.contextmanager
def _orbax(largest: int) -> Iterator[None]:
    """Orbax with the layout and the limits of this format, and without its reports of every internal step."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    limit = max(_CONCURRENT_BYTES, 2 * largest)
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = limit
    verbosity = logging.get_verbosity()
    logging.set_verbosity(min(verbosity, logging.WARNING))
    try:
        with context, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Ss]harding info.*")
            yield
    finally:
        logging.set_verbosity(verbosity)
