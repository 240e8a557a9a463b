"""Decoding on eight devices: what one device says, round by round, in whichever way the work is cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import CountCompilations, mixed_prompts, run
from flax import nnx
from golden_cases import golden_with_markov_head, load_golden

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import bind_drafter
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.request import Request
from dflash_jax.drafters.contract import Drafter
from dflash_jax.kernels.kv_cache import context
from dflash_jax.models.target import Target, place

CASE, VOCAB = "tr_qwen3_full_a", 96
MESHES = [(8, 1), (2, 4), (1, 8)]


@functools.cache
def placed(data: int, tensor: int, markov: bool = False) -> tuple[Target, Drafter]:
    """The golden pair laid out on a mesh; (1, 1) is no mesh at all."""
    target, drafter = golden_with_markov_head(CASE) if markov else load_golden(CASE)[:2]
    if data * tensor == 1:
        return target, drafter
    mesh = sharding.make_mesh(data, tensor)
    target = Target(target.config, target.graphdef, place(target.params, mesh), mesh=mesh, source=target.source)
    params = place(drafter.params, mesh)
    return target, bind_drafter(drafter.config, drafter.graphdef, params, target, None, drafter.source)


def engine(data: int, tensor: int, **options) -> Engine:
    return Engine(*placed(data, tensor), batch=7, max_length=128, **options)


@functools.cache
def requests() -> list[Request]:
    """More than there are rows, so that places are taken again; seven rows are no multiple of two or eight."""
    rng = np.random.default_rng(2)
    prompts = mixed_prompts([1, 40, 13, 7, 22, 9, 31, 5, 3, 17, 28], VOCAB, seed=4)
    prompts[2] = load_golden(CASE)[2]["target.input_ids"][0].tolist()
    return [Request(prompt, int(rng.integers(6, 24)), stop_token_ids=(27,)) for prompt in prompts]


@functools.partial(jax.jit, static_argnums=0)
def draft_logits(graphdef, params, shared, cache, root_B) -> jax.Array:
    module = nnx.merge(graphdef, params)
    return module.logits(shared, module.block_hidden(shared, cache, module.block_tokens(root_B, 4)))


@functools.cache
def one_device() -> tuple[list, tuple]:
    """(answers, state after the first requests' prefill and a round) without a mesh."""
    single = engine(1, 1)
    answers = run(single, requests())
    return answers, after_a_round(single)


def after_a_round(engine: Engine) -> tuple[np.ndarray, list[np.ndarray]]:
    """What the drafter would say next, and every layer's committed rows, of seven rows after a prefill and a round."""
    engine.admit(list(enumerate(requests()[:7])))
    engine.round()
    state, drafter = engine.state, engine.drafter
    logits_BxKxV = draft_logits(drafter.graphdef, drafter.params, drafter.shared, state.cache, state.root_B)
    length_B = np.asarray(state.cache.length_B)
    seen_BxC = np.arange(state.cache.capacity)[None] < length_B[:7, None]
    rows = [
        np.asarray(x_BxGxCxH)[:7].swapaxes(1, 2)[seen_BxC]
        for layer in range(len(state.cache.k))
        for x_BxGxCxH in context(state.cache, layer)
    ]
    return np.asarray(logits_BxKxV)[:7], rows


@pytest.mark.parametrize("data, tensor", MESHES)
def test_b93_answers_drafts_and_caches_are_those_of_one_device(data, tensor):
    answers, (logits_BxKxV, rows) = one_device()
    assert max(max(a.acceptance, default=0) for a in answers) == 4
    assert {a.reason for a in answers} == {"stop", "length"}
    sharded = engine(data, tensor)
    assert sharded.batch == (7 if data == 1 else 8)
    assert run(sharded, requests()) == answers
    with CountCompilations() as compilations:
        assert run(sharded, requests()) == answers
    assert compilations.count == 0  # what comes out of a program goes into it again
    logits, cached = after_a_round(sharded)
    np.testing.assert_allclose(logits, logits_BxKxV, atol=1e-4)
    for ours, expected in zip(cached, rows, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_b93_a_markov_head_on_a_mesh():
    target, drafter = golden_with_markov_head(CASE)
    answers = run(Engine(target, drafter, batch=7, max_length=128), requests())
    assert [a.token_ids for a in answers] == [a.token_ids for a in one_device()[0]]
    assert [a.acceptance for a in answers] != [a.acceptance for a in one_device()[0]]
    assert run(Engine(*placed(2, 4, True), batch=7, max_length=128), requests()) == answers


@functools.cache
def long_requests() -> list[Request]:
    """`requests`, until the target says again what it has said."""
    return [dataclasses.replace(r, stop_token_ids=(), max_tokens=40) for r in requests()]


@functools.cache
def bent_requests() -> list[Request]:
    """Some rows with a bias or penalties, some without."""
    some = [
        {"frequency_penalty": 2.0, "presence_penalty": 2.0}, {}, {"repetition_penalty": 1.8},
        {"logit_bias": {7: 30.0, 90: -np.inf}},
    ]  # fmt: skip
    return [dataclasses.replace(r, **some[i % 4]) for i, r in enumerate(long_requests())]


@functools.cache
def one_device_bent() -> list:
    return run(engine(1, 1, logits_rules=True), bent_requests())


@pytest.mark.parametrize("data, tensor", [(8, 1), (2, 4)])
def test_b46_counts_lie_where_the_logits_do_and_answers_are_those_of_one_device(data, tensor):
    plain = run(engine(1, 1), long_requests())
    differs = [a.token_ids != b.token_ids for a, b in zip(one_device_bent(), plain, strict=True)]
    assert [any(differs[kind::4]) for kind in range(4)] == [True, False, True, True]
    sharded = engine(data, tensor, logits_rules=True)
    assert run(sharded, bent_requests()) == one_device_bent()
    with CountCompilations() as compilations:
        assert run(sharded, bent_requests()) == one_device_bent()
    assert compilations.count == 0
    rules = sharded.rules.logits
    for x_BxV in (sharded.state.count_BxV, rules.bias_BxV, rules.in_prompt_BxV):
        assert x_BxV.addressable_shards[0].data.shape == (8 // data, VOCAB // tensor)


def test_pages_of_a_row_lie_on_its_own_data_shard():
    answers, _ = one_device()
    paged = engine(2, 4, page_size=8, num_pages=79)  # rounded up to 80: forty a shard
    assert run(paged, requests()) == answers
    assert paged.pages.free_pages == 80
    paged.admit(list(enumerate(requests()[:7])))
    for row, table in enumerate(np.asarray(paged.state.cache.page_table_BxT)[:7]):
        held = table[: paged._pages_needed(requests()[row])]
        assert {int(page) // 40 for page in held} == {row // 4}


@pytest.mark.parametrize("layer_axis", ["heads", "pages"])
def test_the_cache_is_really_cut(layer_axis):
    cache = engine(2, 4).state.cache
    shard = cache.k[0].addressable_shards[0].data.shape
    p, g, s, h = cache.k[0].shape
    expected = {"heads": g, "pages": p // 2}  # two KV heads do not divide over four devices: they stay whole
    assert (shard[1] if layer_axis == "heads" else shard[0]) == expected[layer_axis]
    assert shard[2:] == (s, h)
    tall = Engine(*placed(8, 1), batch=8, max_length=128).state
    assert all(x.addressable_shards[0].data.shape[0] == 1 for x in (*tall.cache.k, tall.root_B, tall.remaining_B))


def test_b93_ties_between_vocabulary_shards_go_to_the_lowest_id():
    mesh = sharding.make_mesh(1, 8)
    layout = sharding.named_sharding(mesh, (None, "vocab"), (8, VOCAB))
    best = jax.jit(lambda x: jnp.argmax(x, axis=-1))
    logits = np.zeros((8, VOCAB), np.float32)
    first = np.arange(8) * 12 + 5  # in each shard in turn, and the same again in every later one
    for row, token in enumerate(first):
        logits[row, token::12] = 1.0
    np.testing.assert_array_equal(best(jax.device_put(logits, layout)), first)
