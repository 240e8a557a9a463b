"""Faults that other programs had, as scripts: what must come out is known token by token, round by round."""

import jax.numpy as jnp
import numpy as np
import pytest
from answers import Answer, of_results, run
from flax import nnx
from scripted import (
    BROKEN,
    FILLER,
    HIDDEN,
    VOCAB,
    all_wrong,
    script_table,
    scripted_drafter,
    scripted_target,
    wrong_at,
)

from dflash_jax.config import FULL, DrafterConfig, RopeConfig
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Request
from dflash_jax.drafters.contract import Drafter, SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.kernels.kv_cache import context

EOS = 14


def random_dflash(mask_token_id: int, block_size: int = 4) -> Drafter:
    """A DFlash drafter with random weights for a scripted target."""
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        rms_norm_eps=1e-5, rope=RopeConfig(), vocab_size=VOCAB, block_size=block_size, mask_token_id=mask_token_id,
        target_layer_ids=(0,), num_target_layers=1, layer_types=(FULL,), max_positions=256,
    )  # fmt: skip
    graphdef, params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    table, head = rng.normal(size=(VOCAB, HIDDEN)), rng.normal(size=(HIDDEN, VOCAB))
    shared = SharedWeights(jnp.asarray(table, jnp.float32), jnp.asarray(head, jnp.float32))
    return Drafter(graphdef, params, shared, config, block_size, config.target_layer_ids, "random")


def test_b01_the_mask_id_is_a_token_like_any_other():
    prompts, script = [[3, 2], [0, 0, 4, 0]], (5, 0, 7, 0, 9, EOS)
    table = script_table(prompts, [script, script])
    target = scripted_target(table, [EOS])
    for drafter in (random_dflash(mask_token_id=0), scripted_drafter(table, 4), None):
        results = generate(target, drafter, prompts, max_tokens=20)
        assert [r.token_ids for r in results] == [list(script)] * 2
        assert [r.prompt_ids for r in results] == prompts
        assert [r.finish_reason for r in results] == ["stop"] * 2


