"""Exact verification of a drafted chain: the emitted law is the target's warped law, whatever was drafted.

Greedy: drafted tokens are kept while they are the target's argmax; the next root is the target's argmax behind the
last kept one.

Sampled, token by token (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). With p the
target's law of a slot, given the kept tokens before it, and q the law the drafted token x was drawn from, x is kept
with probability min(1, p(x) / q(x)); the first one not kept is replaced by a draw from max(p - q, 0), renormalised.
A deterministic x is the case q = one-hot: kept with probability p(x), else replaced by a draw from p without x. If
the chain ends with all kept, the next root is a draw from p behind it. The slots of a block drafter are drawn
independently of each other, so given the kept tokens each x still has the law q, which is all the rule asks for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.decoding.sampling import Sampling, Support, categorical, lowest_argmax, probabilities, support
from dflash_jax.drafters.contract import Draft


@struct.dataclass
class Verdict:
    """What the target made of a draft.

    Attributes:
      n_accepted_B: int32, drafted tokens kept: slots 1 .. n_accepted. The root is not counted.
      next_root_B: the token behind them: the target's correction, or the bonus where nothing was refused. A round
        emits n_accepted + 1 tokens.
    """

    n_accepted_B: jax.Array
    next_root_B: jax.Array


def verify(
    draft: Draft,
    logits_BxMxV: jax.Array,
    sampling: Sampling | None,
    key_B: jax.Array | None,
    limit_B: jax.Array,
) -> Verdict:
    """Keeps the right beginning of a drafted chain and draws the token behind it.

    M = 1, the root alone, is plain decoding: the next root is drawn from the target's law behind the root.

    Args:
      draft: the chain; its proposal is None for tokens that are a fixed function of what is committed, else the
        exact laws they were drawn from, independently of each other and of key_B.
      logits_BxMxV: the target's logits; row i is for the token behind slot i. Whatever changes logits per slot has
        been applied.
      sampling: None decodes all rows greedily (a tie goes to the lowest id) and reads no keys. Rows of temperature 0
        in a sampled batch get the same tokens.
      key_B: one key a row; not one that the draft was drawn with.
      limit_B: at most this many drafted tokens are kept, clipped to [0, M - 1]. Where it cuts a chain, the next root
        is drawn from the whole law behind slot `limit`, without looking at the drafted token there. It must not be
        chosen from the drafted tokens or the keys of this round, else the law is no longer the target's.
    """
    if sampling is None:
        return _verify_greedy(draft, logits_BxMxV, limit_B)
    slots = draft.token_BxM.shape[1]
    coin_key_B, draw_key_B = jnp.unstack(jax.vmap(jax.random.split)(key_B), axis=1)
    coin_BxM1 = jax.vmap(lambda key: jax.random.uniform(key, (slots - 1,)))(coin_key_B)
    n_accepted_B, weight_BxV = judge(draft, logits_BxMxV, sampling, coin_BxM1, limit_B)
    next_root_B = jax.vmap(categorical)(draw_key_B, weight_BxV)
    return Verdict(n_accepted_B, next_root_B.astype(draft.token_BxM.dtype))


def judge(
    draft: Draft, logits_BxMxV: jax.Array, sampling: Sampling, coin_BxM1: jax.Array, limit_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule of sampled verification with its randomness taken out.

    Args:
      coin_BxM1: [B, M - 1], for each drafted token a uniform in [0, 1).

    Returns:
      n_accepted_B, and weight_BxV: the law that the next root is to be drawn from, not normalised.
    """
    token_BxM, proposal = draft.token_BxM, draft.proposal_BxMxV
    last_slot = token_BxM.shape[1] - 1
    law = support(logits_BxMxV, sampling)
    # Only the drafted tokens' probabilities and the one row behind the last kept token are ever evaluated.
    drafted_BxM1x1 = token_BxM[:, 1:, None]
    p_BxM1 = probabilities(
        jnp.take_along_axis(logits_BxMxV[:, :-1], drafted_BxM1x1, axis=-1),
        drafted_BxM1x1,
        jax.tree.map(lambda a_BxM: a_BxM[:, :-1], law),
        sampling,
    )[..., 0]
    q_BxM1 = 1.0
    if proposal is not None:
        q_BxM1 = jnp.take_along_axis(proposal[:, 1:], drafted_BxM1x1, axis=-1)[..., 0].astype(jnp.float32)
    n_accepted_B = _prefix(coin_BxM1 * q_BxM1 < p_BxM1, limit_B)

    row_Bx1x1 = n_accepted_B[:, None, None]
    logits_Bx1xV = jnp.take_along_axis(logits_BxMxV, row_Bx1x1, axis=1)
    law_row: Support = jax.tree.map(lambda a_BxM: jnp.take_along_axis(a_BxM, row_Bx1x1[..., 0], axis=1), law)
    ids_Bx1xV = jax.lax.broadcasted_iota(jnp.int32, logits_Bx1xV.shape, 2)
    p_BxV = probabilities(logits_Bx1xV, ids_Bx1xV, law_row, sampling)[:, 0]
    if last_slot == 0:
        return n_accepted_B, p_BxV

    refused_B = n_accepted_B < jnp.clip(limit_B, 0, last_slot)
    refused_slot_Bx1x1 = jnp.minimum(row_Bx1x1 + 1, last_slot)
    if proposal is None:
        refused_token_Bx1 = jnp.take_along_axis(token_BxM, refused_slot_Bx1x1[..., 0], axis=1)
        residual_BxV = jnp.where(ids_Bx1xV[:, 0] == refused_token_Bx1, 0.0, p_BxV)
    else:
        q_BxV = jnp.take_along_axis(proposal, refused_slot_Bx1x1, axis=1)[:, 0].astype(jnp.float32)
        residual_BxV = jnp.maximum(p_BxV - q_BxV, 0.0)
    # No mass is left only where p and q agree up to rounding. Exact arithmetic never refuses there; where rounding
    # did, p is the law to draw from.
    use_residual_Bx1 = (refused_B & (residual_BxV > 0).any(axis=-1))[:, None]
    return n_accepted_B, jnp.where(use_residual_Bx1, residual_BxV, p_BxV)


def _verify_greedy(draft: Draft, logits_BxMxV: jax.Array, limit_B: jax.Array) -> Verdict:
    best_BxM = lowest_argmax(logits_BxMxV).astype(draft.token_BxM.dtype)
    n_accepted_B = _prefix(draft.token_BxM[:, 1:] == best_BxM[:, :-1], limit_B)
    return Verdict(n_accepted_B, jnp.take_along_axis(best_BxM, n_accepted_B[:, None], axis=1)[:, 0])


def _prefix(kept_BxM1: jax.Array, limit_B: jax.Array) -> jax.Array:
    """Length of the run of True at the beginning, at most limit; int32 [B]."""
    run_B = jnp.cumprod(kept_BxM1.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(run_B, jnp.clip(limit_B, 0).astype(jnp.int32))
