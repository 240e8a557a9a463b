"""Bias and penalties: token by token what plain counting says, however many tokens a round commits."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import Answer, of_results, run
from decoding_laws import bend_reference, chi_square, greedy_reference, joint_law_reference
from scripted import all_wrong, drawing_drafter, markov_target, script_table, scripted_drafter

from dflash_jax.decoding import step as step_module
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.logits_rules import bend, count_emitted, make_logits_rules
from dflash_jax.decoding.request import Request
from dflash_jax.models.attention import causal

A, B, OTHER = 0, 1, 2


@pytest.fixture
def counts_once_a_round(monkeypatch):
    """The fault of B46: every slot of a block has the counts of the round's beginning."""

    def stale(logits_BxMxV, rules, count_BxV, token_BxM, visible):
        return bend(logits_BxMxV, rules, count_BxV, token_BxM, jnp.zeros_like(visible))

    monkeypatch.setattr(step_module, "bend", stale)
    step_module.step.clear_cache()
    yield
    step_module.step.clear_cache()


# B46: constant logits, two tokens that matter ---------------------------------------------------------------

B46 = {
    "frequency .5": ({"frequency_penalty": 0.5}, [OTHER], (3.0, 2.2), [A, A] + [B, A] * 31),
    "presence .9": ({"presence_penalty": 0.9}, [OTHER], (3.0, 2.2), [A, B] + [A] * 62),
    "repetition 1.3, too weak": ({"repetition_penalty": 1.3}, [OTHER], (3.0, 2.2), [A] * 64),
    "repetition 1.3": ({"repetition_penalty": 1.3}, [OTHER], (3.0, 2.5), [A, B] + [A] * 62),
    "repetition 1.3, A in the prompt": ({"repetition_penalty": 1.3}, [OTHER, A], (3.0, 2.5), [B] + [A] * 63),
    "repetition 1.3, both in the prompt": ({"repetition_penalty": 1.3}, [OTHER, B, A], (3.0, 2.5), [A] * 64),
    "repetition 1.3, negative logits": ({"repetition_penalty": 1.3}, [OTHER], (-1.0, -1.2), [A, B] + [A] * 62),
    "the prompt is no answer": ({"presence_penalty": 0.9, "frequency_penalty": 0.5}, [OTHER, A, A], (3.0, 2.2),
                                [A, B] + [A, A, B] + [A, B] * 29 + [A]),
}  # fmt: skip


def constant_target(a: float, b: float):
    table_VxV = np.full((4, 4), -100.0)
    table_VxV[:, [A, B]] = a, b
    return markov_target(table_VxV)


def b46_answers(case: str, wrong: bool = False) -> list[Answer]:
    """By plain decoding, by blocks of 8 from a drafter that knows the golden answer or never says it."""
    rules, prompt, logits, golden = B46[case]
    table = script_table([prompt], [golden], 4)
    answers = []
    for drafter in (None, scripted_drafter(table, 8), scripted_drafter(all_wrong(table, 4), 8)):
        answers += of_results(generate(constant_target(*logits), drafter, [prompt], max_tokens=64, **rules))
    return answers


@pytest.mark.parametrize("case", B46)
def test_b46_penalties_count_inside_a_block(case):
    rules, prompt, logits, golden = B46[case]
    assert len(golden) == 64
    table_VxV = np.full((4, 4), -100.0)
    table_VxV[:, [A, B]] = logits
    assert greedy_reference(table_VxV, prompt, 64, **rules) == golden
    plain, oracle, adversary = b46_answers(case)
    assert plain == Answer(tuple(golden), (1,) * 63, "length")
    assert oracle == Answer(tuple(golden), (8,) * 7 + (7,), "length")
    assert adversary == Answer(tuple(golden), (1,) * 63, "length")


@pytest.mark.parametrize("case", ["frequency .5", "presence .9", "repetition 1.3"])
def test_b46_counting_once_a_round_fails_the_case(case, counts_once_a_round):
    plain, oracle, adversary = b46_answers(case)
    golden = tuple(B46[case][-1])
    assert plain.token_ids == adversary.token_ids == golden  # one token a round: nothing to see
    assert oracle.token_ids != golden or oracle.acceptance != (8,) * 7 + (7,)


# The law of sampled answers ------------------------------------------------------------------------------------

VOCAB, WANTED, ROWS = 4, 4, 4096
PROMPT = (1, 3)
TABLE = (np.random.default_rng(5).normal(size=(VOCAB, VOCAB)) * 0.7).astype(np.float32)
SCRIPT = [2, 2, 2, 2]  # a repetition: what a penalty is about
RULES = {"presence_penalty": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {2: 2.0}}
WARPS = {"temperature": 0.9, "top_k": 3, "top_p": 0.95}
REWARD = {"frequency_penalty": -1.5, "repetition_penalty": 0.8}  # negative: repeats more and more
CASES = {"penalties and filters": (RULES, WARPS), "rewards": (REWARD, {"temperature": 1.0})}


