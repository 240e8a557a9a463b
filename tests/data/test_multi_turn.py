"""Conversations answered turn by turn, and regeneration under kill -9."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny

from dflash_jax.config import ConfigError
from dflash_jax.data.prompts import Prompt
from dflash_jax.data.regenerate import regenerate, regenerate_share
from dflash_jax.data.responses import Response, ResponseStore, StoreError, joined_turns, read_samples
from dflash_jax.decoding.generate import generate

SETTINGS = {"batch_size": 2, "max_new_tokens": 32, "progress": False, "temperature": 1.0, "seed": 0}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TALKS = [
    Prompt("a", (user("one"), assistant("gone"), user("two"), assistant("gone too"), user("three")), "test"),
    Prompt("b", ({"role": "system", "content": "s"}, assistant("hello"), user("four"), assistant("gone")), "test"),
    Prompt("c", (user("five"),), "test"),
    Prompt("d", (user("six"), assistant("gone"), user("seven")), "test"),
]  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny.ending_often()


@pytest.fixture(scope="module")
def straight(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("straight")
    report = regenerate(target, TALKS, path, **SETTINGS, multi_turn=True)
    return path, report, {r.id: r for r in ResponseStore(path).rows()}


def test_every_turn_is_answered_in_view_of_the_targets_own_answers(target, straight):
    _, report, rows = straight
    assert set(rows) >= {"a/turn0", "b/turn0", "c/turn0", "d/turn0", "a/turn1"}
    assert report.answered == len(rows) and report.answered + report.cut == 7
    assert report.cut == sum(
        {"a": 3, "b": 1, "c": 1, "d": 2}[i.split("/")[0]] - 1 - int(i[-1])
        for i, r in rows.items() if r.finish_reason == "length"
    )  # fmt: skip
    followers = [r for r in rows.values() if r.follows]
    assert followers and all(rows[r.follows].finish_reason == "stop" for r in followers)
    for r in followers:
        before = rows[r.follows]
        answer = target.tokenizer.decode(before.answer_ids[:-1])
        talk = next(p for p in TALKS if p.id == r.id.split("/")[0])
        own = {"a/turn1": [user("one"), assistant(answer), user("two")],
               "d/turn1": [user("six"), assistant(answer), user("seven")]}  # fmt: skip
        if r.id in own:
            assert list(r.prompt_ids) == target.tokenizer.apply_chat_template(own[r.id])
        assert "gone" not in target.tokenizer.decode(r.prompt_ids) and talk.messages[0]["content"]
    # The greeting of b was nobody's answer: it stays.
    assert "hello" in target.tokenizer.decode(rows["b/turn0"].prompt_ids)


def test_a_turn_is_what_plain_decoding_gives(target, tmp_path):
    regenerate(target, TALKS, tmp_path, **{**SETTINGS, "temperature": 0.0}, multi_turn=True)
    rows = list(ResponseStore(tmp_path).rows())
    results = generate(target, None, [list(r.prompt_ids) for r in rows], max_tokens=32)
    assert [r.answer_ids for r in rows] == [tuple(x.token_ids) for x in results]
    assert {r.mode for r in rows} == {"greedy"}


def test_turns_that_go_on_from_each_other_are_one_sample():
    first = Response("x/turn0", "t", (1, 2), (3, 4), "stop", 0, "greedy")
    second = Response("x/turn1", "t", (1, 2, 3, 4, 5), (6,), "stop", 0, "greedy", follows="x/turn0")
    third = Response("x/turn2", "t", (1, 2, 3, 4, 5, 6, 7), (8, 9), "length", 0, "greedy", follows="x/turn1")
    other = Response("y/turn0", "t", (1,), (2,), "stop", 0, "greedy")
    assert joined_turns([first, other, second, third]) == [
        other, dataclasses.replace(third, earlier_spans=((2, 4), (5, 6))),
    ]  # fmt: skip
    rewritten = dataclasses.replace(second, prompt_ids=(1, 2, 4, 5))  # its template dropped a thought
    assert joined_turns([first, rewritten]) == [first, rewritten]


def test_samples_hold_every_answer_of_a_conversation_once(target, straight):
    path, _, rows = straight
    samples = read_samples(ResponseStore(path))
    supervised = [tuple(s.token_S[s.loss_mask_S].tolist()) for s in samples]
    of_a = [rows[i].answer_ids for i in sorted(rows) if i.startswith("a/")]
    assert len(of_a) > 1 and tuple(token for answer in of_a for token in answer) in supervised
    assert sum(map(len, supervised)) == sum(len(r.answer_ids) for r in rows.values() if r.id[0] in joined(samples))


def joined(samples):
    return {s.id.split("/")[0] for s in samples}


def test_regeneration_killed_again_and_again_loses_and_doubles_nothing(straight, tmp_path):
    """kill -9 in the middle of a process that answers, twice; the store is that of an undisturbed run."""
    _, _, expected = straight
    root = pathlib.Path(__file__).parents[2]
    script = f"""
