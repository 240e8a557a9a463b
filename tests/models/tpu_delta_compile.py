"""Compiles a Gated DeltaNet layer for a TPU mesh that is not there; run as a script by test_delta_net.py.

    python tpu_delta_compile.py v5e:2x2 "block of 16"

prints a JSON object: the exchanges between devices in a call and its commit, and the bytes of the (donated) state that
are updated in place on a device. A process of its own, because libtpu, once loaded, stays.
"""

from __future__ import annotations

import json
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask which TPU this is
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody here holds a TPU

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from dflash_jax import sharding
from dflash_jax.config import LINEAR, DeltaConfig, RopeConfig, TargetConfig
from dflash_jax.kernels.delta_rule import STATE_AXES, abstract_state, commit
from dflash_jax.models.delta_net import DeltaNet

HIDDEN, BATCH = 256, 4
DELTA = DeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
PROGRAMS = {"one token": 1, "block of 16": 16, "prefill of 512": 512}


def main(topology_name: str, program: str) -> None:
    bounds = (2, 2, 1)  # chips a host
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name, chips_per_host_bounds=bounds)
    mesh = sharding.make_mesh(2, 2, topology.devices)

    def laid(x, axes):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named_sharding(mesh, axes, x.shape))

    config = TargetConfig("qwen3_next", 8, HIDDEN, 8, 1, 1, 1, 8, 1e-6, RopeConfig(), 128, (LINEAR,), delta=DELTA)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: DeltaNet(config, 0, jnp.bfloat16, nnx.Rngs(0))))
    params = jax.tree.map(
        lambda x: x.replace(laid(x.get_value(), x.get_metadata("axes"))),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    state = jax.tree.map(laid, abstract_state(DELTA, BATCH, jnp.bfloat16), STATE_AXES)
    count_B = laid(jax.ShapeDtypeStruct((BATCH,), jnp.int32), ("batch",))

    def run(params, x_BxMxD, state, count_B):
        out_BxMxD, inputs = nnx.merge(graphdef, params)(x_BxMxD, state)
        return out_BxMxD, commit(state, inputs, count_B)

    x_BxMxD = laid(jax.ShapeDtypeStruct((BATCH, PROGRAMS[program], HIDDEN), jnp.bfloat16), ("batch", None, None))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, donate_argnums=2).lower(params, x_BxMxD, state, count_B).compile()
    exchanges = r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    report = {
        "collectives": re.findall(exchanges, compiled.as_text()),
        "state_bytes": compiled.memory_analysis().alias_size_in_bytes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
