"""Self-attention of a decoder layer: projections, q/k norm, rotary embedding, block attention."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import CHUNKED, FULL, SLIDING, RopeConfig, TargetConfig
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.models.layers import RMSNorm, dense, param, rope_table, rotate


class BlockContext:
    """What every layer of one call has in common. Made once a call; holds no parameters."""

    def __init__(
        self, position_BxM: jax.Array, length_B: jax.Array, visibility: jax.Array, restarts: bool = False
    ):  # fmt: skip
        self.position_BxM = position_BxM
        self.length_B = length_B
        self.visibility = visibility
        self.restarts = restarts  # see `Transformer.__call__`
        self._tables: dict[tuple, tuple[jax.Array, jax.Array]] = {}

    def rope(self, rope: RopeConfig, dim: int, rotated: int | None = None) -> tuple[jax.Array, jax.Array]:
        """`rope_table` at the block's positions; layers that rotate alike share one."""
        key = rope, dim, rotated
        if key not in self._tables:
            self._tables[key] = rope_table(rope, dim, self.position_BxM, rotated)
        return self._tables[key]


class Attention(nnx.Module):
    """Grouped-query attention.

    q, k and v of one KV group lie together in `qkv_DxGxRxH`: the query heads, then k, then v (no v where the
    key is the value). One product instead of three, and sharding over G keeps each group on one device.
    """

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        kind = config.layer_types[layer]
        g, h = config.kv_shape(layer)
        r = config.num_heads // g
        self.value_is_key = config.full_value_is_key and kind == FULL
        rows = r + 1 if self.value_is_key else r + 2
        group = ("kv_heads", None, None)
        self.qkv_DxGxRxH = param(rngs, (d, g, rows, h), ("embed", *group), dtype, d)
        self.qkv_bias_GxRxH = param(rngs, (g, rows, h), group, dtype, 0) if config.qkv_bias else None
        self.gate_DxGxRxH = param(rngs, (d, g, r, h), ("embed", *group), dtype, d) if config.attention_gate else None
        self.sinks_GxR = param(rngs, (g, r), ("kv_heads", None), dtype, 0) if config.attention_sinks else None
        self.out_GxRxHxD = param(rngs, (g, r, h, d), (*group, "embed"), dtype, g * r * h)
        self.out_bias_D = param(rngs, (d,), ("embed",), dtype, 0) if config.out_bias else None
        self.q_norm = RMSNorm(h, eps, dtype, rngs, offset) if config.qk_norm else None
        self.k_norm = RMSNorm(h, eps, dtype, rngs, offset) if config.qk_norm else None
        self.v_norm = RMSNorm(h, eps, dtype, rngs, has_scale=False) if config.v_norm else None
        self.rope = None if layer in config.nope_layers else config.layer_rope(layer)
        self.rope_dim = config.rotary_dim or h
        self.rotated = config.full_rotary_dim if kind == FULL else None
        self.unit_norm = RMSNorm(h, eps, dtype, rngs, has_scale=False) if config.qk_unit_norm and self.rope else None
        self.temperature = None if self.rope else config.attention_temperature
        self.scale = h**-0.5 if config.attention_scale is None else config.attention_scale
        self.window = config.sliding_window if kind == SLIDING else None
        self.chunk = config.attention_chunk if kind == CHUNKED else None
        self.softcap = config.attention_softcap

    def __call__(
        self, x_BxMxD: jax.Array, pages: tuple[jax.Array, jax.Array, jax.Array | None], block: BlockContext
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns (out_BxMxD, (k_BxGxMxH, v_BxGxMxH) of the block). `pages`: see `kv_cache.pages`."""
        qkv_BxMxGxRxH = dense(x_BxMxD, self.qkv_DxGxRxH[...])
        if self.qkv_bias_GxRxH is not None:
            qkv_BxMxGxRxH += self.qkv_bias_GxRxH[...][None, None]
        b, m, g, rows, h = qkv_BxMxGxRxH.shape
        r = rows - (1 if self.value_is_key else 2)
        q_BxMxNxH = qkv_BxMxGxRxH[..., :r, :].reshape(b, m, g * r, h)
        k_BxMxGxH, v_BxMxGxH = qkv_BxMxGxRxH[..., r, :], qkv_BxMxGxRxH[..., -1, :]
        if self.q_norm is not None:
            q_BxMxNxH, k_BxMxGxH = self.q_norm(q_BxMxNxH), self.k_norm(k_BxMxGxH)
        if self.v_norm is not None:
            v_BxMxGxH = self.v_norm(v_BxMxGxH)
        if self.rope is not None:
            table = block.rope(self.rope, self.rope_dim, self.rotated)
            q_BxMxNxH, k_BxMxGxH = rotate(q_BxMxNxH, *table), rotate(k_BxMxGxH, *table)
        if self.unit_norm is not None:
            q_BxMxNxH, k_BxMxGxH = self.unit_norm(q_BxMxNxH), self.unit_norm(k_BxMxGxH)
        if self.temperature is not None:
            q_BxMxNxH = tempered(q_BxMxNxH, block.position_BxM, *self.temperature)
        k_BxGxMxH, v_BxGxMxH = k_BxMxGxH.swapaxes(1, 2), v_BxMxGxH.swapaxes(1, 2)
        out_BxMxNxH = paged_block_attention(
            q_BxMxNxH, *pages, k_BxGxMxH, v_BxGxMxH,
            length_B=block.length_B, position_BxM=block.position_BxM, visibility=block.visibility,
            window=self.window, chunk=self.chunk, scale=self.scale, softcap=self.softcap,
            sinks_N=None if self.sinks_GxR is None else self.sinks_GxR[...].reshape(-1),
        )  # fmt: skip
        if self.gate_DxGxRxH is not None:
            gate_BxMxNxH = dense(x_BxMxD, self.gate_DxGxRxH[...]).reshape(out_BxMxNxH.shape)
            out_BxMxNxH = out_BxMxNxH * jax.nn.sigmoid(gate_BxMxNxH)
        return self.project(out_BxMxNxH), (k_BxGxMxH, v_BxGxMxH)

    def project(self, out_BxMxNxH: jax.Array) -> jax.Array:
        """The output projection, heads to hidden."""
        b, m = out_BxMxNxH.shape[:2]
        out_BxMxD = dense(out_BxMxNxH.reshape(b, m, -1), fold_heads(self.out_GxRxHxD[...]))
        if self.out_bias_D is not None:
            out_BxMxD += self.out_bias_D[...][None, None]
        return out_BxMxD


def tempered(q_BxMxNxH: jax.Array, position_BxM: jax.Array, floor: float, scale: float) -> jax.Array:
    """Queries scaled up with their position, by 1 + scale * log(1 + floor((position + 1) / floor)) (Llama 4)."""
    steps_BxM = jnp.floor((position_BxM.astype(jnp.float32) + 1.0) / floor)
    factor_BxM = 1.0 + scale * jnp.log1p(steps_BxM)
    return (q_BxMxNxH * factor_BxM[:, :, None, None]).astype(q_BxMxNxH.dtype)


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
