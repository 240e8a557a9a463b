"""Conversations whose turns the target answers one after the other, each in view of its own earlier answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError
from dflash_jax.data.prompts import Message, Prompt
from dflash_jax.data.responses import TURN, Response


class Talk:
    """A conversation while its turns are answered, one after the other.

    Args:
      multi_turn: every turn of the assistant is answered anew, a trailing one too; else the last question alone is
        answered, and earlier answers stay as they are.

    Attributes:
      source: of the prompt.

    Raises:
      ConfigError: a prompt that is answered already, without multi_turn; with it, a conversation with tools, or with
        two messages of the assistant in a row.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, multi_turn: bool):
        messages = list(prompt.messages)
        if not multi_turn and prompt.answered:
            raise ConfigError(
                f"prompt {prompt.id} ends with an answer; use store_natural (data.natural) for finished conversations, "
                "or multi_turn to have every turn of it answered anew"
            )
        if not prompt.answered:
            messages.append({"role": "assistant", "content": None})  # what is to be written
        self._turns = [len(messages) - 1]
        if multi_turn:
            self._turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and _asks(messages[:i])]
            _check_turns(prompt, messages)
        self._prompt, self._messages, self._tokenizer = prompt, messages, tokenizer
        self._multi_turn, self._turn, self._cut = multi_turn, 0, False
        self.source = prompt.source

    @property
    def is_over(self) -> bool:
        """Whether no turn is left to answer, or the last answer was cut."""
        return self._cut or self._turn == len(self._turns)

    @property
    def turns_left(self) -> int:
        return len(self._turns) - self._turn

    @property
    def turns_cut(self) -> int:
        """Turns that stay unanswered because the answer before them was cut."""
        return self.turns_left if self._cut else 0

    @property
    def id(self) -> str:
        """Of the response to the next turn."""
        return self._id(self._turn)

    @property
    def follows(self) -> str:
        """Id of the response to the turn before the next one, or ""."""
        return self._id(self._turn - 1) if self._turn else ""

    def _id(self, turn: int) -> str:
        return f"{self._prompt.id}{TURN}{turn}" if self._multi_turn else self._prompt.id

    @property
    def question(self) -> list[Message]:
        """The messages that the next turn answers."""
        return self._messages[: self._turns[self._turn]]

    def take(self, response: Response | None) -> None:
        """Goes on to the next turn, the answer to this one in its place; None will do where there is one turn only."""
        if response is not None:
            ids = response.answer_ids[:-1] if response.finish_reason == "stop" else response.answer_ids
            self._messages[self._turns[self._turn]] = {"role": "assistant", "content": self._tokenizer.decode(ids)}
            self._cut = response.finish_reason == "length"
        self._turn += 1


def _asks(messages: Sequence[Message]) -> bool:
    """Whether somebody has said something that can be answered (an assistant may greet first)."""
    return any(m["role"] == "user" for m in messages)


def _check_turns(prompt: Prompt, messages: Sequence[Message]) -> None:
    roles = [m["role"] for m in messages]
    if "tool" in roles or any(m.get("tool_calls") for m in messages):
        raise ConfigError(
            f"prompt {prompt.id} has calls of tools: their results would not fit to answers written anew; leave it "
            "out or use multi_turn=False"
        )
    if any(a == b == "assistant" for a, b in itertools.pairwise(roles)):
        raise ConfigError(f"prompt {prompt.id} has two messages of the assistant in a row: join them or leave it out")
