"""The session behind prompts and chats: what is compiled when."""

from decoding.answers import CountCompilations
from serving.tiny_pair import MAX_TOKENS, config, pair

from dflash_jax.decoding.request import Request
from dflash_jax.serving.config import read_config
from dflash_jax.serving.session import DFLASH, PLAIN, Session


def test_prepared_requests_compile_nothing():
    settings = read_config(config())
    target, drafter = pair()
    session = Session(target, drafter, settings.generation, settings.drafter)
    short, long, both = (Request([3] * length, MAX_TOKENS) for length in (5, 60, 150))
    for mode in (PLAIN, DFLASH):
        assert not session.is_prepared(mode, short)
        engine = session.prepare(mode, short)
        assert session.is_prepared(mode, Request([4] * 40, MAX_TOKENS)) and not session.is_prepared(mode, long)
        assert session.prepare(mode, long) is engine and session.is_prepared(mode, long)
        assert not session.is_prepared(mode, both)  # a larger cache
        session.prepare(mode, both)
        with CountCompilations() as compilations:
            for request in (short, long, both):
                assert sum(len(delta.token_ids) for delta in session.stream(mode, request)) == MAX_TOKENS
        assert compilations.count == 0


def test_an_answer_left_early_costs_the_cache_and_not_the_programs():
    settings = read_config(config())
    session = Session(*pair(), settings.generation, settings.drafter)
    request = Request([3] * 5, MAX_TOKENS)
    answer = session.stream(DFLASH, request)
    next(answer)
    answer.close()
    assert not session.is_prepared(DFLASH, request)
    with CountCompilations() as compilations:
        assert sum(len(delta.token_ids) for delta in session.stream(DFLASH, request)) == MAX_TOKENS
    assert compilations.count == 0
