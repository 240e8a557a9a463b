"""Compiles the programs of decoding for a TPU mesh that is not there; run as a script by test_tpu_step.py.

    python tpu_step_compile.py v5e:2x2

prints one JSON object a program: its name, the number of Pallas kernels in it, or the error. A process of its own,
because libtpu, once loaded, stays.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import FULL, SLIDING, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.decoding.abstract import abstract_keys, abstract_rules, abstract_step, rows
from dflash_jax.decoding.step import Admission, Prefill, admit, prefill_chunk, step, steps
from dflash_jax.tpu_topology import tpu_topology

VOCAB, HIDDEN, BATCH, CAPACITY, CHUNK = 512, 256, 4, 512, 64
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 1024,
}  # fmt: skip


def programs(mesh: Mesh, page_size: int | None):
    """(name, jitted function, abstract arguments) of what decoding runs on the mesh in one of the layouts."""
    target = TargetConfig("llama", num_layers=2, layer_types=(FULL, SLIDING), sliding_window=100, **SHAPE)
    drafter = DrafterConfig(
        num_layers=1, layer_types=(FULL,), block_size=8, mask_token_id=1, target_layer_ids=(0, 1),
        num_target_layers=2, markov_rank=0 if page_size is None else 32, **SHAPE,
    )  # fmt: skip

    def abstract(**options):
        return abstract_step(
            target, drafter, mesh, dtype=jnp.bfloat16, batch=BATCH, capacity=CAPACITY, page_size=page_size,
            greedy=False, drawn_proposal=True, **options,
        )  # fmt: skip

    a = abstract()
    if page_size is None:
        yield "step, contiguous", step, (a.config, a.weights, a.state, a.rules)
        bent = abstract(logits_rules=True)
        yield "step with logits rules, contiguous", step, (bent.config, bent.weights, bent.state, bent.rules)
        return
    table, number = a.state.cache.page_table_BxT, rows(mesh, BATCH)
    hidden = sharding.abstract_array(mesh, (BATCH, HIDDEN), jnp.bfloat16, ("batch", None))
    prefill = Prefill(number, hidden)
    admission = Admission(number, table, abstract_keys(mesh, BATCH), number, abstract_rules(mesh, BATCH))
    chunk = sharding.abstract_array(mesh, (BATCH, CHUNK), jnp.int32, ("batch", None))
    pause = jax.ShapeDtypeStruct((), jnp.bool)
    yield "several steps, paged", steps, (a.config, 4, a.weights, a.state, a.rules, pause)
    yield "prefill, paged", prefill_chunk, (a.config, a.weights, a.state, table, prefill, chunk, number)
    yield "admission, paged", admit, (a.config, a.weights, a.state, a.rules, admission, prefill)


def main(topology_name: str) -> None:
    mesh = sharding.make_mesh(2, 2, tpu_topology(topology_name).devices)
    for page_size in (None, 64):
        for name, function, arguments in programs(mesh, page_size):
            try:
                text = function.lower(*arguments).compile().as_text()
                result = {"name": name, "kernels": text.count('custom_call_target="tpu_custom_call"')}
            except Exception as error:  # reported by the test, with all others
                result = {"name": name, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
