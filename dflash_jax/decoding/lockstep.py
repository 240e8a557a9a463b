"""One engine on a mesh over several processes: the first process says what to do, all of them do it.

A program on devices of several processes runs when each of them has called it, all in the same order. Only one of them
has the user in front of it. So that one, the leader, tells the others what it asks of its engines, and they, the
followers, ask the same of theirs. Where the calls are the same the host's side is the same too: who sits in which row,
which pages are free, who has ended. Nothing but the calls is sent, a few hundred bytes a round, and followers read
tokens as the leader does, off their own devices.

They go through the store of jax.distributed, which all processes are connected to already. A collective
(`multihost_utils.broadcast_one_to_all`) would hold the devices while nobody asks anything, could not be left by a
signal, and would put a program between the rounds. The leader does not wait until it is heard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from dflash_jax.decoding.engine import Engine, Event, Seat
from dflash_jax.decoding.request import Request
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target

_POLL_MS = 1000  # how long a follower listens at a time: signals are looked at in between
_KEPT = 4096  # messages that stay in the store; a follower is behind by the calls in flight at most
_ABSENT = "DEADLINE_EXCEEDED"

Order = list[Any]  # name and arguments, of what JSON has
Handlers = dict[signal.Signals, Any]


class Channel(Protocol):
    """Messages from one to many, in order: each is a list of orders."""

    def say(self, orders: Sequence[Order]) -> None: ...

    def hear(self) -> list[Order]: ...


class Store:
    """A channel through the key-value store of jax.distributed.

    Each process makes as many of them as the others, in the same order: their number tells them apart.

    Raises:
      RuntimeError: jax.distributed has not been initialised.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        # JAX has no public door to the store; Orbax uses this one.
        from jax._src import distributed

        self._client = distributed.global_state.client
        if self._client is None:
            raise RuntimeError("processes can only be led after jax.distributed.initialize()")
        self._prefix = f"dflash_jax/lockstep/{next(self._numbers)}"
        self._count = 0

    def say(self, orders: Sequence[Order]) -> None:
        self._client.key_value_set_bytes(f"{self._prefix}/{self._count}", json.dumps(orders).encode())
        if self._count >= _KEPT:
            self._client.key_value_delete(f"{self._prefix}/{self._count - _KEPT}")
        self._count += 1

    def hear(self) -> list[Order]:
        while True:
            try:
                said = self._client.blocking_key_value_get_bytes(f"{self._prefix}/{self._count}", _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if _ABSENT not in str(error):
                    raise
                continue
            self._count += 1
            return json.loads(said)


class Leader:
    """The process that has the user. As a context: leaving it ends the followers, with the error if it is left by one.

    SIGTERM leaves it with status 0. It waits, as Ctrl-C does, for the end of a call that has been said: the others are
    in it.

    Args:
      channel: None: a `Store`.
    """

    def __init__(self, channel: Channel | None = None):
        self._channel = Store() if channel is None else channel
        self._unsaid: list[Order] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Leader:
        # jax.distributed takes SIGTERM for a notice of preemption, which only training asks for.
        self._handlers = handle_signals({signal.SIGTERM: lambda *_: sys.exit(0)})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        asked = error is None or isinstance(error, KeyboardInterrupt)
        asked = asked or (isinstance(error, SystemExit) and not error.code)
        with _signals_held():
            self._say(["end", None if asked else f"{kind.__name__}: {error}"])
        handle_signals(self._handlers)

    def load(self) -> None:
        """Lets the followers load; called before the leader does."""
        with self.together("load"):
            pass

    def make_engine(self, target: Target, drafter: Drafter | None = None, **options: Any) -> Engine:
        """`Engine`, made by all processes, of the target and drafter that each has loaded."""
        return _LeadingEngine(self, next(self._numbers), target, drafter, options)

    @contextlib.contextmanager
    def together(self, *order: Any) -> Iterator[None]:
        """Says an order, and within does it here."""
        with _signals_held():
            self._say(list(order))
            yield

    def later(self, *order: Any) -> None:
        """An order that no device needs yet: said in front of the next one. Can not fail."""
        self._unsaid.append(list(order))

    def _say(self, order: Order) -> None:
        unsaid, self._unsaid = self._unsaid, []
        self._channel.say([*unsaid, order])


class _LeadingEngine(Engine):
    """An engine whose followers do what is done with it."""

    def __init__(
        self, leader: Leader, number: int, target: Target, drafter: Drafter | None, options: dict[str, Any]
    ):  # fmt: skip
        self._leader, self._number = leader, number
        with leader.together("make", number, drafter is not None, options):
            super().__init__(target, drafter, **options)
        weakref.finalize(self, leader.later, "forget", number)  # its cache is memory on all processes

    def enter(self, seats: Sequence[Seat]) -> list[Event]:
        if not seats:
            return []
        # Those who hear it give them the same seats: they have the same rows and pages free.
        with self._leader.together("admit", self._number, [(s.index, _to_json(s.request)) for s in seats]):
            return super().enter(seats)

    def round(self, waiting: bool = False) -> list[Event]:
        with self._leader.together("round", self._number, waiting):
            return super().round(waiting)

    def abort(self, index: int) -> bool:
        self._leader.later("abort", self._number, index)
        return super().abort(index)

    def clear(self) -> None:
        self._leader.later("clear", self._number)
        super().clear()


def follow(load: Callable[[], tuple[Target, Drafter | None]], channel: Channel | None = None) -> None:
    """Does what the leader says, until it says that this is the end.

    Ctrl-C and SIGTERM are for the leader, and often come to all. Here the first is nothing, and SIGTERM is only noted
    once; a second one kills.

    Args:
      load: loads what the leader loads.
      channel: None: a `Store`.

    Raises:
      SystemExit: the leader has ended with an error, which is said.
      JaxRuntimeError: the leader is gone.
    """
    channel = Store() if channel is None else channel
    engines: dict[int, Engine] = {}
    target = drafter = None
    before = handle_signals({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: _note})
    try:
        while True:
            for name, *arguments in channel.hear():
                match name, arguments:
                    case "load", []:
                        target, drafter = load()
                    case "make", [number, drafts, options]:
                        engines[number] = Engine(target, drafter if drafts else None, **options)
                    case "admit", [number, requests]:
                        engines[number].admit([(index, _from_json(fields)) for index, fields in requests])
                    case "round", [number, waiting]:
                        engines[number].round(waiting)
                    case "abort", [number, index]:
                        engines[number].abort(index)
                    case "clear", [number]:
                        engines[number].clear()
                    case "forget", [number]:
                        del engines[number]
                    case "end", [error]:
                        if error is not None:
                            sys.exit(f"process {jax.process_index()} ends, because the first ended with {error}")
                        return
                    case _:
                        raise RuntimeError(f"the leader says {name!r} {arguments}: it runs another version")
    finally:
        handle_signals(before)


def _to_json(request: Request) -> dict[str, Any]:
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    fields["prompt_ids"] = [int(i) for i in request.prompt_ids]
    fields["stop_token_ids"] = [int(i) for i in request.stop_token_ids]
    if request.logit_bias is not None:
        fields["logit_bias"] = [(int(token), float(bias)) for token, bias in request.logit_bias.items()]
    # What is left are numbers, of Python or of numpy.
    return {name: value.item() if hasattr(value, "item") else value for name, value in fields.items()}


def _from_json(fields: dict[str, Any]) -> Request:
    bias = fields["logit_bias"]
    return Request(**(fields | {"logit_bias": None if bias is None else dict(bias)}))


def handle_signals(handlers: Handlers) -> Handlers:
    """Sets handlers of signals and returns those from before. Only the main thread may: elsewhere nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    return {number: signal.SIG_DFL if handler is None else handler for number, handler in before.items()}  # None: C's


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM that are Python's run behind it, not in it."""
    came: list[Callable[[], None]] = []

    def hold(handler: Callable) -> Callable:
        return lambda number, frame: came.append(lambda: handler(number, frame))

    python = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = handle_signals({number: hold(handler) for number, handler in python.items() if callable(handler)})
    try:
        yield
    finally:
        handle_signals(before)
        for run in came[:1]:
            run()


def _note(number: int, frame: Any) -> None:
    print(
        f"process {jax.process_index()} follows the first, which ends it; once more kills this one alone",
        file=sys.stderr,
        flush=True,
    )
    handle_signals({signal.Signals(number): signal.SIG_DFL})
