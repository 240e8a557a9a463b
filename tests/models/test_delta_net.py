"""The Gated DeltaNet layer against Hugging Face's, cut into calls anywhere, and over meshes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import GOLDEN

from dflash_jax import sharding
from dflash_jax.config import FULL, LINEAR, ConfigError, DeltaConfig, RopeConfig, TargetConfig
from dflash_jax.kernels.delta_rule import STATE_AXES, commit, empty_state
from dflash_jax.models.delta_net import DeltaNet
from dflash_jax.models.target import place

TOLERANCE = 1e-5
FAMILIES = ("qwen3_next", "qwen3_5")


def target_config(delta: DeltaConfig | None, hidden_size: int, eps: float = 1e-6) -> TargetConfig:
    kind = FULL if delta is None else LINEAR
    return TargetConfig("qwen3_next", 8, hidden_size, 8, 1, 1, 1, 8, eps, RopeConfig(), 128, (kind,), delta=delta)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, x_BxMxD, state, count_B):
    """(out of one call, the state after its first count tokens)."""
    out_BxMxD, inputs = nnx.merge(graphdef, params)(x_BxMxD, state)
    return out_BxMxD, commit(state, inputs, count_B)


@dataclasses.dataclass
class Layer:
    """A layer by its parts, and what the reference computed with it."""

    config: TargetConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    numbers: dict[str, np.ndarray]

    def empty(self, batch: int):
        return empty_state(self.config.delta, batch, jnp.float32)


def our_weights(config: TargetConfig, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors of either spelling as this layer's parameters (paths with dots)."""
    delta, d = config.delta, config.hidden_size
    g, n, p, h = delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim
    r = n // g

    def by_head(rows: np.ndarray) -> np.ndarray:
        """[q of all key heads, then k, then v; ...] -> [G, C, ...]."""
        parts = np.split(rows, [g * p, 2 * g * p])
        return np.concatenate([part.reshape(g, -1, *rows.shape[1:]) for part in parts], axis=1)

    if "in_proj_qkvz.weight" in hf:
        qkvz_GxCxD = hf["in_proj_qkvz.weight"].reshape(g, -1, d)
        ba_Gx2xRxD = hf["in_proj_ba.weight"].reshape(g, 2, r, d)
    else:
        z_GxCxD = hf["in_proj_z.weight"].reshape(g, r * h, d)
        qkvz_GxCxD = np.concatenate([by_head(hf["in_proj_qkv.weight"]), z_GxCxD], axis=1)
        ba_Gx2xRxD = np.stack([hf[f"in_proj_{name}.weight"].reshape(g, r, d) for name in "ba"], axis=1)
    return {
        "qkvz_DxGxC": qkvz_GxCxD.transpose(2, 0, 1),
        "ba_DxGx2xR": ba_Gx2xRxD.transpose(3, 0, 1, 2),
        "conv_WxGxC": by_head(hf["conv1d.weight"][:, 0]).transpose(2, 0, 1),
        "a_log_GxR": hf["A_log"].reshape(g, r),
        "dt_bias_GxR": hf["dt_bias"].reshape(g, r),
        "norm.scale": hf["norm.weight"],
        "out_GxRxHxD": hf["out_proj.weight"].T.reshape(g, r, h, d),
    }


@functools.cache
def golden_layer(name: str) -> Layer:
    with np.load(GOLDEN / f"delta_{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    sizes = json.loads(str(arrays["config"]))
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    delta = DeltaConfig(*(sizes[f"linear_{name}"] for name in names))
    config = target_config(delta, sizes["hidden_size"], sizes["rms_norm_eps"])
    graphdef, params = nnx.split(DeltaNet(config, 0, jnp.float32, nnx.Rngs(0)))
    hf = {key[2:]: value.astype(np.float32) for key, value in arrays.items() if key.startswith("w.")}
    weights = our_weights(config, hf)
    flat = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(params)}
    assert flat.keys() == weights.keys()
    for path, value in weights.items():
        assert flat[path].get_value().shape == value.shape, path
        flat[path].set_value(jnp.asarray(value))
    return Layer(config, graphdef, params, arrays)


