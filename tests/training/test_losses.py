"""The chunked loss: equal to the dense one, whatever the chunks, and much smaller."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.training.losses import HeadMath, LossConfig, block_loss

B, A, J, D, U = 2, 9, 3, 8, 40


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, A, J, D)), dtype)
    teacher = jnp.asarray(rng.normal(size=(B, A, J, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, U)), dtype)
    label = rng.integers(0, U, (B, A, J)).astype(np.int32)
    label[0, 2, 1] = label[1, 4, 0] = -1  # outside the draft vocabulary
    counts = rng.random((B, A, J)) < 0.7
    counts[0, 6:] = False  # padding blocks at the end of a row
    weight = np.broadcast_to(np.exp(-np.arange(J) / 2.0), (B, A, J)).astype(np.float32)
    return hidden, teacher, head, jnp.asarray(label), jnp.asarray(counts), jnp.asarray(weight)


def dense(math, hidden, teacher, head, label, counts, weight):
    """All logits at once, loss and gradient by autodiff."""
    raw = jnp.einsum("bajd,du->baju", hidden.astype(jnp.float32), head.astype(jnp.float32)) * math.output_multiplier
    z = raw if math.softcap is None else math.softcap * jnp.tanh(raw / math.softcap)
    t = jnp.einsum("bajd,du->baju", teacher.astype(jnp.float32), head.astype(jnp.float32))
    t = t if math.teacher_softcap is None else math.teacher_softcap * jnp.tanh(t / math.teacher_softcap)
    log_q, log_p = jax.nn.log_softmax(z), jax.nn.log_softmax(t)
    weight = jnp.where(counts, weight, 0.0)
    picked = -jnp.take_along_axis(log_q, jnp.maximum(label, 0)[..., None], -1)[..., 0]
    hard = jnp.sum(weight * jnp.where(label >= 0, picked, 0.0))
    soft = jnp.sum(weight * jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1))
    return math.config.hard_weight * hard + math.config.soft_weight * soft, (hard, soft, jnp.argmax(z, -1))


@functools.partial(jax.jit, static_argnums=0)
def chunked_with_grad(math, *args):
    def total(hidden, *rest):
        sums = block_loss(math, hidden, *rest)
        return sums.loss, sums

    return jax.value_and_grad(total, has_aux=True)(*args)


@functools.partial(jax.jit, static_argnums=0)
def dense_with_grad(math, *args):
    return jax.value_and_grad(functools.partial(dense, math), has_aux=True)(*args)


MIXED = HeadMath(LossConfig(0.3, 0.7), output_multiplier=0.8, softcap=3.0, teacher_softcap=5.0)


@pytest.mark.parametrize("chunk_anchors", [1, 2, 7, A])
@pytest.mark.parametrize(
    "math",
    [MIXED, HeadMath(LossConfig(1.0, 0.0)), HeadMath(LossConfig(0.0, 1.0))],
    ids=["both-capped", "hard", "soft"],
)
def test_b92_chunked_equals_dense(math, chunk_anchors):
    math = dataclasses.replace(math, config=dataclasses.replace(math.config, chunk_slots=chunk_anchors * B * J))
    args = inputs()
    (value, sums), grad = chunked_with_grad(math, *args)
    (expected, (hard, soft, best)), expected_grad = dense_with_grad(math, *args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums.hard, hard, rtol=1e-5)
    if math.config.soft_weight:
        np.testing.assert_allclose(sums.soft, soft, rtol=1e-5)
    label, counts = args[3], args[4]
    np.testing.assert_array_equal(sums.correct_J, ((best == label) & counts).sum((0, 1)))
    np.testing.assert_array_equal(sums.count_J, counts.sum((0, 1)))


def test_b92_chunked_equals_dense_in_bfloat16():
    math = dataclasses.replace(MIXED, config=LossConfig(0.3, 0.7, chunk_slots=12, teacher_dtype="bfloat16"))
    args = inputs(jnp.bfloat16)
    (value, _), grad = chunked_with_grad(math, *args)
    (expected, _), expected_grad = dense_with_grad(math, *args)
    np.testing.assert_allclose(value, expected, rtol=2e-2)
    scale = np.abs(np.asarray(expected_grad, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(grad, np.float32) / scale, np.asarray(expected_grad, np.float32) / scale, atol=2e-2
    )


def test_without_gradient_the_sums_are_the_same():
    args = inputs()
    (_, sums), _ = chunked_with_grad(MIXED, *args)
    plain = jax.jit(functools.partial(block_loss, MIXED))(*args)
    for name in ("loss", "hard", "soft", "denominator", "correct_J", "agree_J", "chain", "blocks"):
        np.testing.assert_allclose(getattr(plain, name), getattr(sums, name), rtol=1e-6, err_msg=name)


def test_denominators_and_chain():
    hidden, teacher, head, label, counts, weight = inputs()
    z = jnp.einsum("bajd,du->baju", hidden, head)
    label = jnp.argmax(z, -1).astype(jnp.int32).at[0, 0, 1].set(-1)
    counts = jnp.ones_like(counts).at[1, 0, 2].set(False).at[1, 8].set(False)
    (_, sums), _ = chunked_with_grad(HeadMath(LossConfig(1.0, 0.0)), hidden, teacher, head, label, counts, weight)
    # All 18 blocks are right throughout but three: one stops at a label outside the draft vocabulary, one at the end
    # of the answer, and one is padding.
    assert sums.chain == 15 * 3 + 1 + 2 and sums.blocks == 17
    total = np.where(counts, weight, 0).sum()
    np.testing.assert_allclose(sums.denominator, total, rtol=1e-6)
    np.testing.assert_allclose(sums.hard_denominator, total - weight[0, 0, 1], rtol=1e-6)


def test_agreement_counts_the_targets_first_choice():
    hidden, _, head, label, counts, weight = inputs()
    (_, sums), _ = chunked_with_grad(HeadMath(LossConfig(0.0, 1.0)), hidden, hidden, head, label, counts, weight)
    np.testing.assert_array_equal(sums.agree_J, counts.sum((0, 1)))
    np.testing.assert_allclose(sums.soft, 0.0, atol=1e-4)


def test_nothing_supervised_gives_zeros():
    hidden, teacher, head, label, counts, weight = inputs()
    (value, sums), grad = chunked_with_grad(MIXED, hidden, teacher, head, label, jnp.zeros_like(counts), weight)
    assert value == 0 and sums.denominator == 0 and sums.blocks == 0 and (grad == 0).all()


def test_b92_memory_is_a_small_part_of_the_dense_loss():
    anchors, slots, width, vocab = 64, 15, 64, 150_000
    spec = jax.ShapeDtypeStruct
    args = (
        spec((2, anchors, slots, width), jnp.float32), spec((2, anchors, slots, width), jnp.float32),
        spec((width, vocab), jnp.float32), spec((2, anchors, slots), jnp.int32), spec((2, anchors, slots), bool),
        spec((2, anchors, slots), jnp.float32),
    )  # fmt: skip
    math = HeadMath(LossConfig(0.3, 0.7, chunk_slots=60))
    chunked = chunked_with_grad.lower(math, *args).compile().memory_analysis().temp_size_in_bytes
    whole = dense_with_grad.lower(math, *args).compile().memory_analysis().temp_size_in_bytes
    assert chunked < whole / 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hard_weight": 0.0, "soft_weight": 0.0}, "both 0"),
        ({"hard_weight": -1.0}, "hard_weight is -1.0"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"chunk_slots": 0}, "chunk_slots is 0"),
        ({"teacher_dtype": "float16"}, "teacher_dtype is 'float16'"),
    ],
)
def test_bad_loss_configurations_are_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**fields)


def test_soft_labels_without_the_targets_states_are_refused():
    hidden, _, head, label, counts, weight = inputs()
    with pytest.raises(ConfigError, match="soft_weight"):
        block_loss(MIXED, hidden, None, head, label, counts, weight)
