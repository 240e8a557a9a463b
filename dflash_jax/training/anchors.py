"""Where training blocks start, and what each of their slots must predict."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def valid_anchors(loss_mask_BxS: jax.Array, length_B: jax.Array, document_BxS: jax.Array | None = None) -> jax.Array:
    """[B, S] bool: positions p whose own token and whose next token are both supervised and inside the row.

    The anchor is a token that the target emitted, so it must be part of an answer; and without a
    supervised token behind it the block has nothing to learn. Blocks may run past the end of the answer.

    Args:
      document_BxS: of packed rows, what each token belongs to: the next token must be of the same document.
    """
    s = loss_mask_BxS.shape[1]
    inside_BxS = loss_mask_BxS & (jnp.arange(s, dtype=jnp.int32)[None] < length_B[:, None])
    follows_BxS = jnp.concatenate([inside_BxS[:, 1:], jnp.zeros_like(inside_BxS[:, :1])], axis=1)
    if document_BxS is not None:
        follows_BxS &= document_BxS == jnp.roll(document_BxS, -1, axis=1)
    return inside_BxS & follows_BxS


def sample_anchors(
    key: jax.Array,
    epoch_B: jax.Array,
    id_B: jax.Array | None,
    loss_mask_BxS: jax.Array,
    length_B: jax.Array,
    num_anchors: int,
    document_BxS: jax.Array | None = None,
    position_BxS: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors without replacement, all valid positions of a row alike.

    Every position has a rank that depends on the key, the epoch, its sample's id and its place in the sample, and on
    nothing else: neither on the rows beside it, nor on the padding or the packed documents around it. A row's anchors
    are its valid positions of lowest rank. So a packed document has the anchors that it would have alone wherever
    num_anchors covers all valid positions of the row; else it has the first of them, as many as its row leaves it.

    Args:
      key: one PRNG key of the run.
      epoch_B, id_B: int32, epoch and sample id of each row.
      num_anchors: A, of a row.
      document_BxS, position_BxS: int32, of packed rows: sample id of each token (in place of id_B) and position in it.

    Returns:
      (anchor_BxA int32 ascending rows of the sequence, keep_BxA bool). A row with fewer than A valid positions gives
      all of them; the rest is padding at the end, anchor 0 with keep False.
    """
    b, s = loss_mask_BxS.shape
    valid_BxS = valid_anchors(loss_mask_BxS, length_B, document_BxS)
    if document_BxS is None:
        document_BxS = jnp.broadcast_to(id_B[:, None], (b, s))
        position_BxS = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))

    def draw_row(epoch, document_S, position_S, valid_S):
        epoch_key = jax.random.fold_in(key, epoch)

        def rank(document, position):
            # Made from the position itself, so that more padding changes none of them.
            return jax.random.bits(jax.random.fold_in(jax.random.fold_in(epoch_key, document), position))

        order_S = jnp.lexsort((jax.vmap(rank)(document_S, position_S), ~valid_S))
        chosen_A = order_S[:num_anchors].astype(jnp.int32)
        keep_A = valid_S[chosen_A]
        chosen_A = jnp.sort(jnp.where(keep_A, chosen_A, s))
        return jnp.where(chosen_A < s, chosen_A, 0), chosen_A < s

    anchor_BxA, keep_BxA = jax.vmap(draw_row)(epoch_B, document_BxS, position_BxS, valid_BxS)
    missing = num_anchors - anchor_BxA.shape[1]
    if missing > 0:  # fewer positions than anchors asked for
        anchor_BxA = jnp.pad(anchor_BxA, ((0, 0), (0, missing)))
        keep_BxA = jnp.pad(keep_BxA, ((0, 0), (0, missing)))
    return anchor_BxA, keep_BxA


def slot_labels(
    token_BxS: jax.Array,
    loss_mask_BxS: jax.Array,
    length_B: jax.Array,
    anchor_BxA: jax.Array,
    keep_BxA: jax.Array,
    block_size: int,
    document_BxS: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What slots 1 .. K-1 of every block predict; slot 0 is the anchor itself and carries no loss.

    Returns:
      (label_BxAxJ int32, counts_BxAxJ bool), J = K - 1. Entry j is slot j + 1: the token at anchor + j + 1.
      Where counts is False (padding block, past the row's or the document's end, token outside the answer) the label
      is 0.
    """
    s = token_BxS.shape[1]
    position_BxAxJ = anchor_BxA[..., None] + jnp.arange(1, block_size, dtype=jnp.int32)[None, None]
    inside_BxAxJ = (position_BxAxJ < jnp.minimum(length_B, s)[:, None, None]) & keep_BxA[..., None]
    index_BxAxJ = jnp.minimum(position_BxAxJ, s - 1)
    counts_BxAxJ = inside_BxAxJ & gather_rows(loss_mask_BxS, index_BxAxJ)
    if document_BxS is not None:
        own_BxA = jnp.take_along_axis(document_BxS, anchor_BxA, axis=1)
        counts_BxAxJ &= gather_rows(document_BxS, index_BxAxJ) == own_BxA[..., None]
    return jnp.where(counts_BxAxJ, gather_rows(token_BxS, index_BxAxJ), 0), counts_BxAxJ


def gather_rows(x_BxSx: jax.Array, index_Bx: jax.Array) -> jax.Array:
    """x[b, index[b, ...], ...] for every row b; indices must lie inside."""
    return jax.vmap(lambda row, index: row[index])(x_BxSx, index_Bx)
