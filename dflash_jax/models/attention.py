"""Self-attention of a decoder layer: projections, q/k norm, rotary embedding, block attention."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import SLIDING, TargetConfig
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.models.layers import RMSNorm, dense, param, rotate


class BlockContext:
    """What every layer of one call has in common. Made once a call; holds no parameters."""

    def __init__(
        self,
        position_BxM: jax.Array,
        length_B: jax.Array,
        visibility: jax.Array,
        rope: tuple[jax.Array, jax.Array],
    ):
        self.position_BxM = position_BxM
        self.length_B = length_B
        self.visibility = visibility
        self.rope = rope


class Attention(nnx.Module):
    """Grouped-query attention.

    q, k and v of one KV group lie together in `qkv_DxGxRxH`: R - 2 query heads, then k, then v. One
    product instead of three, and sharding over G keeps each group on one device.
    """

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, g, h = config.hidden_size, config.num_kv_heads, config.head_dim
        r = config.num_heads // g
        self.qkv_DxGxRxH = param(rngs, (d, g, r + 2, h), ("embed", "kv_heads", None, None), dtype, d)
        self.qkv_bias_GxRxH = (
            param(rngs, (g, r + 2, h), ("kv_heads", None, None), dtype, 0) if config.qkv_bias else None
        )
        self.out_GxRxHxD = param(rngs, (g, r, h, d), ("kv_heads", None, None, "embed"), dtype, g * r * h)
        self.out_bias_D = param(rngs, (d,), ("embed",), dtype, 0) if config.out_bias else None
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, rngs) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, rngs) if config.qk_norm else None
        self.window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        self.scale = h**-0.5

    def __call__(
        self, x_BxMxD: jax.Array, pages: tuple[jax.Array, jax.Array, jax.Array | None], block: BlockContext
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns (out_BxMxD, (k_BxGxMxH, v_BxGxMxH) of the block). `pages`: see `kv_cache.pages`."""
        qkv_BxMxGxRxH = dense(x_BxMxD, self.qkv_DxGxRxH[...])
        if self.qkv_bias_GxRxH is not None:
            qkv_BxMxGxRxH += self.qkv_bias_GxRxH[...][None, None]
        b, m, g, r, h = qkv_BxMxGxRxH.shape
        q_BxMxNxH = qkv_BxMxGxRxH[..., :-2, :].reshape(b, m, g * (r - 2), h)
        k_BxMxGxH, v_BxMxGxH = qkv_BxMxGxRxH[..., -2, :], qkv_BxMxGxRxH[..., -1, :]
        if self.q_norm is not None:
            q_BxMxNxH, k_BxMxGxH = self.q_norm(q_BxMxNxH), self.k_norm(k_BxMxGxH)
        q_BxMxNxH, k_BxMxGxH = rotate(q_BxMxNxH, *block.rope), rotate(k_BxMxGxH, *block.rope)
        k_BxGxMxH, v_BxGxMxH = k_BxMxGxH.swapaxes(1, 2), v_BxMxGxH.swapaxes(1, 2)
        out_BxMxNxH = paged_block_attention(
            q_BxMxNxH, *pages, k_BxGxMxH, v_BxGxMxH,
            length_B=block.length_B, position_BxM=block.position_BxM, visibility=block.visibility,
            window=self.window, scale=self.scale,
        )  # fmt: skip
        return self.project(out_BxMxNxH), (k_BxGxMxH, v_BxGxMxH)

    def project(self, out_BxMxNxH: jax.Array) -> jax.Array:
        """The output projection, heads to hidden."""
        b, m = out_BxMxNxH.shape[:2]
        out_BxMxD = dense(out_BxMxNxH.reshape(b, m, -1), fold_heads(self.out_GxRxHxD[...]))
        if self.out_bias_D is not None:
            out_BxMxD += self.out_bias_D[...][None, None]
        return out_BxMxD


def fold_heads(out_GxRxHxD: jax.Array) -> jax.Array:
    """[G, R, H, D] -> [N*H, D]."""
    return out_GxRxHxD.reshape(-1, out_GxRxHxD.shape[-1])


def causal(num_tokens: int) -> jax.Array:
    """The in-block visibility of a chain: slot i sees slots 0..i. [M, M] bool."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def two_sided(num_tokens: int) -> jax.Array:
    """The in-block visibility of a drafted block: every slot sees every slot. [M, M] bool."""
    return jnp.ones((num_tokens, num_tokens), bool)


def stack_kv(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[tuple[jax.Array, ...], ...]:
    """[(k, v), ...] a layer -> (all k, all v)."""
    return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)
