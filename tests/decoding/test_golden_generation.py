"""Greedy generation against the reference implementation: the same ids and the same acceptance lists."""

import pytest
from golden_cases import CASES, load_golden

from dflash_jax.decoding.generate import generate

GENERATIONS = {"gen40": 40, "gen17": 17, "gen1": 1, "gen2": 2, "gen40_stop": 40}


@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_is_that_of_the_reference(case):
    target, drafter, numbers = load_golden(case)
    prompt = numbers["target.input_ids"][0].tolist()
    for name, max_tokens in GENERATIONS.items():
        stops = numbers[f"{name}.stop_token_ids"].tolist() if f"{name}.stop_token_ids" in numbers else None
        expected = numbers[f"{name}.output_ids"][0, len(prompt) :].tolist()
        [result] = generate(target, drafter, [prompt], max_tokens=max_tokens, stop_token_ids=stops)
        assert result.token_ids == expected, name
        assert result.acceptance == numbers[f"{name}.acceptance_lengths"].tolist(), name
        assert result.finish_reason == ("length" if stops is None else "stop"), name
        assert result.prompt_ids == prompt
        [plain] = generate(target, None, [prompt], max_tokens=max_tokens, stop_token_ids=stops)
        assert plain.token_ids == numbers[f"{name}.ar_ids"][0, len(prompt) :].tolist(), name
        assert plain.acceptance == [1] * (len(expected) - 1), name


@pytest.mark.parametrize("case", CASES)
def test_the_references_sequences_are_worth_comparing(case):
    """A reference that accepts nothing, or everything, would not notice a fault of the drafter."""
    numbers = load_golden(case)[2]
    lengths = numbers["gen40.acceptance_lengths"]
    assert sum(lengths) + 1 == 40
    assert min(lengths) == 1 and max(lengths) == 4
