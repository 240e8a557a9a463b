"""The gated delta rule: chunks against the definition, and states after any number of accepted tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.config import DeltaConfig
from dflash_jax.kernels.delta_rule import (
    STATE_AXES,
    RecurrentInputs,
    RecurrentState,
    abstract_state,
    causal_conv,
    commit,
    delta_rule,
    delta_rule_reference,
    empty_state,
)

G, R, P, H = 2, 3, 8, 4
TOLERANCE = 1e-5

chunked = jax.jit(delta_rule, static_argnames="chunk")
reference = jax.jit(delta_rule_reference)
jit_commit = jax.jit(commit)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def sequence(seed: int, b: int, m: int, decays=(-3.0, 1.0), rates=(0.0, 2.0), alike: float = 0.3):
    """Arguments of the rule.

    Args:
      decays: exponents (base 10) between which log decays lie; a tenth of them is 0, no decay at all.
      rates: mean and spread of the logit of beta.
      alike: how much of each key is common to all.
    """
    rng = np.random.default_rng(seed)
    q, noise, v = rng.normal(size=(b, m, G, P)), rng.normal(size=(b, m, G, P)), rng.normal(size=(b, m, G, R, H))
    k = unit(alike * unit(rng.normal(size=(1, 1, G, P))) + (1 - alike) * unit(noise))
    log_decay = -(10 ** rng.uniform(*decays, size=(b, m, G, R))) * (rng.random((b, m, G, R)) > 0.1)
    beta = 1 / (1 + np.exp(-rng.normal(*rates, size=(b, m, G, R))))
    delta = rng.normal(size=(b, G, R, P, H))
    return tuple(jnp.asarray(x, jnp.float32) for x in (unit(q), k, v, log_decay, beta, delta))


def distance(found, wanted) -> float:
    """Largest difference, in units of the largest number wanted where that is above 1."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert np.isfinite(found).all()
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


class TestChunksEqualTheDefinition:
    @pytest.mark.parametrize(("m", "chunk"), [(1, 64), (2, 64), (16, 64), (21, 8), (23, 1), (64, 64), (130, 64)])
    @settings(max_examples=12, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        weakest=st.floats(-7, 3),
        reach=st.floats(0, 8),
        rate=st.floats(-15, 15),
        spread=st.floats(0, 10),
        alike=st.floats(0, 1),
    )
    def test_for_weak_and_strong_decays_and_rates(self, m, chunk, seed, weakest, reach, rate, spread, alike):
        decays = (weakest, min(weakest + reach, 3.5))
        arguments = sequence(seed, 2, m, decays, (rate, spread), alike)
        for found, wanted in zip(chunked(*arguments, chunk=chunk), reference(*arguments), strict=True):
            assert distance(found, wanted) < TOLERANCE

    def test_a_forgetting_token_costs_its_neighbours_no_digits(self):
        # Differences of running sums near 30,000 would be off by 0.002.
        q, k, v, log_decay, beta, delta = sequence(0, 1, 64, decays=(-3.0, -1.0))
        log_decay = log_decay.at[:, 1].set(-30_000.0)
        for found, wanted in zip(
            chunked(q, k, v, log_decay, beta, delta), reference(q, k, v, log_decay, beta, delta), strict=True
        ):
            assert distance(found, wanted) < TOLERANCE

    def test_same_key_again_and_again_at_full_rate(self):
        # All powers of the system's matrix are huge here; its solution is not.
        q, k, v, log_decay, beta, delta = sequence(1, 1, 64, alike=1.0)
        arguments = q, k, v, jnp.zeros_like(log_decay), jnp.ones_like(beta), delta
        for found, wanted in zip(chunked(*arguments), reference(*arguments), strict=True):
            assert distance(found, wanted) < TOLERANCE

    def test_chunk_below_one_is_refused(self):
        with pytest.raises(ValueError, match="chunk is 0"):
            delta_rule(*sequence(0, 1, 2), chunk=0)


