"""Acceptance statistics: the definitions, by hand-counted rounds."""

from __future__ import annotations

import json

import pytest

from dflash_jax.evaluation.statistics import AcceptanceCounter, Round, rounds_of, summarise

B55 = [Round(4, 7), Round(1, 7), Round(3, 7, accepted=3, ends=True)]


def counted(*answers) -> AcceptanceCounter:
    counter = AcceptanceCounter()
    for rounds in answers:
        counter.add_answer(rounds)
    return counter


def test_b55_acceptance_statistics():
    """3 of 7 and the correction; 0 of 7 and the correction; two drafts and a drafted stop, the rest cut."""
    counter = counted(B55)
    assert (counter.rounds, counter.emitted, counter.accepted, counter.proposed) == (3, 8, 6, 21)
    assert counter.tau == pytest.approx(8 / 3)
    assert counter.rate == pytest.approx(6 / 21)
    assert counter.summary()["histogram"] == [0, 1, 0, 1, 1]
    # The prefill's token is in no round: an answer of 9 tokens has 8 in rounds.
    assert counter.emitted + 1 == 9


def test_b55_nothing_before_the_first_round():
    for summary in (AcceptanceCounter().summary(), summarise([], 8), summarise([[]], 8)):
        for name in ("tau", "tau_per_answer", "acceptance_rate"):
            assert summary[name] is None
        assert (summary["rounds"], summary["answers"], summary["histogram"]) == (0, 0, [0])
        assert summary["per_position"] == []
        json.dumps(summary, allow_nan=False)


def test_b55_plain_decoding_has_tau_one_and_no_rate():
    summary = summarise([[1, 1, 1], [1]], 1)
    assert (summary["tau"], summary["acceptance_rate"], summary["proposed"]) == (1.0, None, 0)
    assert summary["per_position"] == []


def test_global_and_per_answer_tau_differ():
    summary = summarise([[4, 4], [1, 1, 1, 1, 1, 1]], 4)
    assert summary["tau"] == pytest.approx(14 / 8)
    assert summary["tau_per_answer"] == pytest.approx((4 + 1) / 2)


def test_an_answer_of_one_token_has_no_rounds():
    assert summarise([[], [3, 2]], 4) == summarise([[3, 2]], 4)


def test_per_position_is_conditional():
    # Block 4, drafts 3. Kept drafts: 3, 0, 1; and a last round that kept 1 and was cut there.
    summary = summarise([[4, 1, 2, 2]], 4)
    # Draft 1: compared in all four, kept in three. Draft 2: compared in rounds 1 and 3; behind the end it was not.
    assert summary["per_position"] == [pytest.approx(3 / 4), pytest.approx(1 / 2), pytest.approx(1.0)]


def test_a_cut_round_says_nothing_about_the_next_draft():
    cut, refused = counted([Round(2, 5, ends=True)]), counted([Round(2, 5)])
    assert cut.per_position() == [1.0]
    assert refused.per_position() == [1.0, 0.0]


def test_merging_equals_counting_together():
    first, second = [Round(4, 7), Round(8, 7)], [Round(2, 3), Round(1, 3, ends=True)]
    merged = counted(first)
    merged.merge(counted(second))
    assert merged == counted(first, second)
    assert merged.summary() == counted(first, second).summary()


def test_round_by_round_equals_answer_by_answer():
    live = AcceptanceCounter()
    for one in B55:
        live.add_round(one)
    live.close_answer(rounds=3, emitted=8)
    assert live == counted(B55)


def test_acceptance_lists_end_with_the_ending_round():
    assert rounds_of([3, 1], 4) == [Round(3, 3), Round(1, 3, ends=True)]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"emitted": 0, "proposed": 3}, r"emitted 0 tokens, must lie in \[1, 4\]"),
        ({"emitted": 5, "proposed": 3}, r"emitted 5 tokens, must lie in \[1, 4\]"),
        ({"emitted": 3, "proposed": 3, "accepted": 3}, "can not have accepted 3: 2$"),
        ({"emitted": 3, "proposed": 3, "accepted": 1, "ends": True}, "can not have accepted 1: 2 or 3"),
        ({"emitted": 4, "proposed": 3, "accepted": 4, "ends": True}, "can not have accepted 4: 3$"),
    ],
)
def test_impossible_rounds_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        Round(**fields)
