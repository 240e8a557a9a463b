"""Compiles the programs of decoding for a TPU mesh that is not there; run as a script by test_tpu_step.py.

    python tpu_step_compile.py v5e:2x2

prints one JSON object a program: its name, the number of Pallas kernels in it, or the error. A process of its own,
because libtpu, once loaded, stays.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask which TPU this is
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody here holds a TPU

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import FULL, SLIDING, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.decoding.cache import POOL_AXES
from dflash_jax.decoding.logits_rules import LOGITS_AXES, LogitsRules
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.decoding.step import (
    Admission,
    DecodeState,
    Prefill,
    Rules,
    Skeleton,
    StepConfig,
    Weights,
    admit,
    prefill_chunk,
    step,
    steps,
)
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer

VOCAB, HIDDEN, BATCH, CAPACITY, CHUNK = 512, 256, 4, 512, 64
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 1024,
}  # fmt: skip


def programs(mesh: Mesh, page_size: int | None):
    """(name, jitted function, abstract arguments) of what decoding runs on the mesh in one of the layouts."""

    def array(shape, dtype, *axes):
        axes = (*axes, *[None] * (len(shape) - len(axes)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named_sharding(mesh, axes, shape))

    def skeleton(make, *args):
        graphdef, params = abstract_model(make, *args)
        params = jax.tree.map(
            lambda x: x.replace(array(x.get_value().shape, x.get_value().dtype, *x.get_metadata("axes"))),
            params,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
        return Skeleton.of(graphdef, params)

    def rows(dtype=jnp.int32, count=BATCH):
        return array((count,), dtype, "batch")

    def rules(count):
        floats = rows(jnp.float32, count)
        return Rules(Sampling(floats, rows(count=count), floats, floats), array((count, 8), jnp.int32, "batch"))

    target, target_leaves = skeleton(
        Transformer, TargetConfig("llama", num_layers=2, layer_types=(FULL, SLIDING), sliding_window=100, **SHAPE),
        jnp.bfloat16,
    )  # fmt: skip
    drafter, drafter_leaves = skeleton(
        DFlash,
        DrafterConfig(
            num_layers=1, layer_types=(FULL,), block_size=8, mask_token_id=1, target_layer_ids=(0, 1),
            num_target_layers=2, **SHAPE,
        ),
        jnp.bfloat16,
    )  # fmt: skip
    shared = SharedWeights(
        array((VOCAB, HIDDEN), jnp.bfloat16, "vocab", "embed"), array((HIDDEN, VOCAB), jnp.bfloat16, "embed", "vocab")
    )
    weights = Weights(target_leaves, drafter_leaves, shared)
    config = StepConfig(target, drafter, (0, 1), 8, greedy=False, drawn_proposal=True, logits_rules=False, mesh=mesh)
    pages = 1 if page_size is None else CAPACITY // page_size
    pool = (array((BATCH * pages, 2, page_size or CAPACITY, 64), jnp.bfloat16, *POOL_AXES),) * 3
    table = None if page_size is None else array((BATCH, pages), jnp.int32, "batch")
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    keys = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding.named_sharding(mesh, ("batch",), key.shape))
    state = DecodeState(KVCache(pool, pool, table, rows()), rows(), keys, rows())
    prefill = Prefill(rows(), array((BATCH, HIDDEN), jnp.bfloat16, "batch"))
    admission = Admission(rows(), table, keys, rows(), rules(BATCH))
    chunk_table = array((BATCH, pages), jnp.int32, "batch")
    chunk = array((BATCH, CHUNK), jnp.int32, "batch")
    if page_size is None:
        yield "step, contiguous", step, (config, weights, state, rules(BATCH))
        wide = [array((BATCH, VOCAB), dtype, *LOGITS_AXES) for dtype in (jnp.float32, jnp.bool, jnp.int32)]
        floats = rows(jnp.float32)
        bent = rules(BATCH).replace(logits=LogitsRules(floats, floats, floats, *wide[:2]))
        counting = dataclasses.replace(config, logits_rules=True), weights, state.replace(count_BxV=wide[2]), bent
        yield "step with logits rules, contiguous", step, counting
        return
    pause = jax.ShapeDtypeStruct((), jnp.bool)
    yield "several steps, paged", steps, (config, 4, weights, state, rules(BATCH), pause)
    yield "prefill, paged", prefill_chunk, (config, weights, state, chunk_table, prefill, chunk, rows())
    yield "admission, paged", admit, (config, weights, state, rules(BATCH), admission, prefill)


def main(topology_name: str) -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=topology_name, chips_per_host_bounds=(2, 2, 1)
    )
    mesh = sharding.make_mesh(2, 2, topology.devices)
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
