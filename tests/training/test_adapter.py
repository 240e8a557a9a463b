"""One trunk, several targets: what a frozen run may change, what it starts from, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.config import FULL, ConfigError
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.responses import Sample
from dflash_jax.decoding.generate import generate
from dflash_jax.models.target import random_target
from dflash_jax.training.adapter import ADAPTER, check_section, configured_drafter, with_trunk_of
from dflash_jax.training.corpus import TrainingData
from dflash_jax.training.loop import train
from tests.training import toy

DEPTH = 4  # of the second target; the first has 5 layers


def second_target(**changes):
    config = toy.target_config(num_layers=DEPTH, layer_types=(FULL,) * DEPTH, **changes)
    return random_target(config, seed=11)


@pytest.fixture(scope="module")
def first_drafter(tmp_path_factory):
    """An exported drafter of the first target."""
    config = toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None)
    _, params = toy.drafter(config, seed=5)
    return export_drafter(tmp_path_factory.mktemp("first") / "drafter", config, params, dtype=jnp.float32), params


def experiment(source, **drafter):
    config = toy.experiment()
    config.drafter.update({"init_from": str(source), "trunk": "frozen", "target_layer_ids": (0, 2), **drafter})
    config.drafter.init_layers = ()
    config.optimizer.total_steps, config.optimizer.warmup_steps = 6, 2
    config.optimizer.weight_decay = 0.5  # it must not reach what is frozen either
    return config


def by_name(params):
    return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}


def test_a_frozen_trunk_stays_bit_for_bit_and_the_adapter_learns(first_drafter, tmp_path):
    directory, theirs = first_drafter
    target = second_target()
    train(experiment(directory), tmp_path, target=target, data=toy.data(), evaluate=None)
    made = load_drafter(tmp_path / "export", target, draft_vocab=False, dtype=jnp.float32)
    ours, theirs = by_name(made.params), by_name(theirs)
    for path, value in theirs.items():
        # The export is bfloat16; the trunk was float32.
        same = np.array_equal(ours[path], value.astype(jnp.bfloat16).astype(np.float32))
        assert same != (path[0] in ADAPTER), path
    assert made.tap_ids == (0, 2) and made.config.num_target_layers == DEPTH

    prompts = [[5, 6, 7], [9, 4]]
    plain = generate(target, None, prompts, max_tokens=20)
    fast = generate(target, load_drafter(tmp_path / "export", target), prompts, max_tokens=20)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    with pytest.raises(ConfigError, match="num_target_layers is 4, the target's num_layers is 5"):
        load_drafter(tmp_path / "export", toy.target())


def test_a_frozen_trunk_keeps_its_markov_head_and_another_vocabulary_can_not_have_it(tmp_path):
    config = toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None, markov_rank=4)
    theirs = toy.drafter(config, seed=5)[1]
    directory = export_drafter(tmp_path / "drafter", config, theirs, dtype=jnp.float32)
    run = experiment(directory, markov_rank=None, draft_vocab_size=30)
    target = second_target()
    train(run, tmp_path / "run", target=target, data=toy.data(), evaluate=None)
    made = load_drafter(tmp_path / "run" / "export", target, dtype=jnp.float32)
    assert made.config.markov_rank == 4 and made.shared.markov_RxV.shape == (4, 30)
    for name in ("w1_VxR", "w2_VxR"):
        kept = theirs["markov"][name].get_value().astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(made.params["markov"][name].get_value(), kept)
    with pytest.raises(ConfigError, match="has markov_rank = 4, this run has 0"):
        configured_drafter(experiment(directory, markov_rank=0).drafter, target.config)
    with pytest.raises(ConfigError, match=r"a Markov head \(markov_rank = 4\) over the 48 ids .* this target has 64"):
        configured_drafter(experiment(directory, markov_rank=None).drafter, of_another_family().config)
    with pytest.raises(ConfigError, match=r"drafter\.markov_rank is -1, must be at least 0"):
        check_section(experiment(directory, markov_rank=-1).drafter)


WIDE, LARGER_VOCAB, OTHER_MASK = 24, 64, 5


def of_another_family():
    """A target that shares nothing with the first but that it is one: family, width, heads, vocabulary, head, depth."""
    return random_target(
        toy.target_config(
            family="qwen3", num_layers=DEPTH, layer_types=(FULL,) * DEPTH, hidden_size=WIDE, intermediate_size=40,
            num_heads=6, num_kv_heads=3, vocab_size=LARGER_VOCAB, tie_embeddings=False, qk_norm=True,
        ), seed=2,
    )  # fmt: skip


def own_answers(target, prompts, tokens):
    """Batches over what the target itself says to the prompts."""
    samples = []
    for i, (prompt, result) in enumerate(zip(prompts, generate(target, None, prompts, max_tokens=tokens), strict=True)):
        token_S = np.asarray([*prompt, *result.token_ids], np.int32)
        samples.append(Sample(str(i), token_S, np.arange(len(token_S)) >= len(prompt)))
    batches = make_iterator(samples, batch_size=4, seq_len=max(len(s.token_S) for s in samples), seed=5)
    return TrainingData(batches, samples, {})


def test_a_target_of_another_width_and_vocabulary_on_the_same_trunk(first_drafter, tmp_path):
    directory, theirs = first_drafter
    target = of_another_family()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, LARGER_VOCAB, 6).tolist() for _ in range(4)]
    steps, taus = 101, []

    def evaluate(target, drafter):
        if 0 < len(taus) < steps - 1:  # only the first and the last count
            taus.append(0.0)
        else:
            results = generate(target, drafter, prompts, max_tokens=30)
            taus.append(sum(sum(r.acceptance) for r in results) / sum(len(r.acceptance) for r in results))
        return {"tau": taus[-1]}

    config = experiment(directory, mask_token_id=OTHER_MASK, draft_vocab_size=40)
    config.drafter.num_layers = None  # the trunk is what it is
    config.step.accumulation = 1
    config.optimizer.update({"total_steps": steps, "weight_decay": 0.0, "learning_rate": 1e-2, "ema_decay": 0.0})
    config.run.update({"eval_every": 1, "log_every": 100})
    train(config, tmp_path, target=target, data=own_answers(target, prompts, 30), evaluate=evaluate)
    # The trunk is random, so the adapter alone learned these answers by heart.
    assert taus[0] < 1.2 and taus[-1] > 1.4

    made = load_drafter(tmp_path / "export", target, dtype=jnp.float32)
    plain = generate(target, None, prompts, max_tokens=30)
    fast = generate(target, made, prompts, max_tokens=30)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    assert made.config.hidden_size == toy.HIDDEN and made.config.target_hidden_size == WIDE
    assert made.shared.head_DxV.shape == (WIDE, 40) and made.config.vocab_size == LARGER_VOCAB
    ours, theirs = by_name(made.params), by_name(theirs)
    assert ours[("fc_TDxD",)].shape == (2 * WIDE, toy.HIDDEN)
    for path, value in theirs.items():
        if path[0] not in ADAPTER:
            np.testing.assert_array_equal(ours[path], value.astype(jnp.bfloat16).astype(np.float32))


def test_without_the_freeze_the_trunk_learns_too(first_drafter, tmp_path):
    directory, theirs = first_drafter
    config = experiment(directory, trunk="trained", target_layer_ids=(1, 3))
    train(config, tmp_path, target=toy.target(), data=toy.data(), evaluate=None)
    ours = by_name(load_drafter(tmp_path / "export", toy.target(), draft_vocab=False, dtype=jnp.float32).params)
    for path, value in by_name(theirs).items():
        assert not np.array_equal(ours[path], value.astype(jnp.bfloat16).astype(np.float32)), path


def test_the_adapter_starts_as_the_other_drafters_where_it_fits(first_drafter):
    directory, theirs = first_drafter
    config = toy.drafter_config(
        layer_types=(FULL, FULL), sliding_window=None, num_target_layers=DEPTH, target_layer_ids=(0, 2)
    )
    started = with_trunk_of(str(directory), config, toy.drafter(config, seed=9)[1])
    jax.tree.map(np.testing.assert_array_equal, started, theirs)
    three = dataclasses.replace(config, target_layer_ids=(0, 1, 2))
    fresh = toy.drafter(three, seed=9)[1]
    started = with_trunk_of(str(directory), three, toy.drafter(three, seed=9)[1])
    np.testing.assert_array_equal(started["fc_TDxD"].get_value(), fresh["fc_TDxD"].get_value())
    np.testing.assert_array_equal(started["norm"]["scale"].get_value(), theirs["norm"]["scale"].get_value())


def test_what_is_refused(first_drafter, tmp_path):
    directory, _ = first_drafter
    cases = [
        (experiment(""), "drafter.trunk is 'frozen', but drafter.init_from is empty"),
        (experiment(directory, trunk="half"), "drafter.trunk is 'half', must be 'trained' or 'frozen'"),
        (experiment(directory, num_layers=1), "has num_layers = 2, this run has 1"),
        (experiment(directory, intermediate_size=48), "has intermediate_size = 32, this run has 48"),
        (experiment(directory, num_heads=2), "has num_heads = 4, this run has 2"),
        (experiment(directory, heads=2), "drafter has no field 'heads'"),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=message):
            train(config, tmp_path / "refused", target=second_target(), data=toy.data(), evaluate=None)
    config = experiment(directory, projections=False)
    with pytest.raises(ConfigError, match="drafter's hidden_size is 16 and the target's 24: without projections"):
        train(config, tmp_path / "wide", target=second_target(hidden_size=24), data=toy.data(), evaluate=None)
