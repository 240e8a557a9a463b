"""Where training starts: the drafter's configuration for a target, and its first parameters.

Two facts of real targets are met here, so that the trained network stays an ordinary DFlash that any reader
of the format can run:

- Tapped layers differ in scale by orders of magnitude, and some positions exceed the rest a thousandfold.
  Each tap's block of fc is divided by that tap's typical size, and the optimiser works on the block before
  that division (Adam moves every weight by about the learning rate, whatever its input): as if every tap
  had unit scale.
- Late target layers are a better start than noise. Their input norm is folded into q, k and v, since DFlash
  norms the block's input but feeds context features to k and v as they are: folded, both see the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import sharding
from dflash_jax.config import (
    FULL,
    LINEAR,
    SLIDING,
    ConfigError,
    DrafterConfig,
    TargetConfig,
    default_target_layer_ids,
)
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.layers import dense
from dflash_jax.models.target import Target
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.training import processes


def drafter_config(
    target: TargetConfig,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | int = 5,
    intermediate_size: int | None = None,
    sliding_window: int | None = None,
    num_full_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    projections: bool | None = None,
    markov_rank: int = 0,
) -> DrafterConfig:
    """A DFlash drafter shaped like the target's own layers.

    Args:
      hidden_size, num_heads, num_kv_heads, head_dim: of the drafter; the target's where None.
      projections: see `target_hidden_size` of DrafterConfig; None: where the two sizes differ.
      markov_rank: see DrafterConfig.
      target_layer_ids: tapped layers, or how many to take by the default rule.
      intermediate_size: of its SwiGLU; the target's where None.
      sliding_window: None, or the window of all but the last `num_full_layers` (default 0) layers.
    """
    if isinstance(target_layer_ids, int):
        target_layer_ids = default_target_layer_ids(target.num_layers, target_layer_ids)
    full = num_layers if sliding_window is None else num_full_layers or 0
    width = target.hidden_size if hidden_size is None else hidden_size
    return DrafterConfig(
        hidden_size=width,
        intermediate_size=target.intermediate_size if intermediate_size is None else intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads or target.num_heads,
        num_kv_heads=num_kv_heads or target.num_kv_heads,
        head_dim=head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        layer_types=(SLIDING,) * (num_layers - full) + (FULL,) * full,
        max_positions=target.max_positions,
        sliding_window=sliding_window,
        # Without these the drafter would read the target's table and head otherwise than the target does.
        embedding_scale=None if target.embedding_scale == 1.0 else target.embedding_scale,
        final_logit_softcap=target.final_logit_softcap,
        target_hidden_size=projected_from(target, width, projections),
        markov_rank=markov_rank,
    )


def projected_from(target: TargetConfig, hidden_size: int, projections: bool | None) -> int | None:
    """`DrafterConfig.target_hidden_size` of a drafter of this width; for `projections` see `drafter_config`.

    Raises:
      ConfigError: the sizes differ and projections are forbidden.
    """
    differ = hidden_size != target.hidden_size
    if differ and projections is False:
        raise ConfigError(
            f"drafter.projections is False, but the drafter's hidden_size is {hidden_size} and the target's "
            f"{target.hidden_size}: without projections they must be equal; leave it None"
        )
    return target.hidden_size if differ or projections else None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Typical sizes of what flows through the target, on a sample of real text.

    Attributes:
      tap_rms: median over tokens of the RMS of each tapped state. The median, since a few positions would
        carry any mean away.
      query_rms, key_rms: RMS over tokens and heads of q and k of each layer asked for, after the q/k norm if
        the target has one; positions with outliers count like any other.
    """

    tap_rms: tuple[float, ...]
    query_rms: tuple[float, ...] = ()
    key_rms: tuple[float, ...] = ()


