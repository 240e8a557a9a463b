"""`generate` and `stream`: losslessness with every kind of drafter and layout, and what is refused."""

import dataclasses
import functools

import numpy as np
import pytest
import tokenizers
from answers import mixed_prompts, of_results
from golden_cases import load_golden
from scripted import FILLER, all_wrong, script_table, scripted_drafter, scripted_target, wrong_at
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.decoding.generate import build, generate, stream

VOCAB, MASK = 96, 95
LENGTHS = (1, 2, 5, 13, 17, 24, 31, 40)
LIMITS = (40, 1, 2, 7, 40, 23, 4, 40)


@functools.cache
def plain() -> tuple[list[list[int]], list]:
    """(prompts, plain greedy answers) of the golden target."""
    target, _, _ = load_golden("tr_qwen3_full_a")
    prompts = [[i, *p[1:]] for i, p in enumerate(mixed_prompts(LENGTHS, VOCAB))]  # the first token names the row
    prompts[3] = load_golden("tr_qwen3_full_a")[2]["target.input_ids"][0].tolist()
    return prompts, generate(target, None, prompts, max_tokens=40)


def chain_table() -> np.ndarray:
    prompts, results = plain()
    return script_table(prompts, [r.token_ids for r in results], VOCAB)


def drafters(name: str):
    target, trained, _ = load_golden("tr_qwen3_full_a")
    layers = target.config.num_layers
    if name == "trained":
        return trained
    if name == "random":
        return random_drafter(dataclasses.replace(trained.config, mask_token_id=3), target, seed=7)
    if name == "oracle":
        return scripted_drafter(chain_table(), 8, layers)
    if name == "adversarial":
        return scripted_drafter(all_wrong(chain_table(), VOCAB), 8, layers)
    rng = np.random.default_rng(1)
    wrong = {p[0]: rng.choice(80, 30, replace=False) for p in plain()[0]}
    return scripted_drafter(wrong_at(chain_table(), wrong, VOCAB), 8, layers)


@pytest.mark.parametrize("name", ["trained", "random", "oracle", "adversarial", "often right"])
def test_answers_are_those_of_plain_decoding(name):
    target, _, _ = load_golden("tr_qwen3_full_a")
    prompts, expected = plain()
    results = generate(target, drafters(name), prompts, max_tokens=LIMITS)
    for result, answer, limit in zip(results, expected, LIMITS, strict=True):
        assert result.token_ids == answer.token_ids[:limit]
        assert result.finish_reason == "length"
        assert sum(result.acceptance) + 1 == limit
    if name == "oracle":  # 39 tokens in blocks of 8
        assert results[0].acceptance == [8, 8, 8, 8, 7]
    if name == "adversarial":
        assert all(set(r.acceptance) <= {1} for r in results)
    if name == "trained":
        assert max(max(r.acceptance, default=0) for r in results) == 4


@pytest.mark.parametrize("block_size", [2, 3])
def test_blocks_may_be_smaller_than_trained(block_size):
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    prompts, expected = plain()
    results = generate(target, drafter, prompts, max_tokens=40, block_size=block_size)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert max(max(r.acceptance) for r in results) == block_size


@pytest.mark.parametrize("page_size", [4, 8])
def test_pages_change_nothing(page_size):
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    prompts, expected = plain()
    contiguous = generate(target, drafter, prompts, max_tokens=LIMITS)
    paged = generate(target, drafter, prompts, max_tokens=LIMITS, page_size=page_size)
    assert of_results(paged) == of_results(contiguous)
    assert [r.token_ids for r in paged] == [r.token_ids[:n] for r, n in zip(expected, LIMITS, strict=True)]


def test_more_prompts_than_rows():
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    prompts, _ = plain()
    together = generate(target, drafter, prompts, max_tokens=LIMITS)
    queued = generate(target, drafter, prompts, max_tokens=LIMITS, batch=3)
    assert of_results(queued) == of_results(together)


def test_rounds_without_the_host_change_nothing():
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    prompts, _ = plain()
    stops = [plain()[1][0].token_ids[9]]
    expected = generate(target, drafter, prompts, max_tokens=LIMITS, stop_token_ids=stops, batch=4)
    unwatched = generate(target, drafter, prompts, max_tokens=LIMITS, stop_token_ids=stops, batch=4, rounds_per_call=5)
    assert of_results(unwatched) == of_results(expected)
    assert {r.finish_reason for r in expected} == {"stop", "length"}