def counts_of(case: str, proposal: str | None) -> np.ndarray:
    """How often each beginning of four tokens came in ROWS answers."""
    rules, warps = CASES[case]
    drafter = {
        None: None, "argmax": scripted_drafter(script_table([PROMPT], [SCRIPT], VOCAB), 4),
        "drawn": drawing_drafter(np.float32([0.1, 0.2, 0.6, 0.1]), 4),
    }[proposal]  # fmt: skip
    engine = Engine(
        markov_target(TABLE), drafter, batch=ROWS, max_length=16, greedy=False, proposal=proposal or "argmax",
        logits_rules=True, prefill_chunk_size=4,
    )  # fmt: skip
    answers = run(engine, [Request(PROMPT, WANTED, seed=7000 + i, **warps, **rules) for i in range(ROWS)])
    if proposal is not None:
        committed = np.array([answer.acceptance[0] for answer in answers])
        assert 0.05 < (committed == 1).mean() < 0.95  # drafts are kept, and refused
    counts = np.zeros((VOCAB,) * WANTED, int)
    for answer in answers:
        counts[answer.token_ids] += 1
    return counts


@functools.cache
def exact_law(case: str) -> np.ndarray:
    return joint_law_reference(TABLE, PROMPT, WANTED, *CASES[case])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("proposal", [None, "argmax", "drawn"])
def test_sampled_answers_have_the_bent_targets_law(case, proposal):
    assert chi_square(counts_of(case, proposal), exact_law(case)) > 1e-4


@pytest.mark.parametrize("proposal", ["argmax", "drawn"])
def test_sampled_answers_counted_once_a_round_do_not(proposal, counts_once_a_round):
    assert chi_square(counts_of("rewards", proposal), exact_law("rewards")) < 1e-9


def test_the_law_without_its_rules_is_another():
    case = "penalties and filters"
    for missing in RULES:
        rules = {name: value for name, value in RULES.items() if name != missing}
        other_law = joint_law_reference(TABLE, PROMPT, WANTED, rules, WARPS)
        assert chi_square(exact_law(case) * ROWS, other_law + 1e-12) < 1e-9, missing


# Anything against plain Python -------------------------------------------------------------------------------------

# Multiples of a quarter and powers of two: float32 is exact, so ties are ties in both.
QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)
RULE = st.fixed_dictionaries({}, optional={
    "presence_penalty": QUARTERS, "frequency_penalty": QUARTERS, "repetition_penalty": st.sampled_from([0.5, 1, 2, 4]),
    "logit_bias": st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, -1.0, 0.5, 2.0, -np.inf]), max_size=4),
})  # fmt: skip
ROW_PROMPTS = [[0, 3], [1], [2, 2, 4]]


def rounds_of(answer: list[int], drafted: list[int], block: int) -> tuple[int, ...]:
    """The acceptance list of an answer whose position i is drafted as drafted[i]."""
    acceptance, done = [], 1
    while done < len(answer):
        kept = 0
        while kept < block - 1 and done + kept < len(answer) - 1 and answer[done + kept] == drafted[done + kept]:
            kept += 1
        acceptance.append(kept + 1)
        done += kept + 1
    return tuple(acceptance)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    table=st.lists(st.lists(QUARTERS, min_size=5, max_size=5), min_size=5, max_size=5),
    rules=st.lists(RULE, min_size=3, max_size=3),
    drafted=st.lists(st.lists(st.integers(0, 4), min_size=14, max_size=14), min_size=3, max_size=3),
    right=st.lists(st.lists(st.booleans(), min_size=14, max_size=14), min_size=3, max_size=3),
)
def test_greedy_rows_are_what_python_counts(table, rules, drafted, right):
    """Three rows of their own rules, drafts right here and wrong there: tokens and rounds are known beforehand."""
    count, table = 14, np.array(table)
    golden = [greedy_reference(table, p, count, **rule) for p, rule in zip(ROW_PROMPTS, rules, strict=True)]
    drafted = [
        [good if is_right else draft for good, draft, is_right in zip(*row, strict=True)]
        for row in zip(golden, drafted, right, strict=True)
    ]
    requests = [Request(p, count, **rule) for p, rule in zip(ROW_PROMPTS, rules, strict=True)]
    for drafter in (None, scripted_drafter(script_table(ROW_PROMPTS, drafted, 5), 4)):
        engine = Engine(markov_target(table), drafter, batch=3, max_length=32, logits_rules=True)
        answers = run(engine, requests)
        assert [list(answer.token_ids) for answer in answers] == golden
    assert [answer.acceptance for answer in answers] == [
        rounds_of(*row, block=4) for row in zip(golden, drafted, strict=True)
    ]


jit_bend = jax.jit(bend)


