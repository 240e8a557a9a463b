"""Features from the store and features made in the step: one loss, one gradient, to bfloat16's rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.features import compute_features
from dflash_jax.data.responses import Sample
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.step import Frozen, StepConfig, make_loss
from tests.training import toy

CONFIG = toy.drafter_config()
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
ROUNDING = 2.0**-8  # the largest relative error of one bfloat16 number
KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def target():
    return toy.target()


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(4, toy.VOCAB, n).astype(np.int32) for n in (24, 17, 9, 14, 10, 22)]
    return [Sample(str(i), x, np.arange(len(x)) >= 2) for i, x in enumerate(tokens)]


@functools.cache
def loss_and_grad():
    target = toy.target()
    step = StepConfig(8, CONFIG.block_size, LossConfig({"hard": 0.3, "forward_kl": 0.7}, gamma=2.0, chunk_slots=24))
    loss = make_loss(step, GRAPHDEF, CONFIG, target.config, target.graphdef)
    frozen = Frozen(shared_weights(target), target=target.params)

    def mean(params, batch):
        sums = loss(params, KEY, frozen, batch)
        return sums.loss / sums.denominator

    return jax.jit(jax.value_and_grad(mean))


def difference(ours, theirs):
    """(relative difference of the losses, of the whole gradients)."""
    (loss, grads), (other, other_grads) = ours, theirs
    grad, other_grad = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (grads, other_grads))
    return abs(float(loss / other) - 1), float(jnp.linalg.norm(grad - other_grad) / jnp.linalg.norm(other_grad))


@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
def test_a_step_on_cached_features_is_the_step_that_runs_the_target(target, samples, packing, tmp_path):
    taps = CONFIG.target_layer_ids
    store = compute_features(target, samples, tmp_path / "right", taps, progress=False)
    settings = {"batch_size": 6, "seq_len": 24, "seed": 1, "num_epochs": 1, "packing": packing}
    (online,), (cached,) = make_iterator(samples, **settings), make_iterator(samples, store, **settings)
    assert "taps_BxSxTD" in cached and "taps_BxSxTD" not in online
    expected = loss_and_grad()(PARAMS, toy.feed(online))
    loss, grad = difference(loss_and_grad()(PARAMS, toy.feed(cached)), expected)
    assert loss < ROUNDING and grad < 3 * ROUNDING
    # Taps of another layer are not within rounding: the bound would not hide them.
    wrong = compute_features(target, samples, tmp_path / "wrong", (taps[0], taps[1] - 1), progress=False)
    (other,) = make_iterator(samples, wrong, **settings)
    _, wrong_grad = difference(loss_and_grad()(PARAMS, toy.feed(other)), expected)
    assert wrong_grad > 20 * ROUNDING
