"""Targets and drafters that say what a table says, so that every acceptance list is known beforehand.

The scripted ones choose a row's script by its prompt's first token, which both read back from the cache: a row that
reads another row's pages, a stale page or an uncommitted row says something else at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.config import FULL, RopeConfig, TargetConfig
from dflash_jax.drafters.contract import Draft, Drafter, SharedWeights, Verified
from dflash_jax.kernels.kv_cache import BlockKV, KVCache, LayerSpec, context, write
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import Forward

VOCAB, HIDDEN, POSITIONS = 16, 8, 256
FILLER = 1  # said wherever no script says otherwise
BROKEN = VOCAB - 1  # said by a row whose committed rows are not what they should be; scripts do without it
KEY_DIM = 2


def _kv(token_BxM: jax.Array, position_BxM: jax.Array) -> BlockKV:
    """Rows that say what they are: keys (token, position), values their negatives."""
    k_BxMxH = jnp.stack([token_BxM, position_BxM], axis=-1).astype(jnp.float32)
    return BlockKV((k_BxMxH[:, None],), (-k_BxMxH[:, None],))


class ScriptedModel(nnx.Module):
    """A target of one layer: behind position p of a row that begins with token s it says table[s, p + 1]."""

    def __init__(self, table_VxP: np.ndarray):
        self.table_VxP = nnx.Param(jnp.asarray(table_VxP, jnp.int32), axes=(None, None))

    def __call__(self, token_BxM, position_BxM, cache, visibility, tap_ids=()) -> Forward:
        first_context_B = context(cache, 0)[0][:, 0, 0, 0].astype(jnp.int32)
        first_B = jnp.where(cache.length_B > 0, first_context_B, token_BxM[:, 0])
        table_VxP = self.table_VxP[...]
        # What lies at each committed row must be that row, whatever happened to the cache before.
        row_C = jnp.arange(cache.capacity)
        rows_BxC = context(cache, 0)[0][:, 0, :, 1]
        whole_B = ((rows_BxC == row_C[None]) | (row_C[None] >= cache.length_B[:, None])).all(axis=1)
        said_BxM = table_VxP[first_B[:, None], jnp.minimum(position_BxM + 1, table_VxP.shape[1] - 1)]
        said_BxM = jnp.where(whole_B[:, None], said_BxM, BROKEN)
        hidden_BxMxD = jnp.zeros((*token_BxM.shape, HIDDEN), jnp.float32).at[..., 0].set(said_BxM.astype(jnp.float32))
        taps = jnp.concatenate([hidden_BxMxD] * len(tap_ids), axis=-1) if tap_ids else None
        return Forward(hidden_BxMxD, taps, _kv(token_BxM, position_BxM))

    def logits(self, hidden_BxMxD: jax.Array) -> jax.Array:
        return 40.0 * jax.nn.one_hot(hidden_BxMxD[..., 0].astype(jnp.int32), VOCAB)


class MarkovModel(nnx.Module):
    """A target of one layer whose logits depend on the last token only: row `token` of a table."""

    def __init__(self, table_VxV: np.ndarray):
        self.table_VxV = nnx.Param(jnp.asarray(table_VxV, jnp.float32), axes=(None, "vocab"))

    def __call__(self, token_BxM, position_BxM, cache, visibility, tap_ids=()) -> Forward:
        hidden_BxMxD = jnp.zeros((*token_BxM.shape, HIDDEN), jnp.float32).at[..., 0].set(token_BxM.astype(jnp.float32))
        return Forward(hidden_BxMxD, None, _kv(token_BxM, position_BxM))

    def logits(self, hidden_BxMxD: jax.Array) -> jax.Array:
        return self.table_VxV[...][hidden_BxMxD[..., 0].astype(jnp.int32)]


class ScriptedDrafter(nnx.Module):
    """Proposes table[s, p] for position p of a row whose prompt begins with s. Keeps what it absorbed in a layer."""

    def __init__(self, table_VxP: np.ndarray, first_layer: int):
        self.table_VxP = nnx.Param(jnp.asarray(table_VxP, jnp.int32), axes=(None, None))
        self.first_layer = first_layer

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(1, KEY_DIM),)

    def absorb(self, shared: SharedWeights, cache: KVCache, verified: Verified) -> KVCache:
        del shared
        position_BxM = cache.length_B[:, None] + jnp.arange(verified.token_BxM.shape[1])[None]
        return write(cache, _kv(verified.token_BxM, position_BxM), self.first_layer, verified.count_B)

    def propose(self, shared, cache, root_B, temperature_B, key_B, block_size) -> Draft:
        del shared, temperature_B, key_B
        first_B = context(cache, self.first_layer)[0][:, 0, 0, 0].astype(jnp.int32)
        position_BxK = cache.length_B[:, None] + jnp.arange(1, block_size)[None]
        table_VxP = self.table_VxP[...]
        token_BxK = table_VxP[first_B[:, None], jnp.minimum(position_BxK, table_VxP.shape[1] - 1)]
        return Draft(jnp.concatenate([root_B[:, None], token_BxK.astype(root_B.dtype)], axis=1))


class DrawingDrafter(ScriptedDrafter):
    """Draws every token from one law, whatever was said; its best token where it is not asked to draw."""

    def __init__(self, law_V: np.ndarray, first_layer: int):
        super().__init__(np.zeros((1, 1)), first_layer)
        self.logits_V = nnx.Param(jnp.log(jnp.asarray(law_V, jnp.float32)), axes=(None,))

    def propose(self, shared, cache, root_B, temperature_B, key_B, block_size) -> Draft:
        logits_V, batch = self.logits_V[...], root_B.shape[0]
        if temperature_B is None:
            drawn_BxK = jnp.broadcast_to(jnp.argmax(logits_V), (batch, block_size - 1))
        else:
            draw = lambda key: jax.random.categorical(key, logits_V, shape=(block_size - 1,))  # noqa: E731
            drawn_BxK = jax.vmap(draw)(key_B)
        token_BxM = jnp.concatenate([root_B[:, None], drawn_BxK.astype(root_B.dtype)], axis=1)
        if temperature_B is None:
            return Draft(token_BxM)
        return Draft(token_BxM, jnp.broadcast_to(jax.nn.softmax(logits_V), (*token_BxM.shape, logits_V.shape[0])))


def script_table(prompts: Sequence[Sequence[int]], scripts: Sequence[Sequence[int]], vocab: int = VOCAB) -> np.ndarray:
    """table_VxP in which a row that starts with prompts[i] goes on with scripts[i] and then FILLER."""
    table = np.full((vocab, POSITIONS), FILLER, np.int32)
    for prompt, script in zip(prompts, scripts, strict=True):
        table[prompt[0], len(prompt) : len(prompt) + len(script)] = script
    return table


def wrong_at(table_VxP: np.ndarray, positions: Mapping[int, Sequence[int]], vocab: int = VOCAB) -> np.ndarray:
    """The table with another token at these positions of the rows that begin with these tokens."""
    wrong = table_VxP.copy()
    for first, where in positions.items():
        wrong[first, list(where)] = (wrong[first, list(where)] + 1) % vocab
    return wrong


def all_wrong(table_VxP: np.ndarray, vocab: int = VOCAB) -> np.ndarray:
    """The table of a drafter that is never right."""
    return (table_VxP + 1) % vocab


_CONFIG = TargetConfig(
    family="scripted", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=1, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=KEY_DIM, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=POSITIONS,
    layer_types=(FULL,),
)  # fmt: skip


def scripted_target(table_VxP: np.ndarray, eos_token_ids: Sequence[int] = (), max_positions: int = POSITIONS) -> Target:
    graphdef, params = nnx.split(ScriptedModel(table_VxP))
    config = dataclasses.replace(_CONFIG, max_positions=max_positions)
    return Target(config, graphdef, params, eos_token_ids=tuple(eos_token_ids), source="scripted")


def markov_target(table_VxV: np.ndarray) -> Target:
    graphdef, params = nnx.split(MarkovModel(table_VxV))
    return Target(dataclasses.replace(_CONFIG, vocab_size=len(table_VxV)), graphdef, params, source="markov")


def drawing_drafter(law_V: np.ndarray, block_size: int) -> Drafter:
    """For a target of one layer; every probability must be positive."""
    graphdef, params = nnx.split(DrawingDrafter(law_V, 1))
    unused = jnp.zeros((1, 1))
    return Drafter(graphdef, params, SharedWeights(unused, unused), None, block_size, (), "drawing")


def scripted_drafter(table_VxP: np.ndarray, block_size: int, num_target_layers: int = 1) -> Drafter:
    """A drafter for a scripted target, or for any target of that many layers."""
    graphdef, params = nnx.split(ScriptedDrafter(table_VxP, num_target_layers))
    unused = jnp.zeros((1, 1))
    return Drafter(graphdef, params, SharedWeights(unused, unused), None, block_size, (), "scripted")