def measure(
    target: Target,
    token_BxS: np.ndarray,
    length_B: np.ndarray,
    tap_ids: Sequence[int],
    layers: Sequence[int] = (),
    position_BxS: np.ndarray | None = None,
    document_BxS: np.ndarray | None = None,
) -> Statistics:
    """Runs the target over a few rows and measures; see `Statistics`.

    A target that lies over several processes is run by all of them together, with the same rows.

    Args:
      layers: target layers whose q and k are wanted.
      position_BxS, document_BxS: of packed rows, see `forward_rows`.

    Raises:
      ConfigError: the rows hold no token, or a layer does not exist or is not made as a drafter's.
    """
    check_layers(target.config, layers)
    inside_BxS = np.arange(token_BxS.shape[1])[None] < np.asarray(length_B)[:, None]
    if not inside_BxS.any():
        raise ConfigError("there is no token to measure the taps on: all sampled rows are empty")
    before = tuple(sorted({layer - 1 for layer in layers if layer > 0}))
    wanted = tuple(sorted({*tap_ids, *before}))

    # On a mesh the numbers are on every device: those of other processes could not be read.
    layout = None if target.mesh is None else sharding.replicated(target.mesh)

    @functools.partial(jax.jit, out_shardings=layout)
    def run(params: nnx.State, token_BxS: jax.Array) -> tuple[dict[int, jax.Array], list[tuple[jax.Array, jax.Array]]]:
        model = nnx.merge(target.graphdef, params)
        b, s = token_BxS.shape
        result = forward_rows(model, token_BxS, wanted, position_BxS, document_BxS)
        taps = result.taps_BxMxTD.reshape(b, s, len(wanted), -1)
        state = {layer: taps[:, :, i].astype(jnp.float32) for i, layer in enumerate(wanted)}
        rms = {layer: jnp.sqrt(jnp.mean(jnp.square(x), -1)) for layer, x in state.items()}
        state[-1] = model.embed(token_BxS)
        return rms, [_query_key_rms(model.layers[layer], state[layer - 1]) for layer in layers]

    with sharding.use(target.mesh):
        rms, qk = run(target.params, token_BxS if layout is None else sharding.put(token_BxS, layout))
    return Statistics(
        tuple(float(np.median(np.asarray(rms[tap])[inside_BxS])) for tap in tap_ids),
        tuple(float(np.sqrt(np.mean(np.square(np.asarray(q)[inside_BxS])))) for q, _ in qk),
        tuple(float(np.sqrt(np.mean(np.square(np.asarray(k)[inside_BxS])))) for _, k in qk),
    )


def _query_key_rms(layer: Any, x_BxSxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """RMS of q and of k over heads and head dims, [B, S] each. Rotation does not change it."""
    attention = layer.attention
    kernel = attention.qkv_DxGxRxH[...]
    qkv = dense(layer.attention_norm(x_BxSxD.astype(kernel.dtype)), kernel)
    if attention.qkv_bias_GxRxH is not None:
        qkv += attention.qkv_bias_GxRxH[...][None, None]
    q, k = qkv[..., :-2, :], qkv[..., -2, :]
    if attention.q_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return (
        jnp.sqrt(jnp.mean(jnp.square(q.astype(jnp.float32)), (2, 3, 4))),
        jnp.sqrt(jnp.mean(jnp.square(k.astype(jnp.float32)), (2, 3))),
    )


def initial_params(
    config: DrafterConfig,
    target: Target,
    statistics: Statistics,
    *,
    seed: int = 0,
    init_layers: Sequence[int] = (),
) -> nnx.State:
    """Float32 parameters to start from.

    Random: kernels as the modules declare them, each tap's block of fc divided by the tap's size.

    From target layers (`init_layers`, one a drafter layer): q, k, v, output projection, SwiGLU and norms are
    theirs, the final norm is the target's. fc passes the last tap through, divided by its size, and begins
    with nothing of the others, which it then learns. A target without q/k norm gets a constant one, the
    RMS of its q (k): DFlash normalises each head's q to RMS 1, so that the attention logits have the
    target's size on average, and lose only its variation from token to token.

    A Markov head begins as no change of what is drafted (w2 is zero), and knows tokens by the principal components of
    the target's table, each of unit scale: tokens that the target takes for alike learn from each other.

    Raises:
      ConfigError: `init_layers` does not fit the drafter or the target.
    """
    params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(seed)))[1]
    d, e, taps = config.hidden_size, config.target_width, len(config.target_layer_ids)
    rms_T = np.asarray(statistics.tap_rms, np.float32)
    if rms_T.shape != (taps,) or not np.all(np.isfinite(rms_T) & (rms_T > 0)):
        raise ConfigError(f"tap_rms is {statistics.tap_rms}, must be {taps} positive numbers, one a tapped layer")
    fc_TxExD = np.asarray(params["fc_TDxD"].get_value()).reshape(taps, e, d) / rms_T[:, None, None]
    if init_layers:
        _check_init_layers(config, target.config, statistics, init_layers)
        fc_TxExD = np.zeros_like(fc_TxExD)
        fc_TxExD[-1] = np.eye(d, dtype=np.float32) / rms_T[-1]
        _copy(params["norm"]["scale"], target.params["norm"]["scale"].get_value())
        for i, layer in enumerate(init_layers):
            _copy_layer(
                params["layers"][i], target.params["layers"][layer], statistics.query_rms[i], statistics.key_rms[i]
            )
    _copy(params["fc_TDxD"], fc_TxExD.reshape(taps * e, d))
    if config.markov_rank:
        _copy(params["markov"]["w1_VxR"], token_components(target, config.markov_rank, seed))
        _copy(params["markov"]["w2_VxR"], jnp.zeros((config.vocab_size, config.markov_rank)))
    return params


