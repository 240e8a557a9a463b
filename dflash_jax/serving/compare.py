"""Plain decoding and DFlash side by side on one prompt: measured, tabulated, written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from dflash_jax.decoding.request import Request
from dflash_jax.decoding.sampling import MIN_TEMPERATURE
from dflash_jax.evaluation.methods import first_difference
from dflash_jax.evaluation.statistics import summarise
from dflash_jax.evaluation.timing import TimedRun, speed_statistics, timed_run
from dflash_jax.serving.session import DFLASH, PLAIN, Session


def compare(
    session: Session, request: Request, repeats: int, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Any]:
    """Times one request with and without the drafter, in turn, in this process, with programs compiled before.

    Who goes first changes from repeat to repeat, so that a machine that slows down or speeds up favours neither.

    Args:
      repeats: timed runs of each; medians are reported.
      progress: called as progress(done, total, what).

    Returns:
      plain, dflash: speed (see `speed_statistics`), acceptance (tau, histogram: tokens -> rounds, per_position,
        rounds), tokens, finish_reason. dflash is None without a drafter.
      speedup, decode_speedup: plain time a token / DFlash's, prefill included and excluded.
      identical: whether both gave the same tokens; None where that is not promised (sampling).
      first_difference: index of the first token that differs, None without one.
      dtype, tokens (of the answer), prompt_tokens, repeats, target, drafter, platform, devices.
    """
    modes = [PLAIN] if session.drafter is None else [PLAIN, DFLASH]
    engines = {mode: session.prepare(mode, request) for mode in modes}
    runs: dict[str, list[TimedRun]] = {mode: [] for mode in modes}
    for repeat in range(repeats):
        for mode in modes if repeat % 2 == 0 else reversed(modes):
            if progress is not None:
                progress(sum(map(len, runs.values())), repeats * len(modes), f"{mode}, run {repeat + 1} of {repeats}")
            runs[mode].append(timed_run(engines[mode], request))
    stats: dict[str, Any] = {mode: _one(runs[mode], session.block_size(mode)) for mode in modes}
    stats.setdefault(DFLASH, None)
    answer = runs[modes[-1]][0]
    stats |= _contrast(runs, stats, greedy=request.temperature < MIN_TEMPERATURE)
    return stats | {
        "dtype": jnp.dtype(session.target.dtype).name,
        "tokens": len(answer.token_ids),
        "prompt_tokens": len(request.prompt_ids),
        "temperature": request.temperature,
        "repeats": repeats,
        "target": session.target.source,
        "drafter": None if session.drafter is None else session.drafter.source,
        "platform": jax.default_backend(),
        "devices": 1 if session.target.mesh is None else session.target.mesh.size,
    }


def _one(runs: list[TimedRun], block_size: int) -> dict[str, Any]:
    # Repeats of a request decode the same tokens, so the acceptance of one of them is that of all.
    first = runs[0]
    acceptance = summarise([first.acceptance], block_size)
    return {
        **speed_statistics(runs),
        "tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
        "block_size": block_size,
        "rounds": acceptance["rounds"],
        "tau": acceptance["tau"],
        "histogram": {str(n): dict(enumerate(acceptance["histogram"])).get(n, 0) for n in range(1, block_size + 1)},
        "per_position": acceptance["per_position"],
    }


def _contrast(runs: Mapping[str, list[TimedRun]], stats: Mapping[str, Any], greedy: bool) -> dict[str, Any]:
    result: dict[str, Any] = dict.fromkeys(("speedup", "decode_speedup", "identical", "first_difference"))
    plain, dflash = stats[PLAIN], stats[DFLASH]
    if dflash is None:
        return result
    result["speedup"] = dflash["tokens_per_s"] / plain["tokens_per_s"]
    if plain["decode_tokens_per_s"] and dflash["decode_tokens_per_s"]:
        result["decode_speedup"] = dflash["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
    if greedy:
        answers = [run.token_ids for mode in (PLAIN, DFLASH) for run in runs[mode]]
        differ = [at for other in answers[1:] if (at := first_difference(answers[0], other)) is not None]
        result["identical"] = not differ
        result["first_difference"] = min(differ, default=None)
    return result


def comparison_table(stats: Mapping[str, Any]) -> Table:
    """The result of `compare` for people."""
    plain, dflash = stats[PLAIN], stats[DFLASH]
    sides = [plain] if dflash is None else [plain, dflash]
    tokens = f"{stats['tokens']} tokens after a prompt of {stats['prompt_tokens']}"
    table = Table(
        title=f"{tokens}, {stats['dtype']} on {stats['platform']}, median of {stats['repeats']}", title_justify="left"
    )
    table.add_column("")
    table.add_column("plain decoding", justify="right")
    if dflash is not None:
        table.add_column(f"DFlash, block {dflash['block_size']}", justify="right")
    rows = {
        "tokens/s, whole answer": [_number(s["tokens_per_s"], ".1f") for s in sides],
        "tokens/s after the first": [_number(s["decode_tokens_per_s"], ".1f") for s in sides],
        "first token (ms)": [_number(1000 * s["first_token_s"], ".0f") for s in sides],
        "target calls after it": [str(s["rounds"]) for s in sides],
        "tokens a call (tau)": [_number(s["tau"], ".2f") for s in sides],
    }
    if dflash is not None:
        rows["speedup, whole answer"] = ["", _number(stats["speedup"], ".2f", "x")]
        rows["speedup after the first"] = ["", _number(stats["decode_speedup"], ".2f", "x")]
        rows["same tokens"] = ["", _sameness(stats)]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    if dflash is not None and dflash["rounds"]:
        table.add_section()
        for tokens, rounds in dflash["histogram"].items():
            share = rounds / dflash["rounds"]
            bar = "\N{FULL BLOCK}" * round(12 * share)
            table.add_row(f"calls that gave {tokens}", "", f"{bar} {100 * share:3.0f} %")
    return table


def _sameness(stats: Mapping[str, Any]) -> str:
    if stats["identical"] is None:
        return "same law (sampled)"
    return "identical" if stats["identical"] else f"differ from token {stats['first_difference'] + 1}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
