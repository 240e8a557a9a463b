"""Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1), in its absorbed form.

A token caches one latent c (kv_rank channels, normed) and one rotated key part p (rope_dim channels), common to
all heads. Head n's key is [k_up_n c, p] and its value v_up_n c, so its score and its output are

    q . k = (k_up_n^T q_nope) . c + q_rope . p        sum_k w_k v_k = v_up_n (sum_k w_k c_k)

that is, attention with one KV head [c, p] of kv_rank + rope_dim channels whose first kv_rank are the value too,
between two small products a head. No key or value of a head is ever made, neither in prefill nor in decoding:
one function serves both, and what is cached is what is read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import FULL, ConfigError, TargetConfig
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.models.attention import BlockContext
from dflash_jax.models.layers import RMSNorm, dense, param, rotate

LATENT_NORM_EPS = 1e-6  # of the two inner norms, whatever the model's rms_norm_eps


class LatentAttention(nnx.Module):
    """Attention of a layer whose target has a `LatentConfig`.

    Rotated channels come last in `q_*` and `kv_down_DxC`, in the half-split layout of `layers.rotate` (published
    checkpoints interleave the pairs; loading reorders them). Every head has its own part of `k_up_NxCxP` and
    `v_up_NxCxV`, so that the tensor axis cuts all of them by heads; the latent is whole on every device.

    Raises:
      ConfigError: a layer that is not FULL, or biases.
    """

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        if config.layer_types[layer] != FULL:
            raise ConfigError(f"layer {layer} is {config.layer_types[layer]!r}: latent attention must be {FULL!r}")
        if config.qkv_bias or config.out_bias:
            raise ConfigError(
                f"qkv_bias is {config.qkv_bias} and out_bias is {config.out_bias}: latent attention has no biases; "
                "only checkpoints with attention_bias false are supported"
            )
        latent, d, n = config.latent, config.hidden_size, config.num_heads
        q_dim, width = latent.nope_dim + latent.rope_dim, latent.kv_rank + latent.rope_dim
        if latent.q_rank is None:
            self.q_DxNxH = param(rngs, (d, n, q_dim), ("embed", "kv_heads", None), dtype, d)
            self.q_down_DxQ = self.q_down_norm = self.q_up_QxNxH = None
        else:
            self.q_DxNxH = None
            self.q_down_DxQ = param(rngs, (d, latent.q_rank), ("embed", None), dtype, d)
            self.q_down_norm = RMSNorm(latent.q_rank, LATENT_NORM_EPS, dtype, rngs)
            self.q_up_QxNxH = param(rngs, (latent.q_rank, n, q_dim), (None, "kv_heads", None), dtype, latent.q_rank)
        self.kv_down_DxC = param(rngs, (d, width), ("embed", None), dtype, d)
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS, dtype, rngs)
        heads = ("kv_heads", None, None)
        self.k_up_NxCxP = param(rngs, (n, latent.kv_rank, latent.nope_dim), heads, dtype, latent.kv_rank)
        self.v_up_NxCxV = param(rngs, (n, latent.kv_rank, latent.value_dim), heads, dtype, latent.kv_rank)
        self.out_NxVxD = param(
            rngs, (n, latent.value_dim, d), ("kv_heads", None, "embed"), dtype, n * latent.value_dim
        )  # fmt: skip
        self.latent = latent
        self.rope = None if layer in config.nope_layers else config.layer_rope(layer)
        # YaRN's factor on the scores, where a checkpoint has one, is in attention_scale.
        self.scale = q_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.softcap = config.attention_softcap

    def __call__(
        self, x_BxMxD: jax.Array, pages: tuple[jax.Array, jax.Array, jax.Array | None], block: BlockContext
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns (out_BxMxD, (k_Bx1xMxC, v_Bx1xMx0) of the block), C = kv_rank + rope_dim.

        `pages`: see `kv_cache.pages`; k_Px1xSxC, v_Px1xSx0 and the page table.
        """
        q_BxMxNxH = self.queries(x_BxMxD)
        latent_BxMxC = dense(x_BxMxD, self.kv_down_DxC[...])
        rank, nope = self.latent.kv_rank, self.latent.nope_dim
        normed_BxMxC, turning_BxMx1xH = self.kv_norm(latent_BxMxC[..., :rank]), latent_BxMxC[:, :, None, rank:]
        q_turning_BxMxNxH = q_BxMxNxH[..., nope:]
        if self.rope is not None:
            table = block.rope(self.rope, self.latent.rope_dim)
            turning_BxMx1xH, q_turning_BxMxNxH = rotate(turning_BxMx1xH, *table), rotate(q_turning_BxMxNxH, *table)
        k_Bx1xMxC = jnp.concatenate([normed_BxMxC, turning_BxMx1xH[:, :, 0]], axis=-1)[:, None]
        v_Bx1xMx0 = k_Bx1xMxC[..., :0]
        q_latent_BxMxNxC = _per_head("nbmp,ncp->nbmc", q_BxMxNxH[..., :nope], self.k_up_NxCxP[...])
        mixed_BxMxNxC = paged_block_attention(
            jnp.concatenate([q_latent_BxMxNxC, q_turning_BxMxNxH], axis=-1), *pages, k_Bx1xMxC, v_Bx1xMx0,
            length_B=block.length_B, position_BxM=block.position_BxM, visibility=block.visibility,
            window=None, scale=self.scale, softcap=self.softcap, values_in_keys=rank,
        )  # fmt: skip
        out_BxMxNxV = _per_head("nbmc,ncv->nbmv", mixed_BxMxNxC, self.v_up_NxCxV[...])
        b, m, n, v = out_BxMxNxV.shape
        out_BxMxD = dense(out_BxMxNxV.reshape(b, m, n * v), self.out_NxVxD[...].reshape(n * v, -1))
        return out_BxMxD, (k_Bx1xMxC, v_Bx1xMx0)

    def queries(self, x_BxMxD: jax.Array) -> jax.Array:
        """Queries [B, M, N, nope_dim + rope_dim], not rotated yet."""
        if self.q_DxNxH is not None:
            return dense(x_BxMxD, self.q_DxNxH[...])
        return dense(self.q_down_norm(dense(x_BxMxD, self.q_down_DxQ[...])), self.q_up_QxNxH[...])


def _per_head(pattern: str, x_BxMxNxI: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product a head, accumulated in float32, in the dtype of x. `pattern`: of x with the heads in front.

    XLA on CPU multiplies bf16 by heads only where heads come first in both (jax 0.10: else it compiles and fails).
    """
    out_NxBxMxO = jnp.einsum(
        pattern, x_BxMxNxI.transpose(2, 0, 1, 3), kernel,
        precision=jax.lax.Precision.HIGHEST if x_BxMxNxI.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return out_NxBxMxO.transpose(1, 2, 0, 3).astype(x_BxMxNxI.dtype)