@pytest.mark.parametrize(("m", "chunk"), [(5, 64), (21, 8)])
@pytest.mark.parametrize("decays", [(-7.0, -4.0), (-3.0, 1.0), (2.0, 4.0)])
def test_gradients_equal_those_of_the_definition(m, chunk, decays):
    arguments = sequence(2, 2, m, decays, alike=0.6)
    for found, wanted in zip(gradients(chunk)(*arguments), gradients(None)(*arguments), strict=True):
        assert distance(found, wanted) < 10 * TOLERANCE
        assert np.abs(wanted).max() > 0 or decays[0] > 0  # such decays underflow, their gradient is 0


@functools.cache
def gradients(chunk):
    rule = delta_rule_reference if chunk is None else functools.partial(delta_rule, chunk=chunk)

    def loss(*arguments):
        out, write, delta = rule(*arguments)
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.square(write)) + jnp.sum(jnp.cos(delta))

    return jax.jit(jax.grad(loss, argnums=tuple(range(6))))


class TestCommit:
    WIDTH, CHANNELS = 3, 2 * P + R * H

    def called(self, seed: int, b: int, m: int, **options):
        """(state, inputs) of a call over M tokens and the arguments of the rule; all rows see the same tokens."""
        arguments = [jnp.repeat(x, b, axis=0) for x in sequence(seed, 1, m, **options)]
        rng = np.random.default_rng(seed + 1)
        past = jnp.asarray(np.repeat(rng.normal(size=(1, self.WIDTH, G, self.CHANNELS)), b, axis=0), jnp.float32)
        conv = jnp.asarray(np.repeat(rng.normal(size=(1, m, G, self.CHANNELS)), b, axis=0), jnp.float32)
        _, write, _ = chunked(*arguments)
        return RecurrentState(past, arguments[5]), RecurrentInputs(conv, arguments[1], write, arguments[3]), arguments

    def check(self, state, inputs, arguments, count_B):
        """Each row of the committed state against the definition run over its first count tokens and no more."""
        found = jit_commit(state, inputs, jnp.asarray(count_B, jnp.int32))
        q, k, v, log_decay, beta, delta = arguments
        stays = (np.arange(k.shape[1])[None] < np.asarray(count_B)[:, None])[:, :, None, None]
        # With beta and log decay 0 a token does nothing: one program for all counts.
        wanted = reference(q, k, v, jnp.where(stays, log_decay, 0), jnp.where(stays, beta, 0), delta)[2]
        assert distance(found.delta_BxGxRxPxH, wanted) < TOLERANCE
        tokens = np.concatenate([state.conv_BxWxGxC, inputs.conv_BxMxGxC], axis=1)
        for row, count in enumerate(count_B):
            np.testing.assert_array_equal(found.conv_BxWxGxC[row], tokens[row, count : count + self.WIDTH])
        return found

    @pytest.mark.parametrize("m", [1, 2, 5, 16])
    def test_blocks_at_every_count(self, m):
        state, inputs, arguments = self.called(m, m + 1, m)
        self.check(state, inputs, arguments, list(range(m + 1)))

    @pytest.mark.parametrize("decays", [(-6.0, -4.0), (-3.0, 2.0), (-4.0, 4.0)])
    def test_prefill_at_any_count(self, decays):
        state, inputs, arguments = self.called(7, 7, 130, decays=decays)
        self.check(state, inputs, arguments, [0, 1, 63, 64, 65, 129, 130])

    def test_count_zero_keeps_every_bit(self):
        state, inputs, _ = self.called(3, 2, 5)
        zeros = jnp.asarray([0.0, -0.0], jnp.float32)[:, None, None, None]
        state = state.replace(
            delta_BxGxRxPxH=state.delta_BxGxRxPxH.at[:, :, :, 0].set(zeros), conv_BxWxGxC=-0.0 * state.conv_BxWxGxC
        )
        kept = jit_commit(state, inputs, jnp.zeros(2, jnp.int32))
        for found, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()

    def test_tokens_beyond_the_count_may_hold_anything(self):
        state, inputs, _ = self.called(4, 3, 5)
        count_B = jnp.asarray([0, 2, 4], jnp.int32)
        clean = jit_commit(state, inputs, count_B)
        beyond = (jnp.arange(5)[None] >= count_B[:, None])[:, :, None, None]
        poisoned = RecurrentInputs(
            jnp.where(beyond, jnp.nan, inputs.conv_BxMxGxC),
            jnp.where(beyond, jnp.nan, inputs.k_BxMxGxP),
            jnp.where(beyond[..., None], jnp.inf, inputs.write_BxMxGxRxH),
            jnp.where(beyond, jnp.nan, inputs.log_decay_BxMxGxR),
        )
        for found, wanted in zip(
            jax.tree.leaves(jit_commit(state, poisoned, count_B)), jax.tree.leaves(clean), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)

    @pytest.mark.parametrize("m", [16, 512])
    def test_has_no_loop_over_tokens(self, m):
        config = DeltaConfig(G, G * R, P, H, 4)
        inputs = jax.eval_shape(lambda: self.called(0, 1, m)[1])
        text = str(jax.make_jaxpr(commit)(empty_state(config, 1, jnp.float32), inputs, jnp.zeros(1, jnp.int32)))
        assert "scan" not in text and "while" not in text

    def test_state_stays_in_its_own_dtype(self):
        # Caches of bf16 models may be float32 (CPU).
        state, inputs, _ = self.called(5, 1, 2)
        inputs = inputs.replace(conv_BxMxGxC=inputs.conv_BxMxGxC.astype(jnp.bfloat16))
        assert jit_commit(state, inputs, jnp.ones(1, jnp.int32)).conv_BxWxGxC.dtype == jnp.float32


