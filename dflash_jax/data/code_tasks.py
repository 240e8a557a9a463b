"""Small programming tasks written from parts: what to look at, what to keep, what to compute, what to return.

The parts combine to thousands of tasks in the form in which benchmarks pose them: a stub whose docstring describes the
task and shows examples. The examples are true: every task carries a solution, which is run to make them.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.data.code_prompts import CodeFunction, docstring_source, stable_hash
from dflash_jax.data.held_out import HeldOut, human_eval


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a task: for the name, for the sentence, for the code."""

    name: str
    words: str
    code: str


_KEEP_NUMBERS = (
    _Part("all", "", ""),
    _Part("even", "that are even", "x % 2 == 0"),
    _Part("odd", "that are odd", "x % 2 != 0"),
    _Part("positive", "greater than zero", "x > 0"),
    _Part("negative", "below zero", "x < 0"),
    _Part("large", "larger than ten", "x > 10"),
    _Part("small", "smaller than five", "x < 5"),
    _Part("triples", "divisible by three", "x % 3 == 0"),
    _Part("fives", "that can be divided by 5 without remainder", "x % 5 == 0"),
    _Part("not_sevens", "not divisible by seven", "x % 7 != 0"),
    _Part("two_digit", "with exactly two digits", "10 <= abs(x) <= 99"),
    _Part("ends_in_one", "whose last digit is 1", "abs(x) % 10 == 1"),
    _Part("between", "between 3 and 12 inclusive", "3 <= x <= 12"),
    _Part("even_digits", "whose digits add up to an even number", "sum(int(d) for d in str(abs(x))) % 2 == 0"),
    _Part("nonzero", "other than 0", "x != 0"),
)
_MAP_NUMBERS = (
    _Part("", "{them}", "x"),
    _Part("squared", "the squares of {them}", "x * x"),
    _Part("cubed", "the cubes of {them}", "x ** 3"),
    _Part("doubled", "twice {them}", "2 * x"),
    _Part("absolute", "the absolute values of {them}", "abs(x)"),
    _Part("last_digits", "the last digits of {them}", "abs(x) % 10"),
    _Part("digit_sums", "the digit sums of {them}", "sum(int(d) for d in str(abs(x)))"),
    _Part("negated", "the negatives of {them}", "-x"),
    _Part("plus_one", "{them}, each increased by one,", "x + 1"),
    _Part("halves", "{them}, each halved and rounded down,", "x // 2"),
)
_REDUCE = (
    _Part("sum", "the sum of {what}", "sum(values)"),
    _Part("product", "the product of {what}, which is 1 if there are none", ""),
    _Part("count_distinct", "how many different values there are among {what}", "len(set(values))"),
    _Part("list", "a list of {what}, in their original order", "values"),
    _Part("sorted", "a list of {what} in ascending order", "sorted(values)"),
    _Part("descending", "a list of {what}, largest first", "sorted(values, reverse=True)"),
    _Part("max", "the largest of {what}, or None if there are none", "max(values) if values else None"),
    _Part("min", "the smallest of {what}, or None if there are none", "min(values) if values else None"),
    _Part("average", "the mean of {what}, or 0 if there are none", "sum(values) / len(values) if values else 0"),
    _Part("spread", "the difference between the largest and the smallest of {what}, or 0 if there are none",
          "max(values) - min(values) if values else 0"),
    _Part("first", "the first of {what}, or -1 if there are none", "values[0] if values else -1"),
    _Part("last_two", "the last two of {what} as a list", "values[-2:]"),
    _Part("reversed", "{what} as a list in reverse order", "values[::-1]"),
    _Part("unique", "a list of {what} without repetitions, keeping the first occurrence of each",
          "list(dict.fromkeys(values))"),
    _Part("running", "the list of running totals of {what}", ""),
    _Part("is_sum_even", "True if the sum of {what} is an even number and False otherwise", "sum(values) % 2 == 0"),
)  # fmt: skip
_KEEP_CHARACTERS = (
    _Part("vowels", "vowels", "c.lower() in 'aeiou'"),
    _Part("consonants", "consonants", "c.isalpha() and c.lower() not in 'aeiou'"),
    _Part("digits", "digits", "c.isdigit()"),
    _Part("capitals", "capital letters", "c.isupper()"),
    _Part("lowercase", "lowercase letters", "c.islower()"),
    _Part("letters", "letters", "c.isalpha()"),
    _Part("spaces", "spaces", "c == ' '"),
    _Part("symbols", "characters that are neither letters nor digits", "not c.isalnum()"),
)
_CHARACTER_RESULTS = (
    _Part("count", "the number of {what} in the text", "sum(1 for c in text if {cond})"),
    _Part("keep", "the text with everything but its {what} removed", "''.join(c for c in text if {cond})"),
    _Part("remove", "the text without its {what}", "''.join(c for c in text if not ({cond}))"),
    _Part("mask", "the text with each of its {what} replaced by '*'", "''.join('*' if {cond} else c for c in text)"),
    _Part("double", "the text with each of its {what} written twice", "''.join(c * 2 if {cond} else c for c in text)"),
    _Part("positions", "the positions of all {what} in the text as a list",
          "[i for i, c in enumerate(text) if {cond}]"),
    _Part("has", "whether the text contains any {what}", "any({cond} for c in text)"),
    _Part("distinct", "how many distinct {what} occur in the text", "len({{c for c in text if {cond}}})"),
    _Part("reverse", "the {what} of the text in reverse order, joined into a string",
          "''.join(c for c in text if {cond})[::-1]"),
    _Part("frequency", "a dictionary that maps each of the {what} in the text to the number of its occurrences",
          "{{c: text.count(c) for c in text if {cond}}}"),
    _Part("swap_case", "the text with the case of its {what} swapped",
          "''.join(c.swapcase() if {cond} else c for c in text)"),
)  # fmt: skip
_KEEP_WORDS = (
    _Part("all", "", ""),
    _Part("long", "with more than four letters", "len(w) > 4"),
    _Part("short", "of at most three letters", "len(w) <= 3"),
    _Part("vowel", "that start with a vowel", "w[0].lower() in 'aeiou'"),
    _Part("palindrome", "that read the same backwards", "w == w[::-1]"),
    _Part("with_e", "that contain the letter 'e'", "'e' in w"),
    _Part("even_length", "of even length", "len(w) % 2 == 0"),
    _Part("capitalised", "that begin with a capital letter", "w[0].isupper()"),
)
_MAP_WORDS = (
    _Part("", "{them}", "w"),
    _Part("lengths", "the lengths of {them}", "len(w)"),
    _Part("backwards", "{them}, each spelled backwards,", "w[::-1]"),
    _Part("upper", "{them} in upper case", "w.upper()"),
    _Part("initials", "the first letters of {them}", "w[0]"),
    _Part("last_letters", "the last letters of {them}", "w[-1]"),
)
_REDUCE_WORDS = (
    _Part("list", "a list of {what}", "values"),
    _Part("count_distinct", "the number of different values among {what}", "len(set(values))"),
    _Part("sorted", "a sorted list of {what}", "sorted(values)"),
    _Part("reversed", "{what} as a list in reverse order", "values[::-1]"),
    _Part("joined", "a string with {what} joined by '-'", "'-'.join(str(v) for v in values)"),
    _Part("first", "the first of {what}, or None if there is none", "values[0] if values else None"),
    _Part("counts", "a dictionary from each of {what} to how often it occurs", "{v: values.count(v) for v in values}"),
)
_PAIRS = (
    _Part("sums", "the sums of elements at the same position", "a + b"),
    _Part("differences", "the differences (first minus second) of elements at the same position", "a - b"),
    _Part("products", "the products of elements at the same position", "a * b"),
    _Part("larger", "the larger of the two elements at each position", "max(a, b)"),
    _Part("smaller", "the smaller of the two elements at each position", "min(a, b)"),
    _Part("distances", "the absolute differences of elements at the same position", "abs(a - b)"),
)
_OPENINGS = ("Return {result}.", "Given {given}, return {result}.",
             "Write a function that takes {given} and returns {result}.",
             "You are given {given}.\nYour task is to return {result}.", "Compute and return {result}.",
             "For {given}, return {result}.")  # fmt: skip
