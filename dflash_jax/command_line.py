"""What the entry points share: flags, and errors said plainly instead of shown as tracebacks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.training.watch import TrainingDiverged

INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended
# Modules that a part of the program needs: the extra that installs them.
_EXTRAS = {"grain": "train", "tensorboardX": "train", "tqdm": "train"}
# What the machine refuses and its user can put right.
_REFUSALS = {
    errno.ENOSPC: "the disk is full; make room, and the same command goes on",
    errno.EDQUOT: "the disk quota is used up; make room, and the same command goes on",
    errno.EROFS: "the file system is read-only; write to another place",
    errno.EACCES: "this user may not do that; change the permissions, or write to another place",
    errno.EPERM: "this user may not do that; change the permissions, or write to another place",
}


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, with exit status 1 and one line for what the user can put right.

    That is a flag, a field of the config or a store (ConfigError), a checkpoint (CheckpointError), a loss that explodes
    (TrainingDiverged), a package that is not installed, a disk that is full or must not be written to. Anything else is
    a fault of the program and keeps its traceback.
    """

    def plainly(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}: every flag is written --name=value")
        _check_config_file()
        _check_workdir()
        try:
            main(argv)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            _end(INTERRUPTED)
        except Exception as error:
            message = plain_message(error)
            if message is None:
                raise
            fail(message)

    app.run(plainly, flags_parser=parse_flags)


def _end(status: int) -> NoReturn:
    """Ends the process behind what was registered for its end, without the interpreter's teardown.

    XLA compiles in threads of its own, and Ctrl-C does not reach them: the teardown would wait for what they are at,
    for minutes where a program is large, and then crash.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads it
                stream.flush()
    finally:
        os._exit(status)


def join_processes(patience_s: int = 300) -> None:
    """`jax.distributed.initialize`, before anything else of JAX: TPU slices, Slurm, MPI and GKE are known to it.

    Elsewhere JAX_COORDINATOR_ADDRESS (HOST:PORT of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID say it.
    Standard output, where it is no terminal, is this program's alone from here on.

    Args:
      patience_s: how long a process that ends waits for the others. Then it ends, and jax.distributed ends the others.

    Raises:
      ConfigError: nothing says who the processes are, or one of these is no number.
    """
    import jax

    numbers = {}
    for name, variable in (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID")):
        value = os.environ.get(variable)
        if value is not None and not value.isdecimal():
            raise ConfigError(f"{variable} is {value!r}, must be a whole number")
        numbers[name] = None if value is None else int(value)
    _keep_stdout_from_libraries()
    try:
        jax.distributed.initialize(**numbers, shutdown_timeout_seconds=patience_s)
    except ValueError as error:
        raise ConfigError(
            f"--distributed: {error} No cluster was recognised; set JAX_COORDINATOR_ADDRESS=HOST:PORT (of the first "
            "process), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error


def _keep_stdout_from_libraries() -> None:
    """What libraries in C write to file descriptor 1 goes to standard error; Python's own output stays where it was.

    Gloo, which connects processes on CPU, tells of its connections there, from several threads, in the middle of an
    answer that a pipe carries. A terminal shows both streams anyway, and its line editing needs descriptor 1.
    """
    if sys.stdout is None or sys.stderr is None or sys.stdout.isatty():
        return
    sys.stdout.flush()
    sys.stdout = os.fdopen(
        os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )  # fmt: skip
    os.dup2(sys.stderr.fileno(), 1)


def plain_message(error: Exception) -> str | None:
    """What to say of an error that the user can put right, in one line; None for a fault of the program."""
    for inner in _chain(error):
        if isinstance(inner, ConfigError | CheckpointError | TrainingDiverged):
            return str(inner)
        if isinstance(inner, ModuleNotFoundError):
            if inner.name is None:  # raised by this program, which says what to install
                return str(inner)
            module = inner.name.partition(".")[0]
            if module in _EXTRAS:
                return f"{module} is not installed; pip install -e '.[{_EXTRAS[module]}]'"
        if isinstance(inner, OSError):
            if inner.errno in _REFUSALS:
                return f"{inner}: {_REFUSALS[inner.errno]}"
            continue
        for number, words in _REFUSALS.items():  # libraries in C++ tell the system's words, and no number
            if os.strerror(number) in str(inner):
                return f"{' '.join(str(inner).split())[:400]}: {words}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, those within a group, and what it was raised from."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _chain(inner)
        error = error.__cause__


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flag parsing; what is wrong with a config file or a field of it is an error like any other."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        message = _without_traceback(str(error))
        if "as a ConfigDict" in message:
            message += "; a section takes a dict, or its fields one by one: --config.SECTION.FIELD=VALUE"
        if "get_config() takes 0 positional arguments" in message:
            message = "--config names a variant, and this config has none; leave the colon and what follows out"
        fail(message)
    except SyntaxError as error:
        fail(f"--config names a file that is no Python: {error}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # from ml_collections
        if "no attribute 'get_config'" in str(error):
            fail("--config names a file without get_config(), which is no experiment")
        given = [arg for arg in argv if arg.startswith(("--config.", "-config."))]
        if not given:
            raise
        while error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        reason = " ".join(str(error.args[0]).split())
        if not reason.startswith("'"):  # not 'name' Did you mean ...: a string or a number was asked for a field
            fail(f"{' '.join(given)} names no field of the config: a value has none ({reason})")
        name = reason.split("'")[1]
        flag = next((arg for arg in given if f".{name}" in arg), " ".join(given))
        fail(f"{flag} names no field of the config: it has no {reason}")


def _check_workdir() -> None:
    """An unset variable in a command would make the current folder one; a file there would be found out late."""
    value = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None
    if value == "":
        fail("--workdir is empty; name a folder")
    if value is not None:
        path = pathlib.Path(value).absolute()
        there = next(place for place in (path, *path.parents) if place.exists())
        if not there.is_dir():
            fail(f"--workdir is {value}, but {there} is a file; name another folder")


def _check_config_file() -> None:
    """config_flags takes a missing file as a config that fails at its first use; said here instead."""
    if "config" not in flags.FLAGS:
        return
    flag = flags.FLAGS["config"]
    try:
        flag.value.keys()
    except OSError as error:
        fail(f"--config names a file that can not be read: {str(error).strip().splitlines()[-1].strip()}")


def _without_traceback(message: str) -> str:
    """Of a traceback within an error of config_flags, its last line and where it was raised."""
    if "Traceback (most recent call last):" not in message:
        return message
    head, _, trace = message.partition("Traceback (most recent call last):")
    lines = [line.strip() for line in trace.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return f"{' '.join(head.split())} {lines[-1]}" + (f" ({places[-1]})" if places else "")


def fail(message: str) -> NoReturn:
    """Ends the program with a message on stderr and status 1."""
    fields = "; the config file names all fields" if "config" in flags.FLAGS else ""
    print(f"FATAL {message}\nPass --help to see the flags{fields}.", file=sys.stderr)
    sys.exit(1)
