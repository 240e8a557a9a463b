"""Mixture of experts against a slow reference: a loop over tokens and their experts, in float64."""

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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax import sharding
from dflash_jax.config import FULL, ConfigError, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.kernels.expert_matmul import expert_matmul
from dflash_jax.models.moe import MoE, route
from dflash_jax.models.target import place

D, E, F = 6, 8, 8
ROUTERS = {
    "mixtral": {},
    "qwen3_moe, not normalised": {"normalise": False, "experts_per_token": 3},
    "qwen3_5_moe": {"shared_intermediate_size": 8, "shared_gate": True, "experts_per_token": 4},
    "deepseek_v2": {
        "normalise": False, "scale": 16.0, "num_groups": 4, "groups_per_token": 2, "shared_intermediate_size": 16,
    },
    "deepseek_v3": {
        "scoring": "sigmoid", "scale": 2.5, "num_groups": 2, "group_score": "top2", "selection_bias": True,
        "shared_intermediate_size": 8, "experts_per_token": 3,
    },
    "gpt_oss": {"router_bias": True, "expert_bias": True, "experts_per_token": 4},
    "llama4": {
        "scoring": "sigmoid", "normalise": False, "weigh_input": True, "experts_per_token": 1,
        "shared_intermediate_size": 8,
    },
    "llama4 with two experts and biases": {
        "scoring": "sigmoid", "normalise": False, "weigh_input": True, "expert_bias": True,
    },
}  # fmt: skip
ACTIVATIONS = {"gpt_oss": ("clipped_swiglu", 1.0), "deepseek_v2": ("gelu_tanh", None)}


def config_of(name="mixtral", d=D, e=E, f=F, **more) -> TargetConfig:
    activation, limit = ACTIVATIONS.get(name, ("silu", None))
    moe = {"num_experts": e, "experts_per_token": 2, "intermediate_size": f, "layers": (0,), **ROUTERS[name], **more}
    return TargetConfig(
        family="test", vocab_size=8, hidden_size=d, intermediate_size=f, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=4, rms_norm_eps=1e-6, rope=RopeConfig(), max_positions=8, layer_types=(FULL,), activation=activation,
        activation_limit=limit, moe=MoeConfig(**moe),
    )  # fmt: skip


def layer_of(config: TargetConfig, dtype=jnp.float32, seed: int = 0) -> MoE:
    """A layer whose biases are not zero."""
    layer = MoE(config, dtype, nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(layer)):
        if not np.any(np.asarray(variable[...], np.float32)):
            variable.set_value(jnp.asarray(rng.normal(size=variable[...].shape), variable[...].dtype))
    return layer


def inputs(b: int, m: int, d: int = D, dtype=jnp.float32, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(b, m, d)), dtype)


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, params, x_BxMxD):
    return nnx.merge(graphdef, params)(x_BxMxD)


def apply(layer: MoE, x_BxMxD: jax.Array) -> np.ndarray:
    return np.asarray(run(*nnx.split(layer), x_BxMxD), np.float64)


