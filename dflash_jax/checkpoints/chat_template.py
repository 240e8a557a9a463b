"""Chat templates: Jinja in a sandbox, rendered the way Hugging Face renders them."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from dflash_jax.config import ConfigError

# Private-use characters: no tokenizer has them as tokens of their own, no template prints them.
_SPAN_START, _SPAN_END = "\U0010fffa", "\U0010fffb"
# Hugging Face passes these as null rather than leaving them out, and templates compare them with none.
_UNSET = {"tools": None, "documents": None}
_ALWAYS = ("messages", "add_generation_prompt")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant wrote; prints its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(text: str) -> jinja2.nodes.Node:
            return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)]).set_lineno(line)

        return [mark(_SPAN_START), *body, mark(_SPAN_END)]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation; `spans` are the [start, end) characters inside generation marks."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One compiled template.

    Args:
      source: the Jinja source.
      special_tokens: variables that every rendering sees, such as bos_token and eos_token.

    Attributes:
      options: the variables that the template reads beyond those that every rendering has.
      marks_generation: whether it marks what the assistant wrote (`{% generation %}`).

    Raises:
      ConfigError: the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            syntax = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is no valid Jinja: {error}") from error
        known = set(_ALWAYS) | set(self._special_tokens) | set(environment.globals)
        self.options = frozenset(jinja2.meta.find_undeclared_variables(syntax) - known)
        self.marks_generation = any(node.data == _SPAN_START for node in syntax.find_all(jinja2.nodes.TemplateData))

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **options: Any
    ) -> Rendered:
        """The conversation as text.

        Args:
          options: what the template reads beyond the messages (enable_thinking, tools, ...). An option that
            the template does not read would have no effect, so it is refused.

        Raises:
          ConfigError: an option is unknown to the template, or the template refuses the messages.
        """
        unknown = sorted(set(options) - self.options)
        if unknown:
            raise ConfigError(
                f"the chat template does not read {unknown[0]!r}; it reads "
                f"{', '.join(sorted(self.options)) or 'no options'}. Take it out of chat_template_kwargs"
            )
        try:
            marked = self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{**_UNSET, **self._special_tokens, **options},
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"the chat template can not render these messages: {error}") from error
        return _take_marks(marked)


def _take_marks(marked: str) -> Rendered:
    if _SPAN_START not in marked:
        return Rendered(marked, ())
    text, spans, length, start = [], [], 0, 0
    for i, piece in enumerate(marked.replace(_SPAN_END, _SPAN_START).split(_SPAN_START)):
        start = length
        text.append(piece)
        length += len(piece)
        if i % 2:
            spans.append((start, length))
    return Rendered("".join(text), tuple(spans))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    # Jinja's own filter escapes HTML characters, which templates written for Hugging Face do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