def random_block(seed: int, rows: int = 3, slots: int = 5, vocab: int = 7):
    """(logits, requests, what each has answered, root last; the block)."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            rng.integers(0, vocab, 3).tolist(), 9, presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2), repetition_penalty=rng.uniform(0.5, 2),
            logit_bias={int(t): float(rng.normal()) for t in rng.integers(0, vocab, 2)},
        )
        for _ in range(rows)
    ]  # fmt: skip
    answered = rng.integers(0, vocab, (rows, 4))
    block = np.concatenate([answered[:, -1:], rng.integers(0, vocab, (rows, slots - 1))], axis=1)
    return rng.normal(size=(rows, slots, vocab)).astype(np.float32), requests, answered, block.astype(np.int32)


def counts(answered: np.ndarray, vocab: int = 7) -> np.ndarray:
    return np.stack([np.bincount(row, minlength=vocab) for row in answered]).astype(np.int32)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_slot_counts_what_it_sees(shape):
    """In a tree the slots of other branches are none of its history, though they lie before it."""
    parent = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 2]}[shape]
    paths = []
    for slot in range(5):
        paths.append([slot] if parent[slot] < 0 else [*paths[parent[slot]], slot])
    visible = np.zeros((5, 5), bool)
    for slot, path in enumerate(paths):
        visible[slot, path] = True
    if shape == "chain":
        np.testing.assert_array_equal(visible, causal(5))
    logits, requests, answered, block = random_block(1)
    rules = make_logits_rules(requests, 7)
    bent = jit_bend(logits, rules, counts(answered), block, visible)
    np.testing.assert_array_equal(
        jit_bend(logits, rules, counts(answered), block, np.broadcast_to(visible, (3, 5, 5))), bent
    )
    for row, request in enumerate(requests):
        for slot, path in enumerate(paths):
            said = [*answered[row], *block[row, path[1:]]]
            on = {"repetition_penalty": request.repetition_penalty, **request.logits_rules()}
            expected = bend_reference(logits[row, slot], request.prompt_ids, said, **on)
            np.testing.assert_allclose(bent[row, slot], expected, rtol=1e-5, atol=1e-5)


def test_rows_without_rules_keep_their_bits():
    logits, requests, answered, block = random_block(2)
    logits[1, 0, :3] = [0.0, -np.inf, 1e30]
    requests[1] = Request(requests[1].prompt_ids, 9)
    for rules in (make_logits_rules(requests, 7), make_logits_rules([requests[0], None, None], 7)):
        bent = jit_bend(logits, rules, counts(answered), block, causal(5))
        np.testing.assert_array_equal(np.asarray(bent[1]).view(np.int32), logits[1].view(np.int32))


def test_a_forbidden_token_stays_forbidden():
    """-inf survives every penalty, without a nan."""
    logits, requests, answered, block = random_block(3)
    logits[:, :, 2] = 1000.0
    for request in requests:
        request.logit_bias = {2: -np.inf, 4: -1000.0}
    bent = np.asarray(jit_bend(logits, make_logits_rules(requests, 7), counts(answered), block, causal(5)))
    assert (bent[:, :, 2] == -np.inf).all() and np.isfinite(np.delete(bent, 2, axis=2)).all()


def test_counts_take_what_was_emitted():
    token = np.int32([[3, 3, 5], [0, 6, 6], [1, 2, 4]])
    counted = count_emitted(jnp.ones((3, 7), jnp.int32), token, np.int32([3, 2, 0]))
    np.testing.assert_array_equal(counted, 1 + counts(np.zeros((3, 0), int)) + [
        [0, 0, 0, 2, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1], [0] * 7,
    ])  # fmt: skip


# Rows come and go --------------------------------------------------------------------------------------------------


def state_counts(engine: Engine, row: int) -> list[int]:
    return np.asarray(engine.state.count_BxV)[row].tolist()


@pytest.mark.parametrize("drafted", [False, True])
def test_counts_end_at_the_stop_and_the_budget_and_a_place_taken_again_starts_clean(drafted):
    golden = [A, A] + [B, A] * 31
    target = constant_target(3.0, 2.2)
    drafter = scripted_drafter(script_table([[OTHER]], [golden], 4), 8) if drafted else None
    engine = Engine(target, drafter, max_length=128, logits_rules=True)
    stopped = Request([OTHER], 64, stop_token_ids=[B], frequency_penalty=0.5)
    limited = Request([OTHER], 6, frequency_penalty=0.5)
    plain = Request([OTHER], 6)
    [answer] = run(engine, [stopped])
    assert answer.token_ids == (A, A, B) and state_counts(engine, 0) == [2, 1, 0, 0]
    [answer] = run(engine, [limited])
    assert answer.token_ids == tuple(golden[:6]) and state_counts(engine, 0) == [4, 2, 0, 0]
    assert [a.token_ids for a in run(engine, [limited, plain, limited, stopped])] == [
        tuple(golden[:6]), (A,) * 6, tuple(golden[:6]), (A, A, B),
    ]  # fmt: skip
    # Given up in the middle, then taken by one that counts and one that does not.
    engine.admit([(0, Request([OTHER, A], 64, repetition_penalty=1.3, frequency_penalty=0.5))])
    engine.round()
    assert engine.abort(0)
    assert [a.token_ids for a in run(engine, [limited, plain])] == [tuple(golden[:6]), (A,) * 6]
