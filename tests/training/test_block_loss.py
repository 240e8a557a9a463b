"""The batched training loss against the slow reference, and what its gradient may touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.config import FULL, ConfigError
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.training.anchors import sample_anchors
from dflash_jax.training.block_forward import block_forward
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.step import Frozen, StepConfig, make_loss
from tests.training import slow_reference, toy

KEY = jax.random.key(5)
MIXTURE = {"hard": 0.3, "forward_kl": 0.7}
CONFIG = toy.drafter_config()
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
TARGET_CONFIG = toy.target_config()
DRAFT_IDS = np.sort(np.random.default_rng(3).permutation(toy.VOCAB)[:29]).astype(np.int32)


def frozen(pruned: bool) -> Frozen:
    rng = np.random.default_rng(1)
    table = rng.normal(size=(toy.VOCAB, toy.HIDDEN)).astype(np.float32)
    head = rng.normal(size=(toy.HIDDEN, toy.VOCAB)).astype(np.float32)
    if not pruned:
        return Frozen(SharedWeights(jnp.asarray(table), jnp.asarray(head)))
    inverse = np.full(toy.VOCAB, -1, np.int32)
    inverse[DRAFT_IDS] = np.arange(len(DRAFT_IDS))
    shared = SharedWeights(jnp.asarray(table), jnp.asarray(head[:, DRAFT_IDS]), jnp.asarray(DRAFT_IDS))
    return Frozen(shared, jnp.asarray(inverse), whole_head_DxV=jnp.asarray(head))


@functools.cache
def loss_and_grad(
    loss_config: LossConfig, num_anchors: int = 5, softcap: float | None = None, graphdef=GRAPHDEF, config=CONFIG
):
    step = StepConfig(num_anchors, config.block_size, loss_config)
    loss = make_loss(step, graphdef, config, toy.target_config(final_logit_softcap=softcap))

    def total(params, frozen, batch):
        sums = loss(params, KEY, frozen, batch)
        return sums.loss, sums

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def chosen_anchors(batch, num_anchors):
    anchor, keep = sample_anchors(
        KEY, *(jnp.asarray(batch[n]) for n in ("epoch_B", "id_B", "loss_mask_BxS", "length_B")), num_anchors
    )
    return {row: np.asarray(anchor[row])[np.asarray(keep[row])].tolist() for row in range(len(anchor))}


def assert_trees_close(ours, theirs, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-3)
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("pruned", "loss_config", "softcap"),
    [
        (True, LossConfig(MIXTURE, gamma=2.0, chunk_slots=30), 4.0),
        (False, LossConfig("hard", "uniform", chunk_slots=1), None),
        (True, LossConfig({"acceptance": 1.0, "reverse_kl": 0.5}, "dpace", dpace_alpha=0.3, chunk_slots=6), 4.0),
        (True, LossConfig({"total_variation": 2.0, "hard": 0.5}, "dpace_confidence", chunk_slots=1), None),
        (False, LossConfig({"acceptance": 1.0, "forward_kl": 1.0}, "dpace_continuation", dpace_alpha=0.0), None),
    ],
    ids=["pruned-mixture-decay", "hard-uniform", "pruned-acceptance-dpace", "pruned-tv-confidence", "continuation"],
)
def test_loss_and_gradient_equal_the_slow_reference(pruned, loss_config, softcap):
    batch = toy.batch(rows=2)
    held = frozen(pruned)
    (value, sums), grads = loss_and_grad(loss_config, 2, softcap)(PARAMS, held, toy.feed(batch))
    anchors = chosen_anchors(batch, 2)
    assert [len(a) for a in anchors.values()] == [2, 2]
    expected, denominator, expected_grads = slow_reference.loss_and_gradient(
        GRAPHDEF, PARAMS, held.shared, frozen(False).shared.head_DxV, batch, anchors, CONFIG.block_size, loss_config,
        held.target_to_draft_V, softcap,
    )  # fmt: skip
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(sums.denominator, denominator, rtol=1e-6)
    assert_trees_close(grads, expected_grads, 1e-5)


@pytest.mark.parametrize(
    ("fields", "loss_config", "learn"),
    [
        (
            {"hidden_size": 8, "target_hidden_size": toy.HIDDEN},
            LossConfig(MIXTURE, gamma=2.0),
            ("embed_projection_ExD", "head_projection_DxE"),
        ),
        (
            {"markov_rank": 5, "output_multiplier": 0.7, "final_logit_softcap": 6.0},
            LossConfig(MIXTURE, "dpace", chunk_slots=6),
            ("w1_VxR", "w2_VxR"),
        ),
    ],
    ids=["projections", "markov"],
)
def test_a_drafter_with_modules_of_its_own_equals_the_slow_reference(fields, loss_config, learn):
    config = toy.drafter_config(**fields)
    graphdef, params = toy.drafter(config)
    batch, held = toy.batch(rows=2), frozen(True)
    (value, _), grads = loss_and_grad(loss_config, 2, None, graphdef, config)(params, held, toy.feed(batch))
    expected, _, expected_grads = slow_reference.loss_and_gradient(
        graphdef, params, held.shared, frozen(False).shared.head_DxV, batch, chosen_anchors(batch, 2),
        config.block_size, loss_config, held.target_to_draft_V,
    )  # fmt: skip
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_trees_close(grads, expected_grads, 1e-5)
    by_name = {path[-1]: x.get_value() for path, x in nnx.to_flat_state(grads)}
    assert all(jnp.abs(by_name[name]).max() > 0 for name in learn)
    if config.markov_rank:
        assert not by_name["w2_VxR"][np.setdiff1d(np.arange(toy.VOCAB), DRAFT_IDS)].any()


def test_gradients_of_a_markov_heads_rows_are_summed_in_float32():
    """Half of the text is one token: summed in bfloat16 the gradient of its row stalls at a fraction."""
    config = toy.drafter_config(markov_rank=5)
    graphdef, params = toy.drafter(config)
    batch = toy.batch(rows=8, length=80, starts=(2,) * 8, ends=(80,) * 8)
    batch["tokens_BxS"][:, ::2] = 7
    held, fed, gradients = frozen(False), toy.feed(batch), []
    for dtype in ("float32", "bfloat16"):
        step = StepConfig(60, config.block_size, LossConfig("hard", "uniform", chunk_slots=2000), compute_dtype=dtype)
        loss = make_loss(step, graphdef, config, toy.target_config())
        grads = jax.jit(jax.grad(lambda params, loss=loss: loss(params, KEY, held, fed).loss))(params)
        gradients.append(np.asarray(grads["markov"]["w1_VxR"][...]))
    exact, rounded = gradients
    assert np.abs(exact[7]).max() > 5 * np.abs(np.delete(exact, 7, 0)).max()
    np.testing.assert_allclose(rounded[7], exact[7], atol=0.03 * np.abs(exact[7]).max())


def test_a_loss_that_needs_the_whole_head_of_a_pruned_vocabulary_says_so():
    held = frozen(True).replace(whole_head_DxV=None)
    with pytest.raises(ConfigError, match=r"'acceptance': 1.0.*pass Frozen.whole_head_DxV"):
        loss_and_grad(LossConfig("acceptance"))(PARAMS, held, toy.feed(toy.batch(rows=2)))


def one_block_loss(taps_SxTD, token_S, anchors, which, table_VxD=None):
    """Sum of squares of one block's states among several; differentiable in the features and the table."""
    held = frozen(False)
    shared = held.shared if table_VxD is None else held.shared.replace(embedding_VxD=table_VxD)
    keep = jnp.ones((1, len(anchors)), bool)
    hidden = block_forward(
        nnx.merge(GRAPHDEF, PARAMS), shared, token_S[None], taps_SxTD[None], jnp.asarray([anchors]), keep, 4
    )
    return jnp.sum(jnp.square(hidden[0, which, 1:] * jnp.arange(1.0, 17.0)[None]))