def test_convolution_is_causal_and_continues_its_past():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 9, G, 5)).astype(np.float32), rng.normal(size=(4, G, 5)).astype(np.float32)
    wanted = np.zeros_like(x)
    for t in range(9):
        for tap in range(4):  # the last tap is the token's own
            if (source := t - 3 + tap) >= 0:
                wanted[:, t] += kernel[tap] * x[:, source]
    whole = causal_conv(jnp.asarray(x), jnp.zeros((2, 3, G, 5)), jnp.asarray(kernel))
    np.testing.assert_allclose(whole, wanted, atol=1e-6)
    later = causal_conv(jnp.asarray(x[:, 6:]), jnp.asarray(x[:, 3:6]), jnp.asarray(kernel))
    np.testing.assert_allclose(later, wanted[:, 6:], atol=1e-6)


class TestStates:
    def test_are_zeros_of_the_documented_size(self):
        config = DeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
        shapes = jax.tree.leaves(abstract_state(config, 1, jnp.bfloat16))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)
        assert size == 4 * 16 * 2 * 128 * 128 + 2 * 3 * 16 * (2 * 128 + 2 * 128) == (2048 + 48) * 1024
        assert round(36 * size / 2**20, 1) == 73.7
        small = empty_state(DeltaConfig(G, G * R, P, H, 4), 5, jnp.bfloat16)
        assert small.conv_BxWxGxC.shape == (5, 3, G, 2 * P + R * H) and small.conv_BxWxGxC.dtype == jnp.bfloat16
        assert small.delta_BxGxRxPxH.shape == (5, G, R, P, H) and small.delta_BxGxRxPxH.dtype == jnp.float32
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(small))

    def test_axes_fit_the_shapes(self):
        shapes = abstract_state(DeltaConfig(G, G * R, P, H, 4), 5, jnp.float32)
        for name in ("conv_BxWxGxC", "delta_BxGxRxPxH"):
            axes, shape = getattr(STATE_AXES, name), getattr(shapes, name).shape
            assert len(axes) == len(shape)
            assert shape[axes.index("batch")] == 5 and shape[axes.index("kv_heads")] == G