_WORDS = ("apple", "Noon", "river", "sky", "level", "Tree", "code", "eve", "planet", "go", "Ibis", "stone", "a",
          "under", "Kayak", "blue", "radar", "on", "Echo", "mountain", "cat", "orange", "it", "wow")  # fmt: skip
_TEXTS = ("Hello World", "abc 123", "Python 3.11!", "", "The quick brown fox", "AEIOU xyz", "a1b2c3", "No Vowels? 42",
          "MiXeD CaSe", "one, two; three", "2 Birds & 1 Stone", "zzz")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Task:
    name: str
    given: str
    result: str
    parameters: tuple[tuple[str, str], ...]  # (name, hint)
    body: str
    arguments: Callable[[random.Random], tuple[Any, ...]]


def tasks(seed: int = 0, held_out: HeldOut | None = None) -> Iterator[CodeFunction]:
    """Every task once, in a fixed order; layout, wording and examples depend on the seed.

    Args:
      held_out: what to keep out; None means HumanEval.
    """
    held_out = human_eval() if held_out is None else held_out
    names = set()
    for task in itertools.chain(_lists(), _ranges(), _characters(), _sentences(), _two_lists()):
        if task.name in names:
            raise AssertionError(f"two tasks are named {task.name}")
        names.add(task.name)
        function = _write(task, random.Random(f"{seed}:{task.name}"))
        if function.name not in held_out.names and not held_out.overlaps(function.source):
            yield function


