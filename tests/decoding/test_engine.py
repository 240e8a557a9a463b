"""The engine: rows that do not know each other, places taken again, work given up, chunks, windows."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from answers import Answer, collect, mixed_prompts, run
from flax import nnx
from golden_cases import golden_with_markov_head, load_golden
from scripted import BROKEN, FILLER, script_table, scripted_drafter, scripted_target, wrong_at

from dflash_jax import sharding
from dflash_jax.config import FULL, SLIDING, RopeConfig, TargetConfig
from dflash_jax.decoding import engine as engine_module
from dflash_jax.decoding.engine import Engine, timed_events
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Request
from dflash_jax.kernels.kv_cache import context
from dflash_jax.models.target import place, random_target

VOCAB = 96
CASE = "tr_llama_full"


def golden_engine(batch: int, **options) -> Engine:
    target, drafter, _ = load_golden(CASE)
    return Engine(target, drafter, batch=batch, max_length=128, **options)


@functools.cache
def requests() -> list[Request]:
    rng = np.random.default_rng(11)
    prompts = mixed_prompts([*range(1, 40, 3), 40, 7, 7], VOCAB, seed=3)
    return [Request(prompt, int(rng.integers(3, 18))) for prompt in prompts]


@functools.cache
def alone() -> list[Answer]:
    """Each request with nobody beside it, one after another in the one row of one engine."""
    return run(golden_engine(1), requests())


@functools.partial(jax.jit, static_argnums=0)
def draft_logits(graphdef, params, shared, cache, root_B) -> jax.Array:
    module = nnx.merge(graphdef, params)
    return module.logits(shared, module.block_hidden(shared, cache, module.block_tokens(root_B, 4)))


def logits_of(engine: Engine) -> np.ndarray:
    """What the drafter would say now, [B, K, V]."""
    drafter, state = engine.drafter, engine.state
    return np.asarray(draft_logits(drafter.graphdef, drafter.params, drafter.shared, state.cache, state.root_B))


def committed(engine: Engine, row: int) -> list[np.ndarray]:
    """Keys and values of every layer of a row, up to its committed length."""
    cache = engine.state.cache
    length = int(cache.length_B[row])
    return [np.asarray(x)[row, :, :length] for layer in range(len(cache.k)) for x in context(cache, layer)]


def test_b19_sixteen_rows_are_sixteen_lonely_rows():
    assert len(requests()) == 16
    assert max(max(a.acceptance, default=0) for a in alone()) == 4  # the drafter does something
    assert run(golden_engine(16), requests()) == alone()


def test_b19_with_a_markov_head_too():
    """Another draft, the same answers; and as many are kept in company as alone."""
    target, drafter = golden_with_markov_head(CASE, tuple(range(5, 90)))
    single, batched = (Engine(target, drafter, batch=batch, max_length=128) for batch in (1, 16))
    answers = run(single, requests())
    assert run(batched, requests()) == answers
    assert [a.token_ids for a in answers] == [a.token_ids for a in alone()]
    assert [a.acceptance for a in answers] != [a.acceptance for a in alone()]
    assert max(max(a.acceptance, default=0) for a in answers) > 1


def test_b19_rows_may_be_permuted():
    order = np.random.default_rng(5).permutation(16)
    answers = run(golden_engine(16), [requests()[i] for i in order])
    assert answers == [alone()[i] for i in order]


def test_b19_and_b14_drafts_and_caches_of_a_batch_with_a_finished_and_a_new_row():
    """After some rounds each row's cache is that of a fresh prefill of its prompt and what it has said."""
    engine = golden_engine(16)
    said = {i: list(e.token_ids) for i, e in enumerate(engine.admit(list(enumerate(requests()[:15]))))}
    finished = []
    for _ in range(3):
        for event in engine.round():
            said[event.index] += event.token_ids
            finished += [event.index] * (event.finish_reason is not None)
    assert 0 < len(finished) < 12
    [event] = engine.admit([(15, requests()[15])])
    said[15] = list(event.token_ids)
    logits_BxKxV = logits_of(engine)
    fresh = golden_engine(1)
    rows = [row for row in engine._rows if row is not None]
    for row in rows[:3] + rows[-1:]:
        prompt = [*requests()[row.index].prompt_ids, *said[row.index]]
        [event] = fresh.admit([(0, Request(prompt[:-1], 5))])
        assert event.token_ids == prompt[-1:]
        for ours, expected in zip(committed(engine, row.slot), committed(fresh, 0), strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-5)
        np.testing.assert_allclose(logits_BxKxV[row.slot], logits_of(fresh)[0], atol=2e-4)
        fresh.abort(0)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_calls_in_flight_change_nothing(lookahead):
    engine = golden_engine(16, lookahead=lookahead)
    twice = run(engine, requests() + requests()[::-1])  # more requests than rows: places are taken again
    assert twice == alone() + alone()[::-1]
    assert not engine._inflight and engine.free_rows == 16


