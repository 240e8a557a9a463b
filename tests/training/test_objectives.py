"""Each objective is what its definition says, its gradient that of the definition; D-PACE weights likewise."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from dflash_jax.config import ConfigError
from dflash_jax.training.objectives import (
    OBJECTIVES,
    WEIGHTINGS,
    Laws,
    LossConfig,
    default_gamma,
    dynamic_weights,
    position_weights,
)
from dflash_jax.training.step import StepConfig
from tests.training import slow_reference

AGAINST_THE_TARGET = [name for name in OBJECTIVES if name != "hard"]
V, U, SLOTS = 13, 9, 6
many = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([0.1, 1.0, 5.0, 30.0])


def case(seed, scale, vocab=V):
    """Draft logits [SLOTS, U], target logits [SLOTS, vocab], labels with some outside, target id of each draft id."""
    rng = np.random.default_rng(seed)
    label = rng.integers(-1, U, SLOTS).astype(np.int32)
    id_U = np.sort(rng.permutation(vocab)[:U])
    return scale * rng.normal(size=(SLOTS, U)), scale * rng.normal(size=(SLOTS, vocab)), label, id_U


def laws(z_xU, teacher_xV, label_x, id_U) -> Laws:
    z_xU, teacher_xV = jnp.asarray(z_xU), jnp.asarray(teacher_xV)
    teacher_xU, lse = teacher_xV[..., id_U], functools.partial(jax.nn.logsumexp, axis=-1)
    return Laws(z_xU, lse(z_xU), jnp.asarray(label_x), teacher_xU, lse(teacher_xU), lse(teacher_xV))


@functools.cache
def compiled(name):
    return jax.jit(lambda *args: OBJECTIVES[name](laws(*args)))


@functools.cache
def by_definition(name):
    one = jax.value_and_grad(functools.partial(slow_reference.slot_objective, name))
    return jax.jit(jax.vmap(one, (0, 0, None, 0)))


@pytest.mark.parametrize("name", OBJECTIVES)
@many
@hypothesis.given(seed=seeds, scale=scales)
def test_value_and_gradient_are_those_of_the_definition(name, seed, scale):
    with jax.enable_x64(True):
        z, teacher, label, ids = case(seed, scale)
        value, gradient = compiled(name)(z, teacher, label, ids)
        expected, expected_gradient = by_definition(name)(z, teacher, ids, label)
        assert value.dtype == gradient.dtype == jnp.float64
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
@many
@hypothesis.given(seed=seeds, scale=scales, shift=st.floats(-50, 50))
def test_bounds_and_invariances_in_float32(name, seed, scale, shift):
    z, teacher, label, ids = case(seed, scale)
    z, teacher = z.astype(np.float32), teacher.astype(np.float32)
    value, gradient = compiled(name)(z, teacher, label, ids)
    rounding = 1e-5 * max(1.0, scale)  # logits of size 100 are themselves known to 1e-5 only
    assert np.isfinite(value).all() and np.isfinite(gradient).all()
    assert (value >= -rounding).all()
    if name == "total_variation":
        assert (value <= 1 + rounding).all()
    # A constant added to all logits of a slot changes no law, so the gradient has no part along it.
    np.testing.assert_allclose(gradient.sum(-1), 0.0, atol=rounding)
    moved, _ = compiled(name)(z + np.float32(shift), teacher - np.float32(shift), label, ids)
    np.testing.assert_allclose(moved, value, rtol=1e-4, atol=10 * rounding)
    # Renaming the tokens renames the gradient.
    order = np.random.default_rng(seed).permutation(U)
    place = np.append(np.argsort(order), -1).astype(np.int32)  # of a label; -1 stays
    renamed, renamed_gradient = compiled(name)(z[:, order], teacher, place[label], ids[order])
    np.testing.assert_allclose(renamed, value, rtol=1e-5, atol=rounding)
    np.testing.assert_allclose(renamed_gradient, gradient[:, order], rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("name", AGAINST_THE_TARGET)
@many
@hypothesis.given(seed=seeds, scale=scales)
def test_equal_laws_cost_nothing_and_pull_nowhere(name, seed, scale):
    z, _, label, _ = case(seed, scale)
    z = z.astype(np.float32)
    value, gradient = compiled(name)(z, z, label, np.arange(U))
    np.testing.assert_allclose(value, 0.0, atol=1e-5)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


@many
@hypothesis.given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_how_the_objectives_hang_together(seed, scale):
    args = case(seed, scale)
    with jax.enable_x64(True):
        value = {name: np.asarray(compiled(name)(*args)[0]) for name in OBJECTIVES}
        whole = case(seed, scale, vocab=U)
        kl, rejected = (np.asarray(compiled(name)(*whole)[0]) for name in ("forward_kl", "total_variation"))
    np.testing.assert_allclose(value["acceptance"], -np.log1p(-value["total_variation"]), rtol=1e-9)
    assert (value["acceptance"] >= value["total_variation"]).all()
    assert (rejected <= np.sqrt(kl / 2) + 1e-12).all()  # Pinsker
    # What the target holds outside the draft vocabulary no drafter can win.
    _, teacher, _, ids = args
    p = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    assert (value["total_variation"] >= 1 - p[:, ids].sum(-1) - 1e-12).all()


@pytest.mark.parametrize("name", ["total_variation", "acceptance"])
def test_the_target_inside_the_draft_vocabulary_is_the_best_a_drafter_can_do(name):
    """q = p renormalised: nothing pulls, and the value is what lies outside; renormalised objectives say 0."""
    _, teacher, label, ids = case(4, 1.0)
    with jax.enable_x64(True):
        value, gradient = compiled(name)(teacher[:, ids], teacher, label, ids)
        zero, _ = compiled("reverse_kl")(teacher[:, ids], teacher, label, ids)
    p = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    outside = 1 - p[:, ids].sum(-1)
    np.testing.assert_allclose(value, outside if name == "total_variation" else -np.log1p(-outside), rtol=1e-10)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-12)
    np.testing.assert_allclose(zero, 0.0, atol=1e-12)


def test_laws_that_share_nothing_still_pull():
    """With 200 nats between them the shared mass is 0 in float32: total variation is flat, acceptance is not."""
    z = np.zeros((1, U), np.float32)
    teacher = np.zeros((1, U), np.float32)
    z[0, 0], teacher[0, 1] = 200.0, 200.0
    args = (z, teacher, np.zeros(1, np.int32), np.arange(U))
    flat, no_pull = compiled("total_variation")(*args)
    value, pull = compiled("acceptance")(*args)
    np.testing.assert_allclose(flat, 1.0)
    np.testing.assert_array_equal(no_pull, 0.0)
    assert np.isfinite(value).all() and value[0] > 190
    assert pull[0, 0] > 0.1 and pull[0, 1] < -0.1


def test_a_label_outside_the_draft_vocabulary_has_no_likelihood():
    z, teacher, _, ids = case(0, 1.0)
    value, gradient = compiled("hard")(z, teacher, np.full(SLOTS, -1, np.int32), ids)
    assert (value == 0).all() and (gradient == 0).all()


# Weights.


weights_of = jax.jit(dynamic_weights, static_argnums=0)


def dynamic(kind, alpha, probability, counts):
    return np.asarray(weights_of(LossConfig("hard", kind, dpace_alpha=alpha), jnp.asarray(probability), counts))


@pytest.mark.parametrize("kind", ["dpace", "dpace_confidence", "dpace_continuation"])
@many
@hypothesis.given(seed=seeds, alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]), num_slots=st.sampled_from([1, 2, 7, 15]))
def test_dynamic_weights_are_those_of_the_loops(kind, alpha, seed, num_slots):
    rng = np.random.default_rng(seed)
    probability = rng.random((4, num_slots)) * (rng.random((4, num_slots)) < 0.8)  # some exactly 0
    counts = rng.random((4, num_slots)) < 0.8
    with jax.enable_x64(True):
        weight = dynamic(kind, alpha, probability, jnp.asarray(counts))
        hidden = np.where(counts, probability, rng.random((4, num_slots)))
        np.testing.assert_array_equal(weight, dynamic(kind, alpha, hidden, jnp.asarray(counts)))
    config = LossConfig("hard", kind, dpace_alpha=alpha)
    for row in range(4):
        expected = slow_reference.slot_weights(config, probability[row].tolist(), counts[row].tolist())
        np.testing.assert_allclose(weight[row], expected, rtol=1e-5, atol=1e-6)
    assert (weight[~counts] == 0).all() and (weight >= 0).all()
    left = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    assert (weight <= np.where(counts, left, 0) + 1e-5).all()
    if kind != "dpace_continuation":
        assert (np.diff(np.where(counts, weight, np.nan), axis=1)[counts[:, 1:] & counts[:, :-1]] <= 1e-6).all()


def test_dpace_at_alpha_1_counts_the_slots_left():
    counts = jnp.asarray([[True, True, False, True, True]])
    np.testing.assert_allclose(dynamic("dpace", 1.0, np.zeros((1, 5)), counts), [[4, 3, 0, 2, 1]])
    np.testing.assert_allclose(dynamic("dpace_confidence", 1.0, np.zeros((1, 5)), counts), [[1, 1, 0, 1, 1]])


@many
@hypothesis.given(seed=seeds)
def test_dpace_at_alpha_0_follows_the_expected_number_of_accepted_drafts(seed):
    """Its gradient is that of minus sum_m prod_{i <= m} q_i, and that of nothing else: weights are constants."""
    rng = np.random.default_rng(seed)
    config = LossConfig("hard", "dpace", dpace_alpha=0.0)
    counts = jnp.ones((2, 5), bool)
    with jax.enable_x64(True):
        z = jnp.asarray(rng.normal(size=(2, 5, 7)) * 2)
        label = jnp.asarray(rng.integers(0, 7, (2, 5)))

        def log_q(z):
            return jnp.take_along_axis(jax.nn.log_softmax(z), label[..., None], -1)[..., 0]

        def dpace(z):
            return -jnp.sum(dynamic_weights(config, jnp.exp(log_q(z)), counts) * log_q(z))

        def accepted(z):
            return jnp.sum(jnp.cumprod(jnp.exp(log_q(z)), axis=-1))

        np.testing.assert_allclose(jax.grad(dpace)(z), -jax.grad(accepted)(z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4), (10, 5), (16, 7), (6, 3), (13, 6), (2, 1), (22, 9)])
def test_gamma_goes_by_the_block_size_unless_it_is_given(block_size, gamma):
    assert default_gamma(block_size) == gamma
    by_default = position_weights(LossConfig("hard"), block_size)
    np.testing.assert_allclose(by_default, np.exp(-np.arange(block_size - 1) / gamma), rtol=1e-6)
    np.testing.assert_array_equal(by_default, position_weights(LossConfig("hard", gamma=float(gamma)), block_size))


@pytest.mark.parametrize("weighting", [w for w in WEIGHTINGS if w != "decay"])
def test_other_weightings_have_no_decay(weighting):
    np.testing.assert_array_equal(position_weights(LossConfig("hard", weighting, gamma=2.0), 6), np.ones(5))


# The configuration.


def test_one_spelling_whatever_the_order_and_the_zeros():
    section = ConfigDict({"objective": {"hard": 0.1, "forward_kl": 0.9, "acceptance": 0.0}, "gamma": 4.0})
    config = LossConfig.of(section)
    assert config == LossConfig((("forward_kl", 0.9), ("hard", 0.1)), gamma=4.0)
    assert hash(config) == hash(LossConfig({"hard": 0.1, "forward_kl": 0.9}, gamma=4.0))
    assert config.needs_target and not config.needs_whole_law and not config.is_dynamic
    assert LossConfig("acceptance").needs_whole_law and not LossConfig("hard").needs_target
    assert LossConfig("hard", "dpace").is_dynamic


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"objective": {"hard": 0.0}}, "nothing would be learned"),
        ({"objective": {"hard": -1.0}}, r"loss.objective.hard is -1.0"),
        ({"objective": {"hard": float("nan")}}, r"loss.objective.hard is nan"),
        ({"objective": "jensen"}, "loss.objective names 'jensen', must be one of hard, forward_kl"),
        ({"weighting": "linear"}, "loss.weighting is 'linear', must be one of uniform, decay, dpace"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"dpace_alpha": 1.5}, "dpace_alpha is 1.5"),
        ({"chunk_slots": 0}, "chunk_slots is 0"),
        ({"teacher_dtype": "float16"}, "teacher_dtype is 'float16'"),
        ({"hard_weight": 0.1}, r"loss.hard_weight = 0.1 is now loss.objective = \{'hard': 0.1\}"),
        ({"soft_weight": 0.9}, r"loss.soft_weight = 0.9 is now loss.objective = \{'forward_kl': 0.9\}"),
        ({"speed": 1}, "loss has no field 'speed'"),
    ],
)
def test_bad_loss_sections_are_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        StepConfig.of({"num_anchors": 4}, ConfigDict(section), 4)
