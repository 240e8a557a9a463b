"""Round by round: what the drafter proposed, and what became of it. For notebooks and for finding faults."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dflash_jax.checkpoints.tokenizer import StreamDecoder, Tokenizer
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import build
from dflash_jax.decoding.step import Skeleton, Weights
from dflash_jax.drafters.contract import Drafter
from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.target import Target


@dataclasses.dataclass(frozen=True)
class TracedRound:
    """One round of one answer.

    Attributes:
      drafted: the proposed tokens, block_size - 1 of them.
      emitted: the tokens given out: accepted drafts, then the target's own unless the answer ended before it.
      accepted: how many of the emitted tokens were drafted.
    """

    drafted: tuple[int, ...]
    emitted: tuple[int, ...]
    accepted: int

    @property
    def own(self) -> int | None:
        """The target's own token, a correction or (behind a whole block) a bonus; None if the answer had ended."""
        return self.emitted[-1] if self.accepted < len(self.emitted) else None

    @property
    def is_bonus(self) -> bool:
        """Whether the target's own token came for nothing behind a block that was right throughout."""
        return self.own is not None and self.accepted == len(self.drafted)


@dataclasses.dataclass(frozen=True)
class Trace:
    """An answer: the token of the prefill, then the rounds. `finish_reason` as in `generate`."""

    prompt_ids: tuple[int, ...]
    first: int
    rounds: tuple[TracedRound, ...]
    finish_reason: str

    @property
    def token_ids(self) -> list[int]:
        """All emitted tokens, as `generate` returns them."""
        return [self.first, *(token for one in self.rounds for token in one.emitted)]


def trace(
    target: Target,
    drafter: Drafter,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 256,
    block_size: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
) -> Trace:
    """Decodes one prompt greedily as `generate` does and keeps every proposal.

    Each round's proposal is computed once more, before the round, from the state that the round begins with: what
    runs is the step that always runs, and the trace costs one draft call a round.

    Args:
      prompt, max_tokens, block_size, stop_token_ids: as in `generate`.

    Raises:
      ValueError, TypeError: as `generate`.
    """
    engine, requests = build(
        target, drafter, [prompt], max_tokens=max_tokens, block_size=block_size, stop_token_ids=stop_token_ids, batch=1
    )
    engine.lookahead = 0  # a round's tokens are read before the next proposal
    (first,) = engine.admit([(0, requests[0])])
    reason, rounds = first.finish_reason, []
    while reason is None:
        drafted = _proposal(engine)
        (event,) = engine.round()
        reason = event.finish_reason
        emitted = tuple(event.token_ids)
        same = [a == b for a, b in zip(drafted, emitted, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        rounds.append(TracedRound(drafted, emitted, accepted))
    return Trace(tuple(requests[0].prompt_ids), first.token_ids[0], tuple(rounds), reason)


def _proposal(engine: Engine) -> tuple[int, ...]:
    config, state = engine.config, engine.state
    token_BxM = _propose(config.drafter, config.block_size, engine.weights, state.cache, state.root_B)
    return tuple(np.asarray(token_BxM)[0, 1:].tolist())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(
    skeleton: Skeleton, block_size: int, weights: Weights, cache: KVCache, root_B: jax.Array
) -> jax.Array:  # fmt: skip
    drafter = skeleton.build(weights.drafter)
    return drafter.propose(weights.shared, cache, root_B, None, None, block_size).token_BxM


COLOURS = {"first": "#e0e0e0", "accepted": "#c8ecc8", "correction": "#ffd9b0", "bonus": "#c9defa", "refused": "#f3c6c6"}


def legend_html() -> str:
    """What the colours of `text_html` and `rounds_html` mean."""
    meanings = {
        "first": "from the prefill",
        "accepted": "drafted and accepted",
        "correction": "the target's own, in place of a wrong draft",
        "bonus": "the target's own, behind a block that was right",
        "refused": "drafted and refused",
    }
    return "<div>" + " &nbsp; ".join(_span(kind, text) for kind, text in meanings.items()) + "</div>"


def text_html(trace: Trace, tokenizer: Tokenizer) -> str:
    """The answer as HTML, each token coloured by where it came from (see `legend_html`)."""
    pieces = _pieces(tokenizer)
    spans = [_span("first", pieces(trace.first))]
    for one in trace.rounds:
        spans += [_span("accepted", pieces(token)) for token in one.emitted[: one.accepted]]
        if one.own is not None:
            spans.append(_span("bonus" if one.is_bonus else "correction", pieces(one.own)))
    return f'<pre style="white-space: pre-wrap; line-height: 1.6">{"".join(spans)}</pre>'


def rounds_html(trace: Trace, tokenizer: Tokenizer, limit: int = 12) -> str:
    """The first `limit` rounds as an HTML table: what was drafted, how much of it was kept, what the target said."""
    rows = []
    for number, one in enumerate(trace.rounds[:limit], 1):
        drafted = "".join(
            _span("accepted" if i < one.accepted else "refused", _single(tokenizer, token))
            for i, token in enumerate(one.drafted)
        )
        own = "" if one.own is None else _span("bonus" if one.is_bonus else "correction", _single(tokenizer, one.own))
        rows.append(f"<tr><td>{number}</td><td>{drafted}</td><td>{one.accepted}</td><td>{own}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("round", "drafted", "accepted", "the target's own"))
    return f'<table style="font-family: monospace"><tr>{head}</tr>{"".join(rows)}</table>'


def _pieces(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Token by token, the text that is complete with it: a character of several tokens comes with its last one."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    return lambda token: decoder.push([token])


def _single(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _span(kind: str, text: str) -> str:
    # A line feed would end the coloured box where it begins, so it is shown and then made.
    shown = html.escape(text).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
    style = f"background: {COLOURS[kind]}; color: black; border-radius: 3px; margin-right: 1px; white-space: pre-wrap"
    return f'<span class="{kind}" style="{style}">{shown}</span>'
