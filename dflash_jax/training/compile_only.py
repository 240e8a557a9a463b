"""`train.py --compile_only`: the train step on a slice that is not there. Does it fit?"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.checkpoints.load_target import as_dtype
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig, check_output_file, from_config_dict
from dflash_jax.decoding.abstract import abstract_shared, laid_out
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.evaluation.ahead_of_time import as_json, compile_program, mesh_on, readable
from dflash_jax.evaluation.roofline import CHIPS, Placement, device_bytes
from dflash_jax.evaluation.training_work import TrainingLoad, step_seconds, training_work
from dflash_jax.models.scanned import stack_layers
from dflash_jax.models.transformer import Transformer
from dflash_jax.sharding import MeshConfig
from dflash_jax.tpu_topology import prepare_host, tpu_topology
from dflash_jax.training.adapter import check_section, configured_drafter, trainable
from dflash_jax.training.from_config import check_present
from dflash_jax.training.initialise import Statistics, coordinate_units
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import (
    Frozen,
    StepConfig,
    TrainState,
    init_state,
    make_loss,
    make_train_step,
    state_shardings,
)


def compile_only(config: ConfigDict, topology: str, stats_json: str | pathlib.Path | None = None) -> dict[str, Any]:
    """Compiles a run's train step for a TPU slice, and says what it takes on each device.

    Nothing is loaded: the step gets shapes with shardings. With `data.features` the batch holds the target's states;
    without, the step holds the target.

    Args:
      config: an experiment of `configs/` as `train` takes it; `target.architecture` may hold what config.json would.
      topology: such as "v5p:4x4x8".
      stats_json: a file for the numbers.

    Returns:
      The numbers; `fits` says whether the step fits, `missing_bytes` how much it lacks on a device.

    Raises:
      ConfigError: a field, the topology or libtpu; or the mesh has another number of devices than the slice.
    """
    prepare_host()
    check_output_file("stats_json", stats_json)
    check_present(config, ("seed", "mesh", "target", "drafter", "data", "step", "loss", "optimizer"))
    check_section(config.drafter)
    place = tpu_topology(topology)
    mesh, chip = mesh_on(from_config_dict(MeshConfig, config.mesh, "mesh"), place), CHIPS[place.generation]
    architecture = config.target.get("architecture")
    target, _ = read_architectures(config.target.source, None if architecture is None else architecture.to_dict())
    drafter = configured_drafter(config.drafter, target)
    dtype = jnp.dtype(as_dtype(config.target.dtype, "bfloat16"))
    step, state, frozen, batch = abstract_train_step(config, target, drafter, dtype, mesh)
    logging.info("compiling the train step for %s", place.name)
    with sharding.use(mesh):
        lowered = step.lower(state, frozen, batch)
    compiled = compile_program(lowered)

    kinds = {
        "target_weights": device_bytes((frozen.target, frozen.shared if frozen.target is None else None)),
        "drafter_masters": device_bytes(state.params),
        "optimizer": device_bytes(state.opt_state),
        "average": device_bytes(state.ema),
        "batch": device_bytes(batch),
    }
    if not compiled.refusal:
        kinds["padding_and_rest"] = max(compiled.arguments - sum(kinds.values()), 0)
        kinds |= {"temporaries": compiled.temporaries, "code": compiled.code, "results": compiled.results}
    missing = max(compiled.missing, sum(kinds.values()) - int(chip.hbm), 0)
    load = TrainingLoad(
        rows=config.data.batch_size, tokens=config.data.seq_len, anchors=config.step.num_anchors,
        block=drafter.block_size, online=not config.data.features,
        teacher=StepConfig.of(config.step, config.loss, drafter.block_size).loss.needs_target,
        draft_vocab=config.drafter.draft_vocab_size or target.vocab_size,
    )  # fmt: skip
    work = training_work(target, drafter, load, Placement(mesh))
    overlapped, in_turn = step_seconds(work, chip)
    stats = {
        "topology": place.name, "devices": len(place.devices), "chips": place.chips, "mesh": dict(mesh.shape),
        "batch": {"rows": config.data.batch_size, "tokens": config.data.seq_len, "features": config.data.features},
        "available_bytes": int(chip.hbm), "bytes_per_device": kinds | {"total": sum(kinds.values())},
        "flops": work.flops, "bytes": work.bytes, "link_bytes": work.link_bytes,
        "roofline_seconds": overlapped, "roofline_seconds_in_turn": in_turn,
        "mfu": work.flops / chip.flops / overlapped, "mfu_in_turn": work.flops / chip.flops / in_turn,
        "xla": as_json(compiled), "fits": not missing and not compiled.refusal, "missing_bytes": missing,
    }  # fmt: skip
    print(report(stats))
    if stats_json is not None:
        pathlib.Path(stats_json).write_text(json.dumps(stats, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return stats


def abstract_train_step(
    config: ConfigDict, target: TargetConfig, drafter: DrafterConfig, dtype: jnp.dtype, mesh: Mesh
) -> tuple[Any, TrainState, Frozen, dict[str, jax.ShapeDtypeStruct]]:
    """(train_step, state, frozen, batch): a run's step as `train` makes it, and its arguments as shapes.

    Raises:
      ConfigError: the batch does not divide over the mesh's data shards.
    """
    optimizer_config = from_config_dict(OptimizerConfig, config.optimizer, "optimizer")
    step_config = StepConfig.of(config.step, config.loss, drafter.block_size)
    graphdef, params = laid_out(None, DFlash, drafter, jnp.float32)
    # Measured on text in a run; as numbers in the program they change nothing of what it takes.
    unit = coordinate_units(params, drafter, Statistics(tap_rms=(1.0,) * len(drafter.target_layer_ids)))
    changing = trainable(params, config.drafter.trunk)
    optimizer = make_optimizer(optimizer_config, unit, changing)
    state = jax.eval_shape(
        lambda p: init_state(p, optimizer, config.seed, None, ema=optimizer_config.ema_decay > 0), params
    )
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state, state_shardings(state, mesh),
    )  # fmt: skip

    target_graphdef, target_params = laid_out(mesh, Transformer, target, dtype)
    size, inverse, whole = config.drafter.draft_vocab_size, None, None
    shared = abstract_shared(target_params, target, mesh)
    if size and size < target.vocab_size:
        whole = shared.head_DxV if step_config.loss.needs_whole_law else None
        shared = shared.replace(
            head_DxV=sharding.abstract_array(mesh, (target.hidden_size, size), dtype, ("embed", "vocab")),
            draft_to_target_V=sharding.abstract_array(mesh, (size,), jnp.int32),
        )
        inverse = sharding.abstract_array(mesh, (target.vocab_size,), jnp.int32)
    features = config.data.features
    if step_config.scan_target:
        target_params = stack_layers(target_params, target_graphdef, mesh)
    frozen = Frozen(shared, inverse, None if features else target_params, whole)
    loss = make_loss(step_config, graphdef, drafter, target, target_graphdef)
    step = make_train_step(step_config, loss, optimizer, optimizer_config, unit, mesh, changing)
    taps = len(drafter.target_layer_ids) * target.hidden_size if features else None
    return step, state, frozen, abstract_batch(config, mesh, target.hidden_size, taps)


def abstract_batch(config: ConfigDict, mesh: Mesh, hidden: int, taps: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as `BatchIterator` makes it; with features where `taps`, the width of all taps, is given."""
    rows, tokens = config.data.batch_size, config.data.seq_len
    parts = sharding.data_parallel_size(mesh)
    if rows % parts:
        raise ConfigError(f"data.batch_size is {rows}, must be a multiple of the mesh's {parts} data shards")
    shapes = {
        "tokens_BxS": ((rows, tokens), jnp.int32), "loss_mask_BxS": ((rows, tokens), jnp.bool),
        "length_B": ((rows,), jnp.int32), "epoch_B": ((rows,), jnp.int32),
    }  # fmt: skip
    if config.data.get("packing"):
        shapes |= dict.fromkeys(("document_BxS", "position_BxS"), ((rows, tokens), jnp.int32))
    else:
        shapes["id_B"] = ((rows,), jnp.int32)
    if taps is not None:
        shapes["taps_BxSxTD"] = ((rows, tokens, taps), jnp.bfloat16)
        shapes["hidden_BxSxD"] = ((rows, tokens, hidden), jnp.bfloat16)
    return {
        name: sharding.abstract_array(mesh, shape, dtype, ("batch", *[None] * (len(shape) - 1)))
        for name, (shape, dtype) in shapes.items()
    }


