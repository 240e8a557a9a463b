"""One engine on several processes: what a leader says is enough to do what it does. (Two: test_serve_pod.py.)"""

import collections
import json
import os
import signal
from typing import ClassVar

import jax
import numpy as np
import pytest

from dflash_jax.decoding import lockstep
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.lockstep import Leader, follow
from dflash_jax.decoding.request import Request
from dflash_jax.training.dry_run import tiny_drafter, tiny_target

OPTIONS = {
    "batch": 2, "max_length": 64, "page_size": 16, "num_pages": 5, "lookahead": 1, "greedy": False,
    "logits_rules": True,
}  # fmt: skip
REQUESTS = [
    Request([5, 6, 7], 20, seed=2**64 - 1, temperature=1.0),
    Request(np.arange(3, 30, dtype=np.int32), 30, stop_token_ids=(9,)),
    Request([40], 12, logit_bias={0: -np.inf, 11: np.float32(2.5)}, presence_penalty=0.5),
]


class Tape:
    """A channel that keeps what was said, as the text that it would be."""

    def __init__(self):
        self.said = collections.deque()

    def say(self, orders):
        self.said.append(json.dumps(orders))

    def hear(self):
        return json.loads(self.said.popleft())


class Watched(Engine):
    """An engine of a follower that remembers itself and its events."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.events = []
        self.made.append(self)

    def admit(self, requests):
        return self._keep(super().admit(requests))

    def round(self, waiting=False):
        return self._keep(super().round(waiting))

    def _keep(self, events):
        self.events += events
        return events


@pytest.fixture(scope="module")
def tiny():
    target = tiny_target()
    return target, tiny_drafter(target)


def test_followers_come_to_the_same_state_through_aborts_and_runs_left_early(tiny, monkeypatch):
    tape, events = Tape(), []
    with Leader(tape) as leader:
        leader.load()
        engine = leader.make_engine(*tiny, **OPTIONS)
        run = engine.run(REQUESTS)
        events += [next(run) for _ in range(4)]
        run.close()  # a call is in flight, both rows and most pages are taken
        events += engine.admit([(7, REQUESTS[0]), (8, REQUESTS[2])])
        for _ in range(3):
            events += engine.round()
        assert engine.abort(7) and not engine.abort(7)
        events += engine.round()
        events += engine.admit([(7, REQUESTS[1])])
        while engine.active_rows:
            events += engine.round()
    assert {e.index for e in events if e.finish_reason} == {7, 8}

    monkeypatch.setattr(lockstep, "Engine", Watched)
    loads = []
    follow(lambda: loads.append(1) or tiny, tape)
    (other,) = Watched.made
    assert loads == [1] and not tape.said
    own = collections.Counter(map(repr, events))
    assert not own - collections.Counter(map(repr, other.events))  # those of the round behind an early end may be more
    assert other.active_rows == 0 and other.rounds >= engine.rounds
    assert other.pages.free_pages == engine.pages.free_pages
    for a, b in zip(jax.tree.leaves(engine.state), jax.tree.leaves(other.state), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_a_request_that_is_refused_is_not_said(tiny):
    tape = Tape()
    with Leader(tape) as leader:
        engine = leader.make_engine(*tiny, batch=1, max_length=32)
        said = len(tape.said)
        with pytest.raises(ValueError, match="prompt 0"):
            engine.admit([(0, Request([], 4))])
        with pytest.raises(ValueError, match="2 prompts for 1 free rows"):
            engine.admit([(0, Request([3], 4)), (1, Request([3], 4))])
        assert len(tape.said) == said
    assert tape.hear() == [["make", 0, True, {"batch": 1, "max_length": 32}]]


def test_an_engine_that_is_let_go_is_let_go_by_all(tiny):
    tape = Tape()
    with Leader(tape) as leader:
        engine = leader.make_engine(tiny[0], None, max_length=32)
        del engine
    assert [name for orders in tape.said for name, *_ in json.loads(orders)] == ["make", "forget", "end"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_a_call(number):
    tape, done = Tape(), []
    with pytest.raises((KeyboardInterrupt, SystemExit)), Leader(tape) as leader:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with leader.together("round", 0, False):
                os.kill(os.getpid(), number)
                done.append("the call")
            done.append("what follows")
        finally:
            signal.signal(signal.SIGINT, before)
    assert done == ["the call"]
    assert [json.loads(orders) for orders in tape.said] == [[["round", 0, False]], [["end", None]]]


def test_an_error_of_the_leader_ends_the_followers_with_it(tiny):
    tape = Tape()
    with pytest.raises(ValueError, match="max_length is 1"), Leader(tape) as leader:
        leader.load()
        leader.make_engine(*tiny, max_length=1)
    tape.said.remove(tape.said[1])  # the follower would raise the same
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit, match="the first ended with ValueError: max_length is 1"):
        follow(lambda: tiny, tape)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_without_jax_distributed_there_is_nobody_to_lead():
    with pytest.raises(RuntimeError, match=r"after jax\.distributed\.initialize"):
        Leader()
