"""Writing a safetensors file."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save_file


def write_safetensors(tensors: Mapping[str, np.ndarray], path: pathlib.Path, data_format: str) -> None:
    """Writes tensors to `path`, readable by whom the umask allows (the library alone makes it private: mode 0600).

    Args:
      data_format: the `format` entry of the header: "pt" is what readers on torch ask for.
    """
    save_file(dict(tensors), path, metadata={"format": data_format})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
