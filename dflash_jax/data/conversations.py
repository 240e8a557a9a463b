"""From messages to ids and a loss mask, with the same rendering that serving and the benchmarks use."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError


class MaskError(ConfigError):
    """What the assistant wrote can not be told from the rendered conversation; says why."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """An encoded conversation that ends with an assistant's turn.

    Attributes:
      ids: all token ids up to the end of the last assistant turn.
      spans: [start, end) of each assistant turn, its end-of-turn id included, ascending.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """Ids of a conversation that the assistant is to answer.

    Args:
      options: chat_template_kwargs; one that the template does not read is refused.

    Raises:
      MaskError: the conversation already ends with the assistant's message.
    """
    if messages[-1]["role"] == "assistant":
        raise MaskError("the last message is the assistant's: there is nothing to answer")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    check_bos(ids, tokenizer.bos_token_id)
    return ids


def check_bos(ids: Sequence[int], bos_id: int | None) -> None:
    """Refuses two BOS at the start: the template writes one and something else adds another.

    Raises:
      MaskError: ids begin with two BOS.
    """
    if bos_id is not None and list(ids[:2]) == [bos_id, bos_id]:
        raise MaskError(f"the rendered conversation begins with BOS (id {bos_id}) twice")


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], end_ids: Collection[int], **options: Any
) -> Conversation:
    """Ids and assistant spans of a conversation whose last message is the assistant's.

    Where the template has generation marks they say what the assistant wrote. Otherwise a turn is what the longer
    rendering adds to the generation prompt before it; that holds only if every shorter rendering is a prefix of the
    whole, which is checked. Text after a turn's end-of-turn id (a newline, say) is not supervised: no model ever
    gets to write it.

    Args:
      end_ids: ids that end a turn (`target.eos_token_ids`).
      options: chat_template_kwargs.

    Raises:
      MaskError: no span can be derived, a turn has no end-of-turn id, or the prompt part is not what serving renders.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise MaskError("the last message must be the assistant's")
    template = tokenizer.require_chat_template()
    whole = template.render(messages, add_generation_prompt=False, **options)
    if template.marks_generation:
        text_spans = whole.spans
        turns = sum(m["role"] == "assistant" for m in messages)
        if len(text_spans) != turns:
            raise MaskError(f"the template marks {len(text_spans)} spans for {turns} assistant turns")
    else:
        text_spans = _spans_by_prefix(template, messages, whole.text, options)
    prompt = template.render(messages[:-1], add_generation_prompt=True, **options).text
    if whole.text[: text_spans[-1][0]] != prompt:
        raise MaskError(
            "the template renders the last question in a finished conversation otherwise than with the generation "
            "prompt: training on it would not match serving"
        )
    return _encode_spans(tokenizer, whole.text, text_spans, frozenset(end_ids))


def _spans_by_prefix(
    template: Any, messages: Sequence[Mapping[str, Any]], whole: str, options: Mapping[str, Any]
) -> tuple[tuple[int, int], ...]:
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = template.render(messages[:i], add_generation_prompt=True, **options).text
            after = template.render(messages[: i + 1], add_generation_prompt=False, **options).text
        except ConfigError as error:
            raise MaskError(f"the template can not render the first {i} messages alone: {error}") from error
        if not after.startswith(before) or not whole.startswith(after):
            raise MaskError(
                f"the template has no generation marks and renders message {i} differently once the conversation goes "
                "on or without its generation prompt (templates that drop earlier thinking do), so what the assistant "
                "wrote can not be derived; add {% generation %} marks to the template or keep single turns"
            )
        spans.append((len(before), len(after)))
    return tuple(spans)


def _encode_spans(
    tokenizer: Tokenizer, text: str, text_spans: Sequence[tuple[int, int]], end_ids: frozenset[int]
) -> Conversation:
    """Encodes piece by piece: an answer's first token never merges with the prompt, as in generation."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for number, (start, end) in enumerate(text_spans):
        ids += tokenizer.encode(text[done:start], add_special_tokens=False)
        # To the next turn: marks may stop short of the end-of-turn token.
        stop = text_spans[number + 1][0] if number + 1 < len(text_spans) else len(text)
        inside = tokenizer.encode(text[start:end], add_special_tokens=False)
        behind = tokenizer.encode(text[end:stop], add_special_tokens=False)
        ends = [i for i, token in enumerate(inside) if token in end_ids]
        if ends:
            supervised = ends[-1] + 1
        elif behind and behind[0] in end_ids:
            supervised = len(inside) + 1
        else:
            raise MaskError(
                f"assistant turn {number} ends with none of the end-of-turn ids {sorted(end_ids)}: a drafter would "
                "never see an answer end"
            )
        spans.append((len(ids), len(ids) + supervised))
        ids += inside + behind
        done = stop
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise MaskError(
            "the tokenizer does not give the conversation back when its turns are encoded one by one, so turns can not "
            "be told apart in ids"
        )
    check_bos(ids, tokenizer.bos_token_id)
    return Conversation(tuple(ids[: spans[-1][1]]), tuple(spans))