def test_b66_a_block_depends_on_nothing_at_or_behind_its_anchor_nor_on_other_blocks():
    rng = np.random.default_rng(0)
    taps = jnp.asarray(rng.normal(size=(12, 2 * toy.HIDDEN)), jnp.float32)
    token = jnp.asarray([*range(20, 25), 7, 26, 9, *range(28, 32)], jnp.int32)  # anchors 5 and 7: tokens 7 and 9
    table = frozen(False).shared.embedding_VxD
    gradient = jax.jit(jax.grad(one_block_loss, argnums=(0, 4)), static_argnums=(2, 3))
    for which, anchor in enumerate((5, 7)):
        by_feature, by_table = gradient(taps, token, (5, 7), which, table)
        touched = np.abs(by_feature).max(axis=1)
        assert (touched[:anchor] > 0).all() and (touched[anchor:] == 0).all()
        read = np.flatnonzero(np.abs(by_table).max(axis=1))
        assert read.tolist() == sorted([toy.MASK, int(token[anchor])])


def test_b66_the_loss_of_a_block_is_the_same_among_others():
    batch = toy.batch(rows=1, length=80, starts=(4,), ends=(80,))
    taps, token = jnp.asarray(batch["taps_BxSxTD"][0]), jnp.asarray(batch["tokens_BxS"][0])
    value = jax.jit(one_block_loss, static_argnums=(2, 3))
    alone = value(taps, token, (30,), 0)
    many = value(taps, token, tuple(range(10, 75)), 20)
    np.testing.assert_allclose(many, alone, rtol=1e-6)


