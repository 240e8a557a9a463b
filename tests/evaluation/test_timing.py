"""Timing of single answers: what is counted, and the arithmetic of medians."""

import pytest
from serving.tiny_pair import BLOCK, MAX_TOKENS, oracle, pair

from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Request
from dflash_jax.evaluation.timing import TimedRun, speed_statistics, timed_run


def test_a_timed_run_is_the_answer_of_generate():
    target, _ = pair()
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    drafter = oracle(target, ids)
    engine = Engine(target, drafter, max_length=128)
    for _ in range(2):  # an engine can be used again
        run = timed_run(engine, Request(ids, MAX_TOKENS, stop_token_ids=target.eos_token_ids))
        result = generate(target, drafter, [ids], max_tokens=MAX_TOKENS)[0]
        assert (run.token_ids, run.acceptance, run.finish_reason) == (
            result.token_ids, result.acceptance, result.finish_reason,
        )  # fmt: skip
        assert max(run.acceptance) == BLOCK and 0 < run.first_token_s < run.seconds


def run_of(tokens: int, seconds: float, first: float) -> TimedRun:
    return TimedRun(list(range(tokens)), [1] * (tokens - 1), "length", seconds, first)


def test_speed_is_medians_with_and_without_the_prefill():
    speed = speed_statistics([run_of(11, 2.0, 1.0), run_of(11, 11.0, 1.0), run_of(11, 3.0, 1.0)])
    assert speed["tokens_per_s"] == pytest.approx(11 / 3)
    assert speed["decode_tokens_per_s"] == pytest.approx(5)
    assert speed["seconds"] == 3 and speed["first_token_s"] == 1 and speed["run_seconds"] == [2.0, 11.0, 3.0]


def test_one_token_has_no_speed_after_it():
    assert speed_statistics([run_of(1, 0.5, 0.5)])["decode_tokens_per_s"] is None
