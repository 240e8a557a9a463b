"""Latent attention: against Hugging Face's layers, and against heads whose keys and values are really made."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax import sharding
from dflash_jax.checkpoints.rope_config import rope_config_from_hf
from dflash_jax.config import FULL, SLIDING, ConfigError, LatentConfig, RopeConfig, TargetConfig
from dflash_jax.kernels.kv_cache import BlockKV, KVCache, advance, pages, write
from dflash_jax.models import latent_attention
from dflash_jax.models.attention import BlockContext, causal
from dflash_jax.models.latent_attention import LatentAttention

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
YARN = RopeConfig(100.0, "yarn", 4.0, 16, mscale=1.0, mscale_all_dim=0.707)


def target_config(latent: LatentConfig, heads: int, hidden: int, **fields) -> TargetConfig:
    fields = {"rope": YARN, "layer_types": (FULL,), **fields}
    return TargetConfig(
        "deepseek_v3", 8, hidden, 8, 1, heads, heads, latent.nope_dim + latent.rope_dim, 1e-2,
        max_positions=64, latent=latent, **fields,
    )  # fmt: skip


CONFIG = target_config(LatentConfig(10, 6, 4, 7, q_rank=9), 4, 24, attention_scale=0.4)
DIRECT_QUERIES = dataclasses.replace(CONFIG, latent=dataclasses.replace(CONFIG.latent, q_rank=None))


@functools.partial(jax.jit, static_argnums=0)
def attend(graphdef, params, x_BxMxD, cache, visibility, count_B):
    """One layer over M tokens, the first count_B of which are committed: (out, block k and v, cache)."""
    position_BxM = cache.length_B[:, None] + jnp.arange(x_BxMxD.shape[1], dtype=jnp.int32)[None]
    block = BlockContext(position_BxM, cache.length_B, visibility)
    out_BxMxD, (k, v) = nnx.merge(graphdef, params)(x_BxMxD, pages(cache, 0), block)
    return out_BxMxD, (k, v), advance(write(cache, BlockKV((k,), (v,)), 0, count_B), count_B)


def empty_cache(config: TargetConfig, batch: int, dtype=jnp.float32) -> KVCache:
    """Room for 24 tokens a row, in pages of 4 that are not in order."""
    width = config.latent.kv_rank + config.latent.rope_dim
    table = np.random.default_rng(0).permutation(batch * 6).reshape(batch, 6)
    shape = (batch * 6, 1, 4)
    return KVCache(
        (jnp.zeros((*shape, width), dtype),), (jnp.zeros((*shape, 0), dtype),),
        jnp.asarray(table, jnp.int32), jnp.zeros(batch, jnp.int32),
    )  # fmt: skip


def in_blocks(config, graphdef, params, x_BxTxD, block: int) -> np.ndarray:
    """Outputs of a chain, `block` tokens at a time over the cache; the last block may be short."""
    cache, outs = empty_cache(config, x_BxTxD.shape[0]), []
    for start in range(0, x_BxTxD.shape[1], block):
        part = np.asarray(x_BxTxD[:, start : start + block])
        count = part.shape[1]
        part = np.pad(part, ((0, 0), (0, block - count), (0, 0)), constant_values=3.0)
        counts = jnp.full(x_BxTxD.shape[0], count, jnp.int32)
        out, _, cache = attend(graphdef, params, part, cache, causal(block), counts)
        outs.append(np.asarray(out)[:, :count])
    return np.concatenate(outs, axis=1)


def golden_layer(name: str):
    """(config, graphdef, params, x, out); rotated channels from neighbouring pairs to halves."""
    with np.load(GOLDEN / f"latent_{name}.npz") as file:
        arrays = {key: file[key].astype(np.float32) if file[key].dtype == np.float16 else file[key] for key in file}
    hf = json.loads(str(arrays["config"]))
    w = {key.removeprefix("w."): value for key, value in arrays.items() if key.startswith("w.")}
    c, p, r, v = (hf[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    n, d, q = hf["num_attention_heads"], hf["hidden_size"], hf["q_lora_rank"]
    order = [*range(p), *range(p, p + r, 2), *range(p + 1, p + r, 2)]
    up = w["kv_b_proj.weight"].reshape(n, p + v, c)
    values = {
        "kv_down_DxC": w["kv_a_proj_with_mqa.weight"][[*range(c), *range(c, c + r, 2), *range(c + 1, c + r, 2)]].T,
        "kv_norm/scale": w["kv_a_layernorm.weight"],
        "k_up_NxCxP": up[:, :p].transpose(0, 2, 1),
        "v_up_NxCxV": up[:, p:].transpose(0, 2, 1),
        "out_NxVxD": w["o_proj.weight"].T.reshape(n, v, d),
    }
    queries = w["q_proj.weight" if q is None else "q_b_proj.weight"].reshape(n, p + r, -1)[:, order].transpose(2, 0, 1)
    if q is None:
        values["q_DxNxH"] = queries
    else:
        values |= {"q_up_QxNxH": queries, "q_down_DxQ": w["q_a_proj.weight"].T}
        values["q_down_norm/scale"] = w["q_a_layernorm.weight"]
    scale = (p + r) ** -0.5
    if "rope_scaling" in hf:
        scale *= (0.1 * hf["rope_scaling"]["mscale_all_dim"] * np.log(hf["rope_scaling"]["factor"]) + 1) ** 2
    config = target_config(
        LatentConfig(c, p, r, v, q), n, d, rope=rope_config_from_hf({**hf, "head_dim": r}), attention_scale=scale
    )
    graphdef, params = layer(config)
    paths = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    assert set(paths) == set(values)
    for path, value in values.items():
        assert paths[path].get_value().shape == value.shape, path
        paths[path].set_value(jnp.asarray(value))
    return config, graphdef, params, arrays["x"][None], arrays["out"][None]


def layer(config: TargetConfig, dtype=jnp.float32, seed: int = 0):
    """(graphdef, params) of a random layer whose scores are not all alike."""
    graphdef, params = nnx.split(LatentAttention(config, 0, dtype, nnx.Rngs(seed)))
    return graphdef, jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, params)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("block", [20, 1, 5, 8])
def test_hugging_face(name, block):
    config, graphdef, params, x, out = golden_layer(name)
    found = in_blocks(config, graphdef, params, x, block)
    np.testing.assert_allclose(found, out, atol=1e-5 * np.ptp(out), rtol=0)


def direct(config: TargetConfig, params, x_TxD: np.ndarray, seen_TxT: np.ndarray, position_T: np.ndarray) -> np.ndarray:
    """The layer over T tokens in float64 numpy, head by head, every key and value made. `seen_TxT`: the mask."""
    weights = {"/".join(map(str, p)): np.asarray(x.get_value(), np.float64) for p, x in nnx.to_flat_state(params)}
    latent, x_TxD = config.latent, np.asarray(x_TxD, np.float64)

    def normed(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    table = BlockContext(jnp.asarray(position_T)[None], None, None).rope(config.rope, latent.rope_dim)
    cos, sin = (np.asarray(x, np.float64)[0] for x in table)

    def rotated(x_TxR):
        a, b = np.split(x_TxR, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    down_TxC = x_TxD @ weights["kv_down_DxC"]
    c_TxC = normed(down_TxC[:, : latent.kv_rank], weights["kv_norm/scale"])
    k_turned_TxR = rotated(down_TxC[:, latent.kv_rank :])
    q_in, q_kernel = x_TxD, weights.get("q_DxNxH")
    if latent.q_rank is not None:
        q_in, q_kernel = normed(x_TxD @ weights["q_down_DxQ"], weights["q_down_norm/scale"]), weights["q_up_QxNxH"]
    out_TxD = 0
    for n in range(config.num_heads):
        q_TxH, k_TxP, v_TxV = q_in @ q_kernel[:, n], c_TxC @ weights["k_up_NxCxP"][n], c_TxC @ weights["v_up_NxCxV"][n]
        q_TxH = np.concatenate([q_TxH[:, : latent.nope_dim], rotated(q_TxH[:, latent.nope_dim :])], axis=-1)
        scores = q_TxH @ np.concatenate([k_TxP, k_turned_TxR], axis=-1).T * config.attention_scale
        weights_TxT = np.where(seen_TxT, np.exp(scores - scores.max()), 0.0)
        out_TxD += weights_TxT / weights_TxT.sum(-1, keepdims=True) @ v_TxV @ weights["out_NxVxD"][n]
    return out_TxD


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).standard_normal((2, 16, 24)).astype(np.float32)


@pytest.mark.parametrize("config", [CONFIG, DIRECT_QUERIES], ids=["query latent", "no query latent"])
def test_a_tree_behind_rows_of_unequal_length(config, tokens):
    graphdef, params = layer(config)
    committed = jnp.asarray([10, 7], jnp.int32)
    _, _, cache = attend(graphdef, params, tokens[:, :10], empty_cache(config, 2), causal(10), committed)
    parent = [None, 0, 0, 1, 2, 3]
    tree = np.eye(6, dtype=bool)
    for slot, before in enumerate(parent):
        if before is not None:
            tree[slot] |= tree[before]
    out, (k, v), _ = attend(graphdef, params, tokens[:, 10:], cache, jnp.asarray(tree), jnp.zeros(2, jnp.int32))
    assert k.shape == (2, 1, 6, 14) and v.shape == (2, 1, 6, 0)
    for row, length in enumerate(committed.tolist()):
        seen = np.tril(np.ones((length + 6, length + 6), bool))
        seen[length:, length:] = tree
        x = np.concatenate([tokens[row, :length], tokens[row, 10:]])
        wanted = direct(config, params, x, seen, np.arange(length + 6))[length:]
        np.testing.assert_allclose(out[row], wanted, atol=1e-5 * np.ptp(wanted), rtol=0)


def test_rejected_tokens_leave_nothing_behind(tokens):
    graphdef, params = layer(CONFIG)
    plain = in_blocks(CONFIG, graphdef, params, tokens[:, :15], 15)
    for kept in range(1, 5):
        cache = empty_cache(CONFIG, 2)
        _, _, cache = attend(graphdef, params, tokens[:, :5], cache, causal(5), jnp.full(2, kept, jnp.int32))
        out, _, _ = attend(graphdef, params, tokens[:, kept : kept + 5], cache, causal(5), jnp.zeros(2, jnp.int32))
        np.testing.assert_allclose(out, plain[:, kept : kept + 5], atol=1e-5 * np.ptp(plain))


def test_bfloat16(tokens):
    graphdef, params = layer(CONFIG, jnp.bfloat16)
    x = jnp.asarray(tokens, jnp.bfloat16)
    cache = empty_cache(CONFIG, 2, jnp.bfloat16)
    out, (k, _), _ = attend(graphdef, params, x, cache, causal(16), jnp.zeros(2, jnp.int32))
    assert out.dtype == k.dtype == jnp.bfloat16
    wide = layer(CONFIG)[0], jax.tree.map(lambda x: x.astype(jnp.float32), params)
    wanted = in_blocks(CONFIG, *wide, np.asarray(x, np.float32), 16)
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=0.03 * np.ptp(wanted))


@pytest.mark.parametrize("data, tensor", [(1, 8), (2, 4), (1, 1)])
@pytest.mark.parametrize("implementation", ["reference", "pallas_interpret"])
def test_heads_over_a_mesh(data, tensor, implementation, tokens, monkeypatch):
    """One KV head, whole on every device; four query heads and their kernels on four devices, or whole on eight."""
    mesh = sharding.make_mesh(data, tensor)
    graphdef, params = layer(CONFIG)
    _, _, cache = attend(graphdef, params, tokens[:, :8], empty_cache(CONFIG, 2), causal(8), jnp.full(2, 8, jnp.int32))
    wanted, _, _ = attend(graphdef, params, tokens[:, 8:], cache, causal(8), jnp.zeros(2, jnp.int32))
    called = functools.partial(latent_attention.paged_block_attention, implementation=implementation)
    monkeypatch.setattr(latent_attention, "paged_block_attention", called)
    params = jax.tree.map(
        lambda x: x.replace(
            jax.device_put(x.get_value(), sharding.named_sharding(mesh, x.get_metadata("axes"), x.get_value().shape))
        ),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    if tensor == 4:
        assert params["k_up_NxCxP"].get_value().sharding.spec[0] == "tensor"
    with sharding.use(mesh):
        fresh = jax.jit(attend.__wrapped__, static_argnums=0)
        out, _, _ = fresh(graphdef, params, tokens[:, 8:], cache, causal(8), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(out, wanted, atol=1e-5 * np.ptp(wanted))


def test_what_is_not_latent_attention_is_refused():
    with pytest.raises(ConfigError, match="layer 0 is 'sliding_attention'"):
        layer(dataclasses.replace(CONFIG, layer_types=(SLIDING,), sliding_window=4))
    with pytest.raises(ConfigError, match="qkv_bias is True"):
        layer(dataclasses.replace(CONFIG, qkv_bias=True))
