"""What a target call costs against the tokens it takes, what a draft costs, and what the memory allows.

    python -m dflash_jax.evaluation.cost_curve --config=configs/benchmark_smollm2.py --workdir=DIR

writes DIR/cost_curve.json and DIR/cost_curve.md. `--dtype=bfloat16`, `--context=256`, `--capacity=512` and
`--repeats=30` replace what is measured. Nothing else should run on the machine meanwhile.

Speculation of block size K pays where tau exceeds (draft(K) + target(K)) / target(1), the break-even tau below. Plain
decoding at batch 1 is bound by reading the weights once a token; how close it comes is the ratio reported.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from flax import nnx
from ml_collections import config_flags

from dflash_jax import command_line
from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.decoding.cache import make_cache
from dflash_jax.decoding.sampling import lowest_argmax
from dflash_jax.decoding.step import Skeleton
from dflash_jax.drafters.contract import Drafter, SharedWeights
from dflash_jax.evaluation.report import table
from dflash_jax.evaluation.runner import BenchmarkConfig, describe
from dflash_jax.kernels.kv_cache import BlockKV, KVCache
from dflash_jax.models.attention import causal
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import layer_specs

WIDTHS = (1, 2, 4, 5, 6, 8, 16, 32)
_READ_BYTES = 1 << 29
_READS = 7


@functools.partial(jax.jit, static_argnums=(0, 4))
def _target_call(
    skeleton: Skeleton, leaves: tuple[jax.Array, ...], cache: KVCache, token_BxM: jax.Array, tap_ids: tuple[int, ...]
) -> tuple[jax.Array, BlockKV, jax.Array | None]:
    """What a round asks of the target: its choice at every slot, the rows to commit, and the taps."""
    target = skeleton.build(leaves)
    num_tokens = token_BxM.shape[1]
    position_BxM = cache.length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    forward = target(token_BxM, position_BxM, cache, causal(num_tokens), tap_ids)
    return lowest_argmax(target.logits(forward.hidden_BxMxD)), forward.block_kv, forward.taps_BxMxTD


@functools.partial(jax.jit, static_argnums=(0, 5))
def _draft_call(
    skeleton: Skeleton,
    leaves: tuple[jax.Array, ...],
    shared: SharedWeights,
    cache: KVCache,
    root_B: jax.Array,
    block_size: int,
) -> jax.Array:
    return skeleton.build(leaves).propose(shared, cache, root_B, None, None, block_size).token_BxM


def cost_curve(
    target: Target,
    drafter: Drafter,
    *,
    context: int = 256,
    capacity: int = 512,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 30,
) -> dict[str, Any]:
    """Times target and draft calls at batch 1 over a committed context, in turn, after compiling all of them.

    Args:
      context: committed tokens. capacity: of the cache.
      widths: tokens of a target call. Draft calls are timed at every block size from 2 to the trained one.
      repeats: of each; medians are reported.

    Returns:
      target_s, draft_s: medians by width and by block size (keys as text). break_even_tau: by block size, where both
      were timed. weight_bytes: what one token of plain decoding must read. bandwidth: bytes a second of large reads
      in the same run. read_s: weight_bytes / bandwidth. plain_over_read: target_s of one token over it.

    Raises:
      ConfigError: the widest call does not fit behind the context.
    """
    sizes = range(2, drafter.block_size + 1)
    target_s, draft_s = call_seconds(
        target, drafter, context=context, capacity=capacity, widths=widths, block_sizes=sizes, repeats=repeats
    )
    weights, bandwidth = weight_bytes(target), read_bandwidth()
    plain_s = target_s.get(1)
    return {
        "context": context,
        "capacity": capacity,
        "repeats": repeats,
        "target_s": _text_keys(target_s),
        "draft_s": _text_keys(draft_s),
        "break_even_tau": _text_keys(
            {k: (draft_s[k] + target_s[k]) / plain_s for k in draft_s if k in target_s and plain_s}
        ),
        "weight_bytes": weights,
        "bandwidth": bandwidth,
        "read_s": weights / bandwidth,
        "plain_over_read": plain_s / (weights / bandwidth) if plain_s else None,
    }


def call_seconds(
    target: Target,
    drafter: Drafter,
    *,
    context: int,
    capacity: int,
    widths: Sequence[int],
    block_sizes: Sequence[int],
    repeats: int,
) -> tuple[dict[int, float], dict[int, float]]:
    """(seconds of a target call by width, of a draft call by block size): medians; see `cost_curve`."""
    widest = max(*widths, *block_sizes)
    if not 0 < context <= capacity - widest:
        raise ConfigError(f"context is {context}, must lie in [1, {capacity - widest}] (capacity - the widest call)")
    target_skeleton, target_leaves = Skeleton.of(target.graphdef, target.params)
    draft_skeleton, draft_leaves = Skeleton.of(drafter.graphdef, drafter.params)
    specs = layer_specs(target.config) + nnx.merge(drafter.graphdef, drafter.params).layer_specs()
    cache = make_cache(specs, 1, capacity, target.dtype).replace(length_B=jnp.full((1,), context, jnp.int32))
    root_B = jnp.ones((1,), jnp.int32)

    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for width in widths:
        token_BxM = jnp.ones((1, width), jnp.int32)
        taps = drafter.tap_ids if width > 1 else ()
        calls["target", width] = functools.partial(
            _target_call, target_skeleton, target_leaves, cache, token_BxM, tuple(taps)
        )
    for size in block_sizes:
        calls["draft", size] = functools.partial(
            _draft_call, draft_skeleton, draft_leaves, drafter.shared, cache, root_B, size
        )
    seconds = _medians(calls, repeats)
    target_s = {size: s for (kind, size), s in seconds.items() if kind == "target"}
    draft_s = {size: s for (kind, size), s in seconds.items() if kind == "draft"}
    return target_s, draft_s


def _medians(calls: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Seconds by call. Every repeat times all calls, in alternating direction, so that no size meets a busier machine
    than another."""
    for key, call in calls.items():
        logging.info("compiling %s", key)
        for _ in range(2):
            jax.block_until_ready(call())
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for repeat in range(repeats):
        for key in list(calls)[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(calls[key]())
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(found) for key, found in times.items()}


