"""From records to numbers, and from numbers to tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.evaluation.methods import PLAIN
from dflash_jax.evaluation.records import Record
from dflash_jax.evaluation.statistics import AcceptanceCounter, rounds_of
from dflash_jax.evaluation.timing import TimedRun

ALL = "all"  # the name under which all tasks are reported together
BOOTSTRAPS = 1000


def aggregate(
    records: Sequence[Record],
    block_sizes: Mapping[str, int | None],
    *,
    baseline: str = PLAIN,
    peers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Numbers by task and over all of them.

    Args:
      records: of one run; each must hold every method.
      block_sizes: run-time block size by method, None where a method does not say what a round gave. Its keys are
        the methods, in the order of the tables.
      baseline: the method that speedups and identity refer to.
      peers: method -> another one that it must agree with in tokens and acceptance lists.

    Returns:
      {task: {"prompts", "prompt_tokens", "methods": {method: see `summarise_method`}}}, with the task "all" last
      where there are several.
    """
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(record)
    if len(by_task) > 1:
        by_task[ALL] = list(records)
    return {
        task: {
            "prompts": len(own),
            "prompt_tokens": sum(r.prompt_tokens for r in own),
            "methods": {
                name: summarise_method(own, name, block_size, baseline, (peers or {}).get(name))
                for name, block_size in block_sizes.items()
            },
        }
        for task, own in by_task.items()
    }


def summarise_method(
    records: Sequence[Record], name: str, block_size: int | None, baseline: str = PLAIN, peer: str | None = None
) -> dict[str, Any]:
    """One method on some prompts.

    Returns:
      tokens, seconds, prefill_s: sums. tokens_per_s: all tokens over all time, prefill included;
      decode_tokens_per_s: tokens after the first over the time after it; median_...: medians over prompts.
      speedup, decode_speedup: the baseline's wall clock per output token over this method's, prefill included and
      excluded; speedup_95: its 95 % interval by resampling prompts; median_...: medians of the prompts' own.
      identical: [prompts whose tokens are the baseline's, prompts]; differences: the others, each with its
      id, index, tokens, logits and whether it is a near tie; unexplained: how many are none.
      acceptance: see `AcceptanceCounter.summary`; None for a method that does not tell.
      peer: {"name", "same_tokens", "same_acceptance", "of", "speedup", "decode_speedup"}, this method against it.
    """
    runs = [record.runs[name] for record in records]
    base = [record.runs[baseline] for record in records]
    differences = [{"id": r.id, **r.differences[name]} for r in records if name in r.differences]
    return {
        "block_size": block_size,
        **_speed(runs),
        **_speedups(base, runs),
        "identical": [sum(a.token_ids == b.token_ids for a, b in zip(runs, base, strict=True)), len(runs)],
        "differences": differences,
        "unexplained": sum(not d["near_tie"] for d in differences),
        "acceptance": None if block_size is None else _acceptance(runs, block_size),
        "peer": None if peer is None else _agreement(peer, [record.runs[peer] for record in records], runs),
    }


def _acceptance(runs: Iterable[TimedRun], block_size: int) -> dict[str, Any]:
    counter = AcceptanceCounter()
    for run in runs:
        counter.add_answer(rounds_of(run.acceptance, block_size))
    return counter.summary()


def _speed(runs: Sequence[TimedRun]) -> dict[str, Any]:
    tokens, seconds = sum(len(r.token_ids) for r in runs), sum(r.seconds for r in runs)
    prefill = sum(r.first_token_s for r in runs)
    decoding = [r for r in runs if len(r.token_ids) > 1]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "prefill_s": prefill,
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": 1 / _decode_seconds_per_token(runs) if decoding else None,
        "median_tokens_per_s": statistics.median(len(r.token_ids) / r.seconds for r in runs),
        "median_decode_tokens_per_s": (
            statistics.median(1 / _decode_seconds_per_token([r]) for r in decoding) if decoding else None
        ),
        "median_prefill_s": statistics.median(r.first_token_s for r in runs),
    }


def _seconds_per_token(runs: Sequence[TimedRun]) -> float:
    return sum(r.seconds for r in runs) / sum(len(r.token_ids) for r in runs)


def _decode_seconds_per_token(runs: Sequence[TimedRun]) -> float:
    """Time after the first token, by tokens after the first. An answer of one token counts in neither."""
    decoding = [r for r in runs if len(r.token_ids) > 1]
    return sum(r.seconds - r.first_token_s for r in decoding) / sum(len(r.token_ids) - 1 for r in decoding)