def distance(found, wanted) -> float:
    """Largest difference, in units of the largest number wanted where that is above 1."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape and np.isfinite(found).all()
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def decode(layer: Layer, x_TxD: np.ndarray, block: int, accepted: int):
    """Outputs [T, D] and the last state, `accepted` tokens of every block; the rest of a block is other tokens."""
    rng = np.random.default_rng(0)
    state, outs = layer.empty(1), []
    for start in range(0, len(x_TxD), accepted):
        real = x_TxD[start : start + accepted]
        x_MxD = rng.normal(size=(block, x_TxD.shape[1])).astype(np.float32)
        x_MxD[: len(real)] = real
        count_B = jnp.asarray([len(real)], jnp.int32)
        out_BxMxD, state = forward(layer.graphdef, layer.params, x_MxD[None], state, count_B)
        outs.append(out_BxMxD[0, : len(real)])
    return np.concatenate(outs), state


def check_state(layer: Layer, state) -> None:
    """Against the reference's at the end: value heads, and the last inputs of the convolution."""
    wanted_NxPxH, conv_CxW = layer.numbers["state"], layer.numbers["conv"]
    assert distance(state.delta_BxGxRxPxH[0].reshape(wanted_NxPxH.shape), wanted_NxPxH) < TOLERANCE
    g, p = layer.config.delta.num_key_heads, layer.config.delta.key_dim
    parts = np.split(np.asarray(state.conv_BxWxGxC[0]), [p, 2 * p], axis=-1)
    found_WxC = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=-1)
    assert g * p * 2 < found_WxC.shape[1]
    assert distance(found_WxC.T, conv_CxW) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
class TestEqualsHuggingFace:
    def test_in_one_call(self, name):
        layer = golden_layer(name)
        x_TxD = layer.numbers["x"]
        out, state = decode(layer, x_TxD, len(x_TxD), len(x_TxD))
        assert distance(out, layer.numbers["out"]) < TOLERANCE
        check_state(layer, state)

    @pytest.mark.parametrize(("block", "accepted"), [(1, 1), (2, 1), (5, 3), (16, 16), (16, 9)])
    def test_in_blocks(self, name, block, accepted):
        layer = golden_layer(name)
        out, state = decode(layer, layer.numbers["x"], block, accepted)
        assert distance(out, layer.numbers["out"]) < TOLERANCE
        decoded = layer.numbers["out_decoded"]
        assert distance(out[-len(decoded) :], decoded) < TOLERANCE
        check_state(layer, state)

    @pytest.mark.parametrize("path", ["a_log_GxR", "dt_bias_GxR", "conv_WxGxC", "ba_DxGx2xR", "norm.scale"])
    def test_vectors_notice_two_heads_swapped(self, name, path):
        """The control of the tests above: what belongs to which head and tap shows in these vectors."""
        layer = golden_layer(name)
        params = jax.tree.map(lambda x: x, layer.params)  # a copy
        variable = {".".join(map(str, key)): value for key, value in nnx.to_flat_state(params)}[path]
        variable.set_value(variable.get_value()[..., ::-1])
        changed = dataclasses.replace(layer, params=params)
        out, _ = decode(changed, layer.numbers["x"], 70, 70)
        assert distance(out, layer.numbers["out"]) > 1000 * TOLERANCE


def test_cut_anywhere_gives_the_same_outputs():
    """Rows that commit 0, 1, ..., M tokens of one call and get the rest in the next: all as one call."""
    layer, m = golden_layer("qwen3_next"), 21
    x_MxD, rows = layer.numbers["x"][:m], m + 1
    whole_MxD, whole_state = decode(layer, x_MxD, m, m)
    count_B = np.arange(rows)
    garbage = np.random.default_rng(1).normal(size=(2, rows, m, x_MxD.shape[1])).astype(np.float32)
    first, second = garbage
    for row, count in enumerate(count_B):
        first[row, :count], second[row, : m - count] = x_MxD[:count], x_MxD[count:]
    out_first, state = forward(layer.graphdef, layer.params, first, layer.empty(rows), jnp.asarray(count_B))
    out_second, state = forward(layer.graphdef, layer.params, second, state, jnp.asarray(m - count_B))
    for row, count in enumerate(count_B):
        out_MxD = np.concatenate([out_first[row, :count], out_second[row, : m - count]])
        assert distance(out_MxD, whole_MxD) < TOLERANCE
        for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(whole_state), strict=True):
            assert distance(found[row], wanted[0]) < TOLERANCE


DELTA = DeltaConfig(num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=5, conv_width=4)


@functools.cache
def random_layer(dtype=jnp.float32) -> Layer:
    config = target_config(DELTA, 16)
    return Layer(config, *nnx.split(DeltaNet(config, 0, dtype, nnx.Rngs(3))), {})


