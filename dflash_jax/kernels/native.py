"""The kernels in C++ for CPU: built once with the system's compiler, kept, and registered with XLA.

JAX brings the headers; a C++ compiler must be there. Without one everything works through XLA alone, more slowly,
and that is said once. DFLASH_JAX_NATIVE=0 switches the native kernels off, which is not said.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading

import jax
import jaxlib
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.cache_dir import cache_dir
from dflash_jax.kernels import dispatch

SWITCH = "DFLASH_JAX_NATIVE"
# Symbols of the library, and their names in XLA.
TARGETS = ("dflash_narrow_matmul_f32", "dflash_narrow_matmul_bf16", "dflash_block_attention")
_FOLDER = pathlib.Path(__file__).parent
SOURCES = tuple(_FOLDER / name for name in ("narrow_matmul.cc", "block_attention.cc"))
HEADER = _FOLDER / "native.h"

_COMPILERS = ("c++", "g++", "clang++")
# Contraction is asked for by name, because the compilers differ in what they do by themselves.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_TUNING = ("-march=native", "-mcpu=native")  # the second for compilers that know only that one
_LIMIT_S = 180
_lock = threading.Lock()


class NativeBuildError(Exception):
    """The library could not be built or loaded; the message says why."""


def available() -> bool:
    """Whether the native kernels may be called in CPU programs; builds and registers them at the first call.

    Raises:
      ValueError: DFLASH_JAX_NATIVE is neither 0 nor 1.
    """
    if not switched_on():
        return False
    with _lock:
        return _registered()


def obstacle(mesh: Mesh | AbstractMesh | None) -> str | None:
    """Why a program on this mesh (None: one device of the default backend) can not call them; None if it can."""
    if dispatch.platform(mesh) != "cpu":
        return "the program is not for CPU"
    if dispatch.needs_mapping(mesh):
        return f"the program runs on {mesh.size} devices"
    return None if available() else "the native kernels are switched off or could not be built"


def switched_on() -> bool:
    """What DFLASH_JAX_NATIVE says.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {value!r}, must be 0 (XLA alone) or 1 (native kernels on CPU)")
    return value == "1"


def needs_build() -> bool:
    """Whether programs here will want the native kernels and the next `available()` runs the compiler, for seconds."""
    if not switched_on() or jax.default_backend() != "cpu":
        return False
    try:
        return not _library_path(_compiler()).exists()
    except NativeBuildError:
        return False


@functools.cache
def _registered() -> bool:
    try:
        library = _load(_built())
    except NativeBuildError as error:
        logging.warning(
            "the native CPU kernels are not used and decoding is slower: %s. Install a C++ compiler (g++ or clang++) "
            "or name one in CXX; %s=0 switches them off without this message.",
            error, SWITCH,
        )  # fmt: skip
        return False
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True


def _load(path: pathlib.Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} can not be loaded ({error}); delete it to have it built again") from error


def _built() -> pathlib.Path:
    """Path of the library, built if it is not there.

    Two processes may build at once: each writes a file of its own and renames it when it is whole.
    """
    compiler = _compiler()
    path = _library_path(compiler)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".so", prefix=f"{path.stem}-", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise NativeBuildError(f"{path.parent} can not be written ({error})") from error
    try:
        _compile(compiler, temporary)
        os.replace(temporary, path)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return path


def _compile(compiler: tuple[str, ...], output: str) -> None:
    logging.info("building %s with %s", ", ".join(source.name for source in SOURCES), shlex.join(compiler))
    for tuning in _TUNING:
        command = (*compiler, *_FLAGS, tuning, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-o", output)
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeBuildError(f"{shlex.join(command)} did not finish ({error})") from error
        if done.returncode == 0:
            return
    raise NativeBuildError(f"{shlex.join(command)} failed with status {done.returncode}: {done.stderr.strip()[-1000:]}")


def _compiler() -> tuple[str, ...]:
    """The command of the compiler: CXX, with arguments if it has some, else the first one found."""
    named = os.environ.get("CXX", "").strip()
    if named:
        command = tuple(shlex.split(named))
        if shutil.which(command[0]) is None:
            raise NativeBuildError(f"CXX is {named!r}, which is no program here")
        return command
    for name in _COMPILERS:
        if shutil.which(name):
            return (name,)
    raise NativeBuildError(f"no C++ compiler was found (none of {', '.join(_COMPILERS)}; CXX is not set)")


@functools.cache
def _library_path(compiler: tuple[str, ...]) -> pathlib.Path:
    """Named by all that the machine code depends on, so that nothing stale or of another machine is ever loaded."""
    try:
        version = subprocess.run((*compiler, "--version"), capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{shlex.join(compiler)} --version did not finish ({error})") from error
    parts = (
        *(file.read_text(encoding="utf-8") for file in (HEADER, *SOURCES)),
        shlex.join(compiler), version.stdout, *_FLAGS, *_TUNING, jaxlib.__version__, _processor(),
    )  # fmt: skip
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_dir() / "native" / f"kernels-{digest[:24]}.so"


def _processor() -> str:
    """The instruction set: what `native` means to the compiler."""
    found = [platform.machine(), platform.processor()]
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(found)  # not Linux
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found += sorted({line for line in lines if line.split(":")[0].strip() in names})
    return " ".join(found)
