"""Evaluation prompts: the published files, their parsers, and that a model is asked what it was trained on."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest
from data import tiny

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.data.conversations import encode_conversation
from dflash_jax.data.prompts import Prompt, code_message, load
from dflash_jax.data.regenerate import regenerate
from dflash_jax.data.responses import ResponseStore
from dflash_jax.evaluation import tasks
from dflash_jax.evaluation.tasks import PUBLIC, TASKS, EncodedPrompt, encode_task, load_task, parse, prompt_hash, spread

STUB = 'def f(x):\n    """Doubles."""\n'

# Rows in the published files' shapes.
ROWS = {
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def f(x):\n    """Doubles."""\n',
        "test": "",
        "entry_point": "f",
    },
    "gsm8k": {"id": "gsm8k-test-0013", "prompt": " How many? ", "expected": "18"},
    "mtbench": {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Again, shorter."]},
    "truthfulqa": {"id": "t-6", "question": "Which one?", "choices": ["a", "b"], "expected_index": 0},
}
CONTENT = {
    "humaneval": code_message('def f(x):\n    """Doubles."""\n')["content"],
    "gsm8k": "How many?",
    "mtbench": "Write a post.",
    "truthfulqa": "Which one?",
}


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts(name, tmp_path):
    source = dataclasses.replace(PUBLIC[name], rows=1)
    path = write(tmp_path / ("x.jsonl.gz" if name == "humaneval" else "x.jsonl"), [ROWS[name]])
    (prompt,) = parse(name, source, path)
    assert prompt == Prompt(prompt.id, ({"role": "user", "content": CONTENT[name]},), name)
    assert prompt.id == f"{name}:{ROWS[name][source.key]}"


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"id": "a", "prompt": "q"}], "has 1 rows of gsm8k, must have 2"),
        ([{"id": "a", "prompt": "q"}] * 2, "with ids of their own"),
        ([{"id": "a", "prompt": "q"}, {"id": "b"}], r"line 2: no row of gsm8k \(KeyError\('prompt'\)\)"),
        ([{"id": "a", "prompt": "q"}, [1]], "line 2: no row of gsm8k"),
    ],
)
def test_wrong_files_are_refused(rows, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        parse("gsm8k", dataclasses.replace(PUBLIC["gsm8k"], rows=2), write(tmp_path / "x.jsonl", rows))


def test_limits_are_spread_over_the_set():
    prompts = [Prompt(str(i), (), "s") for i in range(80)]
    assert [p.id for p in spread(prompts, 4, "s")] == ["0", "20", "40", "60"]
    assert spread(prompts, None, "s") == spread(prompts, 80, "s") == prompts
    with pytest.raises(ConfigError, match="'s' has 80 prompts, 81 are asked for"):
        spread(prompts, 81, "s")


def test_unknown_tasks_and_limits_are_refused():
    with pytest.raises(ConfigError, match="task 'humanval' is unknown; known are humaneval, gsm8k"):
        load_task("humanval")
    with pytest.raises(ConfigError, match="the limit is 0, must be at least 1"):
        load_task("gsm8k", 0)


@pytest.mark.parametrize("name", tasks.HELD_OUT_SOURCES)
def test_held_out_tasks_are_the_other_side_of_the_split(name):
    asked = {p.messages[0]["content"] for p in load_task(name, 40)}
    trained = {p.messages[0]["content"] for p in load(name, seed=0, split="train")}
    assert len(asked) == 40 and not asked & trained


@pytest.mark.parametrize("name", PUBLIC)
def test_the_published_files(name):
    try:
        prompts = load_task(name)
    except CheckpointError as error:
        pytest.skip(f"{PUBLIC[name].package} is neither installed nor kept, and can not be fetched: {error}")
    assert len(prompts) == PUBLIC[name].rows
    assert all(len(p.messages) == 1 and p.messages[0]["content"].strip() for p in prompts)
    assert load_task(name) == prompts
    if name == "humaneval":
        assert prompts[0].id == "humaneval:HumanEval/0" and prompts[-1].id == "humaneval:HumanEval/163"
        assert "def has_close_elements(numbers: List[float]" in prompts[0].messages[0]["content"]


def test_every_task_is_in_the_dict():
    assert set(TASKS) == {*PUBLIC, *tasks.HELD_OUT_SOURCES}


def test_hash_tells_ids_and_order():
    a, b = EncodedPrompt("t", "a", (1, 23)), EncodedPrompt("t", "b", (12, 3))
    hashes = {prompt_hash(x) for x in ([a], [b], [a, b], [b, a], [])}
    assert len(hashes) == 5
    assert prompt_hash([a]) == prompt_hash([dataclasses.replace(a, id="other")])


# B87: one rendering for training, serving and benchmarks.

SHORT = [Prompt(f"p:{i}", ({"role": "user", "content": text},), "p") for i, text in enumerate(("2+2?", "Hi"))]


@pytest.fixture(scope="module")
def switched():
    """A target whose template reads enable_thinking."""
    return tiny.target(template=tiny.SWITCHED)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
def test_b87_benchmark_prompt_ids_equal_training_prompt_ids(kwargs, switched, tmp_path):
    measured = {p.id: p.ids for p in encode_task(switched.tokenizer, "p", SHORT, kwargs)}
    regenerate(
        switched, SHORT, tmp_path / "store", batch_size=2, max_new_tokens=2, chat_template_kwargs=kwargs, progress=False
    )
    trained = {r.id: tuple(r.prompt_ids) for r in ResponseStore(tmp_path / "store").rows()}
    assert measured == trained
    thinks = switched.tokenizer.decode(measured["p:0"], skip_special_tokens=False).endswith("</think>\n\n")
    assert thinks == (kwargs == {"enable_thinking": False}), "the template must have been given the option"


def test_b87_prompt_part_of_finished_conversations():
    tokenizer = tiny.tokenizer(tiny.MARKED)
    (measured,) = encode_task(tokenizer, "p", SHORT[:1])
    finished = (*SHORT[0].messages, {"role": "assistant", "content": "4"})
    trained = encode_conversation(tokenizer, finished, (tiny.END,))
    assert measured.ids == trained.ids[: trained.spans[0][0]]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=str)
def test_b87_serving_renders_the_same(kwargs, switched):
    from dflash_jax.serving.config import DrafterSection, GenerationSection
    from dflash_jax.serving.session import Session

    session = Session(switched, None, GenerationSection(chat_template_kwargs=kwargs), DrafterSection())
    served = [tuple(session.encode(p.messages)) for p in SHORT]
    assert served == [p.ids for p in encode_task(switched.tokenizer, "p", SHORT, kwargs)]


def test_b87_options_that_the_template_does_not_read_are_refused(switched):
    with pytest.raises(ConfigError, match="enable_thought"):
        encode_task(switched.tokenizer, "p", SHORT, {"enable_thought": True})


def test_b87_the_hash_of_prompt_ids_is_shown(switched, monkeypatch):
    from dflash_jax.evaluation import runner

    monkeypatch.setitem(tasks.TASKS, "short", lambda limit: SHORT)
    monkeypatch.setattr(runner.logging, "info", lambda text, *values: shown.append(text % values))
    shown: list[str] = []
    selected = runner.select_prompts({"short": 0}, switched.tokenizer, 256, {})
    assert selected.hashes == {"short": prompt_hash(selected)}
    assert any(selected.hashes["short"] in line for line in shown)


def test_prompts_that_do_not_fit_are_counted(switched, monkeypatch):
    from dflash_jax.evaluation import runner

    monkeypatch.setitem(tasks.TASKS, "short", lambda limit: SHORT)
    lengths = [len(p.ids) for p in encode_task(switched.tokenizer, "short", SHORT)]
    selected = runner.select_prompts({"short": 0}, switched.tokenizer, min(lengths) + 2, {})
    assert (len(selected.by_task["short"]), selected.left_out) == (1, {"short": 1})
    with pytest.raises(ConfigError, match="'short': every prompt is longer"):
        runner.select_prompts({"short": 0}, switched.tokenizer, 4, {})
