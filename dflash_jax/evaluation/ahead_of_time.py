"""A program compiled for a slice that is not there: what it takes on each device, or how much is missing."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax

from dflash_jax.config import ConfigError
from dflash_jax.evaluation.roofline import GIB, Chip
from dflash_jax.sharding import AXES, MeshConfig
from dflash_jax.tpu_topology import Topology

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXCEEDED = re.compile(r"Exceeded (?P<space>\w+) capacity by (?P<number>[\d.]+)(?P<unit>[KMGT]?)")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA says of a program, of one device.

    Attributes:
      seconds: that compiling took.
      arguments: bytes of all arguments, as they lie in memory (with the padding of their tiles).
      temporaries, code, results: bytes besides; results without those that lie where donated arguments lay.
      flops, bytes_accessed: of XLA's cost analysis. It knows nothing of what happens inside Pallas kernels, counts
        every expert's matrices as read and the dearer branch of each condition, and counts what an instruction reads
        from the chip's own memory as if it came from HBM.
      missing: bytes that XLA says it lacks; 0 where it compiled.
      refusal: what XLA said then.
    """

    seconds: float
    arguments: int = 0
    temporaries: int = 0
    code: int = 0
    results: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    missing: int = 0
    refusal: str = ""

    @property
    def total(self) -> int:
        """Bytes while it runs."""
        return self.arguments + self.temporaries + self.code + self.results

    def lacks(self, chip: Chip) -> int:
        """Bytes missing on the chip; 0 where it fits."""
        return max(self.missing, self.total - int(chip.hbm), 0)


def compile_program(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles; a program that XLA refuses because it does not fit is a result too.

    Raises:
      JaxRuntimeError: it can not be compiled for another reason.
    """
    start = time.monotonic()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        missing = missing_bytes(str(error))
        if missing is None:
            raise
        return Compiled(time.monotonic() - start, missing=missing, refusal=str(error).splitlines()[0])
    memory, cost = program.memory_analysis(), program.cost_analysis()
    return Compiled(
        seconds=time.monotonic() - start,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
    )


def missing_bytes(message: str) -> int | None:
    """Bytes of HBM that XLA says are missing; None where its complaint is another one."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    match = _EXCEEDED.search(message)
    if match is None or match["space"] != "hbm":
        return None
    return round(float(match["number"]) * _UNITS[match["unit"]])


def mesh_on(section: MeshConfig, topology: Topology) -> jax.sharding.Mesh:
    """The config's mesh over all devices of a slice.

    Raises:
      ConfigError: it has another number of devices.
    """
    count = len(topology.devices)
    if section.size != count:
        asked = " x ".join(f"{name} {getattr(section, name)}" for name in AXES)
        chips = "" if topology.devices_per_chip == 1 else f" ({topology.chips} chips of {topology.devices_per_chip})"
        shapes = ", ".join(
            f"--config.mesh.expert={count // tensor} --config.mesh.tensor={tensor}" for tensor in _tensor_sizes(count)
        )
        raise ConfigError(
            f"mesh is {asked} = {section.size} devices, but {topology.name} has {count}{chips}: the product of the "
            f"axes must be {count}, such as {shapes} (a target without experts: data instead of expert)"
        )
    return section.make(topology.devices)


def _tensor_sizes(count: int) -> list[int]:
    return [size for size in (2, 8) if count % size == 0] or [count]


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB"


def as_json(compiled: Compiled) -> dict[str, Any]:
    """The fields, and their sum."""
    return dataclasses.asdict(compiled) | {"total": compiled.total}
