"""Compiles experts on a mesh for a TPU that is not there; run as a script by test_moe.py.

Prints one JSON object a program: collectives, loops, bytes a device. A process of its own, because libtpu, once
loaded, stays.
"""

from __future__ import annotations

import json
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask which TPU this is
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody here holds a TPU

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from dflash_jax import sharding
from dflash_jax.config import FULL, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.models.moe import MoE
from dflash_jax.models.target import abstract_model

CONFIG = TargetConfig(
    family="test", vocab_size=8, hidden_size=256, intermediate_size=256, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeConfig(), max_positions=8, layer_types=(FULL,),
    moe=MoeConfig(16, 2, 256, (0,), router_bias=True, expert_bias=True),
)  # fmt: skip


def main() -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=(2, 2, 1)
    )  # fmt: skip
    mesh = sharding.make_mesh(devices=topology.devices, expert=2, tensor=2)

    def abstract(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named_sharding(mesh, axes, shape))

    for kind, dtype in (("forward", jnp.bfloat16), ("forward", jnp.float32), ("gradient", jnp.bfloat16)):
        graphdef, params = abstract_model(MoE, CONFIG, dtype)
        params = jax.tree.map(
            lambda x: x.replace(abstract(x.get_value().shape, x.get_value().dtype, x.get_metadata("axes"))),
            params,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )

        def forward(params, x, graphdef=graphdef):
            return nnx.merge(graphdef, params)(x)

        def gradient(params, x, forward=forward):
            return jax.grad(lambda params, x: forward(params, x).astype(jnp.float32).sum(), (0, 1))(params, x)

        x_BxMxD = abstract((2, 4, CONFIG.hidden_size), dtype, ("batch", None, None))
        with sharding.use(mesh):
            compiled = jax.jit(forward if kind == "forward" else gradient).lower(params, x_BxMxD).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        report = {
            "name": f"{kind} {jnp.dtype(dtype).name}",
            "all_reduce": len(re.findall(r"= \S+ all-reduce(-start)?\(", text)),
            "other_collectives": len(re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)(-start)?\(", text)),
            "while": len(re.findall(r"= \S+ while\(", text)),
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