def test_b01_any_script_over_the_whole_vocabulary():
    rng = np.random.default_rng(1)
    prompts = [[first, *rng.integers(0, BROKEN, first % 5)] for first in range(8)]
    scripts = [rng.integers(0, BROKEN, 24).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    half_right = wrong_at(table, {p[0]: rng.choice(40, 20, replace=False) for p in prompts})
    for drafter in (random_dflash(mask_token_id=0), scripted_drafter(half_right, 4)):
        results = generate(scripted_target(table), drafter, prompts, max_tokens=24)
        assert [r.token_ids for r in results] == scripts


def scripts_that_stop_in_the_first_round(stop: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt k's end is token k of its first round; then the script goes on."""
    prompts = [[k, 2] for k in range(8)]
    return prompts, [[3, *[4 + i % 7 for i in range(k)], stop, 5, 6, 7, 8, 9, 10, 11, 12, 13] for k in range(8)]


@pytest.mark.parametrize("batch", [1, 8])
def test_b03_an_end_anywhere_in_an_accepted_block(batch):
    """One row after another in one slot, and eight rows at once; the last place is the bonus."""
    prompts, scripts = scripts_that_stop_in_the_first_round(EOS)
    table = script_table(prompts, scripts)
    engine = Engine(scripted_target(table), scripted_drafter(table, 8), batch=batch, max_length=64)
    answers = run(engine, [Request(p, 40, stop_token_ids=(EOS,)) for p in prompts])
    assert answers == [Answer((*s[: 2 + k],), (k + 1,), "stop") for k, s in enumerate(scripts)]
    # Behind the end nothing was committed that a later request in the same place could see.
    assert run(engine, [Request([9, 9, 9], 9)]) == [Answer((FILLER,) * 9, (8,), "length")]
    if batch == 8:  # and rows that have ended stay as they are while others go on
        np.testing.assert_array_equal(engine.state.cache.length_B, [3 + 8, *(2 + k + 1 for k in range(1, 8))])


def test_b03_two_stop_ids_the_second_first():
    prompts, scripts = scripts_that_stop_in_the_first_round(13)
    table = script_table(prompts, scripts)
    results = generate(
        scripted_target(table, [EOS]), scripted_drafter(table, 8), prompts, max_tokens=40, stop_token_ids=[13]
    )
    assert [r.token_ids for r in results] == [s[: 2 + k] for k, s in enumerate(scripts)]
    assert [r.finish_reason for r in results] == ["stop"] * 8


def test_b04_max_tokens_within_a_block():
    limits = [1, 2, 5, 15, 16, 17, 31, 33]
    rng = np.random.default_rng(2)
    prompts = [[i, 3, 3] for i in range(8)]
    scripts = [rng.integers(0, BROKEN, 50).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    target, drafter = scripted_target(table), scripted_drafter(table, 16)
    results = generate(target, drafter, prompts, max_tokens=limits)
    assert [r.token_ids for r in results] == [s[:n] for s, n in zip(scripts, limits, strict=True)]
    assert {r.finish_reason for r in results} == {"length"}
    assert [r.acceptance for r in results] == [[], [1], [4], [14], [15], [16], [16, 14], [16, 16]]
    assert of_results(generate(target, None, prompts, max_tokens=limits)) == [
        Answer(tuple(s[:n]), (1,) * (n - 1), "length") for s, n in zip(scripts, limits, strict=True)
    ]


def test_b04_one_token_needs_no_round_and_none_is_refused():
    table = script_table([[5, 5]], [[7, 8]])
    engine = Engine(scripted_target(table), scripted_drafter(table, 16), batch=8, max_length=128)
    assert run(engine, [Request([5, 5], 1)]) == [Answer((7,), (), "length")]
    assert engine.rounds == 0
    with pytest.raises(ValueError, match="max_tokens of prompt 0 is 0, must be a whole number >= 1"):
        run(engine, [Request([5, 5], 0)])


def test_b09_the_prefills_token_is_part_of_the_answer():
    table = script_table([[1, 2]], [[9, 7, 8, EOS]])
    for drafter in (scripted_drafter(table, 4), scripted_drafter(all_wrong(table), 4), None):
        [result] = generate(scripted_target(table, [EOS]), drafter, [[1, 2]], max_tokens=9)
        assert result.token_ids == [9, 7, 8, EOS]
        assert sum(result.acceptance) + 1 == len(result.token_ids)


def test_b09_an_end_straight_after_the_prompt():
    table = script_table([[1, 2]], [[EOS, 5, 6]])
    for drafter in (scripted_drafter(table, 4), None):
        engine = Engine(scripted_target(table), drafter, max_length=128)
        [event] = engine.admit([(0, Request([1, 2], 9, stop_token_ids=[EOS]))])
        assert (event.token_ids, event.finish_reason) == ([EOS], "stop")
        assert engine.rounds == 0 and engine.free_rows == 1


def test_b09_the_first_token_comes_before_the_first_round():
    table = script_table([[1, 2]], [[9, 7, 8, EOS]])
    engine = Engine(scripted_target(table), scripted_drafter(table, 4), max_length=128)
    events = engine.run([Request([1, 2], 9)])
    assert next(events).token_ids == [9]
    assert engine.rounds == 0


def test_b10_every_end_of_the_target_counts_unless_ignored():
    prompts, scripts = [[4, 4], [5, 4]], [[4, 7, 3, 2], [4, 2, 3, 7]]
    table = script_table(prompts, scripts)
    target = scripted_target(table, [2, 7])
    for drafter in (scripted_drafter(table, 4), None):
        results = generate(target, drafter, prompts, max_tokens=4)
        assert [r.token_ids for r in results] == [[4, 7], [4, 2]]
        results = generate(target, drafter, prompts, max_tokens=4, ignore_eos=True)
        assert [r.token_ids for r in results] == scripts
        results = generate(target, drafter, prompts, max_tokens=4, ignore_eos=True, stop_token_ids=[3])
        assert [r.token_ids for r in results] == [s[:3] for s in scripts]


@pytest.mark.parametrize("page_size", [None, 8])
def test_b11_a_block_never_runs_past_the_end_of_the_context(page_size):
    """The cache ends where the context ends: there is no row to spare for a block that would run over."""
    lengths = [1, 23, 24, 25, 30, 31]
    rng = np.random.default_rng(3)
    prompts = [[i, *rng.integers(0, BROKEN, length - 1)] for i, length in enumerate(lengths)]
    scripts = [rng.integers(0, BROKEN, 40).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    target = scripted_target(table, max_positions=32)
    for drafter in (scripted_drafter(table, 8), scripted_drafter(all_wrong(table), 8), None):
        engine = Engine(target, drafter, page_size=page_size)
        assert engine.capacity == 32
        for prompt, script in zip(prompts, scripts, strict=True):
            [answer] = run(engine, [Request(prompt, 64)])
            assert answer.token_ids == tuple(script[: 32 - len(prompt)])
            assert answer.reason == "length"
            # No damage is left behind in the same place.
            [short] = run(engine, [Request([9, 9], 3)])
            assert short.token_ids == (FILLER,) * 3
    for length in (32, 33):
        with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens, the context holds 32"):
            generate(target, None, [[2] * length])


@pytest.mark.parametrize("page_size", [None, 4])
def test_b14_rows_accept_different_numbers_in_one_round(page_size):
    """Accepted drafts (0, 3, 7), then (7, 0, 2): each row's cache is what a prefill of its own tokens would leave."""
    rng = np.random.default_rng(4)
    prompts = [[i, *rng.integers(0, BROKEN, length - 1).tolist()] for i, length in enumerate((3, 9, 17))]
    scripts = [rng.integers(0, BROKEN, 30).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    # Row i's drafts lie at positions length + 1 .. length + 7. The one to refuse, in the first and second round:
    refused = {0: [3 + 1], 1: [9 + 4, 9 + 4 + 1], 2: [17 + 8 + 3]}
    drafter = scripted_drafter(wrong_at(table, refused), 8)
    engine = Engine(scripted_target(table), drafter, batch=3, max_length=64, page_size=page_size)
    said = [list(e.token_ids) for e in engine.admit([(i, Request(p, 30)) for i, p in enumerate(prompts)])]
    length_B = np.array([3, 9, 17])
    for committed in ((1, 4, 8), (8, 1, 3)):
        events = engine.round()
        assert [len(e.token_ids) for e in events] == list(committed)
        for event in events:
            said[event.index] += event.token_ids
        length_B += committed
        cache = engine.state.cache
        np.testing.assert_array_equal(cache.length_B, length_B)
        for layer in range(2):  # the target's and the drafter's
            for b, prompt in enumerate(prompts):
                expected = np.stack([[*prompt, *said[b]][: length_B[b]], np.arange(length_B[b])], axis=-1)
                k_CxH, v_CxH = (np.asarray(x_BxGxCxH)[b, 0] for x_BxGxCxH in context(cache, layer))
                np.testing.assert_array_equal(k_CxH[: length_B[b]], expected)
                np.testing.assert_array_equal(v_CxH[: length_B[b]], -expected)
                owned = len(prompt) + 30 if page_size is None else -(-(len(prompt) + 30) // page_size) * page_size
                assert not k_CxH[length_B[b] : owned].any()  # what was refused has never been written
    assert [said[i] == scripts[i][: len(said[i])] for i in range(3)] == [True] * 3


def test_b18_a_reused_row_starts_clean():
    """A long request, a short one, the long one again, all in one row: a stale length or drafter row shows."""
    rng = np.random.default_rng(5)
    prompts = [[2, *rng.integers(0, BROKEN, 39).tolist()], [3, 4, 5, 6, 7]]
    scripts = [rng.integers(0, BROKEN, 30).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    half_right = wrong_at(table, {2: range(41, 70, 3), 3: range(6, 35, 4)})
    target, drafter = scripted_target(table), scripted_drafter(half_right, 8)
    a, b = Request(prompts[0], 25), Request(prompts[1], 25)
    fresh = {p: run(Engine(target, drafter, max_length=128), [r])[0] for p, r in (("a", a), ("b", b))}
    assert fresh["a"].acceptance != fresh["b"].acceptance
    engine = Engine(target, drafter, max_length=128)
    assert run(engine, [a, b, a]) == [fresh["a"], fresh["b"], fresh["a"]]
    # Given up in the middle, with tokens still owed.
    engine.admit([(0, a)])
    engine.round()
    assert engine.abort(0) and not engine.abort(0)
    assert run(engine, [b, a]) == [fresh["b"], fresh["a"]]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_b22_a_pool_for_two_requests_answers_three(lookahead):
    prompts = [[i, *range(1, 10)] for i in range(3)]
    rng = np.random.default_rng(6)
    scripts = [rng.integers(0, BROKEN, 14).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    target, drafter = scripted_target(table), scripted_drafter(wrong_at(table, {0: range(12, 30, 2)}), 4)
    requests = [Request(p, 14) for p in prompts]
    solo = [run(Engine(target, drafter, max_length=128), [r])[0] for r in requests]
    assert [a.token_ids for a in solo] == [tuple(s) for s in scripts]
    engine = Engine(
        target, drafter, batch=4, max_length=128, page_size=4, num_pages=12, prefill_chunk_size=4, lookahead=lookahead
    )
    assert run(engine, requests) == solo  # six pages each: two fit, the third waits
    assert engine.pages.free_pages == 12
    with pytest.raises(ValueError, match="none are left for prompt 2, which needs 6 pages"):
        engine.admit(list(enumerate(requests)))
    assert engine.pages.free_pages == 12 and engine.free_rows == 4
    with pytest.raises(ValueError, match=r"none are left for prompt 0, which needs 13 pages.*raise num_pages"):
        run(engine, [Request(prompts[0], 40)])
    assert run(engine, requests[::-1]) == solo[::-1]
