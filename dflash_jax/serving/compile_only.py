"""`serve.py --compile_only`: the decode step on a slice that is not there. Does it fit, and what would it gain?"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.table import Table

from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.checkpoints.load_target import as_dtype
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig, check_output_file
from dflash_jax.decoding.abstract import AbstractStep, abstract_step
from dflash_jax.decoding.step import step
from dflash_jax.evaluation.ahead_of_time import Compiled, as_json, compile_program, mesh_on, readable
from dflash_jax.evaluation.roofline import (
    CHIPS,
    Chip,
    Load,
    Placement,
    Work,
    device_bytes,
    round_work,
    seconds,
    speedup,
)
from dflash_jax.serving.config import ServeConfig, read_config, trains
from dflash_jax.serving.session import DFLASH, PLAIN
from dflash_jax.serving.terminal import Terminal
from dflash_jax.tpu_topology import Topology, prepare_host, tpu_topology
from dflash_jax.training.adapter import configured_drafter

TAUS = (2.0, 4.0, 6.0, 8.0)


def compile_only(
    config: ConfigDict,
    topology: str,
    stats_json: str | pathlib.Path | None = None,
    taus: Sequence[float] = TAUS,
    *,
    terminal: Terminal | None = None,
) -> dict[str, Any]:
    """Compiles a round of DFlash and one of plain decoding for a TPU slice, and prints what they take.

    Nothing is loaded or allocated: parameters and cache are shapes with shardings. The programs are those that an
    engine with the config's `cache` section runs on the config's `mesh`.

    Args:
      config: an experiment of `configs/`; sections target, drafter, cache, mesh are read.
      topology: such as "v5p:4x4x8".
      stats_json: a file for the numbers.
      taus: acceptance lengths to foretell the speedup for.

    Returns:
      The numbers; `fits` says whether all programs fit, `missing_bytes` how much they lack on a device.

    Raises:
      ConfigError: a field, the topology or libtpu; or the mesh has another number of devices than the slice.
    """
    prepare_host()
    settings = read_config(config)
    terminal = Terminal() if terminal is None else terminal
    _check_arguments(stats_json, taus)
    place = tpu_topology(topology)
    mesh, chip = mesh_on(settings.mesh, place), CHIPS[place.generation]
    target, drafter = read_architectures(
        settings.target.source, settings.target.architecture, settings.drafter.source, settings.drafter.architecture
    )
    if drafter is None and trains(config):
        drafter = configured_drafter(config.drafter, target)  # the one that a run of this config trains
    modes = {PLAIN: None} if drafter is None else {DFLASH: drafter, PLAIN: None}
    stats: dict[str, Any] = {
        "topology": place.name, "devices": len(place.devices), "chips": place.chips, "mesh": dict(mesh.shape),
        "cache": {"rows": settings.cache.rows, "tokens": capacity(settings, target)},
        "available_bytes": int(chip.hbm), "programs": {},
    }  # fmt: skip
    for mode, used in modes.items():
        abstract = _abstract(settings, target, used, mesh)
        with terminal.stage(f"compiling {mode} for {place.name}"):
            compiled = compile_program(step.lower(abstract.config, abstract.weights, abstract.state, abstract.rules))
        load = Load(
            settings.cache.rows, abstract.config.block_size, stats["cache"]["tokens"], abstract.weights.target[0].dtype
        )
        work = round_work(target, used, load, Placement(mesh))
        stats["programs"][mode] = describe(abstract, compiled, work, chip)
    programs = stats["programs"].values()
    stats["missing_bytes"] = max(program["missing_bytes"] for program in programs)
    stats["fits"] = all(program["fits"] for program in programs)
    if drafter is not None:
        times = [stats["programs"][mode]["roofline_seconds"] for mode in (PLAIN, DFLASH)]
        stats["speedup"] = {f"{tau:g}": speedup(tau, *times) for tau in taus}
        stats["break_even_tau"] = times[1] / times[0]
    terminal.out.print(table(stats, place))
    terminal.out.print(verdict(stats), markup=False, soft_wrap=True)
    if stats_json is not None:
        pathlib.Path(stats_json).write_text(json.dumps(stats, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return stats


def capacity(settings: ServeConfig, target: TargetConfig) -> int:
    """Tokens that a row of the cache holds."""
    length = settings.cache.max_length or target.max_positions
    if length > target.max_positions:
        raise ConfigError(f"cache.max_length is {length}, but the target's context is {target.max_positions}")
    page = settings.cache.page_size or 1
    return -(-length // page) * page


def _abstract(
    settings: ServeConfig, target: TargetConfig, drafter: DrafterConfig | None, mesh: Mesh
) -> AbstractStep:  # fmt: skip
    block = settings.drafter.block_size
    if drafter is not None and block is not None and block > drafter.block_size:
        raise ConfigError(f"drafter.block_size is {block}, but the drafter is trained for {drafter.block_size}")
    try:
        return abstract_step(
            target, drafter, mesh, dtype=jnp.dtype(as_dtype(settings.target.dtype, "bfloat16")),
            batch=settings.cache.rows, capacity=capacity(settings, target), page_size=settings.cache.page_size,
            block_size=block, greedy=settings.generation.temperature == 0,
            drawn_proposal=settings.drafter.proposal == "drawn",
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"cache and mesh do not suit each other: {error}") from error


def describe(abstract: AbstractStep, compiled: Compiled, work: Work, chip: Chip) -> dict[str, Any]:
    """The numbers of one program, of one device: bytes by kind, what XLA says, and the roofline."""
    weights, cache = abstract.weights, abstract.state.cache
    kinds = {
        "target_weights": device_bytes(weights.target),
        "drafter_weights": device_bytes(
            (weights.drafter, None if weights.shared is None else weights.shared.markov_RxV)
        ),
        "cache": device_bytes((cache.k, cache.v, cache.page_table_BxT)),
        "recurrent_states": device_bytes(cache.recurrent),
    }
    if not compiled.refusal:
        kinds["padding_and_rest"] = max(compiled.arguments - sum(kinds.values()), 0)
        kinds |= {
            "temporaries": compiled.temporaries, "code": compiled.code, "results": compiled.results,
        }  # fmt: skip
    missing = max(compiled.missing, sum(kinds.values()) - int(chip.hbm), 0)
    return {
        "block_size": abstract.config.block_size,
        "bytes_per_device": kinds | {"total": sum(kinds.values())},
        "xla": as_json(compiled),
        "flops": work.flops,
        "bytes": work.bytes,
        "link_bytes": work.link_bytes,
        "roofline_seconds": seconds(work, chip),
        "fits": not missing and not compiled.refusal,
        "missing_bytes": missing,
    }


def table(stats: dict[str, Any], place: Topology) -> Table:
    """For people; all numbers are of one device."""
    programs = stats["programs"]
    shape = " x ".join(f"{name} {size}" for name, size in stats["mesh"].items() if size > 1)
    shown = Table(
        title=f"one of {stats['devices']} devices of {place.name} ({shape}), cache of {stats['cache']['rows']} rows x "
        f"{stats['cache']['tokens']} tokens",
        title_justify="left",
    )  # fmt: skip
    shown.add_column("")
    names = {DFLASH: "DFlash, block {}", PLAIN: "plain decoding"}
    for mode, program in programs.items():
        shown.add_column(names[mode].format(program["block_size"]), justify="right")
    kinds = dict.fromkeys(kind for program in programs.values() for kind in program["bytes_per_device"])
    for kind in kinds:
        sizes = [program["bytes_per_device"].get(kind) for program in programs.values()]
        shown.add_row(kind.replace("_", " "), *("" if size is None else readable(size) for size in sizes))
    shown.add_section()
    lines = {
        "flops of a round": lambda p: f"{p['flops'] / 1e9:.1f} G",
        "bytes read in a round": lambda p: readable(p["bytes"]),
        "bytes sent in a round": lambda p: readable(p["link_bytes"]),
        "roofline time of a round": lambda p: f"{1e3 * p['roofline_seconds']:.3f} ms",
        "flops, XLA's analysis": lambda p: f"{p['xla']['flops'] / 1e9:.1f} G" if not p["xla"]["refusal"] else "",
        "bytes, XLA's analysis": lambda p: readable(p["xla"]["bytes_accessed"]) if not p["xla"]["refusal"] else "",
        "compiled in": lambda p: f"{p['xla']['seconds']:.0f} s",
    }
    for name, line in lines.items():
        shown.add_row(name, *(line(program) for program in programs.values()))
    for tau, factor in stats.get("speedup", {}).items():
        shown.add_row(f"speedup at tau {tau}, at most", f"{factor:.2f}x", "")
    return shown


def verdict(stats: dict[str, Any]) -> str:
    """One line."""
    available = readable(stats["available_bytes"])
    if stats["fits"]:
        return f"It fits: {available} are there on each device."
    missing, refusals = stats["missing_bytes"], {p["xla"]["refusal"] for p in stats["programs"].values()} - {""}
    lines = [f"It does not fit: {readable(missing)} are missing on each device, which has {available}."]
    if not missing:
        lines = ["It does not fit: XLA lacks memory of another kind than HBM."]
    lines += [f"XLA: {refusal}" for refusal in sorted(refusals)]
    lines.append("More devices, fewer cache.rows, a shorter cache.max_length or another mesh may help: docs/pods.md.")
    return "\n".join(lines)


def _check_arguments(stats_json: str | pathlib.Path | None, taus: Sequence[float]) -> None:
    for tau in taus:
        if not tau >= 1:
            raise ConfigError(f"--tau holds {tau}, must be at least 1: every round emits a token")
    check_output_file("stats_json", stats_json)
