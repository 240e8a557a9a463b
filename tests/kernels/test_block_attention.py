"""Block attention: the reference against float64 numpy, the Pallas kernel (interpreted) against the reference."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BlockCase, block_inputs, block_oracle
from equations import equations

from dflash_jax import sharding
from dflash_jax.kernels import dispatch
from dflash_jax.kernels.block_attention import block_attention, paged_block_attention
from dflash_jax.kernels.block_attention_pallas import _row_tiling
from dflash_jax.kernels.kv_cache import gather_pages

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


STATIC = ("window", "scale", "chunk", "softcap", "values_in_keys", "implementation", "mesh")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(arrays, **keywords):
    return paged_block_attention(*arrays, **keywords)


def reference(arrays, keywords):
    return attend(arrays, **keywords, implementation="reference")


def kernel(arrays, keywords, mesh=None):
    return attend(arrays, **keywords, implementation="pallas_interpret", mesh=mesh)


def assert_close(actual, expected, dtype="float32"):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE[dtype], rtol=0)


CASES = {
    "verify a chain, paged": BlockCase(lengths=(48, 17)),
    "draft a block, contiguous": BlockCase(slots=7, page_size=40, pages=None, visibility="full"),
    "verify trees": BlockCase(batch=3, slots=9, group=3, visibility="tree", lengths=(0, 1, 48)),
    "sliding window": BlockCase(slots=6, window=5, lengths=(3, 48)),
    "sliding window skips pages": BlockCase(page_size=16, pages=20, window=20, lengths=(320, 150)),
    "plain decoding": BlockCase(batch=3, slots=1, kv_heads=1, group=8, head_dim=128, page_size=32),
    "one head, no group": BlockCase(slots=16, kv_heads=1, group=1, page_size=128, pages=2),
    "large pages in parts": BlockCase(batch=1, slots=3, page_size=700, pages=2, lengths=(1250,), window=800),
    "contiguous in parts": BlockCase(slots=3, page_size=1030, pages=None, lengths=(1030, 513)),
    "nothing cached": BlockCase(slots=5, page_size=1, pages=None, lengths=(0, 0)),
    "long prefill": BlockCase(batch=1, slots=300, kv_heads=1, group=3, lengths=(20,)),
    "odd head dim": BlockCase(batch=1, head_dim=24, group=5, lengths=(33,)),
    "soft cap": BlockCase(softcap=0.5, lengths=(48, 17)),
    "sinks": BlockCase(batch=3, slots=5, sinks=True, lengths=(48, 0, 17)),
    "sinks, soft cap, window": BlockCase(slots=5, sinks=True, softcap=2.0, window=7, lengths=(48, 3)),
    "chunks": BlockCase(batch=4, slots=6, chunk=8, lengths=(48, 0, 20, 7), visibility="full"),
    "chunks skip pages": BlockCase(slots=3, pages=20, chunk=256, lengths=(300, 254)),
    "trees over a border of chunks": BlockCase(slots=9, chunk=4, sinks=True, visibility="tree", lengths=(18, 3)),
    "narrow values": BlockCase(slots=5, head_dim=64, value_dim=24, lengths=(48, 17)),
    "wide values, contiguous": BlockCase(head_dim=24, value_dim=64, pages=None, page_size=40),
    "latent": BlockCase(slots=5, kv_heads=1, group=128, head_dim=40, value_dim=32, in_keys=True, lengths=(48, 17)),
    "heads of two KV heads in several tiles": BlockCase(
        batch=1, slots=16, group=64, head_dim=16, sinks=True, visibility="tree", lengths=(20,)
    ),
    "latent, as wide as DeepSeek's": BlockCase(
        batch=1, slots=2, kv_heads=1, group=128, head_dim=576, value_dim=512, in_keys=True, pages=2, lengths=(19,)
    ),
    "latent, contiguous in parts": BlockCase(
        batch=1, kv_heads=1, group=3, head_dim=20, value_dim=12, in_keys=True, page_size=600, pages=None, lengths=(530,)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_against_float64_numpy(name):
    arrays, keywords = block_inputs(CASES[name])
    assert_close(reference(arrays, keywords), block_oracle(arrays, keywords))


@pytest.mark.parametrize("name", CASES)
def test_kernel_against_reference(name):
    arrays, keywords = block_inputs(CASES[name])
    assert_close(kernel(arrays, keywords), reference(arrays, keywords))


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 4)])
def test_packed_documents(window, chunk):
    """Whole rows without a context: positions restart with each document, and a document sees itself only."""
    case = BlockCase(batch=2, slots=40, page_size=8, pages=None, lengths=(0, 0), window=window, chunk=chunk)
    arrays, keywords = block_inputs(case)
    lengths = ((13, 20, 7), (40,))
    position = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    document = np.stack([np.repeat(np.arange(len(row)), row) for row in lengths])
    visibility = np.tril(np.ones((40, 40), bool)) & (document[:, :, None] == document[:, None])
    packed = keywords | {"position_BxM": jnp.asarray(position, jnp.int32), "visibility": jnp.asarray(visibility)}
    expected = block_oracle(arrays, packed)
    assert_close(reference(arrays, packed), expected)
    assert_close(kernel(arrays, packed), expected)


@pytest.mark.parametrize("name", ["verify a chain, paged", "sliding window", "plain decoding"])
def test_kernel_in_bfloat16(name):
    arrays, keywords = block_inputs(dataclasses.replace(CASES[name], dtype="bfloat16"))
    out = kernel(arrays, keywords)
    assert out.dtype == jnp.bfloat16
    assert_close(out, reference(arrays, keywords), "bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    assert_close(out, reference(wide, keywords), "bfloat16")


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(
    case=st.builds(
        BlockCase,
        batch=st.integers(1, 3), slots=st.integers(1, 16), kv_heads=st.integers(1, 2), group=st.integers(1, 8),
        head_dim=st.sampled_from([64, 128]), page_size=st.sampled_from([16, 24, 32, 64, 128]), pages=st.integers(1, 4),
        window=st.none() | st.integers(1, 100), visibility=st.sampled_from(["chain", "full", "tree"]),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_against_reference_for_any_shape(case, seed):
    arrays, keywords = block_inputs(case, seed)
    assert_close(kernel(arrays, keywords), reference(arrays, keywords))


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(
    case=st.builds(
        BlockCase,
        slots=st.sampled_from([1, 4]), kv_heads=st.integers(1, 2), group=st.sampled_from([1, 3]),
        head_dim=st.just(16), page_size=st.just(8), pages=st.none() | st.just(3),
        visibility=st.sampled_from(["chain", "full", "tree"]), window=st.none() | st.integers(1, 20),
        chunk=st.none() | st.integers(1, 20), softcap=st.none() | st.sampled_from([0.3, 3.0]), sinks=st.booleans(),
        value_dim=st.sampled_from([None, 8, 24]),
    ) | st.builds(
        BlockCase,
        kv_heads=st.just(1), group=st.sampled_from([2, 3]), head_dim=st.just(24), value_dim=st.sampled_from([8, 24]),
        in_keys=st.just(True), page_size=st.just(8), sinks=st.booleans(), chunk=st.none() | st.integers(1, 20),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_options_together(case, seed):
    arrays, keywords = block_inputs(case, seed)
    expected = block_oracle(arrays, keywords)
    assert_close(reference(arrays, keywords), expected)
    assert_close(kernel(arrays, keywords), expected)


@pytest.mark.parametrize("heads", [1, 6, 7, 40, 128])
@pytest.mark.parametrize("slots", [1, 5, 16, 300])
def test_tiles_of_rows(heads, slots):
    slot_tile, cuts = _row_tiling(slots, heads, 512)
    assert heads % cuts == 0
    rows = slot_tile * heads // cuts
    assert rows <= 512 and rows % 16 == 0
    assert slot_tile % 16 == 0 or slot_tile >= slots  # the mask's tile: whole sublane tiles, or everything


@pytest.fixture(scope="module")
def paged():
    """A paged call with a full row, an empty one and one that ends inside a page; four spare pages."""
    case = BlockCase(batch=3, slots=4, lengths=(48, 0, 21))
    arrays, keywords = block_inputs(case)
    return arrays, keywords


def with_garbage(arrays, keywords, k_garbage, v_garbage):
    """The same call with every slot that holds no committed row overwritten."""
    q, k, v, table, k_block, v_block = arrays
    num_pages, page_size = k.shape[0], k.shape[2]
    held = np.zeros((num_pages, page_size), bool)
    for pages, length in zip(np.asarray(table), np.asarray(keywords["length_B"]), strict=True):
        for position in range(length):
            held[pages[position // page_size], position % page_size] = True
    held = jnp.asarray(held)[:, None, :, None]
    return (q, jnp.where(held, k, k_garbage), jnp.where(held, v, v_garbage), table, k_block, v_block), keywords


@pytest.mark.parametrize("garbage", [1e30, -1e30])
def test_reference_never_uses_rows_beyond_the_length(paged, garbage):
    # Finite garbage is what a cache may hold: it starts as zeros, and only finite rows are written.
    out = reference(*with_garbage(*paged, garbage, garbage))
    np.testing.assert_array_equal(out, reference(*paged))


@pytest.mark.parametrize("garbage", [1e30, np.nan, np.inf])
def test_kernel_never_uses_rows_beyond_the_length(paged, garbage):
    out = kernel(*with_garbage(*paged, garbage, garbage))
    np.testing.assert_array_equal(out, kernel(*paged))


def test_kernel_never_uses_rows_beyond_the_length_contiguous():
    arrays, keywords = block_inputs(BlockCase(page_size=600, pages=None, lengths=(520, 0)))
    dead = (jnp.arange(600)[None] >= keywords["length_B"][:, None])[:, None, :, None]
    q, k, v, table, *block = arrays
    out = kernel((q, jnp.where(dead, jnp.nan, k), jnp.where(dead, jnp.nan, v), table, *block), keywords)
    np.testing.assert_array_equal(out, kernel(arrays, keywords))


@pytest.mark.parametrize("run", [reference, kernel])
def test_a_slot_that_sees_nothing_gives_zeros(run, paged):
    arrays, keywords = paged
    visibility = keywords["visibility"].at[2].set(False)
    out = np.asarray(run(arrays, keywords | {"visibility": visibility, "length_B": jnp.zeros((3,), jnp.int32)}))
    assert np.isfinite(out).all()
    assert (out[:, 2] == 0).all()
    assert (np.abs(out[:, [0, 1, 3]]).max(axis=-1) > 0).all()


@pytest.mark.parametrize("run", [reference, kernel])
def test_a_slot_with_a_sink_that_sees_nothing_gives_zeros(run):
    arrays, keywords = block_inputs(BlockCase(slots=4, sinks=True, lengths=(0, 0)))
    for sink in (-jnp.inf, -1e30, 100.0):  # no weight at all; below what is masked; nearly all weight
        sinks_N = keywords["sinks_N"].at[1].set(sink)
        out = np.asarray(
            run(arrays, keywords | {"visibility": keywords["visibility"].at[2].set(False), "sinks_N": sinks_N})
        )
        assert np.isfinite(out).all()
        assert (out[:, 2] == 0).all()
        assert (np.abs(out[:, [0, 1, 3]][:, :, [0, 2, 3]]).max(axis=-1) > 0).all()


def test_a_sink_far_below_the_scores_changes_nothing(paged):
    arrays, keywords = paged
    sinks_N = jnp.full((4,), -1e4, jnp.float32)
    np.testing.assert_array_equal(reference(arrays, keywords | {"sinks_N": sinks_N}), reference(arrays, keywords))
    np.testing.assert_array_equal(kernel(arrays, keywords | {"sinks_N": sinks_N}), kernel(arrays, keywords))


@pytest.mark.parametrize("run", [reference, kernel])
def test_values_in_keys_and_values_beside_them_are_refused(run):
    arrays, keywords = block_inputs(BlockCase())
    with pytest.raises(ValueError, match="values_in_keys is 32 for keys of width 64 and values of width 64"):
        run(arrays, keywords | {"values_in_keys": 32})
    arrays, keywords = block_inputs(BlockCase(in_keys=True, value_dim=65))
    with pytest.raises(ValueError, match="values_in_keys is 65 for keys of width 64"):
        run(arrays, keywords)


@pytest.mark.parametrize("garbage", [1e30, np.nan])
def test_kernel_never_uses_latent_rows_beyond_the_length(garbage):
    arrays, keywords = block_inputs(
        BlockCase(batch=3, kv_heads=1, in_keys=True, value_dim=32, lengths=(48, 0, 21))
    )  # fmt: skip
    out = kernel(*with_garbage(arrays, keywords, garbage, 0.0))
    np.testing.assert_array_equal(out, kernel(arrays, keywords))


@pytest.mark.parametrize("run", [reference, kernel])
@pytest.mark.parametrize("nowhere", [-1, 10_000])
def test_page_table_entries_beyond_the_length_may_point_nowhere(run, paged, nowhere):
    arrays, keywords = paged
    table = np.asarray(arrays[3]).copy()
    table[1], table[2, 2] = nowhere, nowhere  # a row of length 0, and the third page of one of length 21
    out = run((*arrays[:3], jnp.asarray(table), *arrays[4:]), keywords)
    np.testing.assert_array_equal(out, run(arrays, keywords))


@pytest.mark.parametrize("run", [reference, kernel])
def test_the_order_of_pages_does_not_matter(run, paged):
    (q, k, v, table, *block), keywords = paged
    order = np.random.default_rng(1).permutation(k.shape[0])
    where = np.argsort(order)
    moved = run((q, k[order], v[order], jnp.asarray(where, jnp.int32)[table], *block), keywords)
    np.testing.assert_array_equal(moved, run((q, k, v, table, *block), keywords))


def test_paged_and_contiguous_reference_agree_bit_for_bit(paged):
    (q, k, v, table, *block), keywords = paged
    contiguous = (q, gather_pages(k, table), gather_pages(v, table), None, *block)
    np.testing.assert_array_equal(reference((q, k, v, table, *block), keywords), reference(contiguous, keywords))


def test_contiguous_reference_copies_nothing():
    arrays, keywords = block_inputs(BlockCase(pages=None))
    del keywords["window"], keywords["scale"]
    rest = {"window": None, "scale": 0.1}
    q, k, v, _, k_block, v_block = arrays

    def paged_call(q, k, v, k_block, v_block):
        return paged_block_attention(
            q, k, v, None, k_block, v_block, **keywords, **rest, implementation="reference"
        )  # fmt: skip

    def plain_call(q, k, v, k_block, v_block):
        return block_attention(q, k, v, k_block, v_block, **keywords, **rest)

    inputs = (q, k, v, k_block, v_block)
    assert str(jax.make_jaxpr(paged_call)(*inputs)) == str(jax.make_jaxpr(plain_call)(*inputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_products_have_full_precision_and_float32_sums(dtype):
    arrays, keywords = block_inputs(BlockCase(dtype=dtype))
    call = functools.partial(paged_block_attention, **keywords, implementation="pallas")
    traced = equations(jax.make_jaxpr(call)(*arrays).jaxpr)
    found = [equation for equation in traced if equation.primitive.name == "dot_general"]
    assert len(found) >= 4  # scores and mix, of the block and of the context
    for equation in found:
        assert equation.params["preferred_element_type"] == jnp.float32
        if equation.invars[0].aval.dtype == jnp.float32:
            assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_pages_of_fewer_than_eight_slots_are_refused():
    arrays, keywords = block_inputs(BlockCase(page_size=4))
    with pytest.raises(ValueError, match="page size is 4"):
        kernel(arrays, keywords)


class TestDispatch:
    def test_by_platform(self):
        assert dispatch.choose(None) == "reference"  # these tests run on CPU
        assert dispatch.choose(None, sharding.make_mesh(2, 2)) == "reference"
        with jax.set_mesh(sharding.make_mesh(2, 2)):
            found = dispatch.context_mesh(None)
            assert (found.shape["data"], found.shape["tensor"]) == (2, 2)
        assert dispatch.context_mesh(None) is None

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="implementation is 'triton', must be"):
            dispatch.choose("triton")

    def test_no_mapping_of_one_device_or_inside_a_mapping(self):
        mesh = sharding.make_mesh(2, 1)
        seen = []

        def body(x):
            seen.append(dispatch.needs_mapping(dispatch.context_mesh(None)))
            return x

        jax.shard_map(body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))(jnp.zeros(2))
        assert seen == [False]
        assert not dispatch.needs_mapping(None)
        assert not dispatch.needs_mapping(sharding.make_mesh(1, 1))
        assert dispatch.needs_mapping(mesh)


class TestMesh:
    """Four data shards and two tensor shards; the kernel runs inside shard_map."""

    CASE = BlockCase(batch=4, slots=3, pages=2, lengths=(20, 9, 0, 31))

    @pytest.fixture(scope="class")
    def mesh(self):
        return sharding.make_mesh(4, 2)

    def place(self, arrays, mesh):
        axes = (
            ("batch", None, "kv_heads", None), ("pages", "kv_heads", None, None), ("pages", "kv_heads", None, None),
            ("batch", None), ("batch", "kv_heads", None, None), ("batch", "kv_heads", None, None),
        )  # fmt: skip
        return tuple(
            None if x is None else jax.device_put(x, sharding.named_sharding(mesh, names, x.shape))
            for x, names in zip(arrays, axes, strict=True)
        )

    def paged_inputs(self, table):
        (q, k, v, _, *block), keywords = block_inputs(self.CASE)
        return (q, k[:8], v[:8], jnp.asarray(table, jnp.int32), *block), keywords  # two pages a shard

    @pytest.mark.parametrize(
        "table",
        [[[1, 0], [2, 3], [8, 8], [6, 7]], [[2, 3], [0, 1], [8, 8], [5, 4]]],
        ids=["pages at home", "pages on another shard"],
    )
    def test_paged(self, mesh, table):
        arrays, keywords = self.paged_inputs(table)
        out = kernel(self.place(arrays, mesh), keywords, mesh)
        assert_close(out, reference(arrays, keywords))
        assert out.sharding.spec == jax.P("data", None, "tensor", None)

    def test_a_row_over_two_shards_is_no_number(self, mesh):
        arrays, keywords = self.paged_inputs([[1, 2], [3, 8], [8, 8], [6, 7]])
        out = np.asarray(kernel(self.place(arrays, mesh), keywords, mesh))
        assert np.isnan(out[0]).all()
        assert_close(out[1:], np.asarray(reference(arrays, keywords))[1:])

    def test_one_row_of_a_shared_pool(self, mesh):
        arrays, keywords = block_inputs(dataclasses.replace(self.CASE, batch=1, pages=7, lengths=(25,)))
        arrays = (*arrays[:3], jnp.asarray([[5, 4]], jnp.int32), *arrays[4:])  # a prefill
        assert_close(kernel(self.place(arrays, mesh), keywords, mesh), reference(arrays, keywords))

    @pytest.mark.parametrize("batch", [4, 2])
    def test_rows_and_pages_over_two_axes(self, batch):
        # Two rows are cut by one axis only, their pages by both: every shard then goes over all rows.
        mesh = sharding.make_mesh(2, 2, fsdp=2)
        arrays, keywords = self.paged_inputs([[1, 0], [2, 3], [5, 4], [6, 7]])
        q, k, v, table, *block = arrays
        arrays = q[:batch], k, v, table[:batch], *(x[:batch] for x in block)
        keywords = keywords | {name: keywords[name][:batch] for name in ("length_B", "position_BxM")}
        out = kernel(self.place(arrays, mesh), keywords, mesh)
        assert_close(out, reference(arrays, keywords))

    def test_contiguous(self, mesh):
        arrays, keywords = block_inputs(dataclasses.replace(self.CASE, page_size=40, pages=None, lengths=None))
        assert_close(kernel(self.place(arrays, mesh), keywords, mesh), reference(arrays, keywords))

    def test_trees_and_heads_that_do_not_divide(self, mesh):
        case = BlockCase(batch=4, kv_heads=3, group=1, page_size=40, pages=None, visibility="tree", sinks=True)
        arrays, keywords = block_inputs(case)
        out = kernel(self.place(arrays, mesh), keywords, mesh)
        assert_close(out, reference(arrays, keywords))
        assert out.sharding.spec == jax.P("data", None, None, None)


class TestFewHeadsOnManyDevices:
    """KV heads that the tensor axis does not divide: whole on every device, their query heads dealt out."""

    @pytest.mark.parametrize("data, tensor", [(8, 1), (4, 2), (2, 4), (1, 8)])
    @pytest.mark.parametrize(
        "case",
        [
            BlockCase(batch=4, kv_heads=1, group=8, head_dim=24, value_dim=16, in_keys=True, sinks=True, pages=2),
            BlockCase(batch=4, kv_heads=2, group=4, head_dim=16, pages=2, sinks=True),
            BlockCase(batch=4, kv_heads=3, group=8, head_dim=16, page_size=40, pages=None, sinks=True),
        ],
        ids=["one, latent", "two", "three, whose query heads are cut across"],
    )
    def test_same_on_every_mesh(self, case, data, tensor):
        arrays, keywords = block_inputs(case)
        out = kernel(arrays, keywords, sharding.make_mesh(data, tensor))
        assert_close(out, reference(arrays, keywords))
        if tensor > 1:
            assert out.sharding.spec[2] == "tensor"
