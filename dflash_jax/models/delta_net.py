"""A Gated DeltaNet layer (Qwen3-Next, Qwen3.5): short convolution, gated delta rule, gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.kernels.delta_rule import FORGET, RecurrentInputs, RecurrentState, causal_conv, delta_rule
from dflash_jax.models.attention import fold_heads
from dflash_jax.models.layers import RMSNorm, dense, param

UNIT_EPS = 1e-6  # of the L2 norms of q and k


class DeltaNet(nnx.Module):
    """In place of self-attention; the layer's memory of earlier tokens is a state instead of keys and values.

    All that belongs to one of G key heads lies together, so that sharding over G needs one exchange, behind the
    output projection:

      qkvz_DxGxC: q and k (P channels each), then v and the output gate z of its R value heads (R * H each).
      ba_DxGx2xR: b, the logit of the rate; a, of the decay.
      conv_WxGxC: taps over the channels of q, k and v, oldest first.
      a_log_GxR, dt_bias_GxR: float32; log decay = -exp(a_log) softplus(a + dt_bias).
      norm: RMSNorm of each value head, its output times silu(z).
      out_GxRxHxD

    Raises:
      ConfigError: the configuration has no `delta`.
    """

    def __init__(self, config: TargetConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        if config.delta is None:
            raise ConfigError(f"layer {layer} is a recurrent layer, but the configuration's delta is None")
        delta, d = config.delta, config.hidden_size
        g, p, h = delta.num_key_heads, delta.key_dim, delta.value_dim
        r = delta.num_value_heads // g
        mixed = 2 * p + r * h
        self.qkvz_DxGxC = param(rngs, (d, g, mixed + r * h), ("embed", "kv_heads", None), dtype, d)
        self.ba_DxGx2xR = param(rngs, (d, g, 2, r), ("embed", "kv_heads", None, None), dtype, d)
        width = delta.conv_width
        self.conv_WxGxC = param(rngs, (width, g, mixed), (None, "kv_heads", None), dtype, width)
        # Decays from strong to weak, as the published models start: exp(a_log) uniform, here above 1.
        rate_GxR = jax.random.uniform(rngs.params(), (g, r), jnp.float32, 1.0, 16.0)
        self.a_log_GxR = nnx.Param(jnp.log(rate_GxR), axes=("kv_heads", None))
        self.dt_bias_GxR = param(rngs, (g, r), ("kv_heads", None), jnp.float32)
        self.norm = RMSNorm(h, config.rms_norm_eps, dtype, rngs)
        self.out_GxRxHxD = param(rngs, (g, r, h, d), ("kv_heads", None, None, "embed"), dtype, g * r * h)
        self.key_dim = p

    def __call__(
        self, x_BxMxD: jax.Array, state: RecurrentState, position_BxM: jax.Array | None = None
    ) -> tuple[jax.Array, RecurrentInputs]:
        """A chain of M tokens behind the committed ones.

        Args:
          x_BxMxD: normed residual stream.
          state: of this layer, after the committed tokens; read, never written.
          position_BxM: None, or positions where 0 begins a document that knows nothing of the tokens before it: its
            first token forgets the state, and the convolution reaches no further back than to it.

        Returns:
          (out_BxMxD in the dtype of x, what `delta_rule.commit` needs). Tokens see the state and the tokens of the
          call up to themselves: there is no visibility to choose.
        """
        b, m, _ = x_BxMxD.shape
        g, r, h, _ = self.out_GxRxHxD.shape
        p, f32 = self.key_dim, jnp.float32
        qkvz_BxMxGxC = dense(x_BxMxD, self.qkvz_DxGxC[...])
        ba_BxMxGx2xR = dense(x_BxMxD, self.ba_DxGx2xR[...]).astype(f32)
        qkv_BxMxGxC, z_BxMxGxRH = jnp.split(qkvz_BxMxGxC, [2 * p + r * h], axis=-1)

        mixed_BxMxGxC = jax.nn.silu(causal_conv(qkv_BxMxGxC, state.conv_BxWxGxC, self.conv_WxGxC[...], position_BxM))
        q_BxMxGxP, k_BxMxGxP, v_BxMxGxRH = jnp.split(mixed_BxMxGxC, [p, 2 * p], axis=-1)
        q_BxMxGxP, k_BxMxGxP = _unit(q_BxMxGxP) * p**-0.5, _unit(k_BxMxGxP)
        beta_BxMxGxR = jax.nn.sigmoid(ba_BxMxGx2xR[..., 0, :])
        rate_GxR, bias_GxR = jnp.exp(self.a_log_GxR[...].astype(f32)), self.dt_bias_GxR[...].astype(f32)
        log_decay_BxMxGxR = -rate_GxR[None, None] * jax.nn.softplus(ba_BxMxGx2xR[..., 1, :] + bias_GxR[None, None])
        if position_BxM is not None:
            log_decay_BxMxGxR = jnp.where((position_BxM == 0)[..., None, None], FORGET, log_decay_BxMxGxR)

        out_BxMxGxRxH, write_BxMxGxRxH, _ = delta_rule(
            q_BxMxGxP, k_BxMxGxP, v_BxMxGxRH.reshape(b, m, g, r, h), log_decay_BxMxGxR, beta_BxMxGxR,
            state.delta_BxGxRxPxH,
        )  # fmt: skip
        z_BxMxGxRxH = z_BxMxGxRH.reshape(b, m, g, r, h).astype(f32)
        gated_BxMxGxRxH = (self.norm(out_BxMxGxRxH) * jax.nn.silu(z_BxMxGxRxH)).astype(x_BxMxD.dtype)
        out_BxMxD = dense(gated_BxMxGxRxH.reshape(b, m, -1), fold_heads(self.out_GxRxHxD[...]))
        return out_BxMxD, RecurrentInputs(qkv_BxMxGxC, k_BxMxGxP, write_BxMxGxRxH, log_decay_BxMxGxR)


def _unit(x: jax.Array) -> jax.Array:
    """x / |x|, float32."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPS)
