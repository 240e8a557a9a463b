"""One answer, and plain decoding beside DFlash: the numbers, the table and the file."""

import dataclasses

import pytest
from serving.tiny_pair import BLOCK, MAX_TOKENS, config, oracle, pair, strict_json, terminal

from dflash_jax.config import ConfigError
from dflash_jax.decoding.generate import generate
from dflash_jax.evaluation.methods import first_difference
from dflash_jax.evaluation.timing import TimedRun
from dflash_jax.serving.compare import _contrast, comparison_table
from dflash_jax.serving.run import serve

PROMPT = "Say it."


@pytest.fixture(scope="module")
def tiny():
    target, drafter = pair()
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    plain = generate(target, None, [ids], max_tokens=MAX_TOKENS)[0]
    return target, drafter, ids, plain


@pytest.fixture(scope="module")
def random_run(tiny, tmp_path_factory):
    """serve with the random drafter: (stats, the same from the file, stdout, stderr)."""
    target, drafter, _, _ = tiny
    path = tmp_path_factory.mktemp("stats") / "stats.json"
    screen = terminal()
    stats = serve(config(), PROMPT, path, terminal=screen, target=target, drafter=drafter)
    return stats, strict_json(path.read_text()), screen.out.file.getvalue(), screen.err.file.getvalue()


def test_file_has_the_promised_fields(random_run):
    stats, written, _, _ = random_run
    assert written == stats
    number = (int, float)
    assert isinstance(written["plain"]["tokens_per_s"], number) and written["plain"]["tokens_per_s"] > 0
    assert isinstance(written["dflash"]["tokens_per_s"], number) and written["dflash"]["tokens_per_s"] > 0
    assert 1 <= written["dflash"]["tau"] <= BLOCK
    assert list(written["dflash"]["histogram"]) == [str(n) for n in range(1, BLOCK + 1)]
    assert isinstance(written["speedup"], number)
    assert written["identical"] is True and written["first_difference"] is None
    assert written["dtype"] == "float32"
    assert written["tokens"] == written["dflash"]["tokens"] == written["plain"]["tokens"]


def test_numbers_agree_with_each_other(random_run, tiny):
    stats, *_ = random_run
    plain, dflash = stats["plain"], stats["dflash"]
    assert plain["tau"] == 1 and plain["histogram"] == {"1": plain["tokens"] - 1}
    emitted = sum(int(n) * rounds for n, rounds in dflash["histogram"].items())
    assert emitted + 1 == stats["tokens"] == len(tiny[3].token_ids)  # the prefill's token is in no round
    assert sum(dflash["histogram"].values()) == dflash["rounds"]
    assert dflash["tau"] == pytest.approx(emitted / dflash["rounds"])
    assert stats["speedup"] == pytest.approx(dflash["tokens_per_s"] / plain["tokens_per_s"])
    for side in (plain, dflash):
        assert len(side["run_seconds"]) == stats["repeats"] == 2
        assert 0 < side["first_token_s"] < side["seconds"]
        # Prefill included can not be faster than excluded by more than the prefill's own token.
        assert side["tokens_per_s"] <= side["decode_tokens_per_s"] * stats["tokens"] / (stats["tokens"] - 1)


def test_answer_goes_to_stdout_and_progress_to_stderr(random_run, tiny):
    _, _, out, err = random_run
    answer, table = out.split("\n\n", 1)
    assert answer == tiny[3].text
    assert "identical" in table and "tokens/s" in table and "calls that gave 1" in table
    assert "compiling DFlash" in err and "measuring" in err and "identical" not in err


def test_an_oracle_drafter_is_seen_as_one(tiny):
    target, _, ids, plain = tiny
    stats = serve(config(), PROMPT, terminal=terminal(), target=target, drafter=oracle(target, ids))
    rounds, rest = divmod(len(plain.token_ids) - 1, BLOCK)
    assert rest
    expected = {str(n): {BLOCK: rounds, rest: 1}.get(n, 0) for n in range(1, BLOCK + 1)}
    assert stats["dflash"]["histogram"] == expected
    assert stats["dflash"]["per_position"] == [1.0] * (BLOCK - 1)
    assert stats["identical"] is True and stats["dflash"]["rounds"] < stats["plain"]["rounds"]


def test_block_size_of_the_config_is_used(tiny):
    target, _, ids, _ = tiny
    changed = config(**{"drafter.block_size": 2})
    stats = serve(changed, PROMPT, terminal=terminal(), target=target, drafter=oracle(target, ids))
    assert stats["dflash"]["block_size"] == 2
    assert list(stats["dflash"]["histogram"]) == ["1", "2"]
    with pytest.raises(ConfigError, match=r"drafter\.block_size is 9.*blocks of 4"):
        serve(config(**{"drafter.block_size": 9}), PROMPT, terminal=terminal(), target=target, drafter=tiny[1])


