"""What a run is made of, as its config asks: mesh, target, first parameters. (The drafter: adapter.py.)"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import drafter_directory, load_drafter, shared_weights
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig, check_types, from_config_dict
from dflash_jax.models.target import Target
from dflash_jax.sharding import MeshConfig
from dflash_jax.training import processes
from dflash_jax.training.acceptance import EvaluationConfig
from dflash_jax.training.adapter import FROZEN, check_section, read_trunk, with_trunk_of
from dflash_jax.training.adapter_fit import fit_adapter
from dflash_jax.training.corpus import BatchIterator, DataConfig
from dflash_jax.training.dry_run import TINY, tiny_target
from dflash_jax.training.initialise import Statistics, check_layers, deepened, initial_params, measure
from dflash_jax.training.metrics import check_wandb
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import OptimizerConfig
from dflash_jax.training.run_config import RunConfig
from dflash_jax.training.step import StepConfig

FIT_BATCHES = 8  # batches of text that an adapter is fitted on before it is trained
_SECTIONS = ("seed", "mesh", "target", "drafter", "data", "step", "loss", "optimizer", "run", "evaluation")
_OF_SERVING = ("generation", "comparison", "cache")  # one config may do both


def check_sections(
    config: ConfigDict, *, data: bool, evaluation: bool
) -> tuple[RunConfig, OptimizerConfig, StepConfig]:
    """Checks what can be checked before a target is loaded and prompts are answered for hours.

    Args:
      data, evaluation: whether the run reads these sections (it may be given its own).

    Raises:
      ConfigError: a section or field is unknown, missing or wrong, or two fields contradict each other.
    """
    given = {"data": not data, "evaluation": not evaluation}
    check_present(config, [name for name in _SECTIONS if not given.get(name)])
    for name in config:
        if name not in (*_SECTIONS, *_OF_SERVING):
            raise ConfigError(f"the config has a section {name!r}; train.py knows {', '.join(_SECTIONS)}")
    check_types({"seed": config.seed}, {"seed": int}, "config")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed is {config.seed}, must lie in [0, 2 ** 32)")
    run = from_config_dict(RunConfig, config.run.to_dict(), "run")
    check_wandb(run.wandb)
    optimizer = from_config_dict(OptimizerConfig, config.optimizer, "optimizer")
    if run.export_weights == "ema" and not optimizer.ema_decay:
        raise ConfigError(
            "run.export_weights is 'ema', but optimizer.ema_decay is 0: no average is kept; set it (such as 0.999), or "
            "export 'raw' weights"
        )
    for name, instead in (("save_every_minutes", "save_every"), ("max_minutes", "stop_after")):
        minutes = getattr(run, name)
        if minutes is not None and math.isfinite(minutes) and jax.process_count() > 1:
            raise ConfigError(
                f"run.{name} is {minutes}, which needs a single process; set it to None (--config.run.{name}=inf) and "
                f"use run.{instead}"
            )
    check_section(config.drafter)
    step = StepConfig.of(config.step, config.loss, config.drafter.block_size)
    if data:
        section = from_config_dict(DataConfig, config.data.to_dict(), "data")
        if section.batch_size % step.accumulation:
            raise ConfigError(
                f"step.accumulation is {step.accumulation}, must divide data.batch_size = {section.batch_size}"
            )
        mesh = from_config_dict(MeshConfig, config.mesh, "mesh")
        shards = mesh.data * mesh.fsdp
        if section.batch_size % shards:
            raise ConfigError(
                f"data.batch_size is {section.batch_size}, must be a multiple of the {shards} shards that mesh.data x "
                "mesh.fsdp makes of its rows"
            )
        if section.batch_size % (shards * step.accumulation):
            raise ConfigError(
                f"step.accumulation is {step.accumulation}: data.batch_size = {section.batch_size} leaves each part "
                f"{section.batch_size // step.accumulation} rows, which do not divide over the {shards} shards of "
                f"mesh.data x mesh.fsdp; make data.batch_size a multiple of {shards * step.accumulation}"
            )
    if evaluation:
        size = from_config_dict(EvaluationConfig, config.evaluation.to_dict(), "evaluation").block_size
        if size is not None and size > config.drafter.block_size:
            raise ConfigError(
                f"evaluation.block_size is {size}, must be at most drafter.block_size = {config.drafter.block_size}"
            )
    return run, optimizer, step


def check_present(config: ConfigDict, needed: Sequence[str] = _SECTIONS) -> None:
    """Refuses a config that has not all of these sections: one that serves, or a benchmark's.

    Raises:
      ConfigError: names what is missing.
    """
    missing = [name for name in needed if name not in config]
    if missing:
        raise ConfigError(
            f"the config has no {', '.join(missing)}: it is none that trains; one that does, such as "
            f"configs/smollm2_135m_dflash.py, has {', '.join(_SECTIONS)}"
        )
    for name in needed:
        if name != "seed" and not hasattr(config[name], "items"):
            raise ConfigError(f"{name} is {config[name]!r}, must be a section with fields of its own")


def check_for_target(section: ConfigDict, target: TargetConfig) -> None:
    """Refuses a `drafter` section that can not be right for this target; `configured_drafter` checks the rest.

    Raises:
      ConfigError: names the field. CheckpointError: `init_from` is not there.
    """
    if section.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size is {section.draft_vocab_size}, must be at most {target.vocab_size}, the "
            "target's vocabulary; 0 takes all of it"
        )
    check_layers(target, section.init_layers, "drafter.init_layers")
    if section.init_from:
        try:
            drafter_directory(section.init_from)
        except CheckpointError as error:
            raise CheckpointError(f"drafter.init_from: {error}") from error


def configured_target(config: ConfigDict, mesh: jax.sharding.Mesh | None) -> Target:
    """The target that the config's `target` section names, loaded onto the mesh."""
    if config.target.source == TINY:
        architecture = config.target.get("architecture")
        architecture = None if architecture is None else architecture.to_dict()
        return tiny_target(config.seed, mesh, architecture, config.target.dtype)

    def progress(done: int, total: int, what: str) -> None:
        if total and done == total:
            logging.info("%s: complete", what)

    return load_target(config.target.source, dtype=config.target.dtype, mesh=mesh, progress=progress)


