"""Devices of TPU slices that are not there, for compiling ahead of time with libtpu's own compiler.

`libtpu` has to be installed (pip install libtpu); a TPU need not be there, and none is touched.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re

import jax

from dflash_jax.config import ConfigError

_NAME = re.compile(r"(?P<slice>(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2}))(,slices=(?P<slices>[1-9]\d*))?")
_GENERATIONS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # and the dimensions of their tori
_EXAMPLES = "v5e:4x4, v6e:8x8, v5p:4x4x8, tpu7x:4x4x4"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several alike.

    Attributes:
      name: as it was asked for, such as "v5p:4x4x8" or "v5e:16x16,slices=2".
      generation: the part of the name before the colon.
      chips: of all slices together.
      devices: what a mesh is made of. A chip of tpu7x is two of them, of the other generations one.
    """

    name: str
    generation: str
    chips: int
    devices: tuple[jax.Device, ...]

    @property
    def devices_per_chip(self) -> int:
        return len(self.devices) // self.chips


def prepare_host() -> None:
    """Settings of this process for compiling without a TPU; to be called before JAX's first use of a device.

    The host's own arrays (there are next to none) live on its CPU, whatever accelerator it has.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask which TPU this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody here holds a TPU, so several may compile


def tpu_topology(name: str) -> Topology:
    """The slice of a name: generation, colon, chips along each axis of the torus; ",slices=N" for N of them.

    Raises:
      ConfigError: libtpu is missing, or there is no such slice.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["generation"] not in _GENERATIONS:
        raise ConfigError(
            f"topology is {name!r}, must be a TPU generation ({', '.join(_GENERATIONS)}), a colon and the chips along "
            f"each axis, such as {_EXAMPLES}; several slices are {'v5e:16x16,slices=2'!r}"
        )
    generation, shape = match["generation"], tuple(int(n) for n in match["shape"].split("x"))
    slices = int(match["slices"] or 1)
    if len(shape) != _GENERATIONS[generation]:
        raise ConfigError(
            f"topology is {name!r}, but {generation} slices have {_GENERATIONS[generation]} axes, such as {_EXAMPLES}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu is not installed: compiling for a TPU that is not there needs it; pip install libtpu")
    prepare_host()
    from jax.experimental import topologies

    # A host has four chips; a slice of one chip is a part of one.
    host = (1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1)
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=match["slice"], chips_per_host_bounds=host, num_slices=slices
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"topology {name!r} does not exist: {str(error).splitlines()[0]}. Its axes must be multiples of the "
            f"{'x'.join(map(str, host))} chips of a host, such as {_EXAMPLES}"
        ) from error
    return Topology(name, generation, slices * math.prod(shape), tuple(described.devices))
