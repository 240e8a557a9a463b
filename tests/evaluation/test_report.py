"""Aggregation by hand-made measurements, and the tables."""

from __future__ import annotations

import itertools
import json

import pytest

from dflash_jax.evaluation.records import Record
from dflash_jax.evaluation.report import aggregate, markdown, table
from dflash_jax.evaluation.timing import TimedRun


def timed(ids, acceptance, seconds, first):
    return TimedRun(list(ids), list(acceptance), "length", seconds, first)


def record(name, task, plain, dflash, differences=None):
    return Record(
        task, name, "0" * 16, 10, ["plain", "dflash-4"], {"plain": plain, "dflash-4": dflash}, differences or {}
    )


# 5 tokens in 6 s against 3 s, 1 s of each prefill; 3 tokens in 5 s against 4 s, 2 s of each prefill.
RECORDS = [
    record("x:1", "x", timed(range(5), [1] * 4, 6.0, 1.0), timed(range(5), [3, 1], 3.0, 1.0)),
    record("y:1", "y", timed(range(3), [1] * 2, 5.0, 2.0), timed(range(3), [2], 4.0, 2.0)),
]
BLOCKS = {"plain": 1, "dflash-4": 4}


def test_speeds_and_speedups():
    report = aggregate(RECORDS, BLOCKS)
    assert list(report) == ["x", "y", "all"]
    plain, dflash = report["all"]["methods"].values()
    assert (plain["tokens"], plain["seconds"], plain["prefill_s"]) == (8, 11.0, 3.0)
    assert plain["tokens_per_s"] == pytest.approx(8 / 11)
    assert dflash["tokens_per_s"] == pytest.approx(8 / 7)
    assert dflash["speedup"] == pytest.approx(11 / 7)
    # After the first tokens: 6 tokens in 8 s against 6 in 4 s.
    assert dflash["decode_tokens_per_s"] == pytest.approx(6 / 4)
    assert dflash["decode_speedup"] == pytest.approx(2.0)
    assert dflash["median_speedup"] == pytest.approx((6 / 3 + 5 / 4) / 2)
    assert dflash["median_decode_speedup"] == pytest.approx((5 / 2 + 3 / 2) / 2)
    low, high = dflash["speedup_95"]
    assert 5 / 4 <= low <= dflash["speedup"] <= high <= 6 / 3
    assert report["x"]["methods"]["dflash-4"]["speedup_95"] is None
    assert plain["speedup"] == plain["decode_speedup"] == 1.0


def test_speedup_is_per_output_token_where_answers_differ_in_length():
    runs = timed(range(5), [1] * 4, 6.0, 1.0), timed(range(10), [4, 4, 1], 6.0, 1.0)
    dflash = aggregate([record("x:1", "x", *runs)], BLOCKS)["x"]["methods"]["dflash-4"]
    assert dflash["speedup"] == pytest.approx(2.0)
    assert dflash["decode_speedup"] == pytest.approx((5 / 4) / (5 / 9))
    assert dflash["identical"] == [0, 1]


def test_acceptance_of_all_prompts():
    acceptance = aggregate(RECORDS, BLOCKS)["all"]["methods"]["dflash-4"]["acceptance"]
    assert (acceptance["rounds"], acceptance["emitted"]) == (3, 6)
    assert acceptance["tau"] == pytest.approx(2.0)
    assert acceptance["tau_per_answer"] == pytest.approx(2.0)
    assert acceptance["histogram"] == [0, 1, 1, 1]


def test_answers_of_one_token_count_in_no_decode_number():
    one = record("x:2", "x", timed([7], [], 3.0, 3.0), timed([7], [], 3.0, 3.0))
    alone, both = aggregate([one], BLOCKS)["x"], aggregate([*RECORDS[:1], one], BLOCKS)["x"]
    for method in alone["methods"].values():
        assert method["decode_tokens_per_s"] is method["decode_speedup"] is method["median_decode_speedup"] is None
        assert method["tokens_per_s"] == pytest.approx(1 / 3)
    assert both["methods"]["dflash-4"]["decode_speedup"] == pytest.approx(5 / 2)
    assert both["methods"]["dflash-4"]["speedup"] == pytest.approx(9 / 6)


def test_differences_are_listed_and_judged():
    difference = {"index": 1, "near_tie": True}
    worse = {"index": 0, "near_tie": False}
    records = [
        record(f"x:{i}", "x", timed([1, 2], [1], 1.0, 0.5), timed([1, 3], [1], 1.0, 0.5), {"dflash-4": d})
        for i, d in enumerate((difference, worse))
    ]
    report = aggregate(records, BLOCKS)
    method = report["x"]["methods"]["dflash-4"]
    assert (method["identical"], method["unexplained"]) == ([0, 2], 1)
    assert "| 0 of 2, near ties: 1, unexplained: 1 |" in markdown(whole(report))
    assert method["differences"] == [{"id": "x:0", **difference}, {"id": "x:1", **worse}]


def test_peers_are_compared_in_tokens_and_acceptance():
    other = [timed(range(5), [3, 1], 6.0, 1.0), timed(range(3), [1, 1], 8.0, 2.0)]
    records = [
        Record(r.task, r.id, r.prompt_hash, r.prompt_tokens, r.order, {**r.runs, "torch": o}, {})
        for r, o in zip(RECORDS, other, strict=True)
    ]
    report = aggregate(records, {**BLOCKS, "torch": 4}, peers={"dflash-4": "torch"})
    peer = report["all"]["methods"]["dflash-4"]["peer"]
    assert (peer["name"], peer["same_tokens"], peer["same_acceptance"], peer["of"]) == ("torch", 2, 1, 2)
    assert peer["speedup"] == pytest.approx(14 / 7)
    assert report["all"]["methods"]["torch"]["peer"] is None


def test_a_method_that_does_not_tell_its_rounds():
    report = aggregate(RECORDS, {"plain": 1, "dflash-4": None})
    assert report["x"]["methods"]["dflash-4"]["acceptance"] is None
    markdown(whole(report))


def whole(tasks):
    return {
        "setup": {"dtype": "float32", "target": "T", "drafter": "D", "max_tokens": 5, "machine": "M"},
        "prompt_hashes": {"x": "abc"},
        "host_overhead": {
            "plain": {"round_s": 0.04, "call_s": 0.0398, "device_s": 0.0396, "overhead": 0.01, "between_calls": 0.005}
        },
        "tasks": tasks,
    }


def test_markdown():
    text = markdown(whole(aggregate(RECORDS, BLOCKS, peers={"dflash-4": "plain"})))
    lines = text.splitlines()
    assert "### x: 1 prompts, prompt ids abc" in lines
    assert "### all: 2 prompts" in lines
    assert "| plain | 0.7 | 0.8 | 1.00 (1.00 - 1.00) | 1.00 | 1.00 | 2 of 2 |" in lines
    assert "| dflash-4 | 2.000 | 2.000 | 3 | 33 33 33 | 1.00 1.00 0.00 |" in lines
    assert any("dflash-4 against plain: same tokens 1 of 1, same acceptance lists 0 of 1" in line for line in lines)
    assert "| plain | 40.00 | 39.60 | 1.0 % | 0.5 % |" in lines
    for head, rule in itertools.pairwise(lines):
        if rule.startswith("|---|"):
            assert head.count("|") == rule.count("|")


def test_reports_are_json():
    json.dumps(aggregate(RECORDS, BLOCKS), allow_nan=False)


def test_table():
    assert table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---:|", "| 1 | 2 |"]