def configured_mesh(config: ConfigDict) -> jax.sharding.Mesh | None:
    """The mesh of the config's `mesh` section; None for one device.

    Raises:
      ConfigError: it leaves devices of the processes out.
    """
    return from_config_dict(MeshConfig, config.mesh, "mesh").make()


def check_without_own_target(config: ConfigDict, *, evaluation: bool) -> None:
    """Refuses what a process does with a target of its own, where the mesh leaves none of them the target whole.

    Args:
      evaluation: as in `check_sections`.

    Raises:
      ConfigError: names the field.
    """
    asked = [("drafter.init_target", config.drafter.get("init_target"), 'leave it ""')]
    if evaluation:
        section = from_config_dict(EvaluationConfig, config.evaluation.to_dict(), "evaluation")
        timed = section.cost_repeats if section.prompts else 0
        asked.append(("evaluation.cost_repeats", timed, "set it to 0, for no prediction of the speedup"))
    count = jax.process_count()
    for name, value, way_out in asked:
        if value:
            raise ConfigError(
                f"{name} is {value!r}, which each process does with a target of its own, and on mesh "
                f"{config.mesh.to_dict()} none of the {count} processes has the target whole: {way_out}. Or, where the "
                f"target fits into the devices of one, let only mesh.data lead from process to process: a multiple of "
                f"{count}, such as mesh.data={count} and mesh.fsdp={jax.device_count() // count}"
            )