# The slow reference.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_activation(gate, up, config):
    if config.activation == "silu":
        return gate * sigmoid(gate) * up
    if config.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, config.activation_limit), np.clip(up, -config.activation_limit, config.activation_limit)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def slow_route(logit_E, bias_E, moe):
    """[(expert, weight)] of one token."""
    score_E = sigmoid(logit_E)
    if moe.scoring == "softmax":
        score_E = np.exp(logit_E - logit_E.max())
        score_E = score_E / score_E.sum()
    choice_E = score_E + bias_E
    members = moe.num_experts // moe.num_groups
    groups = []
    for group in range(moe.num_groups):
        scores = sorted(choice_E[group * members : (group + 1) * members], reverse=True)
        groups.append((-sum(scores[: {"max": 1, "top2": 2}[moe.group_score]]), group))
    open_groups = [group for _, group in sorted(groups)[: moe.groups_per_token]]
    ranked = sorted((-choice_E[e], e) for e in range(moe.num_experts) if e // members in open_groups)
    chosen = [e for _, e in ranked[: moe.experts_per_token]]
    total = sum(score_E[e] for e in chosen) if moe.normalise else 1.0
    return [(e, score_E[e] / total * moe.scale) for e in chosen]


def slow_moe(layer: MoE, config: TargetConfig, x_BxMxD):
    moe, p = config.moe, {}
    for path, variable in nnx.to_flat_state(nnx.state(layer)):
        p["/".join(map(str, path))] = np.asarray(variable[...], np.float64)
    x_TxD = np.asarray(x_BxMxD, np.float64).reshape(-1, config.hidden_size)
    out_TxD = np.zeros_like(x_TxD)
    for t, x in enumerate(x_TxD):
        chosen = slow_route(x @ p["router_DxE"] + p.get("router_bias_E", 0), p.get("selection_bias_E", 0), moe)
        for e, weight in chosen:
            inner = np.einsum("d,gdf->gf", weight * x if moe.weigh_input else x, p["gate_up_Ex2xDxF"][e])
            inner += p["gate_up_bias_Ex2xF"][e] if moe.expert_bias else 0
            y = slow_activation(*inner, config) @ p["down_ExFxD"][e]
            y += p["down_bias_ExD"][e] if moe.expert_bias else 0
            out_TxD[t] += y if moe.weigh_input else weight * y
        if moe.shared_intermediate_size:
            inner = np.einsum("d,dgf->gf", x, p["shared/gate_up_Dx2xF"])
            y = slow_activation(*inner, config) @ p["shared/down_FxD"]
            out_TxD[t] += y * sigmoid(x @ p["shared_gate_Dx1"]) if moe.shared_gate else y
    return out_TxD.reshape(x_BxMxD.shape)


# One device.


@pytest.mark.parametrize("name", ROUTERS)
def test_equals_the_loop_over_tokens_and_experts(name):
    config = config_of(name)
    layer, x_BxMxD = layer_of(config), inputs(3, 5)
    np.testing.assert_allclose(apply(layer, x_BxMxD), slow_moe(layer, config, x_BxMxD), atol=2e-5, rtol=2e-5)


@given(
    st.sampled_from(sorted(ROUTERS)), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from((4, 8, 12)), st.integers(1, 9), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=3, deadline=None, derandomize=True)
@example("mixtral", 1, 1, 1, 8, 1, 0)
def test_any_size(name, b, m, d, e, f, seed):
    config = config_of(name, d, e, f, **({"experts_per_token": 2} if e == 4 else {}))
    layer, x_BxMxD = layer_of(config, seed=seed), inputs(b, m, d, seed=seed)
    np.testing.assert_allclose(apply(layer, x_BxMxD), slow_moe(layer, config, x_BxMxD), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_bfloat16(name):
    config = config_of(name, d=32, f=32)
    layer, x_BxMxD = layer_of(config, jnp.bfloat16), inputs(2, 7, 32, jnp.bfloat16)
    out = run(*nnx.split(layer), x_BxMxD)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), slow_moe(layer, config, x_BxMxD), atol=0.05, rtol=0.05)


def test_all_tokens_to_the_same_experts_and_none_to_the_others():
    config = config_of("mixtral")
    layer, x_BxMxD = layer_of(config), jnp.abs(inputs(4, 20)) + 0.1
    layer.router_DxE.set_value(jnp.tile(jnp.arange(E, dtype=jnp.float32)[None], (D, 1)))
    chosen = np.asarray(route(x_BxMxD.reshape(-1, D) @ layer.router_DxE[...], None, config.moe)[1])
    assert (chosen == [E - 1, E - 2]).all()
    np.testing.assert_allclose(apply(layer, x_BxMxD), slow_moe(layer, config, x_BxMxD), atol=2e-5, rtol=2e-5)


def test_a_token_does_not_depend_on_its_company():
    config = config_of("qwen3_5_moe")
    layer, x_BxMxD = layer_of(config), inputs(3, 7)
    together = apply(layer, x_BxMxD)
    for t in (0, 3, 6):
        np.testing.assert_allclose(apply(layer, x_BxMxD[:, t : t + 1]), together[:, t : t + 1], atol=1e-6)


def test_experts_are_needed():
    with pytest.raises(ConfigError, match="moe is None"):
        MoE(dataclasses.replace(config_of(), moe=None), jnp.float32, nnx.Rngs(0))


# Routing.