import sys, time
sys.path[:0] = [{str(root)!r}, {str(root / "tests" / "data")!r}]
import tests.conftest, test_multi_turn
from dflash_jax.data import regenerate as regeneration

def slowly(*arguments, answers=regeneration.answers):
    for answer in answers(*arguments):
        yield answer
        time.sleep(0.5)

regeneration.answers = slowly
target = test_multi_turn.tiny.ending_often()
regeneration.regenerate(target, test_multi_turn.TALKS, {str(tmp_path)!r}, **test_multi_turn.SETTINGS, multi_turn=True)
"""
    file, seen = tmp_path / "responses.jsonl", 0
    for _ in range(2):
        run = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=root)
        try:
            deadline = time.monotonic() + 200
            while not file.exists() or file.read_bytes().count(b"\n") <= seen:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        rows = [r.id for r in ResponseStore(tmp_path).rows()]
        assert seen < len(rows) < len(expected) and len(set(rows)) == len(rows)
        seen = len(rows)
    with open(file, "ab") as f:
        f.write(b'{"id": "a/tu')  # a third kill, inside a line
    report = regenerate(tiny.ending_often(), TALKS, tmp_path, **SETTINGS, multi_turn=True)
    assert (report.found, report.answered) == (seen, len(expected) - seen)
    assert {r.id: r for r in ResponseStore(tmp_path).rows()} == expected
    assert sum(1 for _ in ResponseStore(tmp_path).rows()) == len(expected)
    again = regenerate(tiny.ending_often(), TALKS, tmp_path, **SETTINGS, multi_turn=True)
    assert (again.found, again.answered, again.cut) == (len(expected), 0, 0)


def test_processes_share_the_prompts_and_any_number_of_them_goes_on(target, straight, tmp_path):
    """Three processes, then two, then one; the last finds nothing to do, and all answers are those of one process."""
    _, _, expected = straight
    store, settings = tmp_path / "shared", {**SETTINGS, "multi_turn": True}
    rounds = []
    for parts, prompts in ((3, TALKS[:2]), (2, TALKS), (1, TALKS)):
        rounds.append([])
        for part in range(parts):  # one after the other, so that each reads what was there before all
            report, folders = regenerate_share(
                target, prompts, store, part=part, parts=parts, wait=lambda _: None, **settings
            )
            rounds[-1].append(report)
        found = [r for folder in folders for r in ResponseStore(folder).rows()]
        wanted = {i: r for i, r in expected.items() if i[0] in {p.id for p in prompts}}
        assert len(found) == len(wanted) and {r.id: r for r in found} == wanted
    assert sum(r.answered for r in rounds[0]) == sum(i[0] in "ab" for i in expected)
    assert sum(r.answered for r in rounds[1]) == sum(i[0] in "cd" for i in expected)
    assert (rounds[2][0].answered, rounds[2][0].found) == (0, len(expected))
    assert [f.name for f in folders] == ["shared", "shared.part-1", "shared.part-2"]
    assert len(read_samples([ResponseStore(f) for f in folders])) == len(read_samples(ResponseStore(straight[0])))


def test_what_can_not_be_answered_anew_is_named(target, straight, tmp_path):
    path, _, _ = straight
    with pytest.raises(ConfigError, match=r"prompt b ends with an answer; use store_natural .* or multi_turn"):
        regenerate(target, TALKS, tmp_path, **SETTINGS)
    with pytest.raises(StoreError, match="made with multi_turn = True, now it is None"):
        regenerate(target, TALKS[2:3], path, **SETTINGS)
    twice = Prompt("e", (user("a"), assistant("b"), assistant("c")), "test")
    with pytest.raises(ConfigError, match="prompt e has two messages of the assistant in a row"):
        regenerate(target, [twice], tmp_path / "e", **SETTINGS, multi_turn=True)
    tool = Prompt("f", (user("a"), assistant("b"), {"role": "tool", "content": "c"}), "test")
    with pytest.raises(ConfigError, match="prompt f has calls of tools"):
        regenerate(target, [tool], tmp_path / "f", **SETTINGS, multi_turn=True)


@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_is_switched_by_the_template(thinks, tmp_path):
    target = tiny.target(template=tiny.SWITCHED)
    settings = {**SETTINGS, "max_new_tokens": 3, "chat_template_kwargs": {"enable_thinking": thinks}}
    regenerate(target, TALKS[2:3], tmp_path, **settings)
    (row,) = ResponseStore(tmp_path).rows()
    assert ("<think>" in target.tokenizer.decode(row.prompt_ids)) == (not thinks)
    stored = json.loads((tmp_path / "manifest.json").read_text())["fingerprint"]
    assert stored["chat_template_kwargs"] == {"enable_thinking": thinks}
    with pytest.raises(StoreError, match="was made with chat_template"):
        regenerate(target, TALKS[2:3], tmp_path, **settings | {"chat_template_kwargs": {"enable_thinking": not thinks}})