def test_without_a_drafter_there_is_one_column(tiny):
    screen = terminal()
    stats = serve(config(**{"drafter.source": ""}), PROMPT, terminal=screen, target=tiny[0])
    assert stats["dflash"] is None and stats["speedup"] is None and stats["identical"] is None
    assert "DFlash" not in screen.out.file.getvalue()


def test_sampled_answers_are_not_compared(tiny):
    changed = config(**{"generation.temperature": 1.0, "comparison.repeats": 1})
    screen = terminal()
    stats = serve(changed, PROMPT, terminal=screen, target=tiny[0], drafter=tiny[1])
    assert stats["identical"] is None and "same law" in screen.out.file.getvalue()


def test_raw_prompt_skips_the_template(tiny):
    target = tiny[0]
    changed = config(**{"drafter.source": "", "generation.chat_template": False, "comparison.repeats": 1})
    stats = serve(changed, PROMPT, terminal=terminal(), target=target)
    assert stats["prompt_tokens"] == len(target.tokenizer.encode(PROMPT))
    bare = dataclasses.replace(target, tokenizer=type(target.tokenizer)(target.tokenizer.backend))
    with pytest.raises(ConfigError, match=r"no chat template; set generation\.chat_template=False"):
        serve(config(**{"drafter.source": ""}), PROMPT, terminal=terminal(), target=bare)


def run_of(tokens) -> TimedRun:
    return TimedRun(list(tokens), [1] * (len(tokens) - 1), "length", 1.0, 0.5)


def side(speed: float) -> dict:
    return {"tokens_per_s": speed, "decode_tokens_per_s": speed}


@pytest.mark.parametrize(
    ("plain", "dflash", "first"),
    [
        ([[5, 6, 7]], [[5, 6, 7]], None),
        ([[5, 6, 7]], [[5, 9, 7]], 1),
        ([[5, 6, 7]], [[5, 6]], 2),
        ([[5, 6, 7]] * 2, [[5, 6, 7], [5, 6, 8]], 2),  # a later repeat counts too
        ([[5, 6, 7], [4, 6, 7]], [[5, 6, 7]] * 2, 0),  # and so does plain decoding that is not reproducible
    ],
)
def test_any_difference_is_reported(plain, dflash, first):
    runs = {"plain": [run_of(x) for x in plain], "dflash": [run_of(x) for x in dflash]}
    result = _contrast(runs, {"plain": side(2.0), "dflash": side(3.0)}, greedy=True)
    assert result["identical"] is (first is None) and result["first_difference"] == first
    assert result["speedup"] == 1.5


def test_first_difference():
    assert first_difference([], []) is None
    assert first_difference([1], []) == 0
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_table_names_the_first_difference(random_run):
    stats = random_run[0] | {"identical": False, "first_difference": 4}
    assert any(
        "differ from token 5" in str(cell) for column in comparison_table(stats).columns for cell in column.cells
    )


def test_an_answer_of_one_token_has_no_rates(tiny):
    """No round, no tau; nothing after the first token, no speed after it: dashes, never zeros or errors."""
    target, drafter, _, _ = tiny
    screen = terminal()
    stats = serve(config(**{"generation.max_tokens": 1}), PROMPT, terminal=screen, target=target, drafter=drafter)
    assert stats["tokens"] == 1
    assert stats["dflash"]["tau"] is None and stats["dflash"]["decode_tokens_per_s"] is None
    assert stats["dflash"]["histogram"] == {"1": 0, "2": 0, "3": 0, "4": 0} and stats["decode_speedup"] is None
    assert "0.00" not in screen.out.file.getvalue()


def test_prompt_that_fills_the_context_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, the context of random:tiny holds 1024"):
        serve(config(), "x" * 2000, terminal=terminal(), target=tiny[0], drafter=tiny[1])


def test_answer_ends_with_the_context(tiny):
    """B11: the answer is cut by the context, with the same tokens either way."""
    target, drafter, _, _ = tiny
    small = dataclasses.replace(target, config=dataclasses.replace(target.config, max_positions=40))
    stats = serve(config(**{"generation.max_tokens": 500}), PROMPT, terminal=terminal(), target=small, drafter=drafter)
    assert stats["prompt_tokens"] + stats["tokens"] == 40
    assert stats["dflash"]["finish_reason"] == "length" and stats["identical"] is True
