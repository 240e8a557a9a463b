"""Sampled decoding through the engine: the law of what comes out, and whose randomness it is."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import run
from decoding_laws import chi_square, warp_reference
from flax import nnx
from scripted import script_table, scripted_drafter

from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import FULL, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Request
from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.attention import causal
from dflash_jax.models.target import random_target

VOCAB = 8
PROMPT = (3, 1, 4)
ROWS = 2048
CASES = {
    "whole law": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
}


@functools.cache
def pair():
    shape = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 128,
    }  # fmt: skip
    target = random_target(TargetConfig(family="llama", num_layers=2, layer_types=(FULL, FULL), **shape), seed=3)
    config = DrafterConfig(
        num_layers=1, layer_types=(FULL,), block_size=4, mask_token_id=0, target_layer_ids=(0, 1), num_target_layers=2,
        **shape,
    )  # fmt: skip
    return target, random_drafter(config, target, seed=4)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, token_BxM) -> jax.Array:
    module, (b, m) = nnx.merge(graphdef, params), token_BxM.shape
    nothing = (jnp.zeros((b, 1, 1, 8)),) * 2
    cache = KVCache(nothing, nothing, None, jnp.zeros((b,), jnp.int32))
    position_BxM = jnp.broadcast_to(jnp.arange(m), (b, m))
    return module.logits(module(token_BxM, position_BxM, cache, causal(m)).hidden_BxMxD)


def logits_behind(contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """The target's logits behind each context (at most eight tokens), by one pass without any cache, [B, V]."""
    target, _ = pair()
    padded = np.array([[*c, *[0] * (8 - len(c))] for c in contexts], np.int32)
    logits_BxMxV = forward(target.graphdef, target.params, padded)
    return np.asarray(logits_BxMxV)[np.arange(len(contexts)), [len(c) - 1 for c in contexts]]


@functools.cache
def exact_law(case: str) -> np.ndarray:
    """The law of the first three tokens, [V, V, V], by enumeration."""
    law_V = lambda context_logits_V: warp_reference(context_logits_V, **CASES[case])  # noqa: E731
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    first_V = law_V(logits_behind([PROMPT])[0])
    second_VxV = np.stack([law_V(x) for x in logits_behind([[*PROMPT, a] for a in range(VOCAB)])])
    third_VVxV = np.stack([law_V(x) for x in logits_behind([[*PROMPT, a, b] for a, b in pairs])])
    return first_V[:, None, None] * second_VxV[:, :, None] * third_VVxV.reshape(VOCAB, VOCAB, VOCAB)