def test_no_prompts_no_answers():
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    assert generate(target, drafter, []) == []
    assert list(stream(target, drafter, [])) == []


def test_prompts_may_be_arrays():
    table = script_table([[3, 4]], [[5, 6, 7]])
    target = scripted_target(table)
    for prompts in (np.array([[3, 4]]), [np.array([3, 4], np.int64)], ((3, 4),), [range(3, 5)]):
        [result] = generate(target, None, prompts, max_tokens=np.int64(3), seed=np.int64(3))
        assert result.token_ids == [5, 6, 7]
        assert result.prompt_ids == [3, 4]


def test_a_limit_far_beyond_the_context_is_cut():
    table = script_table([[3]], [[5, 6, 7]])
    [result] = generate(scripted_target(table), scripted_drafter(table, 4), [[3]], max_tokens=10**12)
    assert len(result.token_ids) == 255 and result.token_ids[3:] == [FILLER] * 252
    [result] = generate(scripted_target(table), None, [[3]], max_tokens=10**12, max_length=6)
    assert result.token_ids == [5, 6, 7, FILLER, FILLER] and result.finish_reason == "length"


def test_seeds_of_a_call_are_the_rows_own():
    target = scripted_target(script_table([], []))
    seeds = lambda seed: [r.seed for r in build(target, None, [[1], [2], [3]], seed=seed)[1]]  # noqa: E731
    assert seeds(7) == seeds(np.int32(7)) == [7, 8, 9]
    assert seeds([5, 5, 2**63]) == [5, 5, 2**63]
    assert seeds(2**64 - 1) == [2**64 - 1, 0, 1]
    assert seeds(-1) == [2**64 - 1, 0, 1]


def test_stream_gives_the_same_pieces_round_by_round():
    target, drafter, _ = load_golden("tr_qwen3_full_a")
    prompts, _ = plain()
    expected = generate(target, drafter, prompts, max_tokens=LIMITS)
    pieces = [[] for _ in prompts]
    for delta in stream(target, drafter, prompts, max_tokens=LIMITS):
        pieces[delta.index].append(delta)
    for row, result in zip(pieces, expected, strict=True):
        assert [t for d in row for t in d.token_ids] == result.token_ids
        assert [len(d.token_ids) for d in row[1:]] == result.acceptance
        assert [d.finish_reason for d in row] == [None] * (len(row) - 1) + ["length"]


