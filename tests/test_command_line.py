"""What a command says: one line where the user can put it right, a traceback where the program is at fault."""

import errno
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from dflash_jax import command_line
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.command_line import plain_message
from dflash_jax.config import ConfigError, check_output_file
from dflash_jax.data.responses import StoreError
from dflash_jax.training.watch import TrainingDiverged

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, StoreError, TrainingDiverged])
def test_what_a_user_can_put_right_is_said_as_it_is(kind):
    assert plain_message(kind("field is 3")) == "field is 3"
    wrapped = RuntimeError("in a worker")
    wrapped.__cause__ = kind("field is 3")
    assert plain_message(wrapped) == "field is 3"
    assert plain_message(ExceptionGroup("several", [ValueError("x"), kind("field is 3")])) == "field is 3"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only; write to another place"),
        (errno.EACCES, "change the permissions"),
    ],
)
def test_what_the_machine_refuses_is_said_with_the_file(number, words):
    message = plain_message(OSError(number, os.strerror(number), "/runs/metrics.jsonl"))
    assert "'/runs/metrics.jsonl'" in message and words in message
    text = f'FAILED_PRECONDITION: Error writing local file "/runs/d/1":\n {os.strerror(number)} [OS error]'
    message = plain_message(ValueError(text))
    assert '"/runs/d/1"' in message and words in message and "\n" not in message


def test_a_full_disk_as_the_system_tells_it():
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as full:
        full.write("x")
        full.flush()
    assert "No space left on device: the disk is full" in plain_message(caught.value)


def test_packages_that_are_not_installed_are_named_with_what_installs_them():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for module, extra in command_line._EXTRAS.items():
        (listed,) = re.findall(rf"^{extra.upper()} = \[(.*)\]", setup, re.MULTILINE)
        assert f'"{module}' in listed
        error = ModuleNotFoundError("No module named ...", name=f"{module}.inner")
        assert plain_message(error) == f"{module} is not installed; pip install -e '.[{extra}]'"
    assert plain_message(ModuleNotFoundError("x is read with y; pip install y")) == "x is read with y; pip install y"
    assert plain_message(ModuleNotFoundError("No module named ...", name="dflash_jax.gone")) is None


def test_files_that_could_not_be_written_in_the_end_are_refused(tmp_path):
    check_output_file("stats_json", None)
    check_output_file("stats_json", tmp_path / "stats.json")
    for path in (tmp_path, tmp_path / "no" / "stats.json"):
        with pytest.raises(ConfigError, match=f"--stats_json is .{path}., which can not be a file"):
            check_output_file("stats_json", path)


@pytest.mark.parametrize("error", [ValueError("shapes differ"), FileNotFoundError(2, "No such file"), KeyError("a")])
def test_faults_of_the_program_keep_their_traceback(error):
    assert plain_message(error) is None
    consequence = KeyError("b")
    consequence.__context__ = ConfigError("was dealt with")  # raised while that was handled: not because of it
    assert plain_message(consequence) is None


COMMAND = """
import sys
import time
from dflash_jax import command_line

def main(argv):
    {body}

command_line.run(main)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise command_line.TrainingDiverged('step 3: loss nan')", "FATAL step 3: loss nan\nPass --help"),
        ("import os; os.write(os.open('/dev/full', os.O_WRONLY), b'x')", "No space left on device: the disk is full"),
        ("raise IndexError('a fault')", "Traceback (most recent call last)"),
    ],
)
def test_commands_end_with_status_1(body, said):
    ended = subprocess.run([sys.executable, "-c", COMMAND.format(body=body)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and said in ended.stderr
    assert ("Traceback" in ended.stderr) == ("IndexError" in body)


def test_joined_processes_keep_standard_output_from_libraries():
    body = "command_line.join_processes(); import os; os.write(1, b'a library\\n'); print('the answer')"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND.format(body=body)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"} | one,
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert ended.stdout == "the answer\n" and "a library\n" in ended.stderr


@pytest.mark.parametrize(("workdir", "said"), [("", "--workdir is empty"), ("file/runs", "is a file; name another")])
def test_workdirs_that_can_be_none_are_refused_at_once(workdir, said, tmp_path):
    (tmp_path / "file").write_text("")
    code = COMMAND.format(body="print('begun')").replace(
        "command_line.run", "from absl import flags\nflags.DEFINE_string('workdir', None, '')\ncommand_line.run"
    )
    workdir = workdir and str(tmp_path / workdir)
    ended = subprocess.run(
        [sys.executable, "-c", code, f"--workdir={workdir}"], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    assert ended.returncode == 1 and said in ended.stderr and "begun" not in ended.stdout


def test_ctrl_c_ends_what_xla_compiles():
    """XLA goes on in its own threads; the interpreter's teardown would wait for them, and then crash. JAX 0.10 hears of
    the signal at once, JAX 0.12 when the compilation is over."""
    layers, patience_s = (1500, 30) if jax.__version_info__ < (0, 11) else (300, 200)
    body = f"""
    import jax, jax.numpy as jnp
    def long(x):
        for i in range({layers}):
            x = jnp.sin(x) @ x + i
        return x
    lowered = jax.jit(long).lower(jnp.ones((64, 64)))
    print("compiling", flush=True)
    lowered.compile()
"""
    command = [sys.executable, "-c", "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"]
    command[-1] += COMMAND.format(body=body.strip())
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "compiling\n"
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=patience_s)
        finally:
            process.kill()
    assert process.returncode == command_line.INTERRUPTED
    assert said.strip() == "interrupted"
