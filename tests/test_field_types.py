import typing
from collections.abc import Mapping, Sequence

import pytest

from dflash_jax.field_types import described, fits

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (int, (0, -3, 2**70), (1.0, "1", None, True, NAN)),
        (float, (0, 1.5, INF, -INF), ("1", None, False, NAN)),
        (bool, (True, False), (0, 1, "yes", None)),
        (str, ("", "x"), (1, None, b"x", ("x",))),
        (int | None, (None, 1), (1.5, "1", False)),
        (tuple[int, ...], ((), (1, 2), [3]), ("12", 1, (1, 2.5), None)),
        (tuple[str, int], (("a", 1),), (("a",), (1, "a"), ("a", 1, 2))),
        (Sequence[str], ((), ["a"]), ("a", (1,), {"a"})),
        (Mapping[str, float], ({}, {"a": 1}), ({1: 1.0}, {"a": "b"}, {"a": NAN}, (("a", 1.0),))),
        (Mapping[str, int] | Sequence[tuple[str, int]], ({"a": 1}, [("a", 1)]), ("a", [("a", 1.5)], 5)),
        (typing.Literal["a", "b"], ("a",), ("c",)),
        (typing.Any, (1, None, "x"), ()),
    ],
)
def test_values_fit_their_annotation_or_do_not(kind, right, wrong):
    for value in right:
        assert fits(value, kind), value
    for value in wrong:
        assert not fits(value, kind), value


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number or None"),
        (Sequence[int] | int, "a tuple (a whole number each) or a whole number"),
        (Mapping[str, typing.Any], "a dict of a text to anything"),
        (bool, "True or False"),
        (tuple[str, int], "a pair of a text and a whole number"),
    ],
)
def test_annotations_in_words(kind, words):
    assert described(kind) == words