@pytest.mark.parametrize("thrown", [KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_a_stream_left_in_the_middle_breaks_nothing(thrown):
    table = script_table([[3, 4]], [list(range(10))])
    target, drafter = scripted_target(table), scripted_drafter(table, 4)
    expected = generate(target, drafter, [[3, 4]], max_tokens=20)
    pieces = stream(target, drafter, [[3, 4]] * 3, max_tokens=20)
    next(pieces), next(pieces)
    if thrown is GeneratorExit:
        pieces.close()
    else:
        with pytest.raises(thrown):
            pieces.throw(thrown)
    assert list(pieces) == []
    assert of_results(generate(target, drafter, [[3, 4]], max_tokens=20)) == of_results(expected)


def test_a_stream_refuses_before_it_is_read():
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        stream(scripted_target(script_table([], [])), None, [[]])


def test_public_names():
    assert dflash_jax.generate is generate and dflash_jax.stream is stream


REFUSED = [
    ({"prompts": "hello"}, TypeError, r"prompts is a single text; pass a list: \[text\]"),
    ({"prompts": ["hello"]}, ValueError, r"prompt 0 is a text, but the target 'scripted' has no tokenizer"),
    ({"prompts": [1, 2]}, TypeError, r"prompts is a single list of ids \(it holds 1\); pass a list of lists"),
    ({"prompts": np.array([1, 2])}, TypeError, "prompts is a single list of ids"),
    ({"prompts": [b"abc"]}, TypeError, "prompt 0 is a bytes"),
    ({"prompts": [{1: 2}]}, TypeError, "prompt 0 is a dict, must be a text or a list of token ids"),
    ({"prompts": [[1], []]}, ValueError, "prompt 1 is empty: at least one token"),
    ({"prompts": [[1, 16]]}, ValueError, r"prompt 0 holds token id 16, ids must be whole numbers in \[0, 16\)"),
    ({"prompts": [[1, -1]]}, ValueError, "prompt 0 holds token id -1"),
    ({"prompts": [[1.0]]}, ValueError, r"prompt 0 holds token id 1\.0, ids must be whole numbers"),
    ({"prompts": [[1] * 256]}, ValueError, "prompt 0 has 256 tokens, the context holds 256.*shorten the prompt"),
    ({"prompts": [[1] * 9], "max_length": 9}, ValueError, "prompt 0 has 9 tokens, the context holds 9"),
    ({"max_length": 257}, ValueError, r"max_length is 257, must lie in \[2, 256\] \(the target's context\)"),
    ({"max_length": 1}, ValueError, "max_length is 1"),
    ({"max_length": 12.5}, ValueError, r"max_length is 12\.5"),
    ({"max_tokens": 0}, ValueError, "max_tokens of prompt 0 is 0, must be a whole number >= 1"),
    ({"max_tokens": [4, -1]}, ValueError, "max_tokens of prompt 1 is -1"),
    ({"max_tokens": 2.0}, ValueError, r"max_tokens of prompt 0 is 2\.0"),
    ({"max_tokens": True}, ValueError, "max_tokens of prompt 0 is True"),
    ({"max_tokens": None}, ValueError, "max_tokens of prompt 0 is None"),
    ({"max_tokens": [1, 2, 3]}, ValueError, "max_tokens has 3 values for 2 prompts; give one value, or one a prompt"),
    ({"temperature": [1.0, float("nan")]}, ValueError, "temperature of prompt 1 is nan, must be a finite number >= 0"),
    ({"temperature": -0.5}, ValueError, r"temperature of prompt 0 is -0\.5"),
    ({"temperature": "hot"}, ValueError, "temperature of prompt 0 is 'hot'"),
    ({"top_p": np.array([1.0, 0.0])}, ValueError, r"top_p of prompt 1 is 0\.0, must be in \(0, 1\]"),
    ({"top_k": 1.5}, ValueError, r"top_k of prompt 0 is 1\.5, must be a whole number"),
    ({"min_p": 2}, ValueError, "min_p of prompt 0 is 2"),
    ({"presence_penalty": [0.0, 2.1]}, ValueError, r"presence_penalty of prompt 1 is 2\.1, must be in \[-2, 2\]; 0"),
    ({"presence_penalty": None}, ValueError, "presence_penalty of prompt 0 is None"),
    ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty of prompt 0 is nan, must be in"),
    ({"frequency_penalty": [0.5]}, ValueError, "frequency_penalty has 1 values for 2 prompts; give one value, or one"),
    ({"repetition_penalty": 0}, ValueError, r"repetition_penalty of prompt 0 is 0, must be in \[0\.01, 100\]; 1"),
    ({"repetition_penalty": float("inf")}, ValueError, "repetition_penalty of prompt 0 is inf"),
    ({"logit_bias": {16: 1.0}}, ValueError, r"logit_bias of prompt 0 holds token id 16, ids must be .* in \[0, 16\)"),
    ({"logit_bias": {"7": 1.0}}, ValueError, "logit_bias of prompt 0 holds token id '7', ids must be whole numbers"),
    ({"logit_bias": [None, {3: float("nan")}]}, ValueError, "logit_bias of prompt 1 is nan for token 3, must be a num"),
    ({"logit_bias": {3: 1e9}}, ValueError, r"1000000000\.0 for token 3, must be a number in \[-1000, 1000\]; -inf"),
    ({"logit_bias": {3: None}}, ValueError, "logit_bias of prompt 0 is None for token 3"),
    ({"logit_bias": [[3, 4], None]}, ValueError, r"logit_bias of prompt 0 is \[3, 4\], must be a dict"),
    ({"logit_bias": [{}]}, ValueError, "logit_bias has 1 values for 2 prompts"),
    ({"logit_bias": dict.fromkeys(range(16), -np.inf)}, ValueError, "logit_bias of prompt 0 forbids all 16 tokens"),
    ({"seed": 2**64}, ValueError, "seed of the call is 18446744073709551616"),
    ({"seed": [1, 0.5]}, ValueError, r"seed of prompt 1 is 0\.5"),
    ({"seed": None}, ValueError, "seed of prompt 0 is None"),
    ({"stop_token_ids": [16]}, ValueError, r"stop_token_ids of prompt 0 hold 16, ids must be .* in \[0, 16\)"),
    ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids of prompt 0 hold -1"),
    ({"stop_token_ids": 5}, TypeError, "stop_token_ids is 5, must be a list of token ids"),
    ({"stop_token_ids": range(8)}, ValueError, "stop_token_ids of prompt 0 are 9 ids .*at most 8"),
    ({"block_size": 5}, ValueError, r"block_size is 5, must lie in \[2, 4\]: a drafter runs at its trained"),
    ({"block_size": 1}, ValueError, "block_size is 1"),
    ({"block_size": 2.0}, ValueError, r"block_size is 2\.0"),
    ({"drafter": None, "block_size": 4}, ValueError, "block_size is 4, but without a drafter a round is one token"),
    ({"proposal": "best"}, ValueError, "proposal is 'best', must be 'argmax' or 'drawn'"),
    ({"batch": 0}, ValueError, "batch is 0, must be a whole number >= 1"),
    ({"page_size": 0}, ValueError, "page_size is 0, must be a whole number >= 1"),
    ({"page_size": "8"}, ValueError, "page_size is '8'"),
    ({"rounds_per_call": 0}, ValueError, "rounds_per_call is 0"),
    ({"max_new_tokens": 5}, TypeError, "max_new_tokens"),
]


@pytest.mark.parametrize("changes, error, message", REFUSED, ids=[m[:40] for _, _, m in REFUSED])
def test_what_is_refused(changes, error, message):
    table = script_table([], [])
    options = {"target": scripted_target(table, [9]), "drafter": scripted_drafter(table, 4)}
    with pytest.raises(error, match=message):
        generate(**(options | {"prompts": [[1, 2], [3]]} | changes))


def test_a_drafter_of_another_target_is_refused():
    drafter = load_golden("tr_qwen3_full_a")[1]
    with pytest.raises(ValueError, match="the drafter taps layer 4, the target has 1 layers"):
        generate(scripted_target(script_table([], [])), drafter, [[1]])


def bytes_target(text: bytes, max_tokens: int):
    """(target, drafter): behind the prompt "a" comes this text, a token a byte; some drafts are refused."""
    alphabet = bytes(sorted({*text, *b"a"}))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    seen_as = [level.pre_tokenize_str(chr(b))[0][0] if b < 128 else None for b in alphabet]
    # A byte above 127 is spelt as the byte-level alphabet spells it: by the last character of a text that ends in it.
    for i, b in enumerate(alphabet):
        if seen_as[i] is None:
            whole = next(c for c in text.decode() if b in c.encode())
            seen_as[i] = level.pre_tokenize_str(whole)[0][0][whole.encode().index(b)]
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(seen_as)}, []))
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    script = [alphabet.index(b) for b in text][:max_tokens]
    table = script_table([[alphabet.index(b"a")]], [script])
    drafter = scripted_drafter(wrong_at(table, {alphabet.index(b"a"): [4, 5, 11]}), 4)
    return dataclasses.replace(scripted_target(table), tokenizer=Tokenizer(backend)), drafter


@pytest.mark.parametrize("max_tokens", [14, 10])
def test_text_is_streamed_in_whole_characters(max_tokens):
    """The second limit falls inside a character: both ways give the same mark for it."""
    text = "é日ďb 日é"
    target, drafter = bytes_target(text.encode(), max_tokens)
    [result] = generate(target, drafter, ["a"], max_tokens=max_tokens)
    pieces = [d.text for d in stream(target, drafter, ["a"], max_tokens=max_tokens)]
    assert "".join(pieces) == result.text == text.encode()[:max_tokens].decode(errors="replace")
    assert len(pieces) > 3 and not any("\ufffd" in piece for piece in pieces[:-1])
    assert ("\ufffd" in result.text) == (max_tokens == 10)
