"""DFlash: a block-diffusion drafter conditioned on hidden states of the target.

Chen et al., 2026 (arXiv 2602.06036). The block [anchor, mask, mask, ...] goes once through a small
transformer; slot k predicts the token at position anchor + k. Every layer sees the context as extra keys
and values made from the target's tapped states, so a context token costs one fusion and two projections
a layer and is cached for ever; block rows are never cached.

Who sees what, for a slot at position q and a context or block row at position k (anchor at a, context k < a):

    full layer                  every context row, the whole block in both directions
    sliding layer of window W   rows with q - k < W, of context and block alike: W rows, its own included, so
                                the context window moves with the slot; causal inside the block (k <= q)

`DrafterConfig.causal` overrides the second column's direction for all layers; a sliding layer made two-sided
also bounds k - q < W. Other trainers place the window's edge relative to the anchor (k >= a - W), which differs
by up to one block; this is the edge of the reference implementation.

A trunk may serve a target of another width (ours, not the paper's): `fc` then leads from the target's width to the
trunk's, and two projections stand between the target's table and the trunk, and between the trunk and the target's
head. E below is the target's width where it may differ from D, the trunk's.

One pass knows no drafted token when it predicts the next, so its slots may each be likely and together make no text. A
Markov head (`DrafterConfig.markov_rank`) walks the block once more, slot by slot, with a low-rank bias by the token
before; the trunk still runs once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import SLIDING, DrafterConfig
from dflash_jax.drafters.contract import Draft, SharedWeights, Verified, scatter_to_target
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.kernels.kv_cache import BlockKV, KVCache, LayerSpec, pages, write
from dflash_jax.models.attention import causal, fold_heads, stack_kv, two_sided
from dflash_jax.models.layers import GatedMLP, RMSNorm, dense, param, rope_table, rotate
from dflash_jax.models.transformer import softcap


class DFlashAttention(nnx.Module):
    """Block queries over context keys (from fused taps) and block keys, by the same k/v projection."""

    def __init__(self, config: DrafterConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, g, h = config.hidden_size, config.num_kv_heads, config.head_dim
        r, bias = config.num_heads // g, config.attention_bias
        self.q_DxGxRxH = param(rngs, (d, g, r, h), ("embed", "kv_heads", None, None), dtype, d)
        self.kv_DxGx2xH = param(rngs, (d, g, 2, h), ("embed", "kv_heads", None, None), dtype, d)
        self.q_bias_GxRxH = param(rngs, (g, r, h), ("kv_heads", None, None), dtype, 0) if bias else None
        self.kv_bias_Gx2xH = param(rngs, (g, 2, h), ("kv_heads", None, None), dtype, 0) if bias else None
        self.out_GxRxHxD = param(rngs, (g, r, h, d), ("kv_heads", None, None, "embed"), dtype, g * r * h)
        self.out_bias_D = param(rngs, (d,), ("embed",), dtype, 0) if bias else None
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, rngs)
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, rngs)
        self.window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        self.causal = config.layer_is_causal(layer)
        self.scale = h**-0.5

    def keys_values(self, x_BxMxD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(k_BxGxMxH normed and rotated, v_BxGxMxH) of context features or of block hidden states."""
        kv_BxMxGx2xH = dense(x_BxMxD, self.kv_DxGx2xH[...])
        if self.kv_bias_Gx2xH is not None:
            kv_BxMxGx2xH += self.kv_bias_Gx2xH[...][None, None]
        k_BxMxGxH = rotate(self.k_norm(kv_BxMxGx2xH[..., 0, :]), *rope)
        return k_BxMxGxH.swapaxes(1, 2), kv_BxMxGx2xH[..., 1, :].swapaxes(1, 2)

    def queries(self, x_BxMxD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """q_BxMxNxH, normed and rotated."""
        q_BxMxGxRxH = dense(x_BxMxD, self.q_DxGxRxH[...])
        if self.q_bias_GxRxH is not None:
            q_BxMxGxRxH += self.q_bias_GxRxH[...][None, None]
        b, m, g, r, h = q_BxMxGxRxH.shape
        return rotate(self.q_norm(q_BxMxGxRxH.reshape(b, m, g * r, h)), *rope)

    def visibility(self, num_slots: int) -> jax.Array:
        """[K, K] bool, entry [i, j]: slot i may see slot j of its own block, before `q - k < window`.

        A causal layer sees slots up to its own. A two-sided sliding layer has the window on both sides
        (j - i < window), as the reference does; without a window it sees the whole block.
        """
        if self.causal:
            return causal(num_slots)
        visible_KxK = two_sided(num_slots)
        return visible_KxK if self.window is None else jnp.tril(visible_KxK, self.window - 1)

    def project(self, out_BxMxNxH: jax.Array) -> jax.Array:
        """The output projection, heads to hidden."""
        b, m = out_BxMxNxH.shape[:2]
        out_BxMxD = dense(out_BxMxNxH.reshape(b, m, -1), fold_heads(self.out_GxRxHxD[...]))
        return out_BxMxD if self.out_bias_D is None else out_BxMxD + self.out_bias_D[...][None, None]


class DFlashLayer(nnx.Module):
    """Attention with injected context, then a SwiGLU MLP; the input norm touches the block only."""

    def __init__(self, config: DrafterConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(d, eps, dtype, rngs)
        self.attention = DFlashAttention(config, layer, dtype, rngs)
        self.mlp_norm = RMSNorm(d, eps, dtype, rngs)
        self.mlp = GatedMLP(d, config.intermediate_size, False, dtype, rngs)

    def finish(self, x_BxMxD: jax.Array, out_BxMxNxH: jax.Array) -> jax.Array:
        """Everything after the attention itself."""
        x_BxMxD = x_BxMxD + self.attention.project(out_BxMxNxH)
        return x_BxMxD + self.mlp(self.mlp_norm(x_BxMxD))


TABLES = ("w1_VxR", "w2_VxR")  # of a Markov head: a row a token id, of which a call reads some


class MarkovHead(nnx.Module):
    """What a token adds to the logits of the next one: w1[before] . w2[token], over the target's vocabulary.

    Source: the vanilla head of DSpark (arXiv 2607.05147). There slot k predicts the token after its position; here, as
    everywhere in DFlash, the one at it.
    """

    def __init__(self, config: DrafterConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape, axes = (config.vocab_size, config.markov_rank), ("vocab", "embed")
        self.w1_VxR = param(rngs, shape, axes, dtype, 1)
        self.w2_VxR = param(rngs, shape, axes, dtype, config.markov_rank)

    def before(self, token_xs: jax.Array) -> jax.Array:
        """[..., R], of the tokens before."""
        return self.w1_VxR[...][token_xs]

    def columns(self, draft_to_target_U: jax.Array | None) -> jax.Array:
        """[R, U], w2 over a draft vocabulary as the head has it; over all where None."""
        w2_VxR = self.w2_VxR[...]
        return (w2_VxR if draft_to_target_U is None else w2_VxR[draft_to_target_U]).T


class DFlash(nnx.Module):
    """The drafter. Embedding and head are the target's (`SharedWeights`), frozen.

    Attributes:
      embed_projection_ExD, head_projection_DxE: None where `config.target_hidden_size` is.
      markov: None where `config.markov_rank` is 0.
      first_layer: index of its first layer in the shared cache = number of target layers.
    """

    def __init__(self, config: DrafterConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.rms_norm_eps
        e, width = config.target_hidden_size, len(config.target_layer_ids) * config.target_width
        self.config = config
        self.fc_TDxD = param(rngs, (width, d), (None, "embed"), dtype, width)
        self.embed_projection_ExD = None if e is None else param(rngs, (e, d), (None, "embed"), dtype, e)
        self.head_projection_DxE = None if e is None else param(rngs, (d, e), ("embed", None), dtype, d)
        self.hidden_norm = RMSNorm(d, eps, dtype, rngs)
        self.layers = nnx.List([DFlashLayer(config, i, dtype, rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(d, eps, dtype, rngs)
        self.markov = MarkovHead(config, dtype, rngs) if config.markov_rank else None
        self.first_layer = config.num_target_layers

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The cache layers that the drafter needs behind the target's."""
        return (LayerSpec(self.config.num_kv_heads, self.config.head_dim),) * self.config.num_layers

    def fuse(self, taps_BxMxTD: jax.Array) -> jax.Array:
        """Context features [B, M, D] = hidden_norm(fc(taps)); one for all layers."""
        kernel_TDxD = self.fc_TDxD[...]
        return self.hidden_norm(dense(taps_BxMxTD.astype(kernel_TDxD.dtype), kernel_TDxD))

    def context_kv(self, taps_BxMxTD: jax.Array, position_BxM: jax.Array) -> BlockKV:
        """Keys and values of context tokens, every layer."""
        feature_BxMxD = self.fuse(taps_BxMxTD)
        rope = rope_table(self.config.rope, self.config.head_dim, position_BxM)
        return BlockKV(*stack_kv([layer.attention.keys_values(feature_BxMxD, rope) for layer in self.layers]))

    def absorb(self, shared: SharedWeights, cache: KVCache, verified: Verified) -> KVCache:
        """Writes the K/V of newly committed tokens behind the committed length."""
        del shared
        num_tokens = verified.token_BxM.shape[1]
        position_BxM = cache.length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
        rows = self.context_kv(verified.taps_BxMxTD, position_BxM)
        return write(cache, rows, self.first_layer, verified.count_B)

    def block_hidden(self, shared: SharedWeights, cache: KVCache, token_BxK: jax.Array) -> jax.Array:
        """What the head reads of a block [anchor, masks] at positions length .. length+K-1, [B, K, E]."""
        num_slots = token_BxK.shape[1]
        position_BxK = cache.length_B[:, None] + jnp.arange(num_slots, dtype=jnp.int32)[None]
        rope = rope_table(self.config.rope, self.config.head_dim, position_BxK)
        x_BxKxD = self.embed(shared, token_BxK)
        for i, layer in enumerate(self.layers):
            attention = layer.attention
            u_BxKxD = layer.attention_norm(x_BxKxD)
            out_BxKxNxH = paged_block_attention(
                attention.queries(u_BxKxD, rope),
                *pages(cache, self.first_layer + i),
                *attention.keys_values(u_BxKxD, rope),
                length_B=cache.length_B, position_BxM=position_BxK,
                visibility=attention.visibility(num_slots),
                window=attention.window, scale=attention.scale,
            )  # fmt: skip
            x_BxKxD = layer.finish(x_BxKxD, out_BxKxNxH)
        return self.for_head(x_BxKxD)

    def embed(self, shared: SharedWeights, token_BxK: jax.Array) -> jax.Array:
        """The target's embeddings of the block, mask included, with the target's scale if it has one; in the
        trunk's width."""
        x_BxKxE = shared.embedding_VxD[token_BxK]
        if self.config.embedding_scale is not None:
            x_BxKxE = x_BxKxE * jnp.asarray(self.config.embedding_scale, x_BxKxE.dtype)
        x_BxKxE = x_BxKxE.astype(self.fc_TDxD.dtype)  # the drafter may run in another dtype than its target
        return x_BxKxE if self.embed_projection_ExD is None else dense(x_BxKxE, self.embed_projection_ExD[...])

    def for_head(self, x_BxKxD: jax.Array) -> jax.Array:
        """The last layer's output, normed and brought to the width of the target's head."""
        x_BxKxD = self.norm(x_BxKxD)
        return x_BxKxD if self.head_projection_DxE is None else dense(x_BxKxD, self.head_projection_DxE[...])

    def logits(self, shared: SharedWeights, hidden_BxMxE: jax.Array, before_BxM: jax.Array | None = None) -> jax.Array:
        """Float32 logits over the (possibly pruned) draft vocabulary.

        Args:
          before_BxM: target id of the token before each; read by a Markov head, which needs it.
        """
        return self._shifted(shared, self._scores(shared, hidden_BxMxE), before_BxM)

    def _scores(self, shared: SharedWeights, hidden_BxMxE: jax.Array) -> jax.Array:
        return dense(hidden_BxMxE.astype(shared.head_DxV.dtype), shared.head_DxV).astype(jnp.float32)

    def _shifted(self, shared: SharedWeights, score_xV: jax.Array, before_x: jax.Array | None) -> jax.Array:
        if self.markov is not None:
            markov_RxV = shared.markov_RxV
            if markov_RxV is None or before_x is None:
                raise ValueError("a drafter with a Markov head needs shared.markov_RxV (bind_drafter) and before_BxM")
            score_xV += dense(self.markov.before(before_x).astype(markov_RxV.dtype), markov_RxV).astype(jnp.float32)
        return softcap(score_xV * self.config.output_multiplier, self.config.final_logit_softcap or None)  # 0: none

    def block_tokens(self, root_B: jax.Array, block_size: int) -> jax.Array:
        """[anchor, mask, mask, ...], [B, K]."""
        masks = jnp.full((root_B.shape[0], block_size - 1), self.config.mask_token_id, root_B.dtype)
        return jnp.concatenate([root_B[:, None], masks], axis=1)

    def propose(
        self,
        shared: SharedWeights,
        cache: KVCache,
        root_B: jax.Array,
        temperature_B: jax.Array | None,
        key_B: jax.Array | None,
        block_size: int,
    ) -> Draft:
        """Drafts block_size - 1 tokens behind the root.

        Args:
          temperature_B: None for an argmax proposal. Else slots are drawn from softmax(logits / temperature) (one-hot
            at the argmax where it is 0), with a Markov head one after another, and the draft carries that law.
          key_B: one PRNG key a row, read for drawn proposals only.
          block_size: slots of this round, anchor included; at most the trained size.
        """
        hidden_BxJxD = self.block_hidden(shared, cache, self.block_tokens(root_B, block_size))[:, 1:]
        if self.markov is None:
            token_BxJ, law_BxJxV = _choose(self.logits(shared, hidden_BxJxD), temperature_B, key_B)
            token_BxJ = _target_ids(shared, token_BxJ)
        else:
            score_BxJxV = self._scores(shared, hidden_BxJxD)
            walked, before_B = [], root_B
            for slot in range(block_size - 1):
                key = None if key_B is None else jax.vmap(jax.random.fold_in, (0, None))(key_B, slot)
                logits_BxV = self._shifted(shared, score_BxJxV[:, slot], before_B)
                before_B, law_BxV = _choose(logits_BxV, temperature_B, key)
                before_B = _target_ids(shared, before_B)
                walked.append((before_B, law_BxV))
            token_BxJ, law_BxJxV = jax.tree.map(lambda *slots: jnp.stack(slots, axis=1), *walked)
        token_BxM = jnp.concatenate([root_B[:, None], token_BxJ.astype(root_B.dtype)], axis=1)
        if law_BxJxV is None:
            return Draft(token_BxM)
        law = scatter_to_target(law_BxJxV, shared.draft_to_target_V, shared.embedding_VxD.shape[0])
        return Draft(token_BxM, jnp.concatenate([jnp.zeros_like(law[:, :1]), law], axis=1))


def _choose(
    logits_BxxV: jax.Array, temperature_B: jax.Array | None, key_B: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """(draft ids, the law that they were drawn from) of logits [B, ..., V]; no law for an argmax (no temperature)."""
    best = jnp.argmax(logits_BxxV, axis=-1)
    if temperature_B is None:
        return best, None
    each = temperature_B.reshape(-1, *[1] * (logits_BxxV.ndim - 1))
    sure = jax.nn.one_hot(best, logits_BxxV.shape[-1], dtype=jnp.float32)
    law_BxxV = jnp.where(each > 0, jax.nn.softmax(logits_BxxV / jnp.maximum(each, 1e-6), axis=-1), sure)
    return jax.vmap(lambda key, p: jax.random.categorical(key, jnp.log(p), axis=-1))(key_B, law_BxxV), law_BxxV


def _target_ids(shared: SharedWeights, draft_id_xs: jax.Array) -> jax.Array:
    return draft_id_xs if shared.draft_to_target_V is None else shared.draft_to_target_V[draft_id_xs]