def token_components(target: Target, rank: int, seed: int = 0) -> jax.Array:
    """[V, R] float32: the principal components of the target's table, widest first, each of unit variance over tokens.

    Directions that the table does not have are normal noise from the seed: a column of zeros on both sides of a Markov
    head would never learn. With several processes all call this, and all get the first one's components.
    """
    layout = None if target.mesh is None else sharding.replicated(target.mesh)
    table_VxE = target.params["embedding_VxD"].get_value()

    @functools.partial(jax.jit, out_shardings=layout)
    def moments(table_VxE: jax.Array) -> tuple[jax.Array, jax.Array]:
        table_VxE = table_VxE.astype(jnp.float32)
        centred_VxE = table_VxE - table_VxE.mean(0, keepdims=True)
        product_ExE = jnp.einsum("ve,vf->ef", centred_VxE, centred_VxE, precision=jax.lax.Precision.HIGHEST)
        return table_VxE.mean(0, keepdims=True), product_ExE / len(table_VxE)

    @functools.partial(jax.jit, out_shardings=layout)
    def project(table_VxE: jax.Array, mean_1xE: jax.Array, scaled_ExR: np.ndarray) -> jax.Array:
        return jnp.dot(table_VxE.astype(jnp.float32) - mean_1xE, scaled_ExR, precision=jax.lax.Precision.HIGHEST)

    mean_1xE, covariance_ExE = moments(table_VxE)
    variance_E, direction_ExE = np.linalg.eigh(np.asarray(covariance_ExE, np.float64))
    variance_E, direction_ExE = variance_E[::-1], direction_ExE[:, ::-1]
    has = min(rank, int(np.sum(variance_E > 1e-6 * variance_E[0])))  # below lies the rounding of float32
    scaled_ExR = np.zeros((len(covariance_ExE), rank))
    scaled_ExR[:, :has] = direction_ExE[:, :has] * variance_E[:has] ** -0.5
    scaled_ExR = processes.array_of_the_first(scaled_ExR)
    noise_VxR = np.random.default_rng(seed).normal(size=(len(table_VxE), rank)) * ~scaled_ExR.any(0)
    return project(table_VxE, mean_1xE, scaled_ExR) + jnp.asarray(noise_VxR, jnp.float32)


def deepened(trained: nnx.State, fresh: nnx.State) -> nnx.State:
    """`fresh` with everything that `trained` has, a drafter with fewer layers, or no Markov head, and else alike.

    In place.

    The layers behind the trained ones keep what they read with and add nothing yet (output and down projections are
    zero), so that both drafters propose the same. Their first gradients reach the zeros, the next ones all of them
    (Wu et al. 2024, LLaMA Pro).
    """
    for path, variable in trained.flat_state():
        _copy(functools.reduce(lambda tree, key: tree[key], path, fresh), variable.get_value())
    for layer in range(len(trained["layers"]), len(fresh["layers"])):
        for part, name in (("attention", "out_GxRxHxD"), ("attention", "out_bias_D"), ("mlp", "down_FxD")):
            if name in fresh["layers"][layer][part]:
                adds = fresh["layers"][layer][part][name]
                _copy(adds, jnp.zeros_like(adds.get_value()))
    return fresh


