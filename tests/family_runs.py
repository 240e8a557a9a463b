"""Golden families (tests/golden/family_*.npz) as loaded targets, run over a cache in blocks."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_cases import GOLDEN
from safetensors.numpy import save_file

from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.config import TargetConfig
from dflash_jax.kernels.kv_cache import KVCache, abstract_layers, advance, empty_states, write
from dflash_jax.models.attention import causal
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import layer_specs


@dataclasses.dataclass
class Case:
    """A loaded target and what the reference computed: ids [T], logits [T, V], layers [L, T, D]."""

    target: Target
    ids: np.ndarray
    logits: np.ndarray
    layers: np.ndarray


@functools.cache
def family_case(name: str) -> Case:
    """Loaded once, float32 on one device; do not mutate."""
    with np.load(GOLDEN / f"family_{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    weights = {key.removeprefix("w."): value for key, value in arrays.items() if key.startswith("w.")}
    with tempfile.TemporaryDirectory() as directory:
        target = load_directory(pathlib.Path(directory), json.loads(str(arrays["config"])), weights)
    return Case(target, arrays["ids"], arrays["logits"], arrays["layers"])


def load_directory(directory: pathlib.Path, hf: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Target:
    """Through the loader that people use: a directory in Hugging Face's layout."""
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(dict(weights), directory / "model.safetensors")
    return load_target(directory, dtype="float32")


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, token_BxM, cache, count_B):
    """One call over M tokens, the first count_B of which are committed: (logits_BxMxV, layers_LxBxMxD, cache)."""
    model = nnx.merge(graphdef, params)
    (batch, num_tokens), num_layers = token_BxM.shape, len(model.layers)
    position_BxM = cache.length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    out = model(token_BxM, position_BxM, cache, causal(num_tokens), tuple(range(num_layers)))
    cache = advance(write(cache, out.block_kv, 0, count_B), count_B)
    layers_BxMxLxD = out.taps_BxMxTD.reshape(batch, num_tokens, num_layers, -1)
    return model.logits(out.hidden_BxMxD), layers_BxMxLxD.transpose(2, 0, 1, 3), cache


def empty_cache(config: TargetConfig, capacity: int, paged: bool = False, batch: int = 1) -> KVCache:
    page_size = 4
    row_pages = -(-capacity // page_size)
    specs = layer_specs(config)
    if paged:
        k, v = abstract_layers(specs, batch * row_pages, page_size, jnp.float32)
        # Pages out of order: nothing may rely on neighbours in memory.
        order = np.random.default_rng(0).permutation(batch * row_pages)
        table = jnp.asarray(order.reshape(batch, row_pages), jnp.int32)
    else:
        (k, v), table = abstract_layers(specs, batch, capacity, jnp.float32), None

    def zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)

    states = empty_states(specs, batch, jnp.float32)
    return KVCache(zeros(k), zeros(v), table, jnp.zeros(batch, jnp.int32), states)


def run(target: Target, ids: np.ndarray, block: int, paged: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(logits [T, V], layers [L, T, D]) of ids [T], computed `block` tokens at a time."""
    cache = empty_cache(target.config, 24, paged)
    logits, layers = [], []
    for start in range(0, len(ids), block):
        chunk = ids[start : start + block]
        padded = np.zeros(block, np.int32)
        padded[: len(chunk)] = chunk
        count_B = jnp.asarray([len(chunk)], jnp.int32)
        logits_BxMxV, layers_LxBxMxD, cache = forward(target.graphdef, target.params, padded[None], cache, count_B)
        logits.append(logits_BxMxV[0, : len(chunk)])
        layers.append(layers_LxBxMxD[:, 0, : len(chunk)])
    assert int(cache.length_B[0]) == len(ids)
    return np.concatenate(logits), np.concatenate(layers, axis=1)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, in units of the range of the reference where that is above 1."""
    return float(np.abs(found - wanted).max() / max(1.0, np.ptp(wanted)))
