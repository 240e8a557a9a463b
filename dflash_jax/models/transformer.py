"""The decoder-only target: every family by configuration (docs/targets.md lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from dflash_jax import sharding
from dflash_jax.config import LINEAR, TargetConfig
from dflash_jax.kernels import dispatch
from dflash_jax.kernels.kv_cache import BlockKV, KVCache, LayerSpec, pages
from dflash_jax.models.attention import Attention, BlockContext, stack_kv
from dflash_jax.models.delta_net import DeltaNet
from dflash_jax.models.latent_attention import LatentAttention
from dflash_jax.models.layers import GatedMLP, RMSNorm, dense, param
from dflash_jax.models.moe import MoE

# (k_PxGxSxH, v_PxGxSxH, page_table_BxT or None) or a RecurrentState going in, (k_BxGxMxH, v_BxGxMxH) or
# RecurrentInputs coming out.
LayerRows = Any
ROWS = ("batch", None, None)  # logical axes of activations [B, M, D]


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
    """Attention (of one of four kinds) and MLP (dense, experts), each pre-normed and with its residual."""

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, kind, experts = config.hidden_size, config.layer_types[layer], config.moe

        def norm() -> RMSNorm:
            return RMSNorm(d, config.rms_norm_eps, dtype, rngs, config.norm_offset)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.is_recurrent = kind == LINEAR
        if self.is_recurrent:
            self.attention = DeltaNet(config, layer, dtype, rngs)
        elif config.latent is not None:
            self.attention = LatentAttention(config, layer, dtype, rngs)
        else:
            self.attention = Attention(config, layer, dtype, rngs)
        if experts is not None and layer in experts.layers:
            self.moe, self.mlp = MoE(config, dtype, rngs), None
        else:
            self.moe, self.mlp = None, GatedMLP(
                d, config.intermediate_size, config.mlp_bias, dtype, rngs, config.activation, config.activation_limit
            )  # fmt: skip
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.layer_scale_1 = param(rngs, (1,), (None,), dtype) if config.layer_scale else None

    def __call__(self, x_BxMxD: jax.Array, rows: LayerRows, block: BlockContext) -> tuple[jax.Array, LayerRows]:
        """(output, what the M tokens add to the layer's cache). `rows`: pages, or a recurrent state."""
        arguments = (rows, block.position_BxM if block.restarts else None) if self.is_recurrent else (rows, block)
        attended_BxMxD, new_rows = self.attention(self.attention_norm(x_BxMxD), *arguments)
        if self.attention_post_norm is not None:
            attended_BxMxD = self.attention_post_norm(attended_BxMxD)
        x_BxMxD = x_BxMxD + attended_BxMxD
        inner_BxMxD = self.mlp_norm(x_BxMxD)
        inner_BxMxD = self.mlp(inner_BxMxD) if self.moe is None else self.moe(inner_BxMxD)
        if self.mlp_post_norm is not None:
            inner_BxMxD = self.mlp_post_norm(inner_BxMxD)
        x_BxMxD = x_BxMxD + inner_BxMxD
        if self.layer_scale_1 is not None:
            x_BxMxD = x_BxMxD * self.layer_scale_1[...][None, None]
        return sharding.constrain(x_BxMxD, ROWS), new_rows


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
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype, rngs, config.norm_offset)
        needs_head = own_head or not config.tie_embeddings
        self.head_DxV = param(rngs, (d, v), ("embed", "vocab"), dtype, d) if needs_head else None

    def __call__(
        self,
        token_BxM: jax.Array,
        position_BxM: jax.Array,
        cache: KVCache,
        visibility: jax.Array,
        tap_ids: Sequence[int] = (),
        restarts: bool = False,
    ) -> Forward:
        """Runs M tokens over the committed context; see `Forward`.

        Args:
          token_BxM, position_BxM: ids and absolute positions.
          cache: its first num_layers layers are this model's; read, never written.
          visibility: [M, M] or [B, M, M] bool, which slots of the block each slot sees.
          tap_ids: 0-based layers whose output is returned.
          restarts: a token at position 0 begins a document that knows nothing of the tokens before it, in recurrent
            layers too; `visibility` must keep the documents apart by itself.
        """
        x_BxMxD = self.embed(token_BxM)
        block = BlockContext(position_BxM, cache.length_B, visibility, restarts)
        taps, kv, recurrent, states = {}, [], [], iter(cache.recurrent)
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                rows = next(states) if layer.is_recurrent else pages(cache, i)
                x_BxMxD, new_rows = layer(x_BxMxD, rows, block)
            if layer.is_recurrent:
                recurrent.append(new_rows)
                new_rows = no_rows(token_BxM.shape, x_BxMxD.dtype)
            kv.append(new_rows)
            if i in tap_ids:
                taps[i] = x_BxMxD
        taps_BxMxTD = jnp.concatenate([taps[i] for i in tap_ids], axis=-1) if tap_ids else None
        block_kv = BlockKV(*stack_kv(kv), recurrent=tuple(recurrent))
        return Forward(self.norm(x_BxMxD), taps_BxMxTD, block_kv)

    def embed(self, token_BxM: jax.Array) -> jax.Array:
        """Token embeddings [B, M, D], scaled as the family does."""
        x_BxMxD = self.embedding_VxD[...][token_BxM]
        if self.config.embedding_scale != 1.0:
            # Rounded to the model's dtype first, as Hugging Face does.
            x_BxMxD = x_BxMxD * jnp.asarray(self.config.embedding_scale, x_BxMxD.dtype)
        return sharding.constrain(x_BxMxD, ROWS)

    def logits(self, hidden_BxMxD: jax.Array) -> jax.Array:
        """Float32 logits [B, M, V] of normed hidden states."""
        if self.head_DxV is None:
            # XLA multiplies with the table as it lies; for the native kernel it would turn it at every call.
            logits_BxMxV = dense(hidden_BxMxD, self.embedding_VxD[...].T, implementation=dispatch.REFERENCE)
        else:
            logits_BxMxV = dense(hidden_BxMxD, self.head_DxV[...])
        logits_BxMxV = logits_BxMxV.astype(jnp.float32)
        return softcap(logits_BxMxV, self.config.final_logit_softcap)


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), or the logits themselves where cap is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def layer_specs(config: TargetConfig) -> tuple[LayerSpec, ...]:
    """The cache layers that a target needs, one a decoder layer."""

    def spec(layer: int) -> LayerSpec:
        if config.layer_types[layer] == LINEAR:
            return LayerSpec(0, 0, delta=config.delta)
        if config.latent is not None:
            return LayerSpec(1, config.latent.kv_rank + config.latent.rope_dim, value_dim=0)
        return LayerSpec(*config.kv_shape(layer))

    return tuple(spec(layer) for layer in range(config.num_layers))


def no_rows(shape: tuple[int, int], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a layer that has none, [B, 0, M, 0] each."""
    empty = jnp.zeros((shape[0], 0, shape[1], 0), dtype)
    return empty, empty
