"""`generate` and `stream`: prompts in, answers out, with or without a drafter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from dflash_jax.checkpoints.tokenizer import StreamDecoder, Tokenizer
from dflash_jax.decoding.engine import Engine, Event, check_max_length
from dflash_jax.decoding.request import Request, check_request, is_whole
from dflash_jax.decoding.sampling import MIN_TEMPERATURE, check_seed
from dflash_jax.decoding.sizes import capacity_bucket, power_of_two_at_least
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target

DEFAULT_BATCH = 8
ROUNDS_UNWATCHED = 8


@dataclasses.dataclass
class Result:
    """The answer to one prompt.

    Attributes:
      token_ids: emitted ids, the stop id included if one ended the answer.
      text: their text without special tokens; "" without a tokenizer.
      finish_reason: "stop" or "length".
      acceptance: tokens committed in each verify round, cut at the limit or stop. The first token comes
        from the prefill and is in no round, so sum(acceptance) + 1 == len(token_ids).
      prompt_ids: what was answered.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    acceptance: list[int]
    prompt_ids: list[int]


@dataclasses.dataclass
class Delta:
    """A piece of a streamed answer: the tokens of one round, and the text that became certain with them.

    `finish_reason` is None until the last piece of the prompt `index`.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None


def encode_prompts(target: Target, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Texts through the tokenizer, id lists as they are.

    Raises:
      TypeError: prompts is one prompt instead of a list of them, or a prompt is neither text nor ids.
      ValueError: a text, but the target has no tokenizer.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is a single text; pass a list: [text]")
    encoded = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if target.tokenizer is None:
                raise ValueError(f"prompt {i} is a text, but the target {target.source!r} has no tokenizer; pass ids")
            encoded.append(target.tokenizer.encode(prompt))
            continue
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy and jax arrays
        if is_whole(ids):
            raise TypeError(f"prompts is a single list of ids (it holds {ids!r}); pass a list of lists: [ids]")
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise TypeError(f"prompt {i} is a {type(prompt).__name__}, must be a text or a list of token ids")
        encoded.append(list(ids))
    return encoded


def _per_prompt(name: str, value: Any, count: int) -> list:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy and jax numbers and arrays
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values for {count} prompts; give one value, or one a prompt")
        return list(value)
    return [value] * count


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    seed = seed.tolist() if hasattr(seed, "tolist") else seed
    seeds = _per_prompt("seed", seed, count)
    if not is_whole(seed) or not count:
        return seeds
    # Rows that share one seed get streams of their own, whatever batch they land in.
    check_seed(seed, "the call")
    return [(seed + i) % 2**64 for i in range(count)]


def _stop_ids(target: Target, stop_token_ids: Sequence[int] | None, ignore_eos: bool) -> tuple[int, ...]:
    own = [] if stop_token_ids is None else stop_token_ids
    if isinstance(own, str) or not isinstance(own, Iterable):
        raise TypeError(f"stop_token_ids is {own!r}, must be a list of token ids")
    return tuple(dict.fromkeys([*(() if ignore_eos else target.eos_token_ids), *own]))


def build(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int | Sequence[int] = 256,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    min_p: float | Sequence[float] = 0.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    block_size: int | None = None,
    proposal: str = "argmax",
    batch: int | None = None,
    max_length: int | None = None,
    page_size: int | None = None,
    rounds_per_call: int = 1,
) -> tuple[Engine, list[Request]]:
    """The engine and the requests of a `generate` call; arguments as there."""
    limit = check_max_length(max_length, target)
    ids = encode_prompts(target, prompts)
    n = len(ids)
    stops = _stop_ids(target, stop_token_ids, ignore_eos)
    fields = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty, "logit_bias": logit_bias,
    }  # fmt: skip
    columns = {name: _per_prompt(name, value, n) for name, value in fields.items()}
    seeds = _seeds(seed, n)
    requests = [
        Request(
            prompt_ids=prompt, seed=seeds[i], stop_token_ids=stops, **{k: v[i] for k, v in columns.items()},
        )
        for i, prompt in enumerate(ids)
    ]  # fmt: skip
    for i, request in enumerate(requests):
        check_request(request, i, limit, target.config.vocab_size)
    # The cache is as large as these prompts need, in buckets, so that short answers do not pay for long ones.
    needed = max((len(r.prompt_ids) + r.max_tokens for r in requests), default=2)
    engine = Engine(
        target,
        drafter,
        batch=min(power_of_two_at_least(max(n, 1)), DEFAULT_BATCH) if batch is None else batch,
        max_length=min(limit, capacity_bucket(needed, target.config.max_positions)),
        block_size=block_size,
        greedy=all(r.temperature < MIN_TEMPERATURE for r in requests),
        proposal=proposal,
        logits_rules=any(r.logits_rules() for r in requests),
        page_size=page_size,
        rounds_per_call=rounds_per_call,
    )
    return engine, requests


def generate(
    target: Target, drafter: Drafter | None, prompts: Sequence[str | Sequence[int]], **options: Any
) -> list[Result]:
    """Answers prompts; with a drafter several times faster, with the same law.

    Greedy answers (temperature 0) in float32 equal plain decoding token for token; sampled answers follow
    the target's law exactly, warped by temperature, top-k, top-p and min-p in this order. Bias and penalties come
    before all of them and count within a block as they do token by token.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`; None is plain decoding.
      prompts: texts or lists of token ids. A text is encoded as it is, without a chat template.
      max_tokens: the most tokens to emit, an int or one a prompt; cut by the target's context.
      temperature, top_p, top_k, min_p: sampling, scalars or one a prompt; 0, 1, 0, 0 mean off.
      presence_penalty, frequency_penalty: in [-2, 2], scalars or one a prompt; taken off the logits of tokens that
        the answer holds, once or as often as it does. 0 is off.
      repetition_penalty: scalar or one a prompt; divides positive, multiplies negative logits of tokens that prompt
        or answer hold. 1 is off.
      logit_bias: {token id: number}, for all prompts or one a prompt; added to logits, -inf forbids. None is off.
      seed: of the random streams; prompt i uses seed + i, or seed[i].
      stop_token_ids: ids that end an answer, besides the target's end-of-text ids.
      ignore_eos: do not stop at the target's end-of-text ids.
      block_size: tokens verified in a round, at most the drafter's trained size (the default).
      proposal: "argmax" (the drafter's best tokens) or "drawn" (drawn from its law; p/q verification).
      batch: rows decoded together; default: the number of prompts rounded up to a power of two, at most 8.
      max_length: prompt and answer together; default: the target's context.
      page_size: slots a page of the cache; None: contiguous rows.
      rounds_per_call: rounds that the device does before the host reads their tokens. Default: ROUNDS_UNWATCHED,
        but 1 on CPU, where a round is long and its dispatch is not.

    Returns:
      One `Result` a prompt, in order.

    Raises:
      ValueError, TypeError: an argument that can not be right, named with its value.
    """
    options.setdefault("rounds_per_call", 1 if jax.default_backend() == "cpu" else ROUNDS_UNWATCHED)
    engine, requests = build(target, drafter, prompts, **options)
    tokens: list[list[int]] = [[] for _ in requests]
    acceptance: list[list[int]] = [[] for _ in requests]
    reasons: list[str] = ["length"] * len(requests)
    for event in engine.run(requests):
        if tokens[event.index]:
            acceptance[event.index].append(len(event.token_ids))
        tokens[event.index] += event.token_ids
        if event.finish_reason is not None:
            reasons[event.index] = event.finish_reason
    decode = (lambda ids: "") if target.tokenizer is None else target.tokenizer.decode
    return [
        Result(tokens[i], decode(tokens[i]), reasons[i], acceptance[i], list(request.prompt_ids))
        for i, request in enumerate(requests)
    ]


def stream(
    target: Target, drafter: Drafter | None, prompts: Sequence[str | Sequence[int]], **options: Any
) -> Iterator[Delta]:
    """Like `generate`, as an iterator over the pieces of all answers, as rounds end.

    A character whose bytes lie in several tokens is given out when it is complete.
    """
    engine, requests = build(target, drafter, prompts, **options)
    return deltas(target.tokenizer, engine.run(requests))


def deltas(tokenizer: Tokenizer | None, events: Iterable[Event]) -> Iterator[Delta]:
    """Events of an engine with their text; without a tokenizer the text is "".

    Closing the iterator closes that of the events.
    """
    decoders: dict[int, StreamDecoder] = {}
    with contextlib.closing(iter(events)) as running:
        for event in running:
            text = ""
            if tokenizer is not None:
                if event.index not in decoders:
                    decoders[event.index] = StreamDecoder(tokenizer)
                decoder = decoders[event.index]
                text = decoder.push(event.token_ids)
                if event.finish_reason is not None:
                    text += decoder.finish()
            yield Delta(event.index, event.token_ids, text, event.finish_reason)