@functools.cache
def sampled(case: str, proposal: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(counts of the first three tokens, tokens of each round) of ROWS answers, all in one batch."""
    target, drafter = pair()
    if proposal is None:
        drafter = None
    elif proposal == "walked":
        config = dataclasses.replace(drafter.config, markov_rank=4)
        drafter, proposal = random_drafter(config, target, seed=4), "drawn"
    elif proposal == "argmax":  # a random drafter's best is next to never kept; this one is right where greedy
        drafter = scripted_drafter(script_table([PROMPT], [greedy_answer()], VOCAB), 4, target.config.num_layers)
    engine = Engine(
        target, drafter, batch=ROWS, max_length=16, greedy=False, proposal=proposal or "argmax", prefill_chunk_size=4
    )
    answers = run(engine, [Request(PROMPT, 3, seed=1000 + i, **CASES[case]) for i in range(ROWS)])
    counts = np.zeros((VOCAB,) * 3, int)
    for answer in answers:
        counts[answer.token_ids] += 1
    return counts, np.array([n for answer in answers for n in answer.acceptance])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("proposal", [None, "argmax", "drawn", "walked"])
def test_b42_three_tokens_have_the_targets_law(case, proposal):
    counts, committed = sampled(case, proposal)
    assert chi_square(counts, exact_law(case)) > 1e-4
    if proposal is not None:
        assert 0.05 < np.mean(committed == 1) < 0.95  # drafts are kept, and refused


def test_b42_the_test_notices_another_temperature():
    counts, _ = sampled("filtered", "drawn")
    assert chi_square(counts, exact_law("whole law")) < 1e-6
    counts, _ = sampled("whole law", "argmax")
    assert chi_square(counts, exact_law("filtered")) < 1e-6


def engine(batch: int = 4) -> Engine:
    return Engine(*pair(), batch=batch, greedy=False, max_length=64)


@functools.cache
def greedy_answer(prompt: tuple[int, ...] = tuple(PROMPT)) -> tuple[int, ...]:
    return tuple(generate(pair()[0], None, [prompt], max_tokens=12)[0].token_ids)


def test_b42_temperatures_around_zero_are_greedy():
    prompts = [PROMPT, (6, 6)]
    asked = [Request(p, 12, temperature=t) for p in prompts for t in (1e-6, 1e-3)]
    assert [a.token_ids for a in run(engine(), asked)] == [greedy_answer(tuple(p)) for p in prompts for _ in (0, 1)]
    warm = [Request(PROMPT, 12, temperature=0.6, seed=i) for i in range(4)]
    assert len({a.token_ids for a in run(engine(), warm)} - {greedy_answer()}) > 1


def test_b45_each_row_has_its_own_filters():
    """Alone or among others, in any order; what top-p keeps is the smallest set that reaches it."""
    filters = [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {}]
    asked = [Request(PROMPT, 12, temperature=1.0, seed=5, **f) for f in filters]
    answers = run(engine(), asked)
    order = [3, 0, 2, 1]
    assert run(engine(), [asked[i] for i in order]) == [answers[i] for i in order]
    assert run(engine(1), asked) == answers
    off = [{"top_k": VOCAB + 1}, {"top_k": -1, "top_p": 1.0}, {"top_k": 0, "min_p": 0.0}, {"top_k": VOCAB}]
    assert run(engine(), [Request(PROMPT, 12, temperature=1.0, seed=5, **f) for f in off]) == [answers[3]] * 4
    assert answers[0].token_ids == greedy_answer()
    for row in (1, 2):
        ids, cut = answers[row].token_ids, 0
        assert ids != answers[3].token_ids
        for i, logits_V in enumerate(logits_behind([[*PROMPT, *ids[:i]] for i in range(6)])):
            law_V = warp_reference(logits_V, 1.0, **filters[row])
            assert law_V[ids[i]] > 0
            cut += (law_V == 0).sum()
        assert cut > 0


@pytest.mark.parametrize("proposal", ["argmax", "drawn"])
def test_b45_top_k_top_p_and_a_bias_side_by_side(proposal):
    """Blocks of four; each row by its own rule in every slot, in whatever order the rows lie."""
    rules = [{"top_k": 1}, {"top_p": 0.5}, {"logit_bias": {7: 100.0}}]
    asked = [Request(PROMPT, 12, temperature=1.0, seed=5, **rule) for rule in rules]
    one = Engine(*pair(), batch=4, greedy=False, max_length=64, proposal=proposal, logits_rules=True)
    answers = run(one, asked)
    for order in ([2, 0, 1], [1, 2, 0]):
        assert run(one, [asked[i] for i in order]) == [answers[i] for i in order]
    top_k, top_p, biased = (answer.token_ids for answer in answers)
    assert top_k == greedy_answer() and biased == (7,) * 12
    for i, logits_V in enumerate(logits_behind([[*PROMPT, *top_p[:i]] for i in range(6)])):
        assert warp_reference(logits_V, 1.0, top_p=0.5)[top_p[i]] > 0
    off = [{"top_k": VOCAB + 1}, {"top_k": -1}, {"top_p": 1.0, "logit_bias": {}}, {"logit_bias": {7: 0.0}}]
    free = run(one, [Request(PROMPT, 12, temperature=1.0, seed=5, **rule) for rule in off])
    assert len(set(free)) == 1 and free[0].token_ids not in (top_k, top_p, biased)


def test_b49_a_seed_is_a_rows_own():
    """The same tokens alone, among others, in another row, behind other traffic; a greedy neighbour hears nothing."""
    mine, greedy = Request(PROMPT, 12, temperature=1.0, seed=42), Request((6, 6), 12)
    others = [Request([i, 2], 5 + 2 * i, temperature=1.0, seed=i) for i in range(2)]
    [expected] = run(engine(), [mine])
    assert run(engine(1), [mine, mine]) == [expected] * 2
    one = engine()
    for asked in ([*others, mine, greedy], [greedy, mine, *others], [*others * 3, mine, greedy]):
        answers = run(one, asked)
        assert answers[asked.index(mine)] == expected
        assert answers[asked.index(greedy)].token_ids == greedy_answer((6, 6))
    one.admit([(0, mine)])
    one.round()
    one.abort(0)
    assert run(one, [mine] * 4) == [expected] * 4
    seeds = [41, 42 + 2**32, 42 + 2**63, -42]
    changed = run(one, [Request(PROMPT, 12, temperature=1.0, seed=s) for s in seeds])
    assert len({expected.token_ids, *(a.token_ids for a in changed)}) == 5
