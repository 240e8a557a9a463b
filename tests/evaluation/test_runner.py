"""The runner end to end on a tiny trained pair: what it measures, compares, keeps and refuses."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_benchmark import MAX_TOKENS, golden_prompt, pair, prompts, setup

from dflash_jax.config import ConfigError
from dflash_jax.decoding.generate import generate
from dflash_jax.evaluation import near_ties
from dflash_jax.evaluation.methods import PLAIN, EngineMethod
from dflash_jax.evaluation.near_ties import explain, logits_behind, ulps
from dflash_jax.evaluation.records import Record, RecordFile
from dflash_jax.evaluation.runner import BenchmarkConfig, order, own_methods, run
from dflash_jax.models.whole_rows import forward_rows

BLOCKS = (3, 4)


@pytest.fixture(scope="module")
def methods():
    return own_methods(*pair(), BLOCKS)


@pytest.fixture(scope="module")
def finished(methods, tmp_path_factory):
    """(folder, report) of a whole run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, pair()[0], setup(methods), methods, prompts(), MAX_TOKENS, overhead_rounds=8)


class Counting:
    """A method that counts its answers, and may be interrupted before one."""

    def __init__(self, method, interrupt_at=None):
        self.method, self.answers, self.interrupt_at = method, 0, interrupt_at

    def __getattr__(self, name):
        return getattr(self.method, name)

    def answer(self, prompt_ids, max_tokens):
        if self.answers == self.interrupt_at:
            raise KeyboardInterrupt
        self.answers += 1
        return self.method.answer(prompt_ids, max_tokens)


class Wrong(EngineMethod):
    """A decoder with a fault: its fourth token is another one."""

    def answer(self, prompt_ids, max_tokens):
        answer = super().answer(prompt_ids, max_tokens)
        answer.token_ids[3] = (answer.token_ids[3] + 1) % 90
        return answer


def test_report(finished):
    _, report = finished
    assert list(report["tasks"]) == ["one", "two", "all"]
    assert report["prompt_hashes"].keys() == {"one", "two"}
    assert report["unexplained"] == 0
    for task in report["tasks"].values():
        assert list(task["methods"]) == [PLAIN, "dflash-3", "dflash-4"]
        for method in task["methods"].values():
            assert method["identical"] == [task["prompts"]] * 2 and method["differences"] == []
            assert method["tokens_per_s"] > 0 and method["decode_tokens_per_s"] > 0
    plain, dflash = (report["tasks"]["all"]["methods"][name]["acceptance"] for name in (PLAIN, "dflash-4"))
    assert plain["tau"] == 1.0 and plain["acceptance_rate"] is None
    assert 1.0 < dflash["tau"] <= 4.0
    assert report["warm_up_s"].keys() == report["host_overhead"].keys() == {PLAIN, "dflash-3", "dflash-4"}
    assert all(o["rounds"] >= 8 and o["device_s"] > 0 for o in report["host_overhead"].values())
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_the_acceptance_lists_are_those_of_generate(finished):
    folder, _ = finished
    target, drafter = pair()
    records = RecordFile(folder, json.loads((folder / "setup.json").read_text())).records
    (result,) = generate(target, drafter, [golden_prompt()], max_tokens=MAX_TOKENS, block_size=4)
    measured = records["one", "one:0"].runs["dflash-4"]
    assert (measured.token_ids, measured.acceptance) == (result.token_ids, result.acceptance)
    for record in records.values():
        for one in record.runs.values():
            assert sum(one.acceptance) + 1 == len(one.token_ids) == MAX_TOKENS
            assert 0 < one.first_token_s < one.seconds


