"""The chunked loss: equal to the dense one, whatever the chunks, and much smaller."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.training.losses import HeadMath, Markov, block_loss
from dflash_jax.training.objectives import OBJECTIVES, LossConfig
from tests.training import slow_reference

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


def dense(math, hidden, teacher, head, label, counts, weight, whole_head=None, markov=None):
    """All logits at once, each objective by its definition, loss and gradient by autodiff."""
    raw = jnp.einsum("bajd,du->baju", hidden.astype(jnp.float32), head.astype(jnp.float32))
    if markov is not None:
        raw += jnp.einsum("bajr,ru->baju", markov.before_BxAxJxR, markov.columns_RxU)
    raw *= math.output_multiplier
    z = raw if math.softcap is None else math.softcap * jnp.tanh(raw / math.softcap)
    whole_head = head if whole_head is None else whole_head
    t = jnp.einsum("bajd,du->baju", teacher.astype(jnp.float32), whole_head.astype(jnp.float32))
    t = t if math.teacher_softcap is None else math.teacher_softcap * jnp.tanh(t / math.teacher_softcap)
    ids = jnp.arange(head.shape[1])  # the draft vocabulary is the first part of the target's

    def slots(name):
        one = functools.partial(slow_reference.slot_objective, name)
        return jax.vmap(one, (0, 0, None, 0))(
            z.reshape(-1, z.shape[-1]), t.reshape(-1, t.shape[-1]), ids, label.reshape(-1)
        )

    weight = jnp.where(counts, weight, 0.0).reshape(-1)
    values = {name: jnp.sum(weight * slots(name)) for name in ("hard", *dict(math.config.objective))}
    return sum(c * values[name] for name, c in math.config.objective), (values, jnp.argmax(z, -1))


@functools.partial(jax.jit, static_argnums=0)
def chunked_with_grad(math, *args):
    def total(hidden, *rest):
        sums = block_loss(math, hidden, *rest)
        return sums.loss, sums

    return jax.value_and_grad(total, has_aux=True)(*args)


@functools.partial(jax.jit, static_argnums=0)
def dense_with_grad(math, *args):
    return jax.value_and_grad(functools.partial(dense, math), has_aux=True)(*args)


MIXTURE = {"hard": 0.3, "forward_kl": 0.7}
MIXED = HeadMath(LossConfig(MIXTURE), output_multiplier=0.8, softcap=3.0, teacher_softcap=5.0)


def assert_chunked_is_dense(math, args):
    (value, sums), grad = chunked_with_grad(math, *args)
    (expected, (values, best)), expected_grad = dense_with_grad(math, *args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=2e-6)
    assert set(sums.objective) == set(values)
    for name, total in values.items():
        np.testing.assert_allclose(sums.objective[name], total, rtol=1e-5, err_msg=name)
    label, counts, weight = args[3:6]
    np.testing.assert_array_equal(sums.correct_J, ((best == label) & counts).sum((0, 1)))
    np.testing.assert_array_equal(sums.count_J, counts.sum((0, 1)))
    np.testing.assert_allclose(sums.denominator, jnp.where(counts, weight, 0).sum(), rtol=1e-6)


@pytest.mark.parametrize("chunk_anchors", [1, 2, 7, A])
def test_b92_chunked_equals_dense(chunk_anchors):
    config = dataclasses.replace(MIXED.config, chunk_slots=chunk_anchors * B * J)
    assert_chunked_is_dense(dataclasses.replace(MIXED, config=config), inputs())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_b92_chunked_equals_dense_for_each_objective(objective):
    math = dataclasses.replace(MIXED, config=LossConfig(objective, chunk_slots=3 * B * J))
    assert_chunked_is_dense(math, inputs())


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "total_variation", "acceptance"])
def test_each_objective_on_a_part_of_the_targets_vocabulary(objective):
    """The definitions of the reference are over the whole vocabulary; 60 tokens more than the drafter has."""
    args = inputs()
    more = jnp.asarray(np.random.default_rng(1).normal(size=(D, 60)), jnp.float32)
    whole = jnp.concatenate([args[2], more], axis=1)
    math = HeadMath(LossConfig(objective, chunk_slots=2 * B * J), teacher_softcap=5.0)
    assert_chunked_is_dense(math, (*args, whole))
    # What serving accepts is not what renormalising over the draft vocabulary would say.
    (part, _), _ = chunked_with_grad(math, *args)
    (true, _), _ = chunked_with_grad(math, *args, whole)
    assert (part != true) == (objective in ("total_variation", "acceptance"))


@pytest.mark.parametrize("chunk_anchors", [2, A])
def test_a_markov_heads_bias_and_its_gradients_equal_the_dense_ones(chunk_anchors):
    rng, args = np.random.default_rng(2), inputs()
    markov = Markov(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, A, J, 4), (4, U))))
    config = LossConfig(MIXTURE, chunk_slots=chunk_anchors * B * J)
    math = dataclasses.replace(MIXED, config=config)

    def chunked(hidden, markov):
        return block_loss(math, hidden, *args[1:], markov=markov).loss

    def whole(hidden, markov):
        return dense(math, hidden, *args[1:], markov=markov)[0]

    (value, grads), (expected, expected_grads) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(args[0], markov) for f in (chunked, whole)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert jnp.abs(theirs).max() > 1e-2
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_b92_chunked_equals_dense_in_bfloat16():
    math = dataclasses.replace(MIXED, config=LossConfig(MIXTURE, chunk_slots=12, teacher_dtype="bfloat16"))
    args = inputs(jnp.bfloat16)
    (value, _), grad = chunked_with_grad(math, *args)
    (expected, _), expected_grad = dense_with_grad(math, *args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # logits, laws and sums are float32
    scale = np.abs(np.asarray(expected_grad, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(grad, np.float32) / scale, np.asarray(expected_grad, np.float32) / scale, atol=2e-2
    )


def test_without_gradient_the_sums_are_the_same():
    args = inputs()
    (_, sums), _ = chunked_with_grad(MIXED, *args)
    plain = jax.jit(functools.partial(block_loss, MIXED))(*args)
    for name in ("loss", "weight", "label_weight", "denominator", "correct_J", "agree_J", "chain", "blocks"):
        np.testing.assert_allclose(getattr(plain, name), getattr(sums, name), rtol=1e-6, err_msg=name)
    for name in MIXTURE:
        np.testing.assert_allclose(plain.objective[name], sums.objective[name], rtol=1e-6, err_msg=name)


def test_denominators_and_chain():
    hidden, teacher, head, label, counts, weight = inputs()
    z = jnp.einsum("bajd,du->baju", hidden, head)
    label = jnp.argmax(z, -1).astype(jnp.int32).at[0, 0, 1].set(-1)
    counts = jnp.ones_like(counts).at[1, 0, 2].set(False).at[1, 8].set(False)
    (_, sums), _ = chunked_with_grad(HeadMath(LossConfig("hard")), hidden, teacher, head, label, counts, weight)
    # All 18 blocks are right throughout but three: one stops at a label outside the draft vocabulary, one at the end
    # of the answer, and one is padding.
    assert sums.chain == 15 * 3 + 1 + 2 and sums.blocks == 17
    total = np.where(counts, weight, 0).sum()
    np.testing.assert_allclose(sums.denominator, total, rtol=1e-6)
    np.testing.assert_allclose(sums.label_weight, total - weight[0, 0, 1], rtol=1e-6)


def test_agreement_counts_the_targets_first_choice():
    hidden, _, head, label, counts, weight = inputs()
    (_, sums), _ = chunked_with_grad(HeadMath(LossConfig("forward_kl")), hidden, hidden, head, label, counts, weight)
    np.testing.assert_array_equal(sums.agree_J, counts.sum((0, 1)))
    np.testing.assert_allclose(sums.objective["forward_kl"], 0.0, atol=1e-4)


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
    math = HeadMath(LossConfig(MIXTURE, chunk_slots=60))
    chunked = chunked_with_grad.lower(math, *args).compile().memory_analysis().temp_size_in_bytes
    whole = dense_with_grad.lower(math, *args).compile().memory_analysis().temp_size_in_bytes
    assert chunked < whole / 8


def test_soft_labels_without_the_targets_states_are_refused():
    hidden, _, head, label, counts, weight = inputs()
    with pytest.raises(ConfigError, match=r"loss\.objective has forward_kl, which needs the target"):
        block_loss(MIXED, hidden, None, head, label, counts, weight)