def _joined(*names: str) -> str:
    return "_".join(name for name in names if name and name != "all")


def _collect(element: str, source: str, condition: str, variable: str, loop: bool) -> str:
    """Code that fills `values`: a comprehension, or the loop that a beginner would write."""
    if not loop:
        return f"values = [{element} for {variable} in {source}{f' if {condition}' if condition else ''}]"
    lines = ["values = []", f"for {variable} in {source}:"]
    if condition:
        lines += [f"    if {condition}:", f"        values.append({element})"]
    else:
        lines.append(f"    values.append({element})")
    return "\n".join(lines)


def _reduced(reduce: _Part) -> str:
    if reduce.name == "product":
        return "result = 1\nfor value in values:\n    result *= value\nreturn result"
    if reduce.name == "running":
        return (
            "totals = []\ntotal = 0\nfor value in values:\n    total += value\n    totals.append(total)\nreturn totals"
        )
    return f"return {reduce.code}"


def _numbers(rng: random.Random) -> tuple[Any, ...]:
    return ([rng.randint(-12, 30) for _ in range(rng.randint(3, 7))],)


def _lists() -> Iterator[_Task]:
    variables = ("numbers", "nums", "lst", "arr", "values_list", "xs")
    for i, (reduce, change, keep) in enumerate(itertools.product(_REDUCE, _MAP_NUMBERS, _KEEP_NUMBERS)):
        variable = variables[stable_hash(f"list{i}") % len(variables)]
        what = change.words.format(them=f"the numbers {keep.words}".strip())
        collect = _collect(change.code, variable, keep.code, "x", stable_hash(f"loop{i}") % 2 == 0)
        yield _Task(
            _joined(reduce.name, change.name, keep.name, "numbers"), "a list of integers",
            f"{reduce.words.format(what=what)}", ((variable, "List[int]"),), f"{collect}\n{_reduced(reduce)}", _numbers,
        )  # fmt: skip


def _ranges() -> Iterator[_Task]:
    for i, (reduce, change, keep) in enumerate(itertools.product(_REDUCE, _MAP_NUMBERS, _KEEP_NUMBERS)):
        if keep.name in ("negative", "positive", "nonzero", "all", "between") or change.name in ("absolute", "negated"):
            continue  # says nothing about numbers from 1 on
        variable = ("n", "limit", "number")[i % 3]
        what = change.words.format(them=f"the integers from 1 to {variable} {keep.words}")
        collect = _collect(change.code, f"range(1, {variable} + 1)", keep.code, "x", stable_hash(f"range{i}") % 2 == 0)
        yield _Task(
            _joined(reduce.name, change.name, keep.name, "up_to"), f"a positive integer {variable}",
            reduce.words.format(what=what), ((variable, "int"),), f"{collect}\n{_reduced(reduce)}",
            lambda rng: (rng.randint(3, 16),),
        )  # fmt: skip


