"""An adapter that starts from what the trunk knew of its first target: exact where both are one in disguise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import load_drafter, shared_weights
from dflash_jax.config import FULL, ConfigError
from dflash_jax.models.target import random_target
from dflash_jax.training.adapter_fit import common_tokens, fit_adapter, solve
from dflash_jax.training.dry_run import byte_tokenizer
from dflash_jax.training.loop import train
from tests.training import toy

WIDE = 24
TEXT = np.random.default_rng(3).integers(4, toy.VOCAB, (6, 20)).astype(np.int32), np.full(6, 20)


@pytest.fixture(scope="module")
def first():
    return toy.target(seed=6)


@pytest.fixture(scope="module")
def theirs():
    config = toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None)
    return config, toy.drafter(config, seed=5)[1]


def disguised(first):
    """A wider target whose table is that of the first, turned into its space."""
    target = random_target(toy.target_config(hidden_size=WIDE), seed=8)
    turn_DxE = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDE, WIDE)))[0][: toy.HIDDEN]
    target.params["embedding_VxD"].set_value(first.params["embedding_VxD"].get_value() @ jnp.float32(turn_DxE))
    return target


def test_table_and_head_mean_what_they_meant(first, theirs):
    config, trunk = theirs
    target = disguised(first)
    draft = dataclasses.replace(config, target_hidden_size=WIDE)
    graphdef, params = toy.drafter(draft, seed=9)
    fitted = nnx.merge(graphdef, fit_adapter(params, draft, target, trunk, config, first, *TEXT))
    before = nnx.merge(toy.drafter(config)[0], trunk)
    was, now = shared_weights(first), shared_weights(target)
    token_1xV = jnp.arange(toy.VOCAB)[None]
    embedded = before.embed(was, token_1xV)
    np.testing.assert_allclose(fitted.embed(now, token_1xV), embedded, atol=2e-3)
    # The trunk is another's here, so its states are given: the same states must get the same logits.
    state_1xMxD = jax.random.normal(jax.random.key(1), (1, 7, toy.HIDDEN))
    logits = before.logits(was, before.for_head(state_1xMxD))
    fitted.norm.scale.set_value(before.norm.scale.get_value())
    np.testing.assert_allclose(fitted.logits(now, fitted.for_head(state_1xMxD)), logits, atol=5e-3)


def test_features_of_the_same_states_are_the_same(first, theirs):
    config, trunk = theirs
    fitted = fit_adapter(toy.drafter(config, seed=9)[1], config, first, trunk, config, first, *TEXT)
    np.testing.assert_allclose(
        fitted["fc_TDxD"].get_value(), trunk["fc_TDxD"].get_value(),
        atol=0.02 * float(jnp.abs(trunk["fc_TDxD"].get_value()).max()),
    )  # fmt: skip
    # Everything else is left as it was.
    untouched = toy.drafter(config, seed=9)[1]
    untouched["fc_TDxD"] = fitted["fc_TDxD"]
    jax.tree.map(np.testing.assert_array_equal, fitted, untouched)


def test_ridge_is_least_squares():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(50, 6)), rng.normal(size=(6, 3))
    np.testing.assert_allclose(solve(x, x @ w), w, atol=1e-3)


def test_tokens_are_matched_by_their_text(first):
    one, other = (dataclasses.replace(first, tokenizer=byte_tokenizer()) for _ in range(2))
    old, new = common_tokens(one, other)
    np.testing.assert_array_equal(old, np.arange(259))
    np.testing.assert_array_equal(new, old)
    vocab = other.tokenizer.backend.get_vocab()
    swapped = {text: {3: 4, 4: 3}.get(i, i) for text, i in vocab.items() if i != 7}
    other.tokenizer = type("Swapped", (), {"backend": type("B", (), {"get_vocab": lambda self, **_: swapped})()})()
    old, new = common_tokens(one, other)
    assert 7 not in old and len(old) == 258
    assert (new[old == 3], new[old == 4]) == (4, 3)


def test_what_can_not_be_fitted(first, theirs):
    config, trunk = theirs
    other = random_target(toy.target_config(vocab_size=64), seed=1)
    arguments = toy.drafter(config)[1], config
    with pytest.raises(ConfigError, match="vocabularies of 48 and 64 tokens can not be compared without"):
        fit_adapter(*arguments, other, trunk, config, first, *TEXT)
    with pytest.raises(ConfigError, match=r"has hidden_size 16 and vocab_size 64, the drafter of drafter.init_from"):
        fit_adapter(*arguments, first, trunk, config, other, *TEXT)


def test_a_run_starts_from_the_fit(first, theirs, tmp_path):
    config, trunk = theirs
    drafter = export_drafter(tmp_path / "drafter", config, trunk, dtype=jnp.float32)
    source = export_target(tmp_path / "target", first)
    experiment = toy.experiment()
    experiment.drafter.update({"init_from": str(drafter), "trunk": "frozen", "init_target": str(source)})
    experiment.drafter.init_layers = ()
    experiment.optimizer.update({"total_steps": 1, "warmup_steps": 0, "learning_rate": 1e-12})
    experiment.run.export_weights = "raw"
    target = disguised(first)
    done = train(experiment, tmp_path / "run", target=target, data=toy.data(), evaluate=None)
    made = load_drafter(done.export, target, draft_vocab=False, dtype=jnp.float32)
    module = nnx.merge(made.graphdef, made.params)
    before = nnx.merge(toy.drafter(config)[0], trunk)
    token_1xV = jnp.arange(toy.VOCAB)[None]
    np.testing.assert_allclose(
        module.embed(made.shared, token_1xV), before.embed(shared_weights(first), token_1xV), atol=2e-2
    )
    experiment.drafter.trunk = "trained"
    with pytest.raises(ConfigError, match=r"drafter.init_target is .* but drafter.trunk is 'trained'"):
        train(experiment, tmp_path / "refused", target=target, data=toy.data(), evaluate=None)


def test_packed_rows_are_read_as_the_samples_alone(first, theirs):
    config, trunk = theirs
    target = toy.target(seed=8)
    token_RxS = TEXT[0]
    packed = tuple(
        np.concatenate([x[::2], x[1::2]], axis=1)
        for x in (
            token_RxS,
            np.broadcast_to(np.arange(20, dtype=np.int32), token_RxS.shape),
            np.broadcast_to(np.arange(6, dtype=np.int32)[:, None], token_RxS.shape),
        )
    )
    params = toy.drafter(config, seed=9)[1]
    alone = fit_adapter(params, config, target, trunk, config, first, *TEXT)
    tokens, positions, documents = packed
    together = fit_adapter(params, config, target, trunk, config, first, tokens, np.full(3, 40), positions, documents)
    scale = float(jnp.abs(alone["fc_TDxD"].get_value()).max())
    np.testing.assert_allclose(
        together["fc_TDxD"].get_value(), alone["fc_TDxD"].get_value(), atol=1e-3 * scale
    )  # fmt: skip
