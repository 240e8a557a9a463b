"""Saving and resuming a run with Orbax: all that the next step depends on, in one transaction.

A checkpoint holds the training state (parameters, optimiser moments, step, PRNG key), the position of the
data iterator, and in its metadata the facts that a resumed run must share (the fingerprint). Arrays are
stored by their path in the state, so that a checkpoint can be read on any number of devices, and what is
missing or misshapen can be named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging as python_logging
import pathlib
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from orbax.checkpoint import v1 as ocp

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.training.step import TrainState

_STATE, _DATA = "state", "data"
# Facts of earlier checkpoints that decide nothing: any number of processes reads the same rows in the same steps.
_NO_LONGER_FACTS = ("data.processes",)
# Facts that earlier checkpoints do not have: nobody can tell any more what they were.
_LATER_FACTS = ("target.dtype",)


class Checkpoints:
    """The checkpoints of one run, in `directory`; a context manager.

    Args:
      keep: how many of the latest checkpoints stay.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        if keep < 1:
            raise ConfigError(f"keep is {keep}, at least 1 checkpoint must stay")
        self.directory = pathlib.Path(directory).absolute()
        logging.get_absl_logger().addFilter(_worth_saying)  # a second time changes nothing
        self._newest: int | None = None  # saved or being saved by this object
        with _quiet():
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=ocp.training.save_decision_policies.ContinuousCheckpointingPolicy(),
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                cleanup_tmp_directories=True,  # what a killed run left half written
            )
        # Orbax asks jax whether the step it saves is the one where all processes stop for a preemption, and asks again
        # when it is done writing, from its own thread. jax takes the last step asked about for the one that training
        # has come to: a notice right then would agree on a step that lies behind, and no process would stop. The loop
        # asks (`interrupts.stop_signal`), Orbax must not.
        self._checkpointer._manager.reached_preemption = lambda step: False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        with _quiet():
            self._checkpointer.close()

    def wait(self) -> None:
        """Returns when what `save` began is complete on disk.

        Raises:
          Exception: whatever went wrong while it was written.
        """
        with _quiet():
            self._checkpointer.wait()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None; waits for one that is being written."""
        self.wait()
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, state: TrainState, data_state: Mapping[str, Any], facts: Mapping[str, Any]) -> pathlib.Path:
        """Begins to write a checkpoint of `state`, and returns when the arrays are copied: `state` may be donated then.

        The copy is in the host's memory, on CPU beside the state. Writing goes on in the background; a checkpoint
        counts from when it is whole, and a process that is killed before leaves the earlier ones as they were. An
        earlier save that is still being written is waited for, and what went wrong with it is raised.

        Args:
          data_state: JSON-able, what the data iterator's get_state() gave after the last used batch.
          facts: JSON-able; see `facts`.
        """
        step = int(state.step)
        if self._newest is None:
            self._newest = self.latest
        if step != self._newest:
            arrays = flatten(state)
            if jax.default_backend() == "cpu":
                # There Orbax writes from the very memory of the arrays, which the next step is given to write into.
                arrays = jax.block_until_ready(jax.tree.map(jnp.copy, arrays))
            content = {_STATE: arrays, _DATA: {"iterator": dict(data_state)}}
            with _quiet():
                self._checkpointer.save_checkpointables_async(step, content, custom_metadata=dict(facts), force=True)
            self._newest = step
        return self.directory / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        """The facts saved with a checkpoint.

        Raises:
          CheckpointError: its files are damaged.
        """
        self.wait()
        with self._undamaged(step):
            facts = self._checkpointer.metadata(step).custom_metadata
            if not facts:  # Orbax takes a lost file of metadata for one that was empty
                raise ValueError("the facts of its run are missing")
            return dict(facts)

    @contextlib.contextmanager
    def _undamaged(self, step: int) -> Iterator[None]:
        """Says of what goes wrong in reading a checkpoint that its files are damaged, and the way out.

        Files that may not be read, and memory that does not suffice, are no damage.
        """
        try:
            with _quiet():
                yield
        except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax and tensorstore raise many kinds
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise
            others = [found.step for found in self._checkpointer.checkpoints if found.step < step]
            after = f"goes on from step {max(others)}" if others else "begins at step 0, there is no other checkpoint"
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged ({_first_line(error)}); delete this folder, and "
                f"the same command {after}"
            ) from error

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """(state, data_state) of a checkpoint; arrays take the shardings of `like`, whatever mesh they had.

        Raises:
          ConfigError: an array is missing, unknown, misshapen or of another dtype, by its path.
          CheckpointError: its files are damaged.
        """
        self.wait()
        wanted = flatten(like)
        with self._undamaged(step):
            stored = self._checkpointer.checkpointables_metadata(step).metadata[_STATE]
            if stored is None:  # Orbax warns, and says why
                raise ValueError("the names of its arrays can not be read")
        for path in sorted(set(wanted) ^ set(stored)):
            where = "is missing in the checkpoint" if path in wanted else "is in the checkpoint only"
            raise ConfigError(f"checkpoint {self.directory / str(step)} does not fit this run: {path} {where}")
        for path, leaf in wanted.items():
            have = stored[path]
            if tuple(have.shape) != leaf.shape or have.dtype != leaf.dtype:
                raise ConfigError(
                    f"checkpoint {self.directory / str(step)} does not fit this run: {path} is "
                    f"{have.dtype}{list(have.shape)} there, {leaf.dtype}{list(leaf.shape)} here"
                )
        abstract = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for p, x in wanted.items()}
        with self._undamaged(step):
            loaded = self._checkpointer.load_checkpointables(step, {_STATE: abstract, _DATA: None})
            return unflatten(loaded[_STATE], like), loaded[_DATA]["iterator"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax advises on saved shardings that are not used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]harding info.*")
        yield


def _worth_saying(record: python_logging.LogRecord) -> bool:
    """Orbax reports every internal step at INFO, also from the thread that writes, and warns where a part of a
    checkpoint has no arrays, as the data position has none. Of what goes wrong in its threads each logs a traceback;
    `Checkpoints.wait` raises it."""
    if "/orbax/" not in record.pathname:
        return True
    if record.exc_info:
        record.exc_info = None
        return "_SignalingThread" not in record.getMessage()
    return record.levelno > python_logging.INFO and not record.getMessage().startswith("Skipping merge of OCDBT")


def flatten(state: TrainState) -> dict[str, jax.Array]:
    """{path: array}; the PRNG key as its raw data."""
    state = state.replace(key=jax.random.key_data(state.key))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def unflatten(arrays: dict[str, jax.Array], like: TrainState) -> TrainState:
    """The inverse of `flatten`, with the structure of `like`; empties `arrays` as it copies them."""
    raw = like.replace(key=jax.random.key_data(like.key))
    paths, structure = jax.tree_util.tree_flatten_with_path(raw)
    # Fresh buffers: a restored array may share memory with its reader, and the step donates the state.
    leaves = [jnp.copy(arrays.pop(jax.tree_util.keystr(path))) for path, _ in paths]
    state = jax.tree_util.tree_unflatten(structure, leaves)
    return state.replace(key=jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(like.key)))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def check_fingerprint(
    saved: Mapping[str, Any], now: Mapping[str, Any], where: str, kinds: Mapping[str, type] | None = None
) -> None:
    """Refuses to resume a run under another configuration.

    Args:
      kinds: the dataclass that a part of the fingerprint is of, such as {"step": StepConfig}. A field that it has got
        since the run was saved had its default then.

    Raises:
      ConfigError: names the first field that differs, with both values.
    """
    defaults = {name: value for part, kind in (kinds or {}).items() for name, value in _defaults(kind, f"{part}.")}
    ours, theirs = _leaves(now), _leaves(saved)
    for name in ours:
        within = any(name.startswith(f"{leaf}.") for leaf in theirs)  # a part that was None then had no fields
        if name in defaults and name not in theirs and not within:
            theirs[name] = defaults[name]
    for name in sorted({*ours, *theirs} - {*_NO_LONGER_FACTS}):
        if name in _LATER_FACTS and name not in theirs:
            continue
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{where} was trained with {name} = {theirs.get(name, 'unset')!r}, this run has "
                f"{ours.get(name, 'unset')!r}. Resume with the same value, or start in another workdir "
                "(drafter.init_from takes over trained weights)"
            )


def _defaults(kind: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, default) of each field that has one, down into fields that are dataclasses themselves."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        for inner in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(inner):
                yield from _defaults(inner, f"{name}.")
        made = field.default_factory is not dataclasses.MISSING
        if made or field.default is not dataclasses.MISSING:
            value = field.default_factory() if made else field.default
            value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            yield from _leaves(json.loads(json.dumps(value)), f"{name}.").items()  # as it comes back from disk


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {k: v for name, sub in tree.items() for k, v in _leaves(sub, f"{prefix}{name}.").items()}
    return {prefix[:-1]: list(tree) if isinstance(tree, tuple) else tree}
