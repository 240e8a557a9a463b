"""Block attention in C++: the reference's numbers, and the same bits in any company."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BlockCase, block_inputs
from compiler import needs_compiler
from test_block_attention import CASES, assert_close, attend, reference

from dflash_jax import sharding
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.kernels.kv_cache import gather_pages


def native(arrays, keywords):
    return attend(arrays, **keywords, implementation="native")


FOR_NATIVE = [name for name, case in CASES.items() if not case.in_keys]


@needs_compiler
@pytest.mark.parametrize("name", FOR_NATIVE)
def test_native_against_reference(name):
    arrays, keywords = block_inputs(CASES[name])
    assert_close(native(arrays, keywords), reference(arrays, keywords))


@needs_compiler
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    case=st.builds(
        BlockCase,
        batch=st.integers(1, 4), slots=st.integers(1, 16) | st.integers(17, 80),
        kv_heads=st.integers(1, 3), group=st.integers(1, 6),
        head_dim=st.integers(1, 80), page_size=st.integers(1, 70), pages=st.none() | st.integers(1, 4),
        visibility=st.sampled_from(["chain", "full", "tree"]), window=st.none() | st.integers(1, 100),
        chunk=st.none() | st.integers(1, 60), softcap=st.none() | st.sampled_from([0.3, 3.0]), sinks=st.booleans(),
        value_dim=st.none() | st.integers(1, 80),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_native_against_reference_for_any_shape(case, seed):
    arrays, keywords = block_inputs(case, seed)
    assert_close(native(arrays, keywords), reference(arrays, keywords))


@needs_compiler
def test_native_answers_are_the_same_bits_in_any_company():
    """A row alone and among others; a token whatever follows it in its block; garbage behind a length is not read."""
    arrays, keywords = block_inputs(BlockCase(batch=3, slots=6, page_size=100, pages=None, lengths=(100, 7, 64)))
    out = np.asarray(native(arrays, keywords))
    q, k, v, _, k_block, v_block = arrays
    for b in range(3):
        row = slice(b, b + 1)
        alone = keywords | {name: keywords[name][row] for name in ("length_B", "position_BxM")}
        one = native((q[row], k[row], v[row], None, k_block[row], v_block[row]), alone)
        np.testing.assert_array_equal(one[0], out[b])
    short = keywords | {"position_BxM": keywords["position_BxM"][:, :1], "visibility": jnp.ones((1, 1), bool)}
    first = native((q[:, :1], k, v, None, k_block[:, :, :1], v_block[:, :, :1]), short)
    np.testing.assert_array_equal(first[:, 0], out[:, 0])
    behind = (jnp.arange(100)[None] >= keywords["length_B"][:, None])[:, None, :, None]
    k, v = (jnp.where(behind, jnp.nan, x) for x in (k, v))
    np.testing.assert_array_equal(native((q, k, v, None, k_block, v_block), keywords), out)


@needs_compiler
def test_native_tokens_of_a_long_block_have_the_bits_of_a_shorter_one():
    long = BlockCase(batch=2, slots=75, page_size=100, pages=None, lengths=(100, 40), visibility="chain")
    arrays, keywords = block_inputs(long)
    out = np.asarray(native(arrays, keywords))
    q, k, v, _, k_block, v_block = arrays
    for m in (1, 16, 17, 50):  # within a cut of the block, at its end, behind it
        visible = keywords["visibility"][..., :m, :m]
        words = keywords | {"position_BxM": keywords["position_BxM"][:, :m], "visibility": visible}
        fewer = native((q[:, :m], k, v, None, k_block[:, :, :m], v_block[:, :, :m]), words)
        np.testing.assert_array_equal(fewer, out[:, :m])


@needs_compiler
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("pages", [None, 3])
def test_native_tokens_of_a_chain_have_the_bits_of_plain_steps(window, pages):
    """A token of a block, and the same one alone when those before it lie in the cache: verifying is plain decoding."""
    case = BlockCase(
        batch=3, slots=20, page_size=96 if pages is None else 32, pages=pages, lengths=(61, 0, 30), window=window
    )
    (q, k, v, table, k_block, v_block), keywords = block_inputs(case)
    out = np.asarray(native((q, k, v, table, k_block, v_block), keywords))
    length_B, size = keywords["length_B"], case.page_size
    for m in range(case.slots):
        one = slice(m, m + 1)
        words = keywords | {
            "length_B": length_B + m, "position_BxM": keywords["position_BxM"][:, one],
            "visibility": jnp.ones((1, 1), bool),
        }  # fmt: skip
        alone = native((q[:, one], k, v, table, k_block[:, :, one], v_block[:, :, one]), words)
        np.testing.assert_array_equal(alone[:, 0], out[:, m])
        for b in range(case.batch):  # the token is committed
            page, inside = divmod(int(length_B[b]) + m, size)
            page = b if table is None else int(table[b, page])
            k = k.at[page, :, inside].set(k_block[b, :, m])
            v = v.at[page, :, inside].set(v_block[b, :, m])


@needs_compiler
def test_paged_and_contiguous_native_agree_bit_for_bit():
    (q, k, v, table, *block), keywords = block_inputs(CASES["verify a chain, paged"])
    contiguous = (q, gather_pages(k, table), gather_pages(v, table), None, *block)
    np.testing.assert_array_equal(native((q, k, v, table, *block), keywords), native(contiguous, keywords))


@needs_compiler
def test_native_queries_in_bfloat16_over_a_float32_cache():
    arrays, keywords = block_inputs(CASES["verify a chain, paged"])
    narrow = tuple(x if i in (1, 2, 3) else x.astype(jnp.bfloat16) for i, x in enumerate(arrays))
    out = native(narrow, keywords)
    assert out.dtype == jnp.bfloat16
    assert_close(out, reference(narrow, keywords), "bfloat16")


@needs_compiler
def test_native_derivatives_and_batches_are_the_references():
    arrays, keywords = block_inputs(CASES["verify a chain, paged"])

    def total(implementation, q, k):
        chosen = (q, k, *arrays[2:])
        return jnp.square(paged_block_attention(*chosen, **keywords, implementation=implementation)).sum()

    ours, theirs = (jax.grad(total, (1, 2))(name, *arrays[:2]) for name in ("native", "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
    queries = jnp.stack([arrays[0], arrays[0] + 1.0])
    both = jax.vmap(lambda q: paged_block_attention(q, *arrays[1:], **keywords, implementation="native"))(queries)
    assert_close(both[1], reference((queries[1], *arrays[1:]), keywords))


@needs_compiler
def test_native_where_it_does_not_fit(monkeypatch):
    latent, options = block_inputs(CASES["latent"])
    with pytest.raises(ValueError, match="does not fit: values lie in the keys; leave `implementation` out"):
        native(latent, options)
    halved, options = block_inputs(BlockCase(dtype="bfloat16"))
    with pytest.raises(ValueError, match="the cache bfloat16: it must be float32"):
        native(halved, options)
    arrays, options = block_inputs(BlockCase())
    mesh = sharding.MeshConfig(data=2).make(jax.devices()[:2])
    with pytest.raises(ValueError, match="the program runs on 2 devices"):
        attend(arrays, **options, implementation="native", mesh=mesh)
    by_itself = attend(latent, **block_inputs(CASES["latent"])[1])
    assert np.isfinite(np.asarray(by_itself)).all()