def test_b18_a_refilled_row_is_a_fresh_one():
    long, short = requests()[13], requests()[2]
    assert len(long.prompt_ids) == 40 and len(short.prompt_ids) == 7
    expected = [alone()[13], alone()[2], alone()[13]]
    engine = golden_engine(1)
    assert run(engine, [long, short, long]) == expected
    engine.admit([(0, long)])
    engine.round()
    assert engine.abort(0)
    assert run(engine, [short, long]) == expected[1:]
    for i, request in ((13, long), (2, short)):
        assert run(golden_engine(1), [request]) == [alone()[i]]


def test_a_penalty_that_comes_amid_a_batch_disturbs_nobody():
    """Its neighbours say, round by round, what they say in an engine that has no rules for logits."""
    engine = golden_engine(4, logits_rules=True)
    forbidden = alone()[13].token_ids[0]
    rules = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {forbidden: -np.inf}}
    bent = dataclasses.replace(requests()[13], max_tokens=17, **rules)
    [expected] = run(golden_engine(1, logits_rules=True), [bent])
    assert forbidden not in expected.token_ids
    events = engine.admit([(0, requests()[0]), (1, requests()[1])])
    events += engine.round()
    events += engine.admit([(2, bent), (3, requests()[3])])
    while engine.active_rows:
        events += engine.round()
    assert collect(events, 4) == [alone()[0], alone()[1], expected, alone()[3]]
    assert run(engine, [bent, *requests()[:9], bent]) == [expected, *alone()[:9], expected]  # places taken again


@pytest.mark.parametrize("lookahead, rounds_per_call", [(2, 1), (1, 3)])
def test_calls_in_flight_count_alike(lookahead, rounds_per_call):
    bent = [dataclasses.replace(r, presence_penalty=0.7, frequency_penalty=0.6) for r in requests()[:9]]
    expected = run(golden_engine(4, logits_rules=True), bent)
    engine = golden_engine(4, logits_rules=True, lookahead=lookahead, rounds_per_call=rounds_per_call)
    assert run(engine, bent + bent) == expected * 2


@pytest.mark.parametrize("chunk", [1, 5, 16, 36, 37])
def test_b64_prompts_in_chunks(chunk):
    [prompt] = mixed_prompts([37], VOCAB, seed=9)
    request = Request(prompt, 12)
    engines = [golden_engine(1), golden_engine(1, prefill_chunk_size=chunk)]
    events = [engine.admit([(0, request)]) for engine in engines]
    assert events[0] == events[1]
    for whole, chunked in zip(*(committed(engine, 0) for engine in engines), strict=True):
        assert whole.shape[1] == 37
        np.testing.assert_allclose(chunked, whole, atol=1e-5)
    np.testing.assert_allclose(logits_of(engines[1]), logits_of(engines[0]), atol=1e-4)
    for _ in range(12):
        events = [engine.round() for engine in engines]
        assert events[0] == events[1]
    assert all(engine.free_rows == 1 for engine in engines)


def test_b39a_two_hundred_prompts():
    target, drafter, _ = load_golden(CASE)
    prompts = mixed_prompts(np.random.default_rng(0).integers(1, 20, 200), VOCAB, seed=21)
    plain = generate(target, None, prompts, max_tokens=9, batch=16)
    drafted = generate(target, drafter, prompts, max_tokens=9, batch=16)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert sum(len(r.acceptance) for r in drafted) < 200 * 7


@functools.cache
def windowed(window: int):
    """(target, plain answers): sliding and full layers in turn."""
    config = TargetConfig(
        family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=128, layer_types=(SLIDING, FULL),
        sliding_window=window,
    )  # fmt: skip
    target = random_target(config, seed=10)  # says many different things
    return target, generate(target, None, [[3, 1, 4, 1, 5, 9], [2, 7, 1]], max_tokens=40)