def first_params(
    config: ConfigDict,
    target: Target,
    draft: DrafterConfig,
    statistics: Statistics,
    batches: BatchIterator | None = None,
) -> nnx.State:
    """Parameters to start from: fresh, from target layers, a trained drafter's, or fresh around a trained trunk.

    A trained drafter of fewer layers, or without a Markov head, is deepened: what it lacks starts as no change of what
    it proposes.

    Args:
      batches: text to fit an adapter on (`drafter.init_target`); None: it is not fitted, as where a checkpoint will
        take the place of these parameters.

    Raises:
      ConfigError: `drafter.init_from` is of another shape than this run's drafter, or `drafter.init_target` is not what
        that was made for.
    """
    first = config.drafter.get("init_target") or ""
    if not config.drafter.init_from or config.drafter.trunk == FROZEN:
        params = initial_params(
            draft, target, statistics, seed=config.seed, init_layers=tuple(config.drafter.init_layers)
        )
        if not config.drafter.init_from:
            return params
        params = with_trunk_of(config.drafter.init_from, draft, params)
        if not first or batches is None:
            return params
        theirs, trunk = read_trunk(config.drafter.init_from)
        known = load_target(first, dtype=target.dtype, mesh=target.mesh)
        return fit_adapter(params, draft, target, trunk, theirs, known, *_text(batches, FIT_BATCHES, target.mesh))
    trained = load_drafter(config.drafter.init_from, target, dtype=jnp.float32)
    if trained.own_vocabulary:
        raise ConfigError(
            f"drafter.init_from {config.drafter.init_from} has a table or head of its own, and training uses the "
            "target's: its layers would start on others than they were trained with"
        )
    ours, theirs = dataclasses.asdict(draft), dataclasses.asdict(trained.config)
    grown = {}
    if trained.config.num_layers < draft.num_layers:
        grown["num_layers"] = draft.num_layers
        grown["layer_types"] = theirs["layer_types"] + draft.layer_types[trained.config.num_layers :]
    if not trained.config.markov_rank:
        grown["markov_rank"] = draft.markov_rank
    theirs |= grown
    for name, value in ours.items():
        if name != "block_size" and theirs[name] != value:
            raise ConfigError(
                f"drafter.init_from {config.drafter.init_from} has {name} = {theirs[name]}, this run has {value}"
            )
    if trained.config == dataclasses.replace(trained.config, **grown):
        return trained.params
    layers = tuple(config.drafter.init_layers)
    return deepened(trained.params, initial_params(draft, target, statistics, seed=config.seed, init_layers=layers))


def _text(
    batches: BatchIterator, count: int, mesh: jax.sharding.Mesh | None
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """(token_RxS, length_R), of packed rows also (position_RxS, document_RxS), of the next batches; the iterator is
    put back."""
    start = batches.get_state()
    taken = [next(batches) for _ in range(count)]
    batches.set_state(start)
    rows = len(taken[0]["length_B"]) * processes.row_share(mesh)[1]
    packed = ("position_BxS", "document_BxS") if "document_BxS" in taken[0] else ()
    names = ("tokens_BxS", "length_B", *packed)
    return tuple(np.concatenate([processes.first_rows(batch[name], rows, mesh) for batch in taken]) for name in names)


def measured(config: ConfigDict, target: Target, draft: DrafterConfig, batches: BatchIterator) -> Statistics:
    """Measures on the first rows of the first batch, and puts the iterator back."""
    start = batches.get_state()
    batch = next(batches)
    batches.set_state(start)
    token_BxS, length_B, document_BxS, position_BxS = (
        processes.first_rows(batch[name], 4, target.mesh) if name in batch else None
        for name in ("tokens_BxS", "length_B", "document_BxS", "position_BxS")
    )
    found = measure(
        target, token_BxS, length_B, draft.target_layer_ids, tuple(config.drafter.init_layers), position_BxS,
        document_BxS,
    )  # fmt: skip
    return Statistics(*(processes.of_the_first(numbers) for numbers in dataclasses.astuple(found)))


def inverse_vocabulary(
    draft_to_target: np.ndarray | None, vocab: int, mesh: jax.sharding.Mesh | None
) -> jax.Array | None:
    """Draft id of each target id, -1 outside the draft vocabulary; None for the whole vocabulary."""
    if draft_to_target is None:
        return None
    inverse_V = np.full((vocab,), -1, np.int32)
    inverse_V[draft_to_target] = np.arange(len(draft_to_target), dtype=np.int32)
    return jnp.asarray(inverse_V) if mesh is None else sharding.put(inverse_V, sharding.replicated(mesh))


def whole_head(loss: LossConfig, target: Target, draft_to_target: np.ndarray | None) -> jax.Array | None:
    """`Frozen.whole_head_DxV` of a run: the target's head where the loss needs more of it than the drafter has."""
    return shared_weights(target).head_DxV if loss.needs_whole_law and draft_to_target is not None else None