def _text_keys(values: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


def weight_bytes(target: Target) -> int:
    """Bytes of weights that one token of plain decoding reads: all, but of the table only a row, unless it is the
    head too."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    if "head_DxV" not in target.params:
        return total
    return total - target.params["embedding_VxD"].get_value().nbytes


def read_bandwidth(num_bytes: int = _READ_BYTES) -> float:
    """Bytes a second of reading an array much larger than any cache, by the fastest of several readers.

    On CPU these are a BLAS dot product and an XLA product with a vector, elsewhere an XLA sum. Each reads the array
    several times; its median counts.
    """
    rows = num_bytes // (4 * 4096)
    x_NxK = jnp.ones((rows, 4096), jnp.float32)
    ones_K = jnp.ones((4096,), jnp.float32)
    product, total = jax.jit(lambda x, y: x @ y), jax.jit(jnp.sum)
    if jax.default_backend() == "cpu":
        flat = np.ones(rows * 4096, np.float32)
        readers = [lambda: np.dot(flat, flat), lambda: product(x_NxK, ones_K).block_until_ready()]
    else:
        readers = [lambda: product(x_NxK, ones_K).block_until_ready(), lambda: total(x_NxK).block_until_ready()]
    medians = []
    for read in readers:
        read()  # compiles, and touches every page
        times = []
        for _ in range(_READS):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return 4.0 * 4096 * rows / min(medians)


def markdown(report: Mapping[str, Any]) -> str:
    """The result of `cost_curve`, with its setup, as a page of tables."""
    setup = report["setup"]
    targets, drafts, break_even = (report[name] for name in ("target_s", "draft_s", "break_even_tau"))
    milliseconds = lambda values: [f"{1e3 * s:.1f}" for s in values.values()]  # noqa: E731
    ratio = report["plain_over_read"]
    lines = [
        f"## {setup['dtype']}: context {report['context']} of {report['capacity']}, medians of {report['repeats']}",
        "",
        f"{setup['target']}, {setup['drafter']}; {setup['machine']}.",
        "",
        *table(["tokens of a target call", *targets], [["ms", *milliseconds(targets)]]),
        "",
        *table(
            ["block size", *drafts],
            [["draft (ms)", *milliseconds(drafts)], ["break-even tau", *(_or_dash(break_even.get(k)) for k in drafts)]],
        ),
        "",
        f"Weights: {report['weight_bytes'] / 1e6:.1f} MB; large reads: {report['bandwidth'] / 1e9:.1f} GB/s; reading "
        f"the weights once: {1e3 * report['read_s']:.1f} ms; one token of plain decoding takes "
        f"{_or_dash(ratio)} times that.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: list[str]) -> None:
    del argv
    use_compilation_cache()
    values = flags.FLAGS
    config, workdir = from_config_dict(BenchmarkConfig, values.config.to_dict()), pathlib.Path(values.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    reports = {}
    for dtype in values.dtype or config.dtypes:
        target = load_target(config.target, dtype=dtype)
        drafter = load_drafter(config.drafter, target, draft_vocab=config.draft_vocab)
        costs = cost_curve(
            target, drafter, context=values.context, capacity=values.capacity, repeats=values.repeats
        )  # fmt: skip
        reports[dtype] = {"setup": describe(target, drafter, 0, []), **costs}
        (workdir / "cost_curve.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
        (workdir / "cost_curve.md").write_text("\n".join(map(markdown, reports.values())), encoding="utf-8")
    print((workdir / "cost_curve.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "A benchmark of configs/.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Where cost_curve.json and cost_curve.md go.")
    flags.DEFINE_list("dtype", None, "float32, bfloat16, or both.")
    flags.DEFINE_integer("context", 256, "Committed tokens.", lower_bound=1)
    flags.DEFINE_integer("capacity", 512, "Rows of the cache.", lower_bound=2)
    flags.DEFINE_integer("repeats", 30, "Timed calls of each size.", lower_bound=1)
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main)
