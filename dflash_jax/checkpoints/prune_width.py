"""A target with fewer hidden channels, or fewer channels in its MLPs, chosen by what they carry.

Hidden channels: one set for the whole residual stream. A channel is worth the mean, over layers and over the tokens of
a sample of text, of its squared share in the normed state that a layer reads. Norms then divide by the RMS of fewer
channels; their scales are multiplied by the median of what that changes, so that what is read keeps its size.

MLP channels: a set for each layer. A channel is worth the product of the norms of the rows of gate, up and down that
belong to it; no text is needed.

Nothing is trained afterwards: the result says other things than its source, and is meant as a second target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.config import LINEAR, ConfigError, TargetConfig
from dflash_jax.models.target import Target, abstract_model
from dflash_jax.models.transformer import Transformer
from dflash_jax.models.whole_rows import forward_rows

_NORMS = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "norm")


def narrowed(
    target: Target,
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    token_S: Sequence[int] = (),
) -> Target:
    """The target with its most important channels only.

    Args:
      hidden_size, intermediate_size: how many to keep; None keeps all.
      token_S: a text that the target reads to tell what hidden channels carry.

    Raises:
      ConfigError: a number that is not there to keep, no text, or a target with experts, latent attention, recurrent
        layers or scaled embeddings.
    """
    config, source = target.config, target.source
    _check(config, source, hidden_size, intermediate_size)
    if hidden_size is not None and hidden_size < config.hidden_size:
        if not len(token_S):
            raise ConfigError("--hidden_size needs a text to tell what channels carry: --text=FILE")
        worth_LxD, mean_square_SxLxD = _carried(target, np.asarray(token_S, np.int32))
        keep_D = _best(worth_LxD.mean(0), hidden_size)
        target = _without_hidden(target, keep_D, _gains(mean_square_SxLxD, keep_D))
    if intermediate_size is not None and intermediate_size < config.intermediate_size:
        target = _without_mlp(target, intermediate_size)
    width = f"{target.config.hidden_size} hidden and {target.config.intermediate_size} MLP channels"
    return dataclasses.replace(target, source=f"{source} with {width}")


def _check(config: TargetConfig, source: str, hidden_size: int | None, intermediate_size: int | None) -> None:
    if config.moe is not None or config.latent is not None or LINEAR in config.layer_types:
        raise ConfigError(f"{source} has experts, latent attention or recurrent layers and is not narrowed")
    if config.embedding_scale != 1.0:
        raise ConfigError(f"{source} scales its embeddings by its hidden size and is not narrowed")
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size is not None and not 1 <= size <= getattr(config, name):
            raise ConfigError(f"--{name} is {size}, must lie in [1, {getattr(config, name)}], what {source} has")


def _carried(target: Target, token_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(worth_LxD, square_SxLxD): shares of normed states that each layer and the head read, and squared states."""
    last = target.config.num_layers - 1

    @jax.jit
    def run(params: nnx.State, token_1xS: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(target.graphdef, params)
        taps = forward_rows(model, token_1xS, range(last + 1)).taps_BxMxTD
        states = jnp.concatenate([model.embed(token_1xS), taps], -1)[0].astype(jnp.float32)
        state_SxLxD = states.reshape(len(token_S), last + 2, -1)
        norms = [layer.attention_norm for layer in model.layers] + [model.norm]
        normed = [norm(state_SxLxD[:, i]) for i, norm in enumerate(norms)]
        worth = jnp.stack([jnp.mean(jnp.square(x), 0) / jnp.mean(jnp.square(x)) for x in normed])
        return worth, jnp.square(state_SxLxD)

    worth_LxD, square_SxLxD = run(target.params, jnp.asarray(token_S)[None])
    return np.asarray(worth_LxD), np.asarray(square_SxLxD)


def _best(worth: np.ndarray, size: int) -> np.ndarray:
    """Indices of the largest, ascending; of equals the first."""
    return np.sort(np.argsort(-worth, kind="stable")[:size])


def _gains(square_SxLxD: np.ndarray, keep_D: np.ndarray) -> np.ndarray:
    """[L]: what the RMS grows by when only these channels are left, at each layer's input and before the head."""
    ratio_SxL = square_SxLxD[..., keep_D].mean(-1) / np.maximum(square_SxLxD.mean(-1), 1e-30)
    return np.sqrt(np.median(ratio_SxL, axis=0))


def _without_hidden(target: Target, keep_D: np.ndarray, gain_L: np.ndarray) -> Target:
    def cut(path: tuple, variable: nnx.Variable) -> jax.Array:
        value = variable.get_value()
        if path[-2:-1] and path[-2] in _NORMS:
            layer = path[1] if path[0] == "layers" else len(gain_L) - 1
            # A norm behind a block reads the block's output, of which nothing was measured.
            gain = 1.0 if path[-2].endswith("post_norm") else gain_L[layer]
            offset = target.config.norm_offset
            return ((value[keep_D] + offset) * gain - offset).astype(value.dtype)
        axes = variable.get_metadata("axes")
        return jnp.take(value, keep_D, axes.index("embed")) if "embed" in axes else value

    return _rebuilt(target, dataclasses.replace(target.config, hidden_size=len(keep_D)), cut)


def _without_mlp(target: Target, size: int) -> Target:
    keep = {}
    for i, layer in target.params["layers"].items():
        gate_up_Dx2xF = np.asarray(layer["mlp"]["gate_up_Dx2xF"].get_value(), np.float32)
        down_FxD = np.asarray(layer["mlp"]["down_FxD"].get_value(), np.float32)
        keep[i] = _best(np.linalg.norm(gate_up_Dx2xF, axis=0).prod(0) * np.linalg.norm(down_FxD, axis=1), size)

    def cut(path: tuple, variable: nnx.Variable) -> jax.Array:
        axes, value = variable.get_metadata("axes"), variable.get_value()
        return jnp.take(value, keep[path[1]], axes.index("mlp")) if "mlp" in axes else value

    return _rebuilt(target, dataclasses.replace(target.config, intermediate_size=size), cut)


def _rebuilt(target: Target, config: TargetConfig, cut) -> Target:
    graphdef, abstract = abstract_model(Transformer, config, target.dtype, own_head="head_DxV" in target.params)
    shapes = {path: variable.get_value().shape for path, variable in nnx.to_flat_state(abstract)}
    made = [(path, variable.replace(cut(path, variable))) for path, variable in nnx.to_flat_state(target.params)]
    for path, variable in made:
        if variable.get_value().shape != shapes[path]:
            raise AssertionError(f"{path}: cut to {variable.get_value().shape}, the target declares {shapes[path]}")
    return dataclasses.replace(target, config=config, graphdef=graphdef, params=nnx.from_flat_state(made))
