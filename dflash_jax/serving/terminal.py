"""What the user sees: answers on stdout as they come, and on stderr what the program is busy with."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Update = Callable[[int, int, str], None]


class Terminal:
    """Input and output of serve.py. Off a terminal, the moving parts become plain lines.

    Args:
      stdin, stdout, stderr: text streams; the process's own by default.
    """

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None, stderr: TextIO | None = None):
        self.stdin = sys.stdin if stdin is None else stdin
        self.out = Console(file=stdout, highlight=False)
        self.err = Console(file=sys.stderr if stderr is None else stderr, highlight=False)

    @classmethod
    def silent(cls) -> Terminal:
        """One without input that shows nothing."""
        return cls(io.StringIO(), io.StringIO(), io.StringIO())

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Shows that something long goes on, and how long it took.

        Yields update(done, total, what), which may be called to show how far it is.
        """
        start = time.monotonic()
        if self.err.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
                TimeElapsedColumn(),
            )  # fmt: skip
            with Progress(*columns, console=self.err, transient=True) as progress:
                task = progress.add_task(name, total=None)

                def update(done: int, total: int, what: str) -> None:
                    # A total of one is a step without parts, such as a download: the bar only moves to and fro.
                    progress.update(
                        task, description=f"{name}: {what}", completed=done, total=total if total > 1 else None
                    )

                yield update
        else:
            self.note(f"{name} ...")
            yield _Lines(self.note, name)
        self.note(f"{name}: {time.monotonic() - start:.1f} s")

    def note(self, text: str) -> None:
        """A line on stderr."""
        self.err.print(text, style="dim", markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """A piece of an answer, as it is but for ESC: a model must not be able to drive the terminal."""
        self.out.out(text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}"), end="", highlight=False)
        self.out.file.flush()

    def read_line(self, prompt: str) -> str | None:
        """A line of the user's without its end; None at the end of input.

        Raises:
          KeyboardInterrupt: Ctrl-C.
        """
        if self.stdin is sys.stdin and self.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives `input` editing and a history)
            try:
                return input(prompt)
            except EOFError:
                self.write("\n")
                return None
        self.write(prompt)
        line = self.stdin.readline()
        if not line:
            self.write("\n")
            return None
        return line.removesuffix("\n")


class _Lines:
    """Progress as lines: one when a part without a count begins, none for each of some hundred tensors."""

    def __init__(self, note: Callable[[str], None], name: str):
        self._note, self._name = note, name

    def __call__(self, done: int, total: int, what: str) -> None:
        if total == 1 and done == 0:
            self._note(f"{self._name}: {what} ...")
