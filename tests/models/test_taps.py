"""Taps are what a decoder layer gives out: the residual stream behind it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.config import FULL, ConfigError, DrafterConfig, RopeConfig, TargetConfig, default_target_layer_ids
from dflash_jax.kernels.kv_cache import KVCache, abstract_layers
from dflash_jax.models.attention import causal
from dflash_jax.models.target import random_target
from dflash_jax.models.transformer import layer_specs

LAYERS, HIDDEN = 6, 8


def toy_target():
    """Layer i adds the unit vector e_i to the residual stream of every token; embeddings are zero."""
    config = TargetConfig(
        family="llama", vocab_size=11, hidden_size=HIDDEN, intermediate_size=4, num_layers=LAYERS, num_heads=1,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-6, rope=RopeConfig(), max_positions=32,
        layer_types=(FULL,) * LAYERS, qkv_bias=True, out_bias=True,
    )  # fmt: skip
    target = random_target(config)
    target.params = jax.tree.map(jnp.zeros_like, target.params)
    for i in range(LAYERS):
        target.params["layers"][i]["attention"]["out_bias_D"].set_value(jnp.eye(HIDDEN)[i])
    return target


def taps_of(target, tap_ids):
    model = nnx.merge(target.graphdef, target.params)
    shapes = abstract_layers(layer_specs(target.config), 1, 8, jnp.float32)[0]
    empty = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)
    cache = KVCache(empty, empty, None, jnp.zeros(1, jnp.int32))
    token_BxM = jnp.asarray([[3, 1, 4]], jnp.int32)
    return model(token_BxM, jnp.arange(3, dtype=jnp.int32)[None], cache, causal(3), tap_ids).taps_BxMxTD


def test_b23_taps_are_layer_outputs():
    taps_BxMxTD = taps_of(toy_target(), (1, 3))
    e = np.eye(HIDDEN, dtype=np.float32)
    wanted = np.concatenate([e[0] + e[1], e[0] + e[1] + e[2] + e[3]])
    np.testing.assert_array_equal(np.asarray(taps_BxMxTD), np.tile(wanted, (1, 3, 1)))


def test_b23_first_and_last_layer():
    taps_BxMxTD = taps_of(toy_target(), (0, LAYERS - 1))
    wanted = np.concatenate([np.eye(HIDDEN)[0], np.eye(HIDDEN)[:LAYERS].sum(0)])
    # The last layer's tap is before the final norm, whose scale is zero here.
    np.testing.assert_array_equal(np.asarray(taps_BxMxTD[0, 0]), wanted)


def test_without_taps_none_are_returned():
    assert taps_of(toy_target(), ()) is None


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (11, 3, (1, 4, 8)), (6, 1, (3,))],
)
def test_b23_default_ids(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids


@pytest.mark.parametrize(("layers", "taps"), [(4, 2), (2, 2)])
def test_b23_default_ids_of_shallow_targets_are_refused(layers, taps):
    with pytest.raises(ConfigError, match="set target_layer_ids explicitly"):
        default_target_layer_ids(layers, taps)


@pytest.mark.parametrize("ids", [(-1, 2), (1, 6), (2, 1), (1, 1), ()])
def test_b23_ids_out_of_range_or_order_are_refused(ids):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        DrafterConfig(
            hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4,
            rms_norm_eps=1e-6, rope=RopeConfig(), vocab_size=11, block_size=4, mask_token_id=10,
            target_layer_ids=ids, num_target_layers=LAYERS, layer_types=(FULL,), max_positions=32,
        )  # fmt: skip
