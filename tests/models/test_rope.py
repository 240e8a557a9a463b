"""Rotary embedding: frequencies of each kind against their formulas, and precision at long context."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from flax import nnx

from dflash_jax.config import FULL, ConfigError, RopeConfig, TargetConfig
from dflash_jax.models.layers import RMSNorm, rope_frequencies, rope_table, rotate
from dflash_jax.models.target import abstract_model
from dflash_jax.models.transformer import Transformer
from dflash_jax.models.whole_rows import forward_rows

HEAD_DIM = 64
POSITIONS = (4096, 4097, 4111, 131071)


def test_b33_phases_are_float32():
    rope = RopeConfig(theta=10_000.0)
    cos_BxMxR, sin_BxMxR = rope_table(rope, HEAD_DIM, jnp.asarray([POSITIONS], jnp.int32))
    freq = 10_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    phase = np.asarray(POSITIONS, np.float64)[:, None] * freq
    tables = [np.asarray(x[0].astype(jnp.bfloat16), np.float64) for x in (cos_BxMxR, sin_BxMxR)]
    for found, exact in zip(tables, (np.cos(phase), np.sin(phase)), strict=True):
        # Positions of this size are exact in float32 but a phase of 4000 has an error of 2.4e-4; the largest
        # position only shows that nothing overflows.
        np.testing.assert_allclose(found[:3], exact[:3], atol=4e-3)
        assert np.abs(found[3] - exact[3]).max() < 0.02
    both = np.concatenate(tables, axis=-1)
    for i in range(3):
        for j in range(i):
            assert np.abs(both[i] - both[j]).max() > 0.1, "positions fall together"


def test_b33_no_narrow_arithmetic_before_cos():
    """In a bfloat16 model too, only the rotated result is narrow."""

    def rotated(x, position):
        return rotate(x, *rope_table(RopeConfig(), HEAD_DIM, position))

    x = jax.ShapeDtypeStruct((1, 4, 2, HEAD_DIM), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(rotated)(x, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    narrow = [
        equation.primitive.name
        for equation in jaxpr.jaxpr.eqns
        if any(v.aval.dtype == jnp.bfloat16 for v in equation.outvars)
    ]
    assert narrow == ["convert_element_type"]


def test_b33_norm_is_computed_in_float32():
    """A float16 sum of squares would overflow."""
    x_BxMxD = jnp.full((1, 1, 512), 300.0, jnp.float16)
    out_BxMxD = RMSNorm(512, 1e-6, jnp.float16, nnx.Rngs(0))(x_BxMxD)
    np.testing.assert_array_equal(np.asarray(out_BxMxD), 1.0)


def test_b33_softmax_phases_norms_and_logits_of_a_bfloat16_model_are_float32():
    config = TargetConfig(
        family="qwen3", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=8, rms_norm_eps=1e-6, rope=RopeConfig(), max_positions=64, layer_types=(FULL,) * 2, qk_norm=True,
    )  # fmt: skip
    graphdef, params = abstract_model(Transformer, config, jnp.bfloat16)

    def logits(params, token_BxS):
        model = nnx.merge(graphdef, params)
        return model.logits(forward_rows(model, token_BxS, ()).hidden_BxMxD)

    traced = jax.make_jaxpr(logits)(params, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    found = {"exp": 0, "cos": 0, "sin": 0, "rsqrt": 0, "reduce_sum": 0}
    for equation in equations(traced.jaxpr):
        if equation.primitive.name in found:
            found[equation.primitive.name] += 1
            assert all(v.aval.dtype == jnp.float32 for v in equation.outvars), equation
    assert min(found.values()) > 0, found
    assert traced.out_avals[0].dtype == jnp.float32


def test_linear_divides_positions():
    plain, _ = rope_frequencies(RopeConfig(500.0), HEAD_DIM)
    scaled, factor = rope_frequencies(RopeConfig(500.0, "linear", 4.0), HEAD_DIM)
    np.testing.assert_allclose(scaled, plain / 4)
    assert factor == 1.0


def test_llama3_keeps_high_and_divides_low_frequencies():
    rope = RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    plain, _ = rope_frequencies(RopeConfig(500_000.0), 128)
    scaled, _ = rope_frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_attention_factor():
    rope = RopeConfig(10_000.0, "yarn", 4.0, original_max_positions=32)
    assert rope_frequencies(rope, HEAD_DIM)[1] == pytest.approx(0.1 * math.log(4) + 1)
    told = RopeConfig(10_000.0, "yarn", 4.0, original_max_positions=32, attention_factor=1.25)
    cos_BxMxR, _ = rope_table(told, HEAD_DIM, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(np.asarray(cos_BxMxR), 1.25)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_kinds_need_the_original_length(kind):
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        RopeConfig(kind=kind, factor=2.0)


def test_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="longrope"):
        RopeConfig(kind="longrope")


def test_partial_rotary_leaves_the_other_channels():
    """cos and sin of 16 channels: those turn as a head of 16 does, the rest of the head is untouched."""
    position = jnp.asarray([[3, 7]], jnp.int32)
    table = rope_table(RopeConfig(100.0), 16, position)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, HEAD_DIM)), jnp.float32)
    out = rotate(x, *table)
    np.testing.assert_array_equal(out[..., 16:], x[..., 16:])
    np.testing.assert_array_equal(out[..., :16], rotate(x[..., :16], *table))
    assert np.abs(out[..., :16] - x[..., :16]).max() > 0.1


def test_proportional_rotary_turns_channels_of_the_whole_heads_frequencies():
    """`rotated` channels keep the frequencies of a whole head; a pair beyond them has the angle zero."""
    position = jnp.asarray([[5, 90]], jnp.int32)
    whole = rope_table(RopeConfig(100.0, "linear", 2.0), HEAD_DIM, position)
    part = rope_table(RopeConfig(100.0, "linear", 2.0), HEAD_DIM, position, rotated=16)
    for found, full, still in zip(part, whole, (1.0, 0.0), strict=True):
        np.testing.assert_array_equal(found[..., :8], full[..., :8])
        np.testing.assert_array_equal(found[..., 8:], still)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, HEAD_DIM)), jnp.float32)
    turns = np.abs(rotate(x, *part) - x).max(axis=(0, 1, 2)) > 1e-3
    half = HEAD_DIM // 2
    np.testing.assert_array_equal(np.flatnonzero(turns), [*range(8), *range(half, half + 8)])