def random_x(b: int, m: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(b).normal(size=(b, m, 16)), jnp.float32)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (8, 1), (2, 4), (1, 8)])
def test_same_on_every_mesh(data, tensor):
    """A mesh axis that does not divide the key heads (8 on 4) leaves them whole."""
    layer, x_BxMxD, count_B = random_layer(), random_x(8, 5), jnp.arange(8, dtype=jnp.int32) % 6
    _, state = forward(layer.graphdef, layer.params, x_BxMxD, layer.empty(8), jnp.full(8, 5, jnp.int32))
    wanted = forward(layer.graphdef, layer.params, x_BxMxD, state, count_B)

    mesh = sharding.make_mesh(data, tensor)
    laid = jax.tree.map(
        lambda x, axes: jax.device_put(x, sharding.named_sharding(mesh, axes, x.shape)), state, STATE_AXES
    )
    x_BxMxD = jax.device_put(x_BxMxD, sharding.named_sharding(mesh, ("batch", None, None), x_BxMxD.shape))
    with sharding.use(mesh):
        out_BxMxD, after = forward(layer.graphdef, place(layer.params, mesh), x_BxMxD, laid, count_B)
    for found, reference in zip(jax.tree.leaves((out_BxMxD, after)), jax.tree.leaves(wanted), strict=True):
        assert distance(found, reference) < TOLERANCE
    heads = 1 if 4 % tensor else tensor
    assert after.delta_BxGxRxPxH.sharding.shard_shape(after.delta_BxGxRxPxH.shape) == (8 // data, 4 // heads, 2, 6, 5)


def test_every_parameter_learns():
    layer, x_BxMxD = random_layer(), random_x(2, 70)

    @jax.jit
    def gradient(params, x_BxMxD):
        def loss(params, x_BxMxD):
            return jnp.sum(jnp.square(nnx.merge(layer.graphdef, params)(x_BxMxD, layer.empty(2))[0]))

        return jax.grad(loss, argnums=(0, 1))(params, x_BxMxD)

    leaves = jax.tree.leaves(gradient(layer.params, x_BxMxD))
    assert len(leaves) == 8
    for value in leaves:
        assert np.isfinite(value).all() and np.abs(value).max() > 1e-4


def test_bfloat16_keeps_the_state_in_float32():
    layer, exact = random_layer(jnp.bfloat16), random_layer()
    x_BxMxD, count_B = random_x(2, 9), jnp.asarray([9, 4], jnp.int32)
    state = empty_state(DELTA, 2, jnp.bfloat16)
    out, after = forward(layer.graphdef, layer.params, x_BxMxD.astype(jnp.bfloat16), state, count_B)
    wanted, _ = forward(exact.graphdef, exact.params, x_BxMxD, exact.empty(2), count_B)
    assert out.dtype == jnp.bfloat16 and after.conv_BxWxGxC.dtype == jnp.bfloat16
    assert after.delta_BxGxRxPxH.dtype == jnp.float32
    assert layer.params["a_log_GxR"].get_value().dtype == layer.params["dt_bias_GxR"].get_value().dtype == jnp.float32
    # Not the largest error: the norm magnifies a head's output where that is almost zero.
    error = np.abs(np.asarray(out, np.float32) - np.asarray(wanted))
    assert np.median(error) < 0.005 and np.quantile(error, 0.9) < 0.03


def test_configuration_without_delta_is_refused():
    with pytest.raises(ConfigError, match="layer 0 is a recurrent layer, but the configuration's delta is None"):
        DeltaNet(target_config(None, 16), 0, jnp.float32, nnx.Rngs(0))


SCRIPT = pathlib.Path(__file__).with_name("tpu_delta_compile.py")
SLOW_TO_COMPILE = ("one token", "prefill of 512")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu): nothing here can compile for a TPU",
)
@pytest.mark.parametrize("name", ["block of 16", *[pytest.param(n, marks=pytest.mark.slow) for n in SLOW_TO_COMPILE]])
def test_compiles_for_four_chips_with_one_exchange(name):
    done = subprocess.run([sys.executable, str(SCRIPT), "v5e:2x2", name], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    # Of the output projection: key heads, their values and their state never leave their device.
    assert report["collectives"] == ["all-reduce"]
    # The state is updated in place: 2 rows, 8 key heads a device.
    assert report["state_bytes"] == 2 * (4 * 8 * 2 * 128 * 128 + 2 * 3 * 8 * 512)