def coordinate_units(params: nnx.State, config: DrafterConfig, statistics: Statistics) -> nnx.State:
    """The `unit` of `make_optimizer`: 1 / tap size on each tap's rows of fc, 1 elsewhere."""
    scale = jax.tree.map(lambda _: np.float32(1.0), params)
    rows_TDx1 = np.repeat(1.0 / np.asarray(statistics.tap_rms, np.float32), config.target_width)[:, None]
    scale["fc_TDxD"] = scale["fc_TDxD"].replace(rows_TDx1)
    return scale


def check_layers(target: TargetConfig, layers: Sequence[int], name: str = "init_layers") -> None:
    """Whether these target layers exist and have the parts that a drafter's layer is copied from.

    Args:
      name: of the field that holds them.

    Raises:
      ConfigError: one does not.
    """
    for layer in layers:
        if not 0 <= layer < target.num_layers:
            raise ConfigError(f"{name} holds {layer}, must lie in [0, {target.num_layers})")
        has = None
        if target.latent is not None:
            has = "latent attention"
        elif target.layer_types[layer] == LINEAR:
            has = "a recurrent state"
        elif target.moe is not None and layer in target.moe.layers:
            has = "experts"
        if has is not None:
            raise ConfigError(
                f"{name} holds {layer}, a layer with {has}, which a drafter's layer has not; name layers with "
                "attention and a dense MLP, or leave it empty"
            )


def _check_init_layers(
    config: DrafterConfig, target: TargetConfig, statistics: Statistics, init_layers: Sequence[int]
) -> None:
    if len(init_layers) != config.num_layers:
        raise ConfigError(f"init_layers {tuple(init_layers)} must name {config.num_layers} layers, one a drafter layer")
    if len(statistics.query_rms) != len(init_layers):
        raise ConfigError("init_layers needs the q and k sizes of these layers: measure(..., layers=init_layers)")
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ConfigError(
                f"init_layers copies target layers, but the drafter's {name} is {ours} and the target's {theirs}; "
                "make them equal or leave init_layers empty"
            )
    check_layers(target, init_layers)
    if config.target_hidden_size is not None:
        raise ConfigError(
            "init_layers copies target layers, which read the target's table itself, and the drafter has projections; "
            "leave init_layers empty"
        )
    if target.mlp_bias or target.qkv_bias or target.out_bias:
        raise ConfigError("init_layers can not copy a target with biases; leave init_layers empty")


def _copy(variable: nnx.Variable, value: Any) -> None:
    value = jnp.array(value, jnp.float32, copy=True)
    if value.shape != variable.get_value().shape:
        raise ConfigError(f"cannot initialise a parameter of shape {variable.get_value().shape} from {value.shape}")
    variable.set_value(value)


def _copy_layer(ours: nnx.State, theirs: nnx.State, query_rms: float, key_rms: float) -> None:
    attention, source = ours["attention"], theirs["attention"]
    input_scale_D = jnp.asarray(theirs["attention_norm"]["scale"].get_value(), jnp.float32)
    qkv_DxGxRxH = jnp.asarray(source["qkv_DxGxRxH"].get_value(), jnp.float32) * input_scale_D[:, None, None, None]
    _copy(attention["q_DxGxRxH"], qkv_DxGxRxH[:, :, :-2])
    _copy(attention["kv_DxGx2xH"], qkv_DxGxRxH[:, :, -2:])
    _copy(attention["out_GxRxHxD"], source["out_GxRxHxD"].get_value())
    head_dim = qkv_DxGxRxH.shape[-1]
    for norm, rms in (("q_norm", query_rms), ("k_norm", key_rms)):
        own = source[norm]["scale"].get_value() if norm in source else jnp.full((head_dim,), rms)
        _copy(attention[norm]["scale"], own)
    _copy(ours["attention_norm"]["scale"], jnp.ones_like(input_scale_D))
    _copy(ours["mlp_norm"]["scale"], theirs["mlp_norm"]["scale"].get_value())
    for name in ("gate_up_Dx2xF", "down_FxD"):
        _copy(ours["mlp"][name], theirs["mlp"][name].get_value())
