"""serve.py as a user starts it: another process, a config file, checkpoints on disk."""

import os
import pathlib
import select
import subprocess
import sys
import time

import pytest
from serving.tiny_pair import exported, strict_json

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
from ml_collections import ConfigDict

def get_config(variant=""):
    if variant:
        raise ValueError(f"variant {{variant!r}} is unknown")
    return ConfigDict({{
        "target": {{"source": {target!r}, "dtype": "float32"}}, "drafter": {{"source": {drafter!r}}},
        "generation": {{"max_tokens": 12, "temperature": 0.0}}, "comparison": {{"repeats": 1}},
    }})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target, a drafter, a config for them and a program cache."""
    place = tmp_path_factory.mktemp("serve")
    target, drafter = exported(place)
    (place / "tiny.py").write_text(CONFIG.format(target=str(target), drafter=str(drafter)))
    (place / "nothing.py").write_text("get_config = None\ndel get_config\n")  # tiny.py is read before, as one module
    (place / "prose.md").write_text("It isn't one.")
    return place


def command(place, *flags) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return {
        "args": [sys.executable, str(ROOT / "serve.py"), f"--config={place}/tiny.py", *flags],
        "env": environment | {"DFLASH_JAX_CACHE": str(place / "cache"), "PYTHONPATH": str(ROOT)},
        "cwd": place,
    }


def start(place, *flags, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        **command(place, *flags), input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def first_start(place):
    return start(place, "--prompt=Say it.", f"--stats_json={place}/stats.json")


def test_one_command_answers_and_compares(place, first_start):
    assert first_start.returncode == 0, first_start.stderr
    stats = strict_json((place / "stats.json").read_text())
    assert stats["identical"] is True and stats["tokens"] == 12 and stats["dtype"] == "float32"
    assert "plain decoding" in first_start.stdout and "DFlash, block 4" in first_start.stdout
    stages = ["loading", "compiling DFlash", "compiling plain decoding", "measuring both in turn"]
    where = [first_start.stderr.find(stage) for stage in stages]
    assert where == sorted(where) and where[0] >= 0


def test_second_start_compiles_nothing(place, first_start):
    def kept() -> set[str]:
        return {path.name for path in (place / "cache" / "xla").iterdir() if path.name.endswith("-cache")}

    before = kept()
    assert before
    chat = start(place, stdin="Say it.\n/exit\n")
    assert chat.returncode == 0, chat.stderr
    assert kept() == before
    # The chat's first answer is the answer of the first start.
    assert chat.stdout.split("> ")[1].removesuffix("\n") == first_start.stdout.split("\n\n")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--config.target.dtyp=float32"],
            "--config.target.dtyp=float32 names no field of the config: it has no 'dtyp'",
        ),
        (
            ["--config.target.dtype.x=1"],
            "--config.target.dtype.x=1 names no field of the config: a value has none (",
        ),
        (["--config.generation.max_tokens=0", "--prompt=x"], "generation.max_tokens is 0, must be at least 1"),
        (["--config=nowhere.py", "--prompt=x"], "--config names a file that can not be read: [Errno 2]"),
        (["--config=nothing.py"], "--config names a file without get_config(), which is no experiment"),
        (["--config=prose.md"], "--config names a file that is no Python: "),
        (["--config.target=x"], "a section takes a dict, or its fields one by one: --config.SECTION.FIELD=VALUE"),
        (["--compile_only", "--topology=v5e:2x2", "--tau=2,x"], "--tau is '2,x', must be numbers, as 2,4,6"),
        (["--config=tiny.py:huge"], "ValueError: variant 'huge' is unknown"),
        (["--config.target.source=nowhere", "--prompt=x"], "nowhere does not exist"),
        (["say it"], "unexpected argument 'say it'"),
    ],
)
def test_errors_are_one_line_and_no_traceback(place, flags, message):
    ended = start(place, *flags)
    assert ended.returncode == 1
    assert f"FATAL {message}" in ended.stderr or message in ended.stderr.split("FATAL", 1)[1]
    assert "Traceback" not in ended.stderr and ended.stdout == ""


def test_chat_on_a_terminal_survives_ctrl_c_and_ends_with_ctrl_d(place, first_start):
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()
    options = command(place)
    options["args"] = [sys.executable, "-c", TAKE_TERMINAL, *options["args"]]
    with subprocess.Popen(
        **options, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:  # fmt: skip
        os.close(terminal)
        screen = Screen(controller)
        try:
            screen.wait_for("> ")
            screen.send("\x03")
            screen.wait_for("> ", again="\x03")
            screen.send("Say it.\r")
            screen.wait_for("tokens a target call")
            screen.wait_for("> ")
            screen.send("\x04")
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
            os.close(controller)
    answer = first_start.stdout.split("\n\n")[0]
    assert answer.split()[0] in screen.shown
    assert "Traceback" not in screen.shown


# Makes stdin the controlling terminal, so that Ctrl-C becomes a signal, and then becomes the program. A test run that
# was started in the background ignores that signal, and programs inherit it.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """The user's side of a pseudo-terminal."""

    def __init__(self, controller: int):
        self.controller, self.shown, self.seen = controller, "", 0

    def send(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def wait_for(self, text: str, again: str = "") -> None:
        """Until the text is shown behind what was waited for before.

        Args:
          again: sent every ten seconds until then: a Ctrl-C that comes in the moment between a prompt and the read
            behind it is noticed by neither.
        """
        start, sent = time.monotonic(), 1
        while (at := self.shown.find(text, self.seen)) < 0:
            waited = time.monotonic() - start
            assert waited < 120, f"{text!r} did not come; shown so far: {self.shown!r}"
            if again and waited > 10 * sent:
                self.send(again)
                sent += 1
            if select.select([self.controller], [], [], 1.0)[0]:
                self.shown += os.read(self.controller, 4096).decode(errors="replace")
        self.seen = at + len(text)
