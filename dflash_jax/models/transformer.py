"""The dense decoder-only target: Llama, Mistral, Qwen2/2.5, Qwen3 by configuration."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx, struct

from dflash_jax.config import TargetConfig
from dflash_jax.kernels.kv_cache import BlockKV, KVCache, LayerSpec, pages
from dflash_jax.models.attention import Attention, BlockContext, stack_kv
from dflash_jax.models.layers import RMSNorm, SwiGLU, dense, param, rope_table


@struct.dataclass
class Forward:
    """Result of a target call over M tokens.

    Attributes:
      hidden_BxMxD: after the final norm, what the head reads.
      taps_BxMxTD: residual stream after each tapped layer, concatenated in id order; None without taps.
      block_kv: keys and values of the M tokens, committed by nobody yet.
    """

    hidden_BxMxD: jax.Array
    taps_BxMxTD: jax.Array | None
    block_kv: BlockKV


class DecoderLayer(nnx.Module):
    """Pre-norm attention and SwiGLU, each with its residual."""

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(d, eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs)
        self.mlp_norm = RMSNorm(d, eps, dtype, rngs)
        self.mlp = SwiGLU(d, config.intermediate_size, config.mlp_bias, dtype, rngs)

    def __call__(self, x_BxMxD, layer_pages, block):
        attended_BxMxD, kv = self.attention(self.attention_norm(x_BxMxD), layer_pages, block)
        x_BxMxD = x_BxMxD + attended_BxMxD
        return x_BxMxD + self.mlp(self.mlp_norm(x_BxMxD)), kv


class Transformer(nnx.Module):
    """A target. `head_DxV` is None when the head is tied and the embedding table serves for both.

    Args:
      own_head: keep a head of its own even if the configuration ties it (a transposed copy of the table:
        on CPU a [D, V] product over a few rows is twice as fast as one over [V, D]).
    """

    def __init__(self, config: TargetConfig, dtype: jnp.dtype, rngs: nnx.Rngs, own_head: bool = False):
        d, v = config.hidden_size, config.vocab_size
        self.config = config
        self.embedding_VxD = param(rngs, (v, d), ("vocab", "embed"), dtype, d)
        self.layers = nnx.List([DecoderLayer(config, i, dtype, rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype, rngs)
        needs_head = own_head or not config.tie_embeddings
        self.head_DxV = param(rngs, (d, v), ("embed", "vocab"), dtype, d) if needs_head else None

    def __call__(
        self,
        token_BxM: jax.Array,
        position_BxM: jax.Array,
        cache: KVCache,
        visibility: jax.Array,
        tap_ids: Sequence[int] = (),
    ) -> Forward:
        """Runs M tokens over the committed context; see `Forward`.

        Args:
          token_BxM, position_BxM: ids and absolute positions.
          cache: its first num_layers layers are this model's; read, never written.
          visibility: [M, M] or [B, M, M] bool, which slots of the block each slot sees.
          tap_ids: 0-based layers whose output is returned.
        """
        x_BxMxD = self.embed(token_BxM)
        block = BlockContext(
            position_BxM, cache.length_B, visibility,
            rope_table(self.config.rope, self.config.head_dim, position_BxM),
        )  # fmt: skip
        taps, pairs = {}, []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x_BxMxD, kv = layer(x_BxMxD, pages(cache, i), block)
            pairs.append(kv)
            if i in tap_ids:
                taps[i] = x_BxMxD
        taps_BxMxTD = jnp.concatenate([taps[i] for i in tap_ids], axis=-1) if tap_ids else None
        return Forward(self.norm(x_BxMxD), taps_BxMxTD, BlockKV(*stack_kv(pairs)))

    def embed(self, token_BxM: jax.Array) -> jax.Array:
        """Token embeddings [B, M, D], scaled as the family does."""
        x_BxMxD = self.embedding_VxD[...][token_BxM]
        if self.config.embedding_scale != 1.0:
            # Rounded to the model's dtype first, as Hugging Face does.
            x_BxMxD = x_BxMxD * jnp.asarray(self.config.embedding_scale, x_BxMxD.dtype)
        return x_BxMxD

    def logits(self, hidden_BxMxD: jax.Array) -> jax.Array:
        """Float32 logits [B, M, V] of normed hidden states."""
        kernel = self.embedding_VxD[...].T if self.head_DxV is None else self.head_DxV[...]
        logits_BxMxV = dense(hidden_BxMxD, kernel).astype(jnp.float32)
        return softcap(logits_BxMxV, self.config.final_logit_softcap)


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), or the logits themselves where cap is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def layer_specs(config: TargetConfig) -> tuple[LayerSpec, ...]:
    """The cache layers that a target needs."""
    return (LayerSpec(config.num_kv_heads, config.head_dim),) * config.num_layers
