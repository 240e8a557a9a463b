"""Bias and penalties: how a request bends the target's logits, before `sampling` makes a law of them.

With l the target's logit of a token, c how often the answer so far holds it, and "seen" whether the prompt or the
answer does, in this order:

    l += bias
    l  = l / repetition if l > 0 else l * repetition       where seen
    l -= frequency * c + presence * (c > 0)

The frequency and presence penalties and the bias are those of OpenAI's API, the repetition penalty that of CTRL
(Keskar et al. 2019, arXiv 1909.05858) as Hugging Face and vLLM extend it to negative logits and to the prompt. The
order is vLLM's, and Hugging Face's too as far as it has these rules; only bias against repetition could tell.

"So far" is different in every slot of a block: slot j predicts the token behind slot j, so its history is the answer
up to the root and those drafted tokens that slot j sees. A verifier that took the counts of the round's beginning for
all slots would keep what plain decoding, which counts after every token, refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.decoding.request import Request

# Logical axes of what has a row of the vocabulary a row of the batch; [B] arrays have the first.
LOGITS_AXES = ("batch", "vocab")


@struct.dataclass
class LogitsRules:
    """How each row's logits are bent. All fields are arrays, so that no value recompiles anything.

    Attributes:
      presence_B, frequency_B: float32; 0 is off.
      repetition_B: float32, > 0; 1 is off.
      bias_BxV: float32; 0 is off, -inf forbids the token.
      in_prompt_BxV: bool, the tokens of the prompt.
    """

    presence_B: jax.Array
    frequency_B: jax.Array
    repetition_B: jax.Array
    bias_BxV: jax.Array
    in_prompt_BxV: jax.Array


def make_logits_rules(requests: Sequence[Request | None], vocab_size: int) -> LogitsRules:
    """The rules of checked requests, one a row, as numpy arrays; None is an empty row."""
    rows = len(requests)
    bias_BxV, in_prompt_BxV = np.zeros((rows, vocab_size), np.float32), np.zeros((rows, vocab_size), bool)
    for row, request in enumerate(requests):
        if request is not None:
            in_prompt_BxV[row, list(request.prompt_ids)] = True
            for token, bias in (request.logit_bias or {}).items():
                bias_BxV[row, token] = bias

    def column(name: str, off: float) -> np.ndarray:
        return np.array([off if request is None else getattr(request, name) for request in requests], np.float32)

    return LogitsRules(
        presence_B=column("presence_penalty", 0.0),
        frequency_B=column("frequency_penalty", 0.0),
        repetition_B=column("repetition_penalty", 1.0),
        bias_BxV=bias_BxV,
        in_prompt_BxV=in_prompt_BxV,
    )


def bend(
    logits_BxMxV: jax.Array, rules: LogitsRules, count_BxV: jax.Array, token_BxM: jax.Array, visible: jax.Array
) -> jax.Array:
    """The logits of every slot of a block under its row's rules, float32 [B, M, V].

    A row whose rules are all off keeps its logits to the bit.

    Args:
      logits_BxMxV: row j is for the token behind slot j.
      count_BxV: int32, how often each answer holds each token, the root (slot 0) included.
      token_BxM: the block.
      visible: bool [M, M] or [B, M, M]: slot j sees slot i. Lower-triangular for a chain; a tree's slots see their
        ancestors and themselves.
    """
    logits_BxMxV = logits_BxMxV.astype(jnp.float32)
    so_far_BxMxV = counts_in_block(count_BxV, token_BxM, visible)
    said_BxMxV = so_far_BxMxV > 0
    seen_BxMxV = said_BxMxV | rules.in_prompt_BxV[:, None]
    presence_Bx1x1, frequency_Bx1x1, repetition_Bx1x1 = (
        x_B[:, None, None] for x_B in (rules.presence_B, rules.frequency_B, rules.repetition_B)
    )
    logits_BxMxV += rules.bias_BxV[:, None]
    repeated_BxMxV = jnp.where(logits_BxMxV > 0, logits_BxMxV / repetition_Bx1x1, logits_BxMxV * repetition_Bx1x1)
    logits_BxMxV = jnp.where(seen_BxMxV, repeated_BxMxV, logits_BxMxV)
    return logits_BxMxV - (frequency_Bx1x1 * so_far_BxMxV + presence_Bx1x1 * said_BxMxV)


def counts_in_block(count_BxV: jax.Array, token_BxM: jax.Array, visible: jax.Array) -> jax.Array:
    """How often each token lies in the answer as each slot of a block sees it, int32 [B, M, V]; arguments as `bend`.

    A comparison a slot instead of a scatter: it is elementwise over the vocabulary, so a sharded one stays where it is.
    """
    batch, slots = token_BxM.shape
    visible_BxMxM = jnp.broadcast_to(visible, (batch, slots, slots))
    ids_1xV = jnp.arange(count_BxV.shape[1], dtype=token_BxM.dtype)[None]
    so_far_BxMxV = jnp.broadcast_to(count_BxV[:, None], (batch, slots, count_BxV.shape[1]))
    for slot in range(1, slots):  # slot 0 is the root: counted when it was emitted
        here_BxV = token_BxM[:, slot, None] == ids_1xV
        so_far_BxMxV += visible_BxMxM[:, :, slot, None] & here_BxV[:, None]
    return so_far_BxMxV


def count_emitted(count_BxV: jax.Array, token_BxM: jax.Array, emitted_B: jax.Array) -> jax.Array:
    """The counts after the first `emitted_B` of the tokens have been emitted."""
    batch, slots = token_BxM.shape
    slot_1xM = jnp.arange(slots, dtype=jnp.int32)[None]
    token_BxM = jnp.where(slot_1xM < emitted_B[:, None], token_BxM, count_BxV.shape[1])  # out of range: dropped
    return count_BxV.at[jnp.arange(batch)[:, None], token_BxM].add(1, mode="drop")
