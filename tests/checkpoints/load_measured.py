"""Loads a checkpoint on eight virtual devices and prints what memory it took, as JSON. Run by test_sharded_loading.

    python load_measured.py DIRECTORY

parameters: bytes of all devices' shards. numpy_peak: bytes that numpy and Python held at most (tracemalloc), beside
what they held before. anonymous_growth: of the process's own memory at most, sampled a hundred times a second.
mapped_left: bytes of files that are still in its memory, beside those of before.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import tracemalloc

import jax

jax.config.update("jax_num_cpu_devices", 8)

from dflash_jax.checkpoints.load_target import load_target  # noqa: E402
from dflash_jax.sharding import make_mesh  # noqa: E402


def memory(kind: str) -> int:
    """Bytes of RssAnon or RssFile."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(re.search(rf"{kind}:\s+(\d+)", file.read())[1])


def main(directory: str) -> None:
    mesh = make_mesh(data=2, expert=2, tensor=2)
    jax.block_until_ready([jax.device_put(0.0, device) for device in jax.devices()])
    stop, highest = threading.Event(), [memory("RssAnon")]

    def watch() -> None:
        while not stop.wait(0.01):
            highest[0] = max(highest[0], memory("RssAnon"))

    anonymous, mapped = memory("RssAnon"), memory("RssFile")
    tracemalloc.start()
    watcher = threading.Thread(target=watch)
    watcher.start()
    target = load_target(directory, mesh=mesh)
    stop.set()
    watcher.join()
    _, peak = tracemalloc.get_traced_memory()
    print(
        json.dumps(
            {
                "parameters": sum(s.data.nbytes for x in jax.tree.leaves(target.params) for s in x.addressable_shards),
                "numpy_peak": peak,
                "anonymous_growth": highest[0] - anonymous,
                "mapped_left": memory("RssFile") - mapped,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
