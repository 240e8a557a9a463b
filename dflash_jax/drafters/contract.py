"""What a drafter is to the rest of the program.

A drafter is an `nnx.Module` of parameters with three functions, pure in everything but those parameters:

    absorb(shared, cache, verified) -> cache
        take in newly committed tokens: write the drafter's own rows behind the committed length
    propose(shared, cache, root_B, temperature_B, key_B, block_size) -> Draft
        propose a block from the root token, which is emitted but in no cache yet

and `layer_specs()`, the cache layers it needs; they lie behind the target's in the one shared cache.
Prefill is an absorb. Nothing else in the program may know which drafter runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct


@struct.dataclass
class Draft:
    """A proposal for one round. Slot 0 is the root: already emitted, not yet in any cache.

    A chain: slot i follows slot i - 1 and lies at position length + i.

    Attributes:
      token_BxM: the root and the drafted tokens, in target ids.
      proposal_BxMxV: None when the tokens are a deterministic choice (argmax). Else row i is the exact law,
        over the target's vocabulary, that token i was drawn from, given the tokens before it in the block. Row 0
        is not read.
    """

    token_BxM: jax.Array
    proposal_BxMxV: jax.Array | None = None


@struct.dataclass
class Verified:
    """Tokens just committed, with what the target computed for them.

    Slots at or beyond count_B are padding or rejected. Position of slot m: cache.length_B + m (the length
    before these tokens are counted in).
    """

    token_BxM: jax.Array
    taps_BxMxTD: jax.Array | None
    hidden_BxMxD: jax.Array
    count_B: jax.Array


@struct.dataclass
class SharedWeights:
    """What a drafter reads by token id, laid out for its draft vocabulary: the target's frozen table and head.

    Attributes:
      embedding_VxD: raw table.
      head_DxV: the head, over the draft vocabulary if that is pruned (then V is its size).
      draft_to_target_V: target id of each draft id; None for the whole vocabulary.
      markov_RxV: the columns of the drafter's own Markov head that `head_DxV` has, once it is bound for drafting; None
        where it has no such head, and in training, where they still change.
    """

    embedding_VxD: jax.Array
    head_DxV: jax.Array
    draft_to_target_V: jax.Array | None = None
    markov_RxV: jax.Array | None = None


def scatter_to_target(probs_BxMxU: jax.Array, draft_to_target_U: jax.Array | None, vocab: int) -> jax.Array:
    """A law over the draft vocabulary as one over the target's: zero where no draft id maps to."""
    if draft_to_target_U is None:
        return probs_BxMxU
    zeros = jnp.zeros((*probs_BxMxU.shape[:-1], vocab), probs_BxMxU.dtype)
    return zeros.at[..., draft_to_target_U].set(probs_BxMxU)


@dataclasses.dataclass
class Drafter:
    """A loaded drafter, bound to its target: what `load_drafter` returns.

    Attributes:
      graphdef, params: the module and its own parameters; `nnx.merge(graphdef, params)` has the contract above.
      shared: the target's parameters that it reads.
      config: the method's own configuration.
      block_size: the trained block size, anchor included; the default and the upper bound at run time.
      tap_ids: target layers whose output `absorb` needs.
      source: where it was loaded from.
      own_vocabulary: whether the table or head in `shared` are not the target's: they came with the drafter.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    shared: SharedWeights
    config: Any
    block_size: int
    tap_ids: tuple[int, ...]
    source: str = ""
    own_vocabulary: bool = False