def test_a_killed_run_goes_on_where_it_was(methods, tmp_path):
    asked = prompts()
    first = [methods[0], methods[1], Counting(methods[2], interrupt_at=2)]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, pair()[0], setup(first), first, asked, MAX_TOKENS, overhead_rounds=0)
    records = tmp_path / "records.jsonl"
    kept = records.read_text()
    assert kept.count("\n") == 2
    records.write_text(kept + kept[:100])  # killed while writing
    second = [methods[0], methods[1], Counting(methods[2])]
    report = run(tmp_path, pair()[0], setup(second), second, asked, MAX_TOKENS, overhead_rounds=0)
    assert second[2].answers == 2
    assert records.read_text().startswith(kept)
    assert report["tasks"]["all"]["prompts"] == 4
    assert [json.loads(line)["id"] for line in records.read_text().splitlines()] == [p.id for p in asked]
    third = [methods[0], methods[1], Counting(methods[2])]
    again = run(tmp_path, pair()[0], setup(third), third, asked, MAX_TOKENS, overhead_rounds=0)
    assert third[2].answers == 0 and again["tasks"] == report["tasks"]


def test_more_prompts_may_be_asked_later(methods, finished, tmp_path):
    (tmp_path / "records.jsonl").write_text((finished[0] / "records.jsonl").read_text())
    counting = [*methods[:2], Counting(methods[2])]
    report = run(tmp_path, pair()[0], setup(methods), counting, prompts(5), MAX_TOKENS, overhead_rounds=0)
    assert counting[2].answers == 1 and report["tasks"]["all"]["prompts"] == 5


def test_other_setups_are_not_mixed(methods, finished, tmp_path):
    for name in ("records.jsonl", "setup.json"):
        (tmp_path / name).write_text((finished[0] / name).read_text())
    changed = setup(methods) | {"max_tokens": 99}
    with pytest.raises(ConfigError, match="holds measurements with max_tokens = 24, this run has 99"):
        run(tmp_path, pair()[0], changed, methods, prompts(), 99)
    with pytest.raises(ConfigError, match=r"methods = \['plain', 'dflash-3', 'dflash-4'\], this run has \['plain'\]"):
        run(tmp_path, pair()[0], setup(methods[:1]), methods[:1], prompts(), MAX_TOKENS)


def test_b87_changed_prompt_ids_are_not_mixed(methods, finished):
    folder, _ = finished
    asked = prompts()
    first = asked.by_task["one"][0]
    changed = {**asked.by_task, "one": [dataclasses.replace(first, ids=(*first.ids, 5))]}
    with pytest.raises(ConfigError, match=r"measurement of one:0 with other prompt ids \(hash"):
        run(folder, pair()[0], setup(methods), methods, dataclasses.replace(asked, by_task=changed), MAX_TOKENS)


def test_broken_records_are_named(methods, tmp_path):
    (tmp_path / "records.jsonl").write_text('{"task": "one"}\n')
    with pytest.raises(ConfigError, match=r"records.jsonl, line 1: no record \(KeyError\('runs'\)\)"):
        RecordFile(tmp_path, {})


def test_records_come_back_as_they_were(finished):
    for line in (finished[0] / "records.jsonl").read_text().splitlines():
        assert Record.from_json(line).to_json() == line


def test_everyone_is_first_and_after_everyone_else_equally_often():
    names = ["a", "b", "c"]
    orders = [order(names, number) for number in range(6)]
    assert all(sorted(one) == names for one in orders)
    assert set(Counter(one[0] for one in orders).values()) == {2}
    before = Counter((x, y) for one in orders for i, x in enumerate(one) for y in one[i + 1 :])
    assert set(before.values()) == {3}


def test_the_first_method_must_be_plain_decoding(methods, tmp_path):
    with pytest.raises(ValueError, match="first method is 'dflash-3'"):
        run(tmp_path, pair()[0], {}, methods[1:], prompts(), MAX_TOKENS)
    with pytest.raises(ValueError, match="share a name"):
        run(tmp_path, pair()[0], {}, [methods[0], methods[1], methods[1]], prompts(), MAX_TOKENS)


# B39: every difference is looked at.


def test_b39_a_wrong_decoder_is_found_out(methods, tmp_path):
    wrong = Wrong("dflash-4", *pair(), 4)
    faulty = [methods[0], wrong]
    report = run(tmp_path, pair()[0], setup(faulty), faulty, prompts(2), MAX_TOKENS, overhead_rounds=0)
    assert report["unexplained"] == 2
    method = report["tasks"]["all"]["methods"]["dflash-4"]
    assert (method["identical"], method["unexplained"]) == ([0, 2], 2)
    for difference in method["differences"]:
        assert difference["index"] == 3 and not difference["near_tie"]
        assert difference["best_tokens"][0] == difference["plain_token"] != difference["other_token"]