def test_of_equal_scores_the_lower_id_is_chosen():
    logits_TxE = jnp.asarray([[0.0] * E, [0, 1, 0, 1, 0, 1, 0, 1], [-200.0] * 7 + [200.0]])
    weight_TxK, expert_TxK = route(logits_TxE, None, config_of(experts_per_token=3).moe)
    np.testing.assert_array_equal(expert_TxK, [[0, 1, 2], [1, 3, 5], [7, 0, 1]])
    np.testing.assert_allclose(weight_TxK, [[1 / 3] * 3, [1 / 3] * 3, [1, 0, 0]], atol=1e-7)


def test_of_equal_groups_the_lower_one_is_chosen():
    for rule in ("max", "top2"):
        moe = config_of(num_groups=4, groups_per_token=2, group_score=rule, experts_per_token=4).moe
        np.testing.assert_array_equal(route(jnp.zeros((1, E)), None, moe)[1], [[0, 1, 2, 3]])


def test_a_group_is_as_good_as_its_best_expert_or_its_two_best():
    logits_TxE = jnp.asarray([[3.0, -9, -9, -9, 2, 2, -9, -9]])
    for rule, wanted in (("max", [0, 1]), ("top2", [4, 5])):
        moe = config_of(num_groups=2, group_score=rule, scoring="sigmoid").moe
        np.testing.assert_array_equal(route(logits_TxE, None, moe)[1], [wanted])


def test_groups_of_one_expert():
    moe = config_of(num_groups=E, groups_per_token=3, group_score="top2").moe
    np.testing.assert_array_equal(route(jnp.arange(E, dtype=jnp.float32)[None], None, moe)[1], [[7, 6]])


def test_the_selection_bias_chooses_but_does_not_weigh():
    moe = config_of(scoring="sigmoid", selection_bias=True, scale=3.0).moe
    logits_TxE = jnp.asarray([[2.0, 1, 0, 0, 0, 0, 0, -1]])
    bias_E = jnp.zeros(E).at[7].set(5.0).at[0].set(-5.0)
    weight_TxK, expert_TxK = route(logits_TxE, bias_E, moe)
    np.testing.assert_array_equal(expert_TxK, [[7, 1]])
    scores = sigmoid(np.array([-1.0, 1.0]))
    np.testing.assert_allclose(weight_TxK[0], 3 * scores / scores.sum(), rtol=1e-6)


def test_scores_that_are_all_zero_give_no_nan():
    weight_TxK, _ = route(jnp.full((1, E), -1e4), None, config_of(scoring="sigmoid").moe)
    np.testing.assert_array_equal(weight_TxK, [[0.0, 0.0]])


# Gradients: against the product of every token with every expert, which JAX differentiates by itself.


def dense_moe(params, x_TxD, config):
    moe = config.moe
    logits_TxE = x_TxD @ params["router_DxE"][...]
    weight_TxK, expert_TxK = route(logits_TxE, None, moe)
    weight_TxE = (jax.nn.one_hot(expert_TxK, moe.num_experts) * weight_TxK[..., None]).sum(1)
    h = jnp.einsum("td,egdf->tegf", x_TxD, params["gate_up_Ex2xDxF"][...])
    inner = jax.nn.silu(h[:, :, 0]) * h[:, :, 1]
    return jnp.einsum("tef,efd,te->td", inner, params["down_ExFxD"][...], weight_TxE)


def gradients(function, dtype=jnp.float32, mesh=None):
    """Of parameters and inputs, by a loss that weighs every output differently."""
    config = config_of("mixtral")
    graphdef, params = nnx.split(layer_of(config, dtype))
    x_BxMxD = inputs(2, 5, dtype=dtype)

    def loss(params, x_BxMxD):
        if function is dense_moe:
            out = dense_moe(params, x_BxMxD.reshape(-1, D), config)
        else:
            out = nnx.merge(graphdef, params)(x_BxMxD)
        return (jnp.sin(out.astype(jnp.float32).reshape(-1)) * jnp.arange(out.size)).sum()

    with sharding.use(mesh):
        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(place(params, mesh), x_BxMxD))


def test_gradients():
    wanted = gradients(dense_moe)
    assert len(wanted) == 4
    for got, want in zip(gradients(MoE), wanted, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-4)


