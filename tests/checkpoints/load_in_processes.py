"""One of several processes that load, convert and load again together. Run by test_load_in_processes.

    python load_in_processes.py ADDRESS PROCESSES INDEX SOURCE OUT

Prints as JSON: the stored bytes that this process read of each tensor of SOURCE, and whether what it holds of every
parameter is what a single process makes of SOURCE.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from dflash_jax.checkpoints.convert import convert  # noqa: E402
from dflash_jax.checkpoints.load_target import load_target  # noqa: E402
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader  # noqa: E402
from dflash_jax.sharding import make_mesh  # noqa: E402


def main(address: str, processes: int, index: int, source: str, out: str) -> None:
    jax.distributed.initialize(address, processes, index)
    read, plain = Counter(), SafetensorsReader._read_box

    def counted(self: SafetensorsReader, name: str, box: tuple) -> np.ndarray:
        value = plain(self, name, box)
        read[name] += value.nbytes
        return value

    mesh = make_mesh(expert=4, tensor=2)
    SafetensorsReader._read_box = counted
    target = load_target(source, mesh=mesh, dtype="float32")
    SafetensorsReader._read_box = plain
    convert(source, out, dtype="float32", mesh=mesh)
    again = load_target(out, mesh=mesh)
    whole = dict(nnx.to_flat_state(load_target(source, dtype="float32").params))
    same = True
    for params in (target.params, again.params):
        for path, variable in nnx.to_flat_state(params):
            wanted = np.asarray(whole[path].get_value())
            for shard in variable.get_value().addressable_shards:
                same &= np.array_equal(np.asarray(shard.data), wanted[shard.index])
    print(json.dumps({"read": read, "same": bool(same), "devices": jax.device_count()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
