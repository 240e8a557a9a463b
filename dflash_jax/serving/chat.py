"""A chat in the terminal: several turns, streamed answers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.decoding.lockstep import handle_signals
from dflash_jax.evaluation.statistics import summarise
from dflash_jax.serving.session import DFLASH, PLAIN, PromptTooLong, Session
from dflash_jax.serving.terminal import Terminal

HELP = "/reset begins a new conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def chat(session: Session, terminal: Terminal) -> None:
    """Talks until /exit or the end of input. Ctrl-C ends an answer, never the chat."""
    mode = PLAIN if session.drafter is None else DFLASH
    terminal.note(HELP)
    messages: list[dict[str, str]] = []
    turn = 0
    while True:
        try:
            line = terminal.read_line("> ")
        except KeyboardInterrupt:
            terminal.write("\n")
            terminal.note(HELP)
            continue
        if line is None or line.strip() == "/exit":
            return
        if not line.strip():
            continue
        if line.strip() == "/reset":
            messages.clear()
            terminal.note("a new conversation")
        elif line.lstrip().startswith("/"):
            terminal.note(f"{line.split()[0]} is no command; {HELP}")
        else:
            messages.append({"role": "user", "content": line})
            answer = _answer(session, terminal, mode, messages, turn)
            turn += 1
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # unanswered: the next turn must not follow on a question that stands alone


def _answer(session: Session, terminal: Terminal, mode: str, messages: list[dict[str, str]], turn: int) -> str:
    """Streams the answer to a conversation; returns what of it was given out."""
    text, tokens, acceptance = "", 0, []
    try:
        request = session.request(session.encode(messages), turn)
    except PromptTooLong as error:
        terminal.note(f"{error}; /reset begins a new conversation")
        return text
    try:
        if not session.is_prepared(mode, request):
            with terminal.stage("compiling"):
                session.prepare(mode, request)
        start = time.perf_counter()
        with _ctrl_c_between_pieces() as look:
            for delta in session.stream(mode, request):
                if tokens:
                    acceptance.append(len(delta.token_ids))
                tokens += len(delta.token_ids)
                text += delta.text
                terminal.write(delta.text)
                if delta.finish_reason is None:
                    look()
        seconds = time.perf_counter() - start
    except KeyboardInterrupt:
        terminal.write("\n")
        terminal.note("stopped")
        return text
    terminal.write("\n")
    speed = f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"
    tau = summarise([acceptance], session.block_size(mode))["tau"] if mode == DFLASH else None
    terminal.note(speed if tau is None else f"{speed}, {tau:.2f} tokens a target call")
    return text


@contextlib.contextmanager
def _ctrl_c_between_pieces() -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C is noted, and raised by the function that is given. A second one raises where it comes.

    Python raises it wherever the main thread is just then. In a callback, of the garbage collector say, it is lost, and
    the answer would go on.
    """
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def look() -> None:
        if came:
            raise KeyboardInterrupt

    before = handle_signals({signal.SIGINT: note})
    try:
        yield look
    finally:
        handle_signals(before)