def report(stats: dict[str, Any]) -> str:
    """For people; all numbers are of one device."""
    lines = [f"one of {stats['devices']} devices of {stats['topology']}, mesh {stats['mesh']}, batch {stats['batch']}"]
    lines += [f"  {kind.replace('_', ' '):18} {readable(size)}" for kind, size in stats["bytes_per_device"].items()]
    lines.append(
        f"Counted from shapes: {stats['flops'] / 1e12:.2f} Tflop, {readable(stats['bytes'])} read and written, "
        f"{readable(stats['link_bytes'])} sent a step. At least {1e3 * stats['roofline_seconds']:.1f} ms, MFU at most "
        f"{stats['mfu']:.0%}; with nothing sent while it computes {1e3 * stats['roofline_seconds_in_turn']:.1f} ms, "
        f"{stats['mfu_in_turn']:.0%}."
    )
    if stats["xla"]["refusal"]:
        lines.append(f"XLA: {stats['xla']['refusal']}")
    else:
        lines.append(
            f"By XLA's analysis (loop bodies once, Pallas kernels not) {stats['xla']['flops'] / 1e12:.2f} Tflop "
            f"a step; compiled in {stats['xla']['seconds']:.0f} s."
        )
    available, missing = readable(stats["available_bytes"]), stats["missing_bytes"]
    if stats["fits"]:
        lines.append(f"It fits: {available} are there on each device.")
    elif missing:
        lines.append(f"It does not fit: {readable(missing)} are missing on each device, which has {available}.")
    else:
        lines.append("It does not fit: XLA lacks memory of another kind than HBM.")
    return "\n".join(lines)
