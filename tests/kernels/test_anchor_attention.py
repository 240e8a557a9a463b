"""Anchor attention: the reference against block attention one block at a time, the Pallas kernels against it."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from attention_cases import AnchorCase, anchor_inputs

from dflash_jax import sharding
from dflash_jax.kernels.anchor_attention import anchor_attention
from dflash_jax.kernels.anchor_attention_pallas import choose_tiles
from dflash_jax.kernels.block_attention import block_attention

NAMES = ("q", "k_context", "v_context", "k_block", "v_block")


@functools.partial(jax.jit, static_argnames=("window", "scale", "implementation", "mesh"))
def run(arrays, gradient, *, window, scale, implementation, mesh=None, **keywords):
    """(out, gradients of q, context k and v, block k and v) for a given gradient of out."""
    call = functools.partial(
        anchor_attention, window=window, scale=scale, implementation=implementation, mesh=mesh, **keywords
    )
    out, pull = jax.vjp(call, *arrays)
    return out, *pull(gradient)


def both(case: AnchorCase, seed: int = 0):
    """(reference, kernel): the results of `run` by each."""
    arrays, keywords = anchor_inputs(case, seed)
    gradient = jnp.asarray(np.random.default_rng(seed + 1).standard_normal(arrays[0].shape), case.dtype)
    return [run(arrays, gradient, **keywords, implementation=name) for name in ("reference", "pallas_interpret")]


def assert_close(actual, expected, tolerance=5e-6):
    for name, x, y in zip(("out", *NAMES), actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.isfinite(x).all(), name
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()), rtol=0, err_msg=name)


CASES = {
    "two-sided": AnchorCase(),
    "causal, windowed, packed": AnchorCase(causal=True, window=3, packed=True, group=3),
    "odd block": AnchorCase(batch=1, anchors=9, slots=7, group=3, context=33),
    "several tiles, windowed": AnchorCase(batch=1, anchors=40, slots=16, kv_heads=1, context=1100, window=90),
    "one slot": AnchorCase(anchors=2, slots=1, kv_heads=1, group=1, head_dim=128, context=3),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_against_reference(name):
    expected, actual = both(CASES[name])
    assert_close(actual, expected)


def test_kernels_in_bfloat16():
    expected, actual = both(dataclasses.replace(CASES["causal, windowed, packed"], dtype="bfloat16"))
    assert all(x.dtype == jnp.bfloat16 for x in actual)
    assert_close(actual, expected, tolerance=2e-2)


@hypothesis.settings(max_examples=2, deadline=None, derandomize=True)
@hypothesis.given(
    case=st.builds(
        AnchorCase,
        batch=st.integers(1, 2), anchors=st.integers(2, 12), slots=st.integers(1, 16), kv_heads=st.integers(1, 2),
        group=st.integers(1, 8), head_dim=st.sampled_from([64, 128]), context=st.integers(2, 90),
        window=st.none() | st.integers(1, 40), causal=st.booleans(), packed=st.booleans(),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_kernels_against_reference_for_any_shape(case, seed):
    expected, actual = both(case, seed)
    assert_close(actual, expected)


@pytest.mark.parametrize("name", ["two-sided", "causal, windowed, packed"])
def test_each_block_is_what_serving_computes_for_it(name):
    """Training and serving must attend alike: block a is a drafted block behind `anchor` committed rows."""
    case = CASES[name]
    arrays, keywords = anchor_inputs(case)
    out = np.asarray(anchor_attention(*arrays, **keywords, implementation="reference"))
    q, k_context, v_context, k_block, v_block = arrays
    serve = jax.jit(functools.partial(block_attention, window=case.window, scale=keywords["scale"]))
    for b in range(case.batch):
        for a in range(case.anchors):
            if not keywords["keep_BxA"][b, a]:
                assert (out[b, a] == 0).all()
                continue
            anchor = int(keywords["anchor_BxA"][b, a])
            start = 0
            if case.packed:  # the document alone, from its own row 0
                document = np.asarray(keywords["document_BxS"][b])
                start = int(np.argmax(document == document[anchor]))
            length = jnp.asarray([anchor - start], jnp.int32)
            # Rolled rather than cut, so that all blocks share one compiled program.
            alone = serve(
                q[b, a][None], jnp.roll(k_context[b, None], -start, 2), jnp.roll(v_context[b, None], -start, 2),
                k_block[b, a][None], v_block[b, a][None], length_B=length,
                position_BxM=length[:, None] + jnp.arange(case.slots, dtype=jnp.int32)[None],
                visibility=keywords["visibility_KxK"],
            )  # fmt: skip
            np.testing.assert_allclose(out[b, a], alone[0], atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "pallas_interpret"])
def test_gradients_against_finite_differences(implementation):
    arrays, keywords = anchor_inputs(AnchorCase(batch=1, anchors=2, slots=2, kv_heads=1, head_dim=8, context=6))
    keywords["anchor_BxA"] = jnp.asarray([[3, 5]], jnp.int32)
    keywords["keep_BxA"] = jnp.ones((1, 2), bool)
    call = jax.jit(functools.partial(anchor_attention, **keywords, implementation=implementation))
    jax.test_util.check_grads(call, arrays, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("implementation", ["reference", "pallas_interpret"])
def test_no_gradient_reaches_what_a_block_does_not_see(implementation):
    case = AnchorCase(batch=1, anchors=3, context=40)
    arrays, keywords = anchor_inputs(case)
    keywords["anchor_BxA"] = jnp.asarray([[7, 21, 0]], jnp.int32)
    keywords["keep_BxA"] = jnp.asarray([[True, True, False]])
    only_first = jnp.zeros_like(arrays[0]).at[:, 0].set(1.0)
    _, dq, dk, dv, dkb, dvb = run(arrays, only_first, **keywords, implementation=implementation)
    for x in (dk, dv):
        assert (np.asarray(x[:, :, 7:]) == 0).all()  # its own anchor's row included
        assert (np.abs(np.asarray(x[:, :, :7])).max(axis=-1) > 0).all()
    for x in (dq, dkb, dvb):
        assert (np.asarray(x[:, 1:]) == 0).all()
    everything = run(arrays, jnp.ones_like(arrays[0]), **keywords, implementation=implementation)
    for x in (everything[0], everything[1], everything[4], everything[5]):
        assert (np.asarray(x[:, 2]) == 0).all()  # a padding block neither gives nor takes


@pytest.mark.parametrize("implementation", ["reference", "pallas_interpret"])
def test_an_empty_batch_has_zero_gradients(implementation):
    arrays, keywords = anchor_inputs(AnchorCase())
    keywords["keep_BxA"] = jnp.zeros_like(keywords["keep_BxA"])
    for x in run(arrays, jnp.ones_like(arrays[0]), **keywords, implementation=implementation):
        assert (np.asarray(x) == 0).all()


def test_rows_at_or_beyond_every_anchor_do_not_matter_to_the_kernels():
    arrays, keywords = anchor_inputs(AnchorCase())
    keywords["anchor_BxA"] = jnp.minimum(keywords["anchor_BxA"], 20)
    q, k, v, *block = arrays
    garbage = (q, k.at[:, :, 20:].set(1e30), v.at[:, :, 20:].set(-1e30), *block)
    gradient = jnp.ones_like(q)
    clean = run(arrays, gradient, **keywords, implementation="pallas_interpret")
    dirty = run(garbage, gradient, **keywords, implementation="pallas_interpret")
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(x, y)


def test_mapped_over_a_mesh():
    mesh = sharding.make_mesh(2, 2)
    arrays, keywords = anchor_inputs(AnchorCase(packed=True))
    gradient = jnp.cos(arrays[0])
    expected = run(arrays, gradient, **keywords, implementation="reference")
    axes = (("batch", None, None, "kv_heads", None), *[("batch", "kv_heads", None, None)] * 2,
            *[("batch", None, "kv_heads", None, None)] * 2)  # fmt: skip
    placed = tuple(
        jax.device_put(x, sharding.named_sharding(mesh, names, x.shape)) for x, names in zip(arrays, axes, strict=True)
    )
    actual = run(placed, gradient, **keywords, implementation="pallas_interpret", mesh=mesh)
    assert_close(actual, expected)
    assert actual[0].sharding.spec == jax.P("data", None, None, "tensor", None)


@pytest.mark.parametrize("slots", [1, 4, 7, 8, 10, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("anchors", [1, 5, 64, 512])
def test_tiles_fit_the_machine(slots, group, anchors):
    tiles = choose_tiles(anchors, slots, group, 4096, 1.0, False)
    assert tiles.queries >= slots * group
    assert tiles.block_keys >= slots
    assert tiles.query_tile % 128 == 0  # whole lanes
    assert tiles.block_tile % 16 == 0  # whole sublanes, bf16
    assert tiles.context % 16 == 0
    assert tiles.query_tile * tiles.context <= 512 * 512 * 1.5  # scores in VMEM