def test_b70_a_row_without_anchors_adds_nothing():
    batch = toy.batch(rows=2, starts=(24, 2), ends=(24, 17))
    run = loss_and_grad(LossConfig(MIXTURE, chunk_slots=8))
    (value, sums), grads = run(PARAMS, frozen(True), toy.feed(batch))
    (alone, alone_sums), alone_grads = run(PARAMS, frozen(True), toy.feed({k: x[1:] for k, x in batch.items()}))
    assert np.isfinite(value)
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    np.testing.assert_allclose(sums.denominator, alone_sums.denominator, rtol=1e-6)
    assert_trees_close(grads, alone_grads, 1e-6)


def test_b70_an_empty_batch_has_no_loss_and_no_gradient():
    batch = toy.batch(rows=2, starts=(24, 24), ends=(24, 24))
    (value, sums), grads = loss_and_grad(LossConfig(MIXTURE, chunk_slots=8))(PARAMS, frozen(True), toy.feed(batch))
    assert value == 0 and sums.denominator == 0
    assert all((x == 0).all() for x in jax.tree.leaves(grads))


def test_features_computed_in_the_step_equal_cached_ones():
    from dflash_jax.models.whole_rows import forward_rows

    target = toy.target()
    batch = toy.feed(toy.batch(features=False))
    step = StepConfig(4, CONFIG.block_size, LossConfig(MIXTURE))
    loss = jax.jit(make_loss(step, GRAPHDEF, CONFIG, target.config, target.graphdef))
    result = forward_rows(nnx.merge(target.graphdef, target.params), batch["tokens_BxS"], CONFIG.target_layer_ids)
    cached = batch | {"taps_BxSxTD": result.taps_BxMxTD, "hidden_BxSxD": result.hidden_BxMxD}
    held = frozen(False)
    online = loss(PARAMS, KEY, held.replace(target=target.params), batch)
    offline = loss(PARAMS, KEY, held, cached)
    np.testing.assert_allclose(online.loss, offline.loss, rtol=1e-6)


def test_a_wide_window_and_two_sided_layers_equal_full_attention():
    batch = toy.feed(toy.batch())
    anchor, keep = jnp.asarray([[6, 9], [3, 8], [11, 15]]), jnp.ones((3, 2), bool)

    def run(config):
        graphdef = toy.drafter(config)[0]
        return block_forward(
            nnx.merge(graphdef, PARAMS),
            frozen(False).shared,
            batch["tokens_BxS"],
            batch["taps_BxSxTD"],
            anchor,
            keep,
            4,
        )

    wide = run(toy.drafter_config(sliding_window=1000, causal=False))
    full = run(toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None))
    np.testing.assert_allclose(wide, full, atol=1e-6)


def test_b72_blocks_of_packed_documents_equal_blocks_of_each_alone():
    first, second = 10, 14
    batch = toy.feed(toy.batch(rows=1))
    token, taps = batch["tokens_BxS"], batch["taps_BxSxTD"]
    position = jnp.concatenate([jnp.arange(first), jnp.arange(second)])[None]
    document = jnp.concatenate([jnp.zeros(first, jnp.int32), jnp.ones(second, jnp.int32)])[None]

    @jax.jit
    def run(token, taps, anchor, position, document):
        drafter = nnx.merge(GRAPHDEF, PARAMS)
        keep = jnp.ones(anchor.shape, bool)
        return block_forward(drafter, frozen(False).shared, token, taps, anchor, keep, 4, position, document)

    anchor = jnp.asarray([[3, 8, first, first + 1, first + 9]])
    packed = run(token, taps, anchor, position, document)
    one = run(token[:, :first], taps[:, :first], jnp.asarray([[3, 8]]), position[:, :first], document[:, :first])
    two = run(token[:, first:], taps[:, first:], jnp.asarray([[0, 1, 9]]), position[:, first:], document[:, first:])
    np.testing.assert_allclose(packed[:, :2], one, atol=1e-5)
    np.testing.assert_allclose(packed[:, 2:], two, atol=1e-5)
    # And nothing of the first document, whatever it holds, reaches a block of the second.
    other = run(token, taps.at[:, :first].mul(-3.0), anchor, position, document)
    np.testing.assert_array_equal(other[:, 2:], packed[:, 2:])
    assert not np.array_equal(other[:, :2], packed[:, :2])
