"""Block attention on CPU: XLA's products over the native kernel, in turn in one process.

    JAX_PLATFORMS=cpu python benchmarks/cpu_attention.py

Heads of SmolLM2-135M (9 query and 3 KV heads of 64), float32, contiguous cache. Prints a Markdown table; times are
medians of one layer's attention in milliseconds. Nothing else should run on the machine.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from dflash_jax.kernels.block_attention import paged_block_attention

LAYERS, ROUNDS = 4, 40  # calls a program, so that dispatch counts less; timings of each
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
# (rows, capacity, tokens of a row's block, cached tokens)
SIZES = (
    (1, 512, 1, 256), (1, 512, 6, 256), (1, 2048, 6, 1500), (8, 512, 1, 256), (8, 512, 6, 256), (8, 2048, 6, 1500),
    (32, 512, 1, 256), (32, 512, 1, 500), (128, 512, 1, 256),
)  # fmt: skip


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


def main() -> None:
    columns = ("rows", "capacity", "tokens a row", "cached", "XLA, ms", "native, ms", "ratio")
    print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
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


if __name__ == "__main__":
    main()
