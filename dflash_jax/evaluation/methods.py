"""What a benchmark compares: ways to answer one prompt, each timed in the same manner.

A method has a name and two calls, `warm_up` and `answer`. Ours are engines in this process; a rival that lives in
another program answers through pipes (`RemoteMethod`). All of them stay loaded side by side and only one works at a
time, so that they can be interleaved prompt by prompt.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.decoding.sizes import capacity_bucket
from dflash_jax.drafters.contract import Drafter
from dflash_jax.evaluation.timing import TimedRun, timed_run
from dflash_jax.models.target import Target

PLAIN = "plain"


class Method(Protocol):
    """One way to decode greedily.

    Attributes:
      name: unique in a run.
      block_size: tokens of a target call in a round; None where the method does not say what a round gave.
    """

    name: str
    block_size: int | None

    def warm_up(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        """Makes sure that answering a prompt of this length compiles nothing; seconds that it took."""
        ...

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> TimedRun:
        """Answers one prompt alone."""
        ...


class EngineMethod:
    """This program's engine at batch 1: with a drafter at a run-time block size, or plain.

    Each cache capacity has an engine of its own, as `generate` would choose it, the same for every method: short
    answers do not pay for long caches.

    Args:
      stop_token_ids: ids that end an answer.

    Raises:
      ValueError: block_size does not suit the drafter.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        drafter: Drafter | None = None,
        block_size: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ):
        self.name, self.target, self.drafter = name, target, drafter
        self.stop_token_ids = tuple(stop_token_ids)
        self._requested_block = block_size
        self._engines: dict[int, Engine] = {}
        self.block_size = self._engine(2).block_size

    def _engine(self, length: int) -> Engine:
        limit = self.target.config.max_positions
        capacity = capacity_bucket(length, limit)
        if capacity not in self._engines:
            self._engines[capacity] = self.new_engine(capacity)
        return self._engines[capacity]

    def new_engine(self, capacity: int) -> Engine:
        """An engine that no answer has gone through yet."""
        return Engine(
            self.target, self.drafter, batch=1, max_length=capacity, block_size=self._requested_block, greedy=True
        )

    def engine_for(self, prompt_ids: Sequence[int], max_tokens: int) -> Engine:
        """The engine that answers this prompt."""
        return self._engine(len(prompt_ids) + max_tokens)

    def request(self, prompt_ids: Sequence[int], max_tokens: int) -> Request:
        """What the engine is asked for."""
        return Request(list(prompt_ids), max_tokens, stop_token_ids=self.stop_token_ids)

    def warm_up(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        start = time.perf_counter()
        engine = self.engine_for(prompt_ids, max_tokens)
        # Without stop ids, so that there is a round whatever the prefill says.
        rounds = min(max_tokens, 2 * self.block_size + 2)
        for length in engine.prefill_sizes.rehearsals():  # other prompts may need programs that this one does not
            ids = (list(prompt_ids) * length)[:length]
            timed_run(engine, Request(ids, min(rounds, engine.capacity - length)))
        return time.perf_counter() - start

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> TimedRun:
        return timed_run(self.engine_for(prompt_ids, max_tokens), self.request(prompt_ids, max_tokens))


class WorkerError(RuntimeError):
    """A worker process failed: says what it was asked and what it said."""


class Worker:
    """A program that answers JSON lines on its standard output, one for each line it is given.

    Its standard error is this process's, so that its own messages are seen. It clocks itself, so the pipe is not
    in any measurement.

    Args:
      command: program and arguments.
      environment: of the process; None: this one's.

    Raises:
      WorkerError: it does not start or does not greet with {"ready": true}.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None):
        self.command = list(command)
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise WorkerError(f"{self.command[0]} can not be started: {error}") from error
        self.greeting = self._read("the greeting")
        if not self.greeting.get("ready"):
            self.close()
            raise WorkerError(f"{' '.join(self.command)} greeted with {self.greeting}, expected ready: true")

    def ask(self, **question: Any) -> dict[str, Any]:
        """One question, one answer.

        Raises:
          WorkerError: the worker ended, or answered with an error.
        """
        with contextlib.suppress(BrokenPipeError):  # it ended; reading says with which status
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._read(str(question.get("method", question)))
        if "error" in answer:
            raise WorkerError(f"{' '.join(self.command)}, asked for {question.get('method')}: {answer['error']}")
        return answer

    def _read(self, what: str) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerError(f"{' '.join(self.command)} ended with status {status} instead of {what}")
        try:
            return json.loads(line)
        except ValueError as error:
            self.close()
            raise WorkerError(f"{' '.join(self.command)} wrote {line[:200]!r}, which is no JSON") from error

    def close(self) -> None:
        """Ends the process by closing its input, and waits for it."""
        with contextlib.suppress(BrokenPipeError):  # what was not sent before it ended
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteMethod:
    """A method of a worker.

    The worker is asked {"method", "prompt_ids", "max_tokens", "stop_token_ids"} and answers {"token_ids",
    "acceptance", "first_token_s", "seconds"}, with the meanings of `TimedRun`.

    Args:
      name: in this run; `method`: the worker's name for it.
      block_size: see `Method`.
    """

    def __init__(
        self, name: str, worker: Worker, method: str, block_size: int | None, stop_token_ids: Sequence[int] = ()
    ):
        self.name, self.worker, self.method, self.block_size = name, worker, method, block_size
        self.stop_token_ids = tuple(stop_token_ids)

    def _ask(self, prompt_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> TimedRun:
        said = self.worker.ask(
            method=self.method, prompt_ids=list(prompt_ids), max_tokens=max_tokens, stop_token_ids=list(stop_token_ids)
        )
        ids = said["token_ids"]
        stopped = bool(ids) and ids[-1] in stop_token_ids
        return TimedRun(
            ids, said["acceptance"], "stop" if stopped else "length", said["seconds"], said["first_token_s"]
        )

    def warm_up(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        start = time.perf_counter()
        self._ask(prompt_ids, min(max_tokens, 2 * (self.block_size or 1) + 2), ())
        return time.perf_counter() - start

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> TimedRun:
        return self._ask(prompt_ids, max_tokens, self.stop_token_ids)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter one's end included; None where they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