@pytest.mark.parametrize("window, block, page_size", [(8, 4, None), (3, 8, 4)])
def test_b17_windows_that_have_wrapped(window, block, page_size):
    """Drafts are refused half the time, long after the window has left the first rows; or outgrow it in one block."""
    target, plain = windowed(window)
    prompts = [r.prompt_ids for r in plain]
    table = script_table(prompts, [r.token_ids for r in plain], 32)
    rng = np.random.default_rng(2)
    wrong = {p[0]: rng.choice(60, 20, replace=False) for p in prompts}
    drafter = scripted_drafter(wrong_at(table, wrong, 32), block, 2)
    drafted = generate(target, drafter, prompts, max_tokens=40, page_size=page_size)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(len({*r.acceptance}) > 1 for r in drafted)


def test_b17_the_window_is_felt():
    assert all(a.token_ids != b.token_ids for a, b in zip(windowed(8)[1], windowed(3)[1], strict=True))


# Scripted: what happens to rows, pages and calls in flight -----------------------------------------------


def scripted_engine(**options) -> tuple[Engine, list[Request], list[list[int]]]:
    rng = np.random.default_rng(8)
    prompts = [[i, *rng.integers(0, BROKEN, i + 1).tolist()] for i in range(4)]
    scripts = [rng.integers(0, BROKEN, 30).tolist() for _ in prompts]
    table = script_table(prompts, scripts)
    drafter = scripted_drafter(wrong_at(table, {1: range(5, 30, 3), 2: range(7, 30, 5)}), 4)
    engine = Engine(scripted_target(table), drafter, max_length=64, **options)
    return engine, [Request(p, 20) for p in prompts], scripts


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("page_size", [None, 8])
def test_an_abort_leaves_its_tokens_to_nobody(lookahead, page_size):
    """Rounds for the old request are in flight while another one takes its row: they say nothing for it."""
    engine, asked, scripts = scripted_engine(batch=2, lookahead=lookahead, page_size=page_size)
    events = engine.admit([(0, asked[0]), (1, asked[1])])
    for _ in range(3):
        events += engine.round()
    assert engine.abort(0)
    assert not engine.abort(0) and not engine.abort(77)
    assert engine.free_rows == 1
    later = engine.admit([(2, asked[2])])
    while engine.active_rows:
        later += engine.round()
    assert {e.index for e in later} == {1, 2}
    answers = collect(events + later, 3)
    assert [a.token_ids for a in answers[1:]] == [tuple(s[:20]) for s in scripts[1:3]]
    assert answers[0].token_ids == tuple(scripts[0][: len(answers[0].token_ids)]) and answers[0].reason is None
    assert engine.pages is None or engine.pages.free_pages == engine.pages.num_pages


def test_an_aborted_row_stands_still():
    engine, asked, _ = scripted_engine(batch=2)
    engine.admit([(0, asked[0]), (1, asked[1])])
    engine.abort(0)
    engine.round()
    np.testing.assert_array_equal(engine.state.cache.length_B[0], len(asked[0].prompt_ids))
    assert int(engine.state.remaining_B[0]) == 0


@pytest.mark.parametrize("page_size", [None, 8])
def test_a_run_left_early_frees_everything(page_size):
    engine, asked, scripts = scripted_engine(batch=2, lookahead=1, page_size=page_size)
    expected = [Answer(tuple(s[:20]), a.acceptance, "length") for s, a in zip(scripts, run(engine, asked), strict=True)]
    events = engine.run(asked)
    for _ in range(5):
        next(events)
    with pytest.raises(ValueError, match="the engine is decoding 2 requests; finish or abort them first"):
        next(engine.run(asked))
    events.close()
    assert engine.free_rows == 2 and not engine._inflight
    assert engine.pages is None or engine.pages.free_pages == engine.pages.num_pages
    assert run(engine, asked) == expected


@pytest.mark.parametrize("part", ["prefill_chunk", "admit"])
def test_an_interrupted_admission_takes_nothing(part, monkeypatch):
    engine, asked, scripts = scripted_engine(batch=2, page_size=8)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine_module, part, interrupted)
        engine.admit([(0, asked[0])])
    assert engine.free_rows == 2 and engine.pages.free_pages == engine.pages.num_pages
    assert [a.token_ids for a in run(engine, asked)] == [tuple(s[:20]) for s in scripts]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_several_rounds_a_call(lookahead):
    """With a prompt waiting a call ends with the first row that does; else it goes on to the limit or the last row."""
    engine, asked, scripts = scripted_engine(batch=4, rounds_per_call=3, lookahead=lookahead)
    single, _, _ = scripted_engine(batch=4)
    assert run(engine, asked) == run(single, asked)
    assert engine.rounds == single.rounds
    if lookahead:
        return
    short = Request(asked[0].prompt_ids, 2)
    engine.admit([(0, short), (1, asked[1])])
    events = engine.round(waiting=True)
    assert [(e.index, e.finish_reason) for e in events] == [(0, "length"), (1, None)]
    events = engine.round(waiting=True)
    assert [e.index for e in events] == [1, 1, 1]
    engine.admit([(0, short)])
    events = engine.round()
    assert [e.index for e in events] == [0, 1, 1, 1]  # nobody waits: row 0's end does not stop it
    assert events[-1].finish_reason == "length" and events[-1].token_ids[-1] == scripts[1][19]


