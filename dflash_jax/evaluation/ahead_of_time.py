"""A program compiled for a slice that is not there: what it takes on each device, or how much is missing."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax

from dflash_jax.config import ConfigError
from dflash_jax.sharding import AXES, DATA, FSDP, MeshConfig
from dflash_jax.tpu_topology import Topology

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# Two ways in which libtpu refuses a program. The second speaks of temporaries and means arguments too (0.0.52).
_EXCEEDED = re.compile(rf"Exceeded hbm capacity by {_SIZE}")
_NEEDED = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")


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
      refusal: what XLA said where the program does not fit, else "".
      missing: bytes of HBM that it said are missing; 0 where it compiled, or lacks another kind of memory.
    """

    seconds: float
    arguments: int = 0
    temporaries: int = 0
    code: int = 0
    results: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    refusal: str = ""
    missing: int = 0

    @property
    def total(self) -> int:
        """Bytes while it runs."""
        return self.arguments + self.temporaries + self.code + self.results


def compile_program(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles; a program that XLA refuses because it does not fit is a result too.

    Raises:
      JaxRuntimeError: it can not be compiled for another reason.
    """
    start = time.monotonic()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
        return Compiled(time.monotonic() - start, refusal=refusal, missing=missing_bytes(str(error)))
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


def missing_bytes(message: str) -> int:
    """Bytes of HBM that XLA says are missing; 0 where it names none."""
    if (match := _EXCEEDED.search(message)) is not None:
        return _bytes(*match.groups())
    if (match := _NEEDED.search(message)) is not None:
        needed, available = _bytes(*match.groups()[:2]), _bytes(*match.groups()[2:])
        return needed - available
    return 0


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def mesh_on(section: MeshConfig, topology: Topology) -> jax.sharding.Mesh:
    """The config's mesh over all devices of a slice.

    Raises:
      ConfigError: it has another number of devices.
    """
    count = len(topology.devices)
    if section.size != count:
        asked = " x ".join(f"{name} {getattr(section, name)}" for name in AXES)
        chips = "" if topology.devices_per_chip == 1 else f" ({topology.chips} chips of {topology.devices_per_chip})"
        raise ConfigError(
            f"mesh is {asked} = {section.size} devices, but {topology.name} has {count}{chips}: the product of the "
            f"axes must be {count}, such as {_shapes(section, count)}"
        )
    return section.make(topology.devices)


def _shapes(section: MeshConfig, count: int) -> str:
    """Flags that make another mesh of that many devices out of this one."""
    wide = [name for name in AXES if getattr(section, name) > 1]
    rows = [name for name in wide if name in (DATA, FSDP)]
    if rows and rows == wide:
        *others, last = rows
        return " ".join([f"--config.mesh.{last}={count}", *(f"--config.mesh.{name}=1" for name in others)])
    ones = "".join(f" --config.mesh.{name}=1" for name in rows)
    shapes = (f"--config.mesh.expert={count // t} --config.mesh.tensor={t}{ones}" for t in _tensor_sizes(count))
    return f"{', '.join(shapes)} (a target without experts: data instead of expert)"


def _tensor_sizes(count: int) -> list[int]:
    return [size for size in (2, 8) if count % size == 0] or [count]


def readable(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def as_json(compiled: Compiled) -> dict[str, Any]:
    """The fields, and their sum."""
    return dataclasses.asdict(compiled) | {"total": compiled.total}