def test_b39_the_logits_looked_at_are_those_of_plain_decoding(methods):
    plain = methods[0]
    answer = plain.answer(golden_prompt(), MAX_TOKENS).token_ids
    target, start = pair()[0], len(golden_prompt()) - 1
    model = nnx.merge(target.graphdef, target.params)
    row = jnp.asarray([[*golden_prompt(), *answer]])
    expected_MxV = jax.jit(lambda row: model.logits(forward_rows(model, row, ()).hidden_BxMxD)[0])(row)
    for index in (0, 1, 2, 11, MAX_TOKENS - 1):
        logit_V = logits_behind(plain, golden_prompt(), MAX_TOKENS, index)
        assert logit_V.argmax() == answer[index]
        np.testing.assert_allclose(logit_V, expected_MxV[start + index], atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "logits", "chosen", "near_tie"),
    [
        ("bfloat16", (20.0, 19.75), (5, 7), True),  # 2 ulps: one is 0.125 in [16, 32)
        ("bfloat16", (20.0, 19.625), (5, 7), False),
        ("bfloat16", (20.0, 19.875), (5, 8), False),  # not the second best token
        ("bfloat16", (20.0, 20.0), (7, 5), True),
        ("bfloat16", (20.0, 19.875, 19.75), (7, 9), True),  # three that tie
        ("bfloat16", (20.0, 19.875, 19.625), (7, 9), False),
        ("bfloat16", (20.0, 19.875, 19.625), (9, 7), False),
        ("float32", (20.0, 19.999995), (5, 7), True),
        ("float32", (20.0, 19.9999), (5, 7), False),
    ],
)
def test_b39_what_excuses_a_difference(dtype, logits, chosen, near_tie, methods, monkeypatch):
    logit_V = np.zeros(10, np.float32)
    logit_V[[5, 7, 9][: len(logits)]] = logits
    monkeypatch.setattr(near_ties, "logits_behind", lambda *_: logit_V)
    plain = EngineMethod.__new__(EngineMethod)
    plain.target = dataclasses.replace(pair()[0], dtype=dtype)
    found = explain(plain, [1], 4, [1, chosen[0]], [1, chosen[1]], 1)
    assert found.near_tie is near_tie
    assert (found.plain_token, found.other_token) == chosen
    assert found.best_tokens == (5, 7) and found.best_logits == tuple(np.float32(x) for x in logits[:2])
    assert found.other_logit == logit_V[chosen[1]]


def test_b39_answers_that_end_differ_too(methods):
    answer = methods[0].answer(golden_prompt(), MAX_TOKENS).token_ids
    found = explain(methods[0], golden_prompt(), MAX_TOKENS, answer, answer[:2], 2)
    assert found.other_token is None and not found.near_tie


def test_ulps():
    assert ulps(1.0, 1.0078125, "bfloat16") == 1.0
    assert ulps(-4.0, -4.03125, "bfloat16") == 1.0
    assert ulps(0.0, 0.0, "bfloat16") == 0.0
    assert ulps(1.0, 1.0 + 2.0**-23, "float32") == 1.0


# Configuration.


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tasks": {}}, "tasks is empty"),
        ({"block_sizes": ()}, "block_sizes is empty"),
        ({"block_sizes": (4, 4)}, r"block_sizes is \[4, 4\], which names one twice"),
        ({"tasks": {"gsm8k": -1}}, "tasks.gsm8k is -1"),
        ({"max_tokens": 1}, "max_tokens is 1, must be at least 2"),
    ],
)
def test_wrong_configs_are_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        BenchmarkConfig(**({"target": "t", "drafter": "d", "tasks": {"gsm8k": 0}, "block_sizes": (4,)} | fields))


def test_block_sizes_above_the_trained_are_refused():
    with pytest.raises(ConfigError, match=r"block_sizes holds 9, must lie in \[2, \d\]"):
        own_methods(*pair(), (9,))