def _characters() -> Iterator[_Task]:
    for result, keep in itertools.product(_CHARACTER_RESULTS, _KEEP_CHARACTERS):
        if result.name == "swap_case" and keep.name in ("digits", "spaces", "symbols"):
            continue
        yield _Task(
            _joined(result.name, keep.name), "a string called text", result.words.format(what=keep.words),
            (("text", "str"),), f"return {result.code.format(cond=keep.code)}", lambda rng: (rng.choice(_TEXTS),),
        )  # fmt: skip


def _sentences() -> Iterator[_Task]:
    for i, (reduce, change, keep) in enumerate(itertools.product(_REDUCE_WORDS, _MAP_WORDS, _KEEP_WORDS)):
        as_list = i % 2 == 0
        name, hint = ("words", "List[str]") if as_list else ("sentence", "str")
        given = "a list of words" if as_list else "a sentence whose words are separated by single spaces"
        what = change.words.format(them=f"the words {keep.words}".strip())
        collect = _collect(change.code, name if as_list else f"{name}.split()", keep.code, "w", i % 3 == 0)

        def arguments(rng: random.Random, as_list: bool = as_list) -> tuple[Any, ...]:
            words = rng.sample(_WORDS, rng.randint(2, 6))
            return (words if as_list else " ".join(words),)

        yield _Task(
            _joined(reduce.name, change.name, keep.name, "words"), given, reduce.words.format(what=what),
            ((name, hint),), f"{collect}\n{_reduced(reduce)}", arguments,
        )  # fmt: skip


def _two_lists() -> Iterator[_Task]:
    for i, (reduce, pair) in enumerate(itertools.product(_REDUCE, _PAIRS)):
        first, second = (("a_list", "b_list"), ("first", "second"), ("left", "right"))[i % 3]

        def arguments(rng: random.Random) -> tuple[Any, ...]:
            size = rng.randint(2, 5)
            return tuple([rng.randint(-9, 20) for _ in range(size)] for _ in range(2))

        collect = _collect(pair.code, f"zip({first}, {second})", "", "a, b", i % 2 == 0)
        yield _Task(
            _joined(reduce.name, "pairwise", pair.name), "two lists of integers of the same length",
            reduce.words.format(what=pair.words), ((first, "List[int]"), (second, "List[int]")),
            f"{collect}\n{_reduced(reduce)}", arguments,
        )  # fmt: skip


def _write(task: _Task, rng: random.Random) -> CodeFunction:
    """Stub and solution of a task, in one of the layouts that benchmarks use."""
    body = "\n".join(f"    {line}" for line in task.body.splitlines())
    hinted = rng.random() < 0.4
    parameters = ", ".join(f"{name}: {hint}" if hinted else name for name, hint in task.parameters)
    line = f"def {task.name}({parameters}):"
    imports = "from typing import List\n\n\n" if "List[" in parameters else ""
    text = rng.choice(_OPENINGS).format(given=task.given, result=task.result)
    text = "\n".join(textwrap.fill(part, rng.choice((76, 92, 108))) for part in text.splitlines())
    text = text[0].upper() + text[1:]
    description = "\n".join([text, *_examples(task, f"{imports}{line}\n{body}", rng)])
    key = stable_hash(f"{line} {description}")
    stub = f"{imports}{line}\n{docstring_source(description, key)}"
    return CodeFunction(f"{key:016x}", task.name, stub, f"{stub}\n{body}", "tasks")


def _examples(task: _Task, solution: str, rng: random.Random) -> list[str]:
    count = rng.choice((0, 1, 2, 2, 3))
    if not count:
        return []
    scope: dict[str, Any] = {}
    exec(solution, scope)  # the solution is made from the parts above, from nothing else
    form = rng.choice(("doctest", "doctest", "doctest", "equals", "arrow", "for_example"))
    lines = {"doctest": [], "equals": ["Examples:"], "arrow": ["", "Example:"], "for_example": ["For example:"]}[form]
    for _ in range(count):
        arguments = task.arguments(rng)
        shown = f"{task.name}({', '.join(map(repr, arguments))})"
        value = scope[task.name](*arguments)
        value = round(value, 4) if isinstance(value, float) else value
        if form == "doctest":
            lines += [f">>> {shown}", repr(value)] if value is not None else [f">>> {shown} is None", "True"]
        else:
            joint = {"equals": "==", "arrow": "->", "for_example": "should return"}[form]
            lines.append(f"    {shown} {joint} {value!r}")
    return lines
