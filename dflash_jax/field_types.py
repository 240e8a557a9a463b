"""Whether a value of a config file is of the type that its field declares."""

from __future__ import annotations

import collections.abc
import math
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` can stand where the annotation `kind` does.

    As Python's type checkers have it (an int serves as a float, a bool is no number), with two rules of configs: a list
    serves as a tuple, and NaN is no number, since every comparison that would refuse it is false. Kinds that say
    nothing about values (Any, type variables) take everything.
    """
    if kind is Any:
        return True
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if kind in (bool, int, float):
        if isinstance(value, bool) or kind is bool:
            return kind is bool and isinstance(value, bool)
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not math.isnan(value)
    if _is_mapping(origin or kind):
        return isinstance(value, Mapping) and (
            not arguments or all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items())
        )
    if _is_sequence(origin or kind):
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return False
        if (origin or kind) is tuple and arguments and arguments[-1] is not Ellipsis:
            return len(value) == len(arguments) and all(map(fits, value, arguments))
        return not arguments or all(fits(item, arguments[0]) for item in value)
    return isinstance(value, kind) if isinstance(kind, type) else True


def described(kind: Any) -> str:
    """The annotation in words, for a message: "an int or None"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(described, arguments)))
    if kind is type(None) or kind is None:
        return "None"
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if kind in (bool, int, float, str):
        return {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}[kind]
    if _is_mapping(origin or kind):
        return f"a dict of {described(arguments[0])} to {described(arguments[1])}" if arguments else "a dict"
    if _is_sequence(origin or kind):
        if not arguments:
            return "a tuple"
        if origin is tuple and arguments[-1] is not Ellipsis:
            return f"a pair of {' and '.join(map(described, arguments))}"
        return f"a tuple ({described(arguments[0])} each)"
    return "anything" if kind is Any else getattr(kind, "__name__", str(kind))


def _is_mapping(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, collections.abc.Mapping)


def _is_sequence(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, collections.abc.Sequence) and not issubclass(kind, (str, bytes))
