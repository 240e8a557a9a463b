"""The trace of an answer: the same tokens and rounds as `generate`, with what was drafted beside them."""

import re

import pytest
from serving.tiny_pair import BLOCK, MAX_TOKENS, oracle, pair
from tiny_benchmark import golden_prompt
from tiny_benchmark import pair as golden_pair

from dflash_jax.decoding.generate import generate
from dflash_jax.evaluation.trace import Trace, TracedRound, rounds_html, text_html, trace


def test_trace_is_what_generate_decodes():
    target, drafter = golden_pair()
    prompt = golden_prompt()
    traced = trace(target, drafter, prompt, max_tokens=30)
    result = generate(target, drafter, [prompt], max_tokens=30)[0]
    assert traced.token_ids == result.token_ids and traced.finish_reason == result.finish_reason
    assert [len(one.emitted) for one in traced.rounds] == result.acceptance
    assert len(set(result.acceptance)) > 1  # some drafts are right and some are not
    for one in traced.rounds[:-1]:
        assert len(one.drafted) == drafter.block_size - 1
        # The proposal explains the round: kept up to the first token that the target would not have said.
        assert one.emitted[: one.accepted] == one.drafted[: one.accepted]
        assert one.accepted == len(one.emitted) - 1 and one.own == one.emitted[-1]
        if not one.is_bonus:
            assert one.own != one.drafted[one.accepted]


def test_oracle_blocks_end_in_a_bonus():
    target, _ = pair()
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    traced = trace(target, oracle(target, ids), ids, max_tokens=MAX_TOKENS)
    assert all(one.is_bonus and one.accepted == BLOCK - 1 for one in traced.rounds[:-1])


def test_stop_within_a_draft_has_no_token_of_the_target():
    target, _ = pair()
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    answer = generate(target, None, [ids], max_tokens=MAX_TOKENS)[0].token_ids
    stop = next(token for i, token in enumerate(answer) if i % BLOCK == 2 and answer.index(token) == i)
    traced = trace(target, oracle(target, ids), ids, max_tokens=MAX_TOKENS, stop_token_ids=[stop])
    last = traced.rounds[-1]
    assert traced.finish_reason == "stop" and last.own is None and last.accepted == len(last.emitted)


@pytest.fixture(scope="module")
def tokenizer():
    return pair()[0].tokenizer


def kinds(text: str) -> list[tuple[str, str]]:
    return re.findall(r'<span class="(\w+)"[^>]*>([^<]*)</span>', text)


def test_html_says_where_tokens_came_from(tokenizer):
    a, b, lt, nl = (tokenizer.encode(c)[0] for c in "ab<\n")
    traced = Trace((a,), a, (TracedRound((b, b), (b, nl), 1), TracedRound((a, b), (a, b, lt), 2)), "length")
    text = text_html(traced, tokenizer)
    assert kinds(text) == [
        ("first", "a"), ("accepted", "b"), ("correction", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"),
        ("accepted", "a"), ("accepted", "b"), ("bonus", "&lt;"),
    ]  # fmt: skip
    table = rounds_html(traced, tokenizer, limit=1)
    assert kinds(table)[:2] == [("accepted", "b"), ("refused", "b")] and "&lt;" not in table


def test_characters_of_several_tokens_are_whole(tokenizer):
    """B60, on a screen: no replacement characters in the middle of a text."""
    ids = tokenizer.encode("naïve 日本")
    rounds = tuple(TracedRound((token,), (token,), 1) for token in ids[1:])
    shown = "".join(text for _, text in kinds(text_html(Trace((1,), ids[0], rounds, "length"), tokenizer)))
    assert shown == "naïve 日本"
