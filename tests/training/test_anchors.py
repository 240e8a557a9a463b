"""Where blocks start and what their slots must predict."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.training.anchors import sample_anchors, slot_labels, valid_anchors

KEY = jax.random.key(11)
sample = jax.jit(sample_anchors, static_argnums=5)


def rows(mask, length=None):
    mask = np.atleast_2d(np.asarray(mask, bool))
    length = np.full(len(mask), mask.shape[1]) if length is None else np.asarray(length)
    return jnp.asarray(mask), jnp.asarray(length, jnp.int32)


def between(size, start, end):
    return np.isin(np.arange(size), np.arange(start, end))


def draw(mask, length, num_anchors, ids=None, epoch=0, key=KEY):
    ids = np.arange(mask.shape[0]) if ids is None else np.asarray(ids)
    epoch = jnp.full(mask.shape[0], epoch, jnp.int32)
    return sample(key, epoch, jnp.asarray(ids, jnp.int32), mask, length, num_anchors)


def test_b65_labels_are_those_of_the_same_position():
    token = jnp.arange(100, 120, dtype=jnp.int32)[None]
    label, counts = slot_labels(
        token, jnp.ones((1, 20), bool), jnp.asarray([20]), jnp.asarray([[7]]), jnp.ones((1, 1), bool), 4
    )
    assert label.tolist() == [[[108, 109, 110]]]
    assert counts.all()


def test_b69_valid_anchors_reach_the_end_of_the_answer():
    mask, length = rows(between(12, 5, 12))
    assert np.flatnonzero(valid_anchors(mask, length)[0]).tolist() == [5, 6, 7, 8, 9, 10]
    anchor, keep = draw(mask, length, 6)
    assert anchor.tolist() == [[5, 6, 7, 8, 9, 10]] and keep.all()
    token = jnp.arange(100, 112, dtype=jnp.int32)[None]
    label, counts = slot_labels(token, mask, length, anchor, keep, 4)
    # Anchor 10 has one slot inside, anchor 8 has all three.
    assert counts[0, 5].tolist() == [True, False, False] and label[0, 5].tolist() == [111, 0, 0]
    assert counts[0, 3].all() and label[0, 3].tolist() == [109, 110, 111]


def test_b69_the_row_ends_at_its_length_not_at_its_mask():
    mask, length = rows(between(12, 5, 12), [9])
    assert np.flatnonzero(valid_anchors(mask, length)[0]).tolist() == [5, 6, 7]
    anchor, keep = draw(mask, length, 8)
    assert anchor[0, :3].tolist() == [5, 6, 7] and keep[0].tolist() == [True] * 3 + [False] * 5
    _, counts = slot_labels(jnp.arange(12, dtype=jnp.int32)[None], mask, length, anchor, keep, 4)
    assert counts[0].sum(-1).tolist() == [3, 2, 1, 0, 0, 0, 0, 0]


def test_b69_a_row_shorter_than_a_block():
    mask, length = rows(between(3, 0, 3))
    anchor, keep = draw(mask, length, 5)
    assert anchor.shape == (1, 5) and anchor[0, :2].tolist() == [0, 1] and keep.sum() == 2
    label, counts = slot_labels(jnp.asarray([[7, 8, 9]]), mask, length, anchor, keep, 6)
    assert label[0, 0].tolist() == [8, 9, 0, 0, 0] and counts[0, 1].tolist() == [True, False, False, False, False]


def test_b69_anchors_do_not_depend_on_batch_mates_or_padding():
    mask, length = rows([between(40, 3, 35), between(40, 0, 20), between(40, 10, 40), between(40, 30, 32)])
    together, keep = draw(mask, length, 7, ids=[9, 4, 77, 2])
    for i, sample_id in enumerate([9, 4, 77, 2]):
        alone, keep_alone = draw(mask[i : i + 1], length[i : i + 1], 7, ids=[sample_id])
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(keep_alone[0], keep[i])
    wider = jnp.pad(mask, ((0, 0), (0, 24)))
    np.testing.assert_array_equal(draw(wider, length, 7, ids=[9, 4, 77, 2])[0], together)


def test_anchors_are_drawn_without_replacement_and_anew_each_epoch():
    mask, length = rows(between(40, 4, 40))
    seen = set()
    for epoch in range(6):
        anchor, keep = draw(mask, length, 12, epoch=epoch)
        assert keep.all() and len(set(anchor[0].tolist())) == 12 and (np.diff(anchor[0]) > 0).all()
        seen.add(tuple(anchor[0].tolist()))
    assert len(seen) == 6
    again, _ = draw(mask, length, 12, epoch=3)
    assert tuple(again[0].tolist()) in seen
    other, _ = draw(mask, length, 12, epoch=3, key=jax.random.key(12))
    assert tuple(other[0].tolist()) != tuple(again[0].tolist())


def test_every_valid_position_is_drawn_equally_often():
    mask, length = rows(np.repeat(between(10, 2, 10)[None], 512, 0))  # 7 valid positions
    anchor, _ = draw(mask, length, 3)
    count = np.bincount(np.asarray(anchor).ravel(), minlength=10)
    assert count[[0, 1, 9]].tolist() == [0, 0, 0]
    expected = 512 * 3 / 7
    assert np.abs(count[2:9] - expected).max() < 5 * np.sqrt(expected)


def test_b70_a_row_without_a_valid_anchor_is_all_padding():
    lone = between(12, 4, 5) | between(12, 7, 8)  # supervised, but never two in a row
    mask, length = rows([np.zeros(12, bool), lone])
    anchor, keep = draw(mask, length, 4)
    assert not keep.any() and (anchor == 0).all()
    _, counts = slot_labels(jnp.zeros((2, 12), jnp.int32), mask, length, anchor, keep, 4)
    assert not counts.any()