def test_admission_is_all_or_nothing():
    engine, asked, _ = scripted_engine(batch=2)
    assert engine.admit([]) == []
    with pytest.raises(ValueError, match="3 prompts for 2 free rows"):
        engine.admit(list(enumerate(asked[:3])))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.admit([(0, asked[0]), (1, Request([], 3))])
    with pytest.raises(ValueError, match=r"the indices \[4, 4\] name a prompt twice"):
        engine.admit([(4, asked[0]), (4, asked[1])])
    assert engine.free_rows == 2
    engine.admit([(0, asked[0])])
    with pytest.raises(ValueError, match="prompt 0 is being decoded already"):
        engine.admit([(0, asked[1])])
    with pytest.raises(ValueError, match=r"temperature of prompt 1 is 0\.5 in a greedy engine"):
        engine.admit([(1, Request([1], 3, temperature=0.5))])
    with pytest.raises(ValueError, match=r"frequency_penalty of prompt 1 is 0\.5 .*make it with logits_rules=True"):
        engine.admit([(1, Request([1], 3, frequency_penalty=0.5))])
    assert engine.free_rows == 1


@pytest.mark.parametrize("mesh", [None, (1, 1), (8, 1)])
def test_b22_a_staging_array_is_copied(mesh):
    target = scripted_target(script_table([], []))
    if mesh is not None:
        mesh = sharding.make_mesh(*mesh)
        target = dataclasses.replace(target, params=place(target.params, mesh), mesh=mesh)
    engine = Engine(target, batch=8)
    memory = np.zeros(4096 + 16, np.int32)
    staging = memory[-memory.ctypes.data % 64 // 4 :][:4096]  # aligned so that the runtime would take it as it is
    placed = jax.block_until_ready(engine._put(staging))
    staging[:] = -1
    np.testing.assert_array_equal(placed, np.zeros(4096))


def test_a_run_refuses_before_it_decodes():
    engine, asked, _ = scripted_engine(batch=2)
    with pytest.raises(ValueError, match="prompt 3 has 64 tokens, the context holds 64"):
        next(engine.run([*asked[:3], Request([1] * 64, 3)]))
    assert engine.free_rows == 2


def test_timed_events_are_in_order():
    engine, asked, scripts = scripted_engine(batch=2)
    timed = list(timed_events(engine, asked))
    assert [a.token_ids for a in collect((e for _, e in timed), 4)] == [tuple(s[:20]) for s in scripts]
    assert all(0 <= a <= b for (a, _), (b, _) in itertools.pairwise(timed))


def test_capacities_are_few():
    target = scripted_target(script_table([], []))
    assert Engine(target, max_length=100).capacity == 128
    assert Engine(target, max_length=100, page_size=48).capacity == 144
    assert Engine(target).max_length == 256


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0, must be a whole number >= 1"),
        ({"lookahead": -1}, "lookahead is -1, must be a whole number >= 0"),
        ({"num_pages": 4}, "num_pages is 4, but the contiguous layout has a page a row; set page_size"),
        ({"batch": 1.5}, "batch is 1.5"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(scripted_target(script_table([], [])), **options)


def test_a_filler_is_what_a_script_ends_in():
    """The scripted target itself: behind its script it says the filler, and on a damaged cache it says so."""
    engine, asked, scripts = scripted_engine(batch=1)
    assert run(engine, [Request(asked[0].prompt_ids, 33)])[0].token_ids == (*scripts[0], *[FILLER] * 3)
    engine.admit([(0, asked[0])])
    engine.state = engine.state.replace(
        cache=engine.state.cache.replace(k=tuple(x.at[0, 0, 1].add(1.0) for x in engine.state.cache.k))
    )
    assert BROKEN in engine.round()[0].token_ids
