"""Methods in other processes: the protocol, and every way in which a worker can fail."""

from __future__ import annotations

import sys

import pytest

from dflash_jax.evaluation.methods import RemoteMethod, Worker, WorkerError, first_difference

WORKER = """
import json, sys
def say(x): print(json.dumps(x), flush=True)
say({"ready": True, "versions": {}})
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "fails":
        say({"error": "ValueError: no such thing"})
    elif asked["method"] == "dies":
        sys.exit(3)
    elif asked["method"] == "babbles":
        print("hello", flush=True)
    else:
        ids = (asked["prompt_ids"] * 9)[: asked["max_tokens"]]
        if 2 in asked["stop_token_ids"] and 2 in ids:
            ids = ids[: ids.index(2) + 1]
        say({"token_ids": ids, "acceptance": [1] * (len(ids) - 1), "first_token_s": 0.25, "seconds": 1.5})
"""


@pytest.fixture
def worker():
    with Worker([sys.executable, "-c", WORKER]) as worker:
        yield worker


def test_a_remote_method_answers_as_ours_do(worker):
    method = RemoteMethod("torch", worker, "echo", 1, stop_token_ids=(2,))
    assert method.warm_up([2, 3], 24) > 0
    one = method.answer([1, 2, 3], 8)
    assert (one.token_ids, one.acceptance, one.finish_reason) == ([1, 2], [1], "stop")
    assert (one.seconds, one.first_token_s) == (1.5, 0.25)
    assert method.answer([1, 3], 3).finish_reason == "length"


def test_errors_of_a_worker_are_passed_on_and_it_lives_on(worker):
    with pytest.raises(WorkerError, match="asked for fails: ValueError: no such thing"):
        RemoteMethod("x", worker, "fails", 1).answer([1], 1)
    assert RemoteMethod("x", worker, "echo", 1).answer([1], 1).token_ids == [1]


@pytest.mark.parametrize(("method", "match"), [("dies", "ended with status 3"), ("babbles", "'hello.*no JSON")])
def test_workers_that_break(method, match):
    with Worker([sys.executable, "-c", WORKER]) as worker, pytest.raises(WorkerError, match=match):
        RemoteMethod("x", worker, method, 1).answer([1], 1)


def test_a_worker_that_has_ended_is_said_to_have(worker):
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with status 3"):
            RemoteMethod("x", worker, "dies", 1).answer([1], 1)


def test_workers_that_never_start():
    with pytest.raises(WorkerError, match="can not be started"):
        Worker(["/no/such/program"])
    with pytest.raises(WorkerError, match="ended with status 5 instead of the greeting"):
        Worker([sys.executable, "-c", "import sys; sys.exit(5)"])
    with pytest.raises(WorkerError, match="expected ready: true"):
        Worker([sys.executable, "-c", "print('{}')"])


@pytest.mark.parametrize(
    ("a", "b", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([1], [], 0)]
)
def test_first_difference(a, b, index):
    assert first_difference(a, b) == first_difference(b, a) == index
