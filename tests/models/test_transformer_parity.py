"""The transformer against Hugging Face's, for every family, from vectors in tests/golden.

All hidden states and logits, in one prefill, token by token, and in blocks of three over the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import CASES, GOLDEN, golden_json
from safetensors.numpy import save_file

from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.config import SLIDING, RopeConfig, TargetConfig
from dflash_jax.kernels.kv_cache import KVCache, abstract_layers, advance, write
from dflash_jax.models.attention import causal
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import Transformer, layer_specs

FAMILIES = ("llama3_rope", "llama_linear", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3", "qwen3_yarn")
TOLERANCE = 1e-4


@dataclasses.dataclass
class Case:
    """A loaded target and what the reference computed: ids [T], logits [T, V], layers [L, T, D]."""

    target: Target
    ids: np.ndarray
    logits: np.ndarray
    layers: np.ndarray


@functools.cache
def family_case(name: str, directory: pathlib.Path) -> Case:
    with np.load(GOLDEN / f"family_{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    target = _load(json.loads(str(arrays["config"])), arrays, "w.", directory / name)
    return Case(target, arrays["ids"], arrays["logits"], arrays["layers"])


def _load(hf: dict, arrays: dict, prefix: str, directory: pathlib.Path) -> Target:
    """Through the loader that people use: a directory in Hugging Face's layout."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf))
    weights = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    save_file(weights, directory / "model.safetensors")
    return load_target(directory, dtype="float32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, token_BxM, cache, count_B):
    """One call over M tokens, the first count_B of which are committed: (logits, taps, cache)."""
    model = nnx.merge(graphdef, params)
    num_tokens, num_layers = token_BxM.shape[1], len(model.layers)
    position_BxM = cache.length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    out = model(token_BxM, position_BxM, cache, causal(num_tokens), tuple(range(num_layers)))
    cache = advance(write(cache, out.block_kv, 0, count_B), count_B)
    return model.logits(out.hidden_BxMxD), out.taps_BxMxTD, cache


def empty_cache(config: TargetConfig, capacity: int, paged: bool) -> KVCache:
    page_size = 4
    num_pages = -(-capacity // page_size)
    if paged:
        shapes = abstract_layers(layer_specs(config), num_pages, page_size, jnp.float32)[0]
        # Pages out of order: nothing may rely on neighbours in memory.
        table = jnp.asarray(np.random.default_rng(0).permutation(num_pages)[None], jnp.int32)
    else:
        shapes, table = abstract_layers(layer_specs(config), 1, capacity, jnp.float32)[0], None

    def side() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)

    return KVCache(side(), side(), table, jnp.zeros(1, jnp.int32))


def run(target: Target, ids: np.ndarray, block: int, paged: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(logits [T, V], layers [L, T, D]) of ids [T], computed `block` tokens at a time."""
    cache = empty_cache(target.config, 24, paged)
    logits, layers = [], []
    for start in range(0, len(ids), block):
        chunk = ids[start : start + block]
        padded = np.zeros(block, np.int32)
        padded[: len(chunk)] = chunk
        count = jnp.asarray([len(chunk)], jnp.int32)
        logits_BxMxV, taps_BxMxTD, cache = forward(target.graphdef, target.params, padded[None], cache, count)
        logits.append(logits_BxMxV[0, : len(chunk)])
        layers.append(taps_BxMxTD[0, : len(chunk)])
    assert int(cache.length_B[0]) == len(ids)
    layers_TxLD = np.concatenate(layers)
    layers_LxTxD = layers_TxLD.reshape(len(ids), target.config.num_layers, -1).swapaxes(0, 1)
    return np.concatenate(logits), layers_LxTxD


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, in units of the range of the reference where that is above 1."""
    return float(np.abs(found - wanted).max() / max(1.0, np.ptp(wanted)))


@pytest.mark.parametrize("block", [20, 1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_hugging_face(name, block, directory):
    case = family_case(name, directory)
    logits, layers = run(case.target, case.ids, block, paged=block == 3)
    assert distance(logits, case.logits) < TOLERANCE
    for layer, (found, wanted) in enumerate(zip(layers, case.layers, strict=True)):
        assert np.abs(found - wanted).max() < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3_rope", {"rope": RopeConfig(500.0)}),
        ("qwen3_yarn", {"rope": RopeConfig(10_000.0)}),
        ("qwen2_sliding", {"sliding_window": 6}),
        ("qwen3", {"layer_types": (SLIDING,) * 3}),
    ],
)
def test_vectors_notice_a_wrong_configuration(name, change, directory):
    """The control of the test above: scaling, window and layer kinds each show in these vectors."""
    case = family_case(name, directory)
    config = dataclasses.replace(case.target.config, **change)
    own_head = "head_DxV" in case.target.params
    model = nnx.eval_shape(lambda: Transformer(config, jnp.float32, nnx.Rngs(0), own_head=own_head))
    logits, _ = run(dataclasses.replace(case.target, graphdef=nnx.split(model)[0], config=config), case.ids, 20)
    assert distance(logits, case.logits) > 100 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_shared_parity_cases(name, tmp_path):
    """Targets of the drafter's parity cases; the reference's last hidden state is behind the final norm."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    hf = golden_json(name)["target"]
    target = _load(hf, arrays, "target_w.", tmp_path / name)
    logits, layers = run(target, arrays["target.input_ids"][0].astype(np.int32), 13)
    assert distance(logits, arrays["target.logits"][0]) < TOLERANCE
    wanted = arrays["target.hidden_states"][1:-1, 0]
    assert wanted.shape == layers[:-1].shape
    assert np.abs(layers[:-1] - wanted).max() < TOLERANCE
    assert np.abs(layers[-1] - arrays["target.hidden_states"][-1, 0]).max() > 1e-2  # before the norm, not behind it