def test_gradients_of_bfloat16():
    for got, want in zip(gradients(MoE, jnp.bfloat16), gradients(MoE), strict=True):
        assert got.dtype == jnp.bfloat16
        got, want = np.asarray(got, np.float32), np.asarray(want)
        assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)


def test_gradients_on_a_mesh():
    mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
    for got, want in zip(gradients(MoE, mesh=mesh), gradients(MoE), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("counts", [(3, 0, 9, 4), (0, 0, 0, 0), (1, 1, 0, 150)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_products_are_equal_with_gradients(counts, dtype):
    rng = np.random.default_rng(3)
    rows = sum(counts) + 2  # two that are no one's
    x_RxI, w_ExIxO = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, 6), (4, 6, 5)))
    owner_R = np.repeat(np.arange(4), counts)

    def run(implementation):
        def loss(x, w):
            y_RxO = expert_matmul(x, w, jnp.asarray(counts, jnp.int32), implementation=implementation)
            return (y_RxO**2).sum(), y_RxO

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x_RxI, w_ExIxO)

    (_, y), gradient = run("tiles")
    assert y.dtype == jnp.float32
    want = np.zeros((rows, 5))
    for r, e in enumerate(owner_R):
        want[r] = np.asarray(x_RxI[r], np.float64) @ np.asarray(w_ExIxO[e], np.float64)
    np.testing.assert_allclose(y, want, atol=1e-5)
    tolerance = 1e-4 if dtype == jnp.float32 else 0.1
    (_, wanted_y), wanted_gradient = run("ragged_dot")
    for got, want in zip((y, *gradient), (wanted_y, *wanted_gradient), strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), atol=tolerance, rtol=tolerance)


def test_products_refuse_what_they_do_not_know():
    x_RxI, w_ExIxO, count_E = jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.asarray([2], jnp.int32)
    with pytest.raises(ValueError, match="implementation is 'loop'"):
        expert_matmul(x_RxI, w_ExIxO, count_E, implementation="loop")
    with pytest.raises(ValueError, match="float32 and matrices bfloat16"):
        expert_matmul(x_RxI, w_ExIxO.astype(jnp.bfloat16), count_E)


# Meshes.

MESHES = {
    "(8,1)": {"data": 8},
    "(4,2)": {"data": 4, "tensor": 2},
    "(2,4), experts": {"data": 2, "expert": 4},
    "(1,8)": {"tensor": 8},
    "(1,8), experts": {"expert": 8},
    "all": {"fsdp": 2, "expert": 2, "tensor": 2},
}


@pytest.mark.parametrize(("name", "mesh"), [*(("gpt_oss", mesh) for mesh in MESHES), ("deepseek_v3", "all")])
def test_meshes_give_the_same(mesh, name):
    layer, mesh = layer_of(config_of(name, d=8)), sharding.make_mesh(**MESHES[mesh])
    graphdef, params = nnx.split(layer)
    x_BxMxD = inputs(8, 3, 8)
    with sharding.use(mesh):
        # A function of its own: traced here, under this mesh, whatever `run` has kept.
        got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(place(params, mesh), x_BxMxD)
    np.testing.assert_allclose(got, apply(layer, x_BxMxD), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"e": 6}, {"e": 5, "f": 7}], ids=str)
def test_what_does_not_divide_is_right(sizes):
    layer, mesh = layer_of(config_of("gpt_oss", **sizes)), sharding.make_mesh(expert=4, tensor=2)
    graphdef, params = nnx.split(layer)
    x_BxMxD = inputs(3, 5)
    with sharding.use(mesh):
        got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(place(params, mesh), x_BxMxD)
    np.testing.assert_allclose(got, apply(layer, x_BxMxD), atol=1e-5, rtol=1e-5)


# Ahead of time for a TPU.

SCRIPT = pathlib.Path(__file__).with_name("moe_tpu_compile.py")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu): nothing here can compile for a TPU",
)
def test_compiles_for_tpu():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in reports] == ["forward bfloat16", "forward float32", "gradient bfloat16"]
    for report in reports:
        assert report["while"] == 0, report  # by the ragged product, not by the loop that CPUs have
    for report in reports[:2]:
        assert report["all_reduce"] == 1 and report["other_collectives"] == 0, report