def _speedups(base: Sequence[TimedRun], runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Ratios of wall clock per output token, the base's over the runs'."""
    both = [(b, r) for b, r in zip(base, runs, strict=True) if len(b.token_ids) > 1 and len(r.token_ids) > 1]
    whole = [_seconds_per_token([b]) / _seconds_per_token([r]) for b, r in zip(base, runs, strict=True)]
    decode = [_decode_seconds_per_token([b]) / _decode_seconds_per_token([r]) for b, r in both]
    return {
        "speedup": _seconds_per_token(base) / _seconds_per_token(runs),
        "speedup_95": _interval(base, runs),
        "decode_speedup": _decode_seconds_per_token(base) / _decode_seconds_per_token(runs) if both else None,
        "median_speedup": statistics.median(whole),
        "median_decode_speedup": statistics.median(decode) if decode else None,
    }


def _interval(base: Sequence[TimedRun], runs: Sequence[TimedRun]) -> list[float] | None:
    """Percentile bootstrap of the speedup over prompts; None for a single prompt."""
    if len(runs) < 2:
        return None
    columns = [[len(r.token_ids), r.seconds] for r in base], [[len(r.token_ids), r.seconds] for r in runs]
    base_Px2, runs_Px2 = (np.asarray(c, np.float64) for c in columns)
    pick_RxP = np.random.default_rng(0).integers(0, len(runs), (BOOTSTRAPS, len(runs)))
    base_Rx2, runs_Rx2 = base_Px2[pick_RxP].sum(1), runs_Px2[pick_RxP].sum(1)
    ratio_R = (base_Rx2[:, 1] / base_Rx2[:, 0]) / (runs_Rx2[:, 1] / runs_Rx2[:, 0])
    return [float(x) for x in np.quantile(ratio_R, (0.025, 0.975))]


def _agreement(peer: str, peers: Sequence[TimedRun], runs: Sequence[TimedRun]) -> dict[str, Any]:
    pairs = list(zip(peers, runs, strict=True))
    speedups = _speedups(peers, runs)
    return {
        "name": peer,
        "same_tokens": sum(p.token_ids == r.token_ids for p, r in pairs),
        "same_acceptance": sum(p.acceptance == r.acceptance for p, r in pairs),
        "of": len(pairs),
        "speedup": speedups["speedup"],
        "decode_speedup": speedups["decode_speedup"],
    }


# Tables ------------------------------------------------------------------------------------------------


def markdown(report: Mapping[str, Any]) -> str:
    """The report of a run (see `benchmark.run`) as a page of tables."""
    setup = report["setup"]
    lines = [
        f"## {setup['dtype']}",
        "",
        f"Target {setup['target']}, drafter {setup['drafter']}, greedy, batch 1, at most {setup['max_tokens']} tokens "
        f"an answer; {setup['machine']}.",
        "",
    ]
    for task, numbers in report["tasks"].items():
        hashed = f", prompt ids {report['prompt_hashes'][task]}" if task in report["prompt_hashes"] else ""
        lines += [f"### {task}: {numbers['prompts']} prompts{hashed}", ""]
        lines += [*speed_table(numbers["methods"]), "", *acceptance_table(numbers["methods"]), ""]
        lines += _peer_lines(numbers["methods"])
    if report["host_overhead"]:
        lines += ["### Host overhead", "", *overhead_table(report["host_overhead"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def speed_table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tokens/s, speedups and identity by method."""
    rows = [
        [
            name,
            _number(m["tokens_per_s"], ".1f"),
            _number(m["decode_tokens_per_s"], ".1f"),
            _number(m["speedup"], ".2f") + _range(m["speedup_95"]),
            _number(m["decode_speedup"], ".2f"),
            _number(m["median_speedup"], ".2f"),
            _sameness(m),
        ]
        for name, m in methods.items()
    ]
    head = [
        "method", "tokens/s", "tokens/s after prefill", "speedup (95 %)", "speedup after prefill", "median speedup",
        "same tokens",
    ]  # fmt: skip
    return table(head, rows)


def _sameness(method: Mapping[str, Any]) -> str:
    """As `163 of 164, near ties: 1`."""
    near_ties = len(method["differences"]) - method["unexplained"]
    text = "{} of {}".format(*method["identical"])
    text += f", near ties: {near_ties}" if near_ties else ""
    return text + (f", unexplained: {method['unexplained']}" if method["unexplained"] else "")


def acceptance_table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """tau, histogram and acceptance per position, of the methods that draft."""
    rows = []
    for name, m in methods.items():
        acceptance = m["acceptance"]
        if acceptance is None or not acceptance["proposed"]:
            continue
        histogram = acceptance["histogram"][1:]
        rows.append(
            [
                name,
                _number(acceptance["tau"], ".3f"),
                _number(acceptance["tau_per_answer"], ".3f"),
                str(acceptance["rounds"]),
                " ".join(f"{100 * n / acceptance['rounds']:.0f}" for n in histogram),
                " ".join(_number(share, ".2f") for share in acceptance["per_position"]),
            ]
        )
    head = [
        "method", "tau", "tau, mean of answers", "rounds", "rounds (%) that gave 1, 2, ... tokens",
        "acceptance of draft 1, 2, ...",
    ]  # fmt: skip
    return table(head, rows) if rows else []


def overhead_table(overhead: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Milliseconds of a round and the host's share by method."""
    rows = [
        [
            name,
            f"{1e3 * o['round_s']:.2f}",
            f"{1e3 * o['device_s']:.2f}",
            f"{100 * o['overhead']:.1f} %",
            f"{100 * o['between_calls']:.1f} %",
        ]
        for name, o in overhead.items()
    ]
    return table(["method", "round (ms)", "device (ms)", "host", "host between calls"], rows)


def _peer_lines(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, m in methods.items():
        if m["peer"] is not None:
            p = m["peer"]
            lines.append(
                f"- {name} against {p['name']}: same tokens {p['same_tokens']} of {p['of']}, same acceptance lists "
                f"{p['same_acceptance']} of {p['of']}; {_number(p['speedup'], '.2f')} times its tokens/s, "
                f"{_number(p['decode_speedup'], '.2f')} after prefill"
            )
    return [*lines, ""] if lines else []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is left-aligned, the others right."""
    line = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return [line(head), "|---|" + "---:|" * (len(head) - 1), *(line(row) for row in rows)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _range(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.2f} - {interval[1]:.2f})"
