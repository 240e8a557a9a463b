"""The parts that target and drafter are made of: dense product, RMSNorm, rotary embedding, gated MLP."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.config import RopeConfig
from dflash_jax.kernels.narrow_matmul import narrow_matmul


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype,
          fan_in: int | None = None) -> nnx.Param:  # fmt: skip
    """One parameter: shape, logical axes and init in one declaration.

    Normal with standard deviation fan_in ** -0.5; ones where fan_in is None (norm scales); zeros where
    fan_in is 0 (biases).
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in rank")
    if fan_in is None:
        value = jnp.ones(shape, dtype)
    elif fan_in == 0:
        value = jnp.zeros(shape, dtype)
    else:
        value = (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)
    return nnx.Param(value, axes=axes)


def dense(x: jax.Array, kernel: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """x[..., I] times kernel[I, *O] -> [..., *O], accumulated in float32, in the dtype of x.

    `implementation`: see `kernels.narrow_matmul`, which this is for any number of leading dimensions.
    """
    lead, out = x.shape[:-1], kernel.shape[1:]
    y = narrow_matmul(
        x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[0], -1), implementation=implementation
    )  # fmt: skip
    return y.reshape(*lead, *out)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale), computed in float32 (Zhang and Sennrich, 2019).

    Args:
      offset: 1 where the stored scale is the difference from one; it then starts at zero.
      has_scale: False: no scale at all.
    """

    def __init__(
        self, dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs, offset: float = 0.0, has_scale: bool = True
    ):
        self.scale = param(rngs, (dim,), (None,), dtype, 0 if offset else None) if has_scale else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.scale is None:
            return normed.astype(x.dtype)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if self.offset:
            return (normed * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)
        # The product with the scale is taken in the model's dtype, as Hugging Face models do.
        return scale * normed.astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array, activation: str, limit: float | None = None) -> jax.Array:
    """activation(gate) * up, one of `config.ACTIVATIONS`.

    clipped_swiglu (gpt-oss): gate clipped from above and up on both sides at `limit`, then
    gate * sigmoid(1.702 gate) * (up + 1).
    """
    if activation == "silu":
        return jax.nn.silu(gate) * up
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) with gate and up in one kernel; SwiGLU by default."""

    def __init__(self, dim: int, ffn: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, activation: str = "silu",
                 limit: float | None = None):  # fmt: skip
        self.gate_up_Dx2xF = param(rngs, (dim, 2, ffn), ("embed", None, "mlp"), dtype, dim)
        self.down_FxD = param(rngs, (ffn, dim), ("mlp", "embed"), dtype, ffn)
        self.gate_up_bias_2xF = param(rngs, (2, ffn), (None, "mlp"), dtype, 0) if bias else None
        self.down_bias_D = param(rngs, (dim,), ("embed",), dtype, 0) if bias else None
        self.activation, self.limit = activation, limit

    def __call__(self, x_BxMxD: jax.Array) -> jax.Array:
        h_BxMx2xF = dense(x_BxMxD, self.gate_up_Dx2xF[...])
        if self.gate_up_bias_2xF is not None:
            h_BxMx2xF += self.gate_up_bias_2xF[...][None, None]
        inner_BxMxF = gated(h_BxMx2xF[..., 0, :], h_BxMx2xF[..., 1, :], self.activation, self.limit)
        out_BxMxD = dense(inner_BxMxF, self.down_FxD[...])
        if self.down_bias_D is not None:
            out_BxMxD += self.down_bias_D[...][None, None]
        return out_BxMxD


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2] (float64) and the factor on cos and sin.

    linear: positions divided by `factor`. llama3: low frequencies divided, high ones kept, a ramp in
    between. yarn: the ramp runs over dimensions between the two correction dims (Peng et al., 2023,
    section 3; the attention factor defaults to 0.1 ln(factor) + 1).
    """
    freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        old = rope.original_max_positions
        wavelength = 2 * math.pi / freq
        smooth = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * freq / rope.factor + smooth * freq, 1.0
    if rope.kind == "yarn":

        def correction_dim(rotations: float) -> float:
            old = rope.original_max_positions
            return head_dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
        mixed = freq / rope.factor * ramp + freq * (1 - ramp)
        return mixed, _yarn_attention_factor(rope)
    return freq, 1.0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(
    rope: RopeConfig, head_dim: int, position_BxM: jax.Array, rotated: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [B, M, head_dim / 2] float32: phases are never computed in a narrower type.

    Args:
      rotated: only so many channels turn, those of the highest frequencies; the others' angle is zero.
    """
    freq, factor = rope_frequencies(rope, head_dim)
    if rotated is not None:
        freq = np.where(np.arange(head_dim // 2) < rotated // 2, freq, 0.0)
    phase = position_BxM.astype(jnp.float32)[..., None] * jnp.asarray(freq, jnp.float32)[None, None]
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(x_BxMxNxH: jax.Array, cos_BxMxR: jax.Array, sin_BxMxR: jax.Array) -> jax.Array:
    """Rotates the two halves of each head against each other (NeoX layout), in float32.

    Of heads wider than 2 * R channels the first 2 * R are rotated and the others stay (partial rotary).
    """
    width = 2 * cos_BxMxR.shape[-1]
    if width < x_BxMxNxH.shape[-1]:
        turning = rotate(x_BxMxNxH[..., :width], cos_BxMxR, sin_BxMxR)
        return jnp.concatenate([turning, x_BxMxNxH[..., width:]], axis=-1)
    first, second = jnp.split(x_BxMxNxH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BxMxR[:, :, None], sin_BxMxR[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxMxNxH.dtype)
