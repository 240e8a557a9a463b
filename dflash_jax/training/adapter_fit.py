"""Where an adapter starts, when the target that the trunk was made for is at hand: linear least squares.

The trunk knows three things by the first target: what a token's embedding looks like, which state the head turns into
a token, and what context features look like. Each is a linear map of something that the new target has too:

    embed_projection   new table -> what the trunk got from the first one, over the tokens that both vocabularies have
    head_projection    so that the new head's logits of projected states are the first head's, over the same tokens
    fc                 new taps -> features before their norm, over the same text, where ids mean the same in both

All three are ridge regressions, solved in float64 on the host. They are a start: a run goes on training them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import ConfigError, DrafterConfig
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import Target
from dflash_jax.models.whole_rows import forward_rows

RIDGE = 1e-4  # of the mean squared input


def fit_adapter(
    params: nnx.State,
    draft: DrafterConfig,
    target: Target,
    trunk: nnx.State,
    theirs: DrafterConfig,
    first: Target,
    token_RxS: np.ndarray,
    length_R: np.ndarray,
    position_RxS: np.ndarray | None = None,
    document_RxS: np.ndarray | None = None,
) -> nnx.State:
    """`params` with projections and fc fitted to what the trunk got from its first target.

    Args:
      params, draft: this run's drafter, its trunk taken over already.
      trunk, theirs: parameters and configuration of the drafter that the trunk is from.
      first: the target that was made for.
      token_RxS, length_R: rows of text for `fc`; read only where both targets have the same ids.
      position_RxS, document_RxS: of packed rows, see `forward_rows`.

    Raises:
      ConfigError: `first` is not what `theirs` was made for, or the vocabularies have too little in common.
    """
    if (theirs.target_width, theirs.vocab_size) != (first.config.hidden_size, first.config.vocab_size):
        raise ConfigError(
            f"drafter.init_target {first.source} has hidden_size {first.config.hidden_size} and vocab_size "
            f"{first.config.vocab_size}, the drafter of drafter.init_from was made for {theirs.target_width} and "
            f"{theirs.vocab_size}"
        )
    old_U, new_U = common_tokens(first, target)
    result = dict(nnx.to_flat_state(params))

    def put(path: tuple, value: np.ndarray) -> None:
        result[path] = result[path].replace(jnp.asarray(value, jnp.float32))

    drafter = nnx.merge(nnx.split(nnx.eval_shape(lambda: DFlash(theirs, jnp.float32, nnx.Rngs(0))))[0], trunk)
    if draft.target_hidden_size is not None:
        if len(old_U) < max(draft.hidden_size, draft.target_width):
            raise ConfigError(
                f"{first.source} and {target.source} have only {len(old_U)} tokens in common, too few to fit "
                f"projections of width {draft.target_width}; leave drafter.init_target empty"
            )
        was, now = shared_weights(first), shared_weights(target)
        known_UxD = np.asarray(drafter.embed(was, jnp.asarray(old_U)[None])[0], np.float64)
        table_UxE = np.asarray(now.embedding_VxD[new_U], np.float64) * (draft.embedding_scale or 1.0)
        put(("embed_projection_ExD",), solve(table_UxE, known_UxD))
        head_DxU = np.asarray(was.head_DxV[:, old_U], np.float64)
        if drafter.head_projection_DxE is not None:
            head_DxU = np.asarray(drafter.head_projection_DxE[...], np.float64) @ head_DxU
        put(("head_projection_DxE",), solve(np.asarray(now.head_DxV[:, new_U], np.float64).T, head_DxU.T).T)
    if first.config.vocab_size == target.config.vocab_size and np.array_equal(old_U, new_U):
        rows = (token_RxS,) if document_RxS is None else (token_RxS, position_RxS, document_RxS)
        put(("fc_TDxD",), _fitted_fc(draft, target, drafter, first, rows, length_R))
    else:
        logging.info("ids of %s and %s mean different tokens: fc starts at random", first.source, target.source)
    return nnx.from_flat_state(list(result.items()))


def common_tokens(first: Target, second: Target) -> tuple[np.ndarray, np.ndarray]:
    """Ids [U] of the tokens that both vocabularies have, in the first and in the second, ascending in the first.

    Raises:
      ConfigError: a target has no tokenizer, and the vocabularies differ in size.
    """
    if first.tokenizer is None or second.tokenizer is None:
        if first.config.vocab_size != second.config.vocab_size:
            raise ConfigError(
                f"vocabularies of {first.config.vocab_size} and {second.config.vocab_size} tokens can not be compared "
                "without both tokenizers; leave drafter.init_target empty"
            )
        every_V = np.arange(first.config.vocab_size)
        return every_V, every_V
    theirs, ours = (t.tokenizer.backend.get_vocab(with_added_tokens=True) for t in (first, second))
    pairs = sorted((i, ours[text]) for text, i in theirs.items() if text in ours)
    old_U, new_U = np.asarray(pairs, np.int64).reshape(-1, 2).T
    return old_U, new_U


def solve(x_RxI: np.ndarray, y_RxO: np.ndarray) -> np.ndarray:
    """[I, O]: the ridge regression of y on x."""
    gram_IxI = x_RxI.T @ x_RxI
    gram_IxI += RIDGE * np.trace(gram_IxI) / len(gram_IxI) * np.eye(len(gram_IxI))
    return np.linalg.solve(gram_IxI, x_RxI.T @ y_RxO)


def _fitted_fc(
    draft: DrafterConfig, target: Target, drafter: DFlash, first: Target, rows: tuple[np.ndarray, ...],
    length_R: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """`rows` are tokens, and of packed ones positions and documents, [R, S] each."""
    inside_RxS = np.arange(rows[0].shape[1])[None] < np.asarray(length_R)[:, None]
    x_RxI = _taps(target, draft.target_layer_ids, rows)[inside_RxS]
    y_RxD = _taps(first, drafter.config.target_layer_ids, rows)[inside_RxS]
    y_RxD = y_RxD @ np.asarray(drafter.fc_TDxD[...], np.float64)
    # The norm behind fc makes all tokens equally large: errors count relative to a token's size. Taps differ in scale
    # by orders of magnitude: the ridge must not.
    weight_Rx1 = 1.0 / np.sqrt(np.mean(np.square(y_RxD), -1, keepdims=True))
    x_RxI, y_RxD = x_RxI * weight_Rx1, y_RxD * weight_Rx1
    size_T = np.sqrt(np.mean(np.square(x_RxI).reshape(len(x_RxI), len(draft.target_layer_ids), -1), (0, 2)))
    size_I = np.repeat(size_T, draft.target_width)
    return solve(x_RxI / size_I, y_RxD) / size_I[:, None]


def _taps(target: Target, tap_ids: tuple[int, ...], rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Tapped states [R, S, T*D] of rows, a row at a time."""

    @jax.jit
    def run(params: nnx.State, token_1xS: jax.Array, *packed: jax.Array) -> jax.Array:
        return forward_rows(nnx.merge(target.graphdef, params), token_1xS, tap_ids, *packed).taps_BxMxTD

    with sharding.use(target.mesh):
        taps = [
            np.asarray(run(target.params, *(row_S[None] for row_S in row))[0], np.float64)
            for row in zip(*rows, strict=True)
        ]
    return np.stack(taps)
