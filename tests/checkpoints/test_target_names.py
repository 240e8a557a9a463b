"""The name map: every family's real tensor names, both directions, bit for bit."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import GOLDEN, ArrayReader
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.placement import export_tensors, load_params
from dflash_jax.checkpoints.safetensors_reader import SafetensorsReader
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer

FAMILIES = ("llama3_rope", "llama_linear", "mistral_sliding", "qwen2", "qwen3", "qwen3_yarn")


def family(name: str):
    """(configuration, weights under their Hugging Face names) that transformers made."""
    with np.load(GOLDEN / f"family_{name}.npz") as file:
        config = target_config_from_hf(json.loads(str(file["config"])))
        return config, {key[2:]: file[key] for key in file.files if key.startswith("w.")}


def load(config, reader, own_head=False, dtype=jnp.float16):
    _, abstract = abstract_model(Transformer, config, dtype, own_head=own_head)
    return load_params(abstract, target_placements(config, own_head), reader)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_values_there_and_back(name):
    config, weights = family(name)
    params = load(config, ArrayReader(weights))
    exported = dict(export_tensors(params, target_placements(config, own_head=False)))
    assert set(exported) == set(weights)
    for key, value in weights.items():
        assert exported[key].dtype == value.dtype
        np.testing.assert_array_equal(exported[key], value, err_msg=key)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_saved_files_are_the_same_bytes(dtype, tmp_path):
    config, weights = family("llama_linear")
    params = load(config, ArrayReader(weights), dtype=dtype)
    paths = []
    for directory in (tmp_path / "first", tmp_path / "second"):
        directory.mkdir()
        paths.append(directory / "model.safetensors")
        save_file(dict(export_tensors(params, target_placements(config, own_head=False))), paths[-1])
        params = load(config, SafetensorsReader(directory), dtype=dtype)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert load_file(paths[0])["model.norm.weight"].dtype == dtype


def test_own_head_of_a_tied_model_is_the_table_transposed():
    config, weights = family("qwen2")
    params = load(config, ArrayReader(weights), own_head=True)
    np.testing.assert_array_equal(params["head_DxV"].get_value(), weights["model.embed_tokens.weight"].T)
    exported = dict(export_tensors(params, target_placements(config, own_head=True)))
    assert "lm_head.weight" not in exported
    assert set(exported) == set(weights)


def test_query_heads_lie_with_their_group():
    """Query head n reads KV head n // (N / G): [group, head in group] is n."""
    config, weights = family("llama3_rope")
    g, r, h = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    params = load(config, ArrayReader(weights))
    qkv_DxGxRxH = np.asarray(params["layers"][0]["attention"]["qkv_DxGxRxH"].get_value())
    q, k, v = (weights[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    for n in range(config.num_heads):
        np.testing.assert_array_equal(qkv_DxGxRxH[:, n // r, n % r].T, q[n * h : (n + 1) * h])
    for group in range(g):
        np.testing.assert_array_equal(qkv_DxGxRxH[:, group, r].T, k[group * h : (group + 1) * h])
        np.testing.assert_array_equal(qkv_DxGxRxH[:, group, r + 1].T, v[group * h : (group + 1) * h])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("own_head", [True, False])
def test_every_parameter_has_one_placement(name, own_head):
    config, _ = family(name)
    _, abstract = abstract_model(Transformer, config, jnp.float32, own_head=own_head)
    paths = [placement.path for placement in target_placements(config, own_head)]
    assert sorted(map(str, paths)) == sorted(str(path) for path, _ in nnx.to_flat_state(abstract))
    assert len(jax.tree.leaves(abstract)) == len(paths)


def test_harmless_names():
    config, _ = family("qwen2")
    untied, _ = family("llama3_rope")
    assert is_harmless(config, "model.layers.3.self_attn.rotary_emb.inv_freq")
    assert is_harmless(config, "model.rotary_emb.inv_freq")
    assert is_harmless(config, "lm_head.weight")
    assert not is_harmless(untied, "lm_head.weight")
    assert not is_harmless(config, "model.layers.0.self_attn.q_proj.lora_A.weight")
