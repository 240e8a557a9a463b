"""Compiles the kernels for TPUs that are not there; run as a script by test_tpu_compile.py.

    python tpu_compile.py v5e:2x2

prints one JSON object a program: its name, the number of Pallas kernels and of collectives in it, bytes and
flops a device as the compiler sees them, or the error. A process of its own, because libtpu, once loaded, stays.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask which TPU this is
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody here holds a TPU

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import FULL, SLIDING, RopeConfig, TargetConfig
from dflash_jax.kernels.anchor_attention import anchor_attention
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.attention import causal
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer

Program = tuple[str, Mesh, Any, tuple]  # name, mesh of the context, function, abstract arguments
DTYPES = (jnp.bfloat16, jnp.float32)


def abstract(mesh: Mesh, shape: tuple[int, ...], dtype, *axes: str | None) -> jax.ShapeDtypeStruct:
    axes = (*axes, *[None] * (len(shape) - len(axes)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named_sharding(mesh, axes, shape))


def block_program(
    mesh, name, *, b, m, g, r, h, s, pages, dtype, window=None, value_dim=None, sinks=False, **options
) -> Program:
    array = functools.partial(abstract, mesh)
    value_dim = h if value_dim is None else value_dim
    pools = [array((b * (pages or 1), g, s, width), dtype, "pages", "kv_heads") for width in (h, value_dim)]
    blocks = [array((b, g, m, width), dtype, "batch", "kv_heads") for width in (h, value_dim)]
    table = None if pages is None else array((b, pages), jnp.int32, "batch")

    def run(q, k, v, table, k_block, v_block, length, position, visibility, sinks_N):
        return paged_block_attention(
            q, k, v, table, k_block, v_block, length_B=length, position_BxM=position, visibility=visibility,
            window=window, scale=h**-0.5, sinks_N=sinks_N, **options,
        )  # fmt: skip

    return (
        f"block attention, {name}, {jnp.dtype(dtype).name}", mesh, run,
        (array((b, m, g * r, h), dtype, "batch", None, "kv_heads"), *pools, table, *blocks,
         array((b,), jnp.int32, "batch"), array((b, m), jnp.int32, "batch"), array((m, m), jnp.bool),
         array((g * r,), dtype, "kv_heads") if sinks else None),
    )  # fmt: skip


def anchor_program(mesh, name, *, b, a, k, g, r, h, s, dtype, window=None, packed=False) -> Program:
    array = functools.partial(abstract, mesh)
    q = array((b, a, k, g * r, h), dtype, "batch", None, None, "kv_heads")
    context = array((b, g, s, h), dtype, "batch", "kv_heads")
    block = array((b, a, g, k, h), dtype, "batch", None, "kv_heads")
    document = array((b, s), jnp.int32, "batch") if packed else None

    def run(arrays, anchor, keep, visibility, document, gradient):
        def call(*arrays):
            return anchor_attention(
                *arrays, anchor_BxA=anchor, keep_BxA=keep, visibility_KxK=visibility, document_BxS=document,
                window=window, scale=h**-0.5,
            )  # fmt: skip

        out, pull = jax.vjp(call, *arrays)
        return out, pull(gradient)

    return (
        f"anchor attention, {name}, {jnp.dtype(dtype).name}", mesh, run,
        ((q, context, context, block, block), array((b, a), jnp.int32, "batch"), array((b, a), jnp.bool, "batch"),
         array((k, k), jnp.bool), document, q),
    )  # fmt: skip


def verify_program(mesh: Mesh, paged: bool) -> Program:
    """A target's verification call over a sharded cache: models find the kernel by the mesh alone."""
    config = TargetConfig(
        "llama", 512, 256, 512, 2, 4, 2, 64, 1e-5, RopeConfig(), 1024, (FULL, SLIDING), sliding_window=100
    )
    graphdef, params = abstract_model(Transformer, config, jnp.bfloat16)
    params = jax.tree.map(
        lambda x: x.replace(abstract(mesh, x.get_value().shape, x.get_value().dtype, *x.get_metadata("axes"))),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    b, m, capacity, page_size = 4, 8, 512, 64
    pages = capacity // page_size
    shape = (b * pages, 2, page_size, 64) if paged else (b, 2, capacity, 64)
    pool = (abstract(mesh, shape, jnp.bfloat16, "pages", "kv_heads"),) * 2
    table = abstract(mesh, (b, pages), jnp.int32, "batch") if paged else None
    cache = KVCache(pool, pool, table, abstract(mesh, (b,), jnp.int32, "batch"))

    def run(params, token, cache):
        position = cache.length_B[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
        return nnx.merge(graphdef, params)(token, position, cache, causal(m)).hidden_BxMxD

    name = f"target, {'paged' if paged else 'contiguous'}"
    return name, mesh, run, (params, abstract(mesh, (b, m), jnp.int32, "batch"), cache)


def programs(devices) -> Iterator[Program]:
    one, four = sharding.make_mesh(1, 1, devices), sharding.make_mesh(2, 2, devices)
    for dtype in DTYPES:
        block = functools.partial(block_program, dtype=dtype)
        yield block(one, "verify, pages of 128", b=4, m=16, g=2, r=4, h=128, s=128, pages=16)
        yield block(one, "decode, pages of 16, window", b=2, m=1, g=3, r=3, h=64, s=16, pages=16, window=100)
        yield block(one, "draft, contiguous", b=2, m=7, g=2, r=1, h=64, s=1000, pages=None)
        yield block(one, "prefill", b=1, m=512, g=1, r=8, h=128, s=2048, pages=None)
        yield block(one, "whole sequence, nothing cached", b=1, m=1024, g=1, r=2, h=64, s=1, pages=None)
        yield block(one, "odd head dim", b=2, m=5, g=1, r=5, h=80, s=32, pages=3)
        yield block(one, "soft cap, window", b=2, m=8, g=2, r=2, h=256, s=64, pages=4, window=100, softcap=50.0)
        yield block(one, "sinks, window", b=2, m=8, g=2, r=8, h=64, s=64, pages=4, window=128, sinks=True)
        yield block(one, "chunks", b=2, m=8, g=2, r=5, h=128, s=64, pages=40, chunk=1024)
        yield block(one, "narrow values", b=2, m=8, g=2, r=2, h=192, s=64, pages=4, value_dim=128)
        latent = functools.partial(block, one, g=1, r=128, h=576, value_dim=0, values_in_keys=512)
        yield latent("latent, verify", b=4, m=16, s=64, pages=32)
        yield latent("latent, decode, contiguous", b=4, m=1, s=2000, pages=None)
        yield latent("latent, prefill", b=1, m=512, s=2048, pages=None)
        anchor = functools.partial(anchor_program, dtype=dtype)
        yield anchor(one, "blocks of 16", b=1, a=16, k=16, g=1, r=4, h=128, s=1024)
        yield anchor(one, "odd blocks, packed, window", b=1, a=9, k=7, g=2, r=3, h=64, s=200, window=50, packed=True)
    yield block_program(four, "2x2, paged", b=4, m=8, g=2, r=2, h=64, s=64, pages=4, dtype=jnp.bfloat16)
    yield block_program(four, "2x2, contiguous", b=4, m=8, g=2, r=2, h=64, s=256, pages=None, dtype=jnp.bfloat16)
    few = functools.partial(block_program, four, b=4, m=8, dtype=jnp.bfloat16)
    yield few("2x2, contiguous, latent", g=1, r=128, h=576, s=256, pages=None, value_dim=0, values_in_keys=512)
    yield few("2x2, paged, sinks, three KV heads", g=3, r=4, h=64, s=64, pages=4, sinks=True)
    yield anchor_program(four, "2x2", b=2, a=4, k=8, g=2, r=2, h=64, s=128, dtype=jnp.bfloat16)
    yield verify_program(four, paged=False)
    yield verify_program(four, paged=True)


def compile_one(program: Program) -> dict[str, Any]:
    name, mesh, run, arguments = program
    try:
        with jax.set_mesh(mesh):
            compiled = jax.jit(run).lower(*arguments).compile()
    except Exception as error:  # reported by the test, with all others
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
    text, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "name": name,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": len(re.findall(r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute)(-start)?\(", text)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
    }  # fmt: skip


def main(topology_name: str) -> None:
    bounds = (2, 2, 1)  # chips a host
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name, chips_per_host_bounds=bounds)
    for program in programs(topology.devices):
        print(json.dumps(compile_one(program)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
