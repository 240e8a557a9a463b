"""A loaded target and drafter that answer one prompt after another, with and without the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.config import ConfigError
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import Delta, deltas
from dflash_jax.decoding.request import Request
from dflash_jax.decoding.sampling import MIN_TEMPERATURE
from dflash_jax.decoding.sizes import capacity_bucket
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target
from dflash_jax.serving.config import DrafterSection, GenerationSection

PLAIN, DFLASH = "plain", "dflash"


class PromptTooLong(ConfigError):
    """A prompt that leaves no room for an answer in the target's context."""


class Session:
    """Answers prompts one at a time; compiled programs and caches are kept between them.

    A cache has the capacity that prompt and answer need, in buckets: each new bucket compiles its own programs
    (`prepare`), and every prompt that fits runs on what is there, but for the first with a long end (`PrefillSizes`).

    Args:
      target, drafter: drafter None: plain decoding only.
      generation: how answers are made.
      options: the drafter's run-time options.
      make_engine: called as `Engine`; by several processes, a leader's (see `decoding.lockstep`).

    Raises:
      ConfigError: block_size does not suit the drafter, logit_bias names an id that the target has not, or texts are
        to be answered without a tokenizer.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        generation: GenerationSection,
        options: DrafterSection,
        make_engine: Callable[..., Engine] = Engine,
    ):
        if target.tokenizer is None:
            raise ConfigError(f"target.source is {target.source!r}, which has no tokenizer: it can not answer texts")
        if drafter is not None and options.block_size is not None and options.block_size > drafter.block_size:
            raise ConfigError(
                f"drafter.block_size is {options.block_size}, but {drafter.source} was trained with blocks of "
                f"{drafter.block_size}; set it to at most that, or to None"
            )
        self.target, self.drafter, self.generation, self.options = target, drafter, generation, options
        self._logit_bias = generation.bias(target.config.vocab_size)
        self._make_engine = make_engine
        self._engines: dict[tuple[str, int], Engine] = {}
        self._rehearsed: set[tuple[str, int, int]] = set()  # mode, capacity, tokens of the prompt

    def block_size(self, mode: str) -> int:
        """Tokens of a target call in a round."""
        if mode == PLAIN or self.drafter is None:
            return 1
        return self.options.block_size or self.drafter.block_size

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, or of the last message as it is where no chat template is wanted.

        Raises:
          ConfigError: there is no template, or it refuses the messages or its options.
        """
        if not self.generation.chat_template:
            return self.target.tokenizer.encode(messages[-1]["content"])
        if self.target.tokenizer.chat_template is None:
            raise ConfigError(
                f"{self.target.source} has no chat template; set generation.chat_template=False to give it the prompt "
                "as it is"
            )
        return encode_prompt(self.target.tokenizer, messages, **self.generation.chat_template_kwargs)

    def request(self, prompt_ids: Sequence[int], turn: int = 0) -> Request:
        """What the engine is asked for.

        Raises:
          PromptTooLong: nothing of the context is left for an answer.
          ConfigError: the prompt has no tokens.
        """
        limit = self.target.config.max_positions
        if not prompt_ids:
            raise ConfigError("the prompt has no tokens: at least one is needed to start from")
        if len(prompt_ids) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the context of {self.target.source} holds {limit}: nothing "
                "is left to answer with"
            )
        g = self.generation
        return Request(
            prompt_ids, g.max_tokens, g.temperature, g.top_k, g.top_p, g.min_p, g.seed + turn,
            self.target.eos_token_ids, g.presence_penalty, g.frequency_penalty, g.repetition_penalty, self._logit_bias,
        )  # fmt: skip

    def is_prepared(self, mode: str, request: Request) -> bool:
        """Whether the programs that this request needs are compiled."""
        key = (mode, self._capacity(request))
        return key in self._engines and not self._unrehearsed(key, self._engines[key], request)

    def prepare(self, mode: str, request: Request) -> Engine:
        """The engine for a request, its programs compiled and run once."""
        key = (mode, self._capacity(request))
        engine = self._engines.pop(key, None)  # back when all went well: a call that was broken off spoils it
        if engine is None:
            engine = self._make_engine(
                self.target,
                self.drafter if mode == DFLASH else None,
                max_length=key[1],
                block_size=self.block_size(mode),
                greedy=self.generation.temperature < MIN_TEMPERATURE,
                proposal=self.options.proposal,
                logits_rules=bool(request.logits_rules()),
            )
        for length in self._unrehearsed(key, engine, request):
            # Two rounds at least: the second runs on what the first left, in the layout it left it in.
            size = min(2 * engine.block_size + 1, key[1] - length)
            rehearsal = dataclasses.replace(
                request, prompt_ids=list(request.prompt_ids[:1]) * length, max_tokens=size, stop_token_ids=()
            )
            for _ in engine.run([rehearsal]):
                pass
            self._rehearsed.add((*key, length))
        self._engines[key] = engine
        return engine

    def _unrehearsed(self, key: tuple[str, int], engine: Engine, request: Request) -> list[int]:
        """Lengths of prompts that go through the programs of this request that have not run yet."""
        lengths = engine.prefill_sizes.rehearsals(len(request.prompt_ids))
        return [length for length in lengths if (*key, length) not in self._rehearsed]

    def stream(self, mode: str, request: Request) -> Iterator[Delta]:
        """The pieces of an answer as they come. An answer that is not read to its end costs its engine's cache."""
        engine = self.prepare(mode, request)
        finished = False
        try:
            for delta in deltas(self.target.tokenizer, engine.run([request])):
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                # Its row is still taken, and a step that was broken off has given its state away. The programs stay.
                self._engines = {key: other for key, other in self._engines.items() if other is not engine}

    def _capacity(self, request: Request) -> int:
        limit = self.target.config.max_positions
        return capacity_bucket(min(len(request.prompt_ids) + request.max_tokens, limit), limit)
