"""The pool's layout and the owner of each page."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dflash_jax import sharding
from dflash_jax.decoding.cache import PageAllocator, make_cache
from dflash_jax.kernels.kv_cache import LayerSpec

SPECS = (LayerSpec(2, 4), LayerSpec(2, 4), LayerSpec(1, 8))


def test_contiguous_layout_has_a_page_a_row():
    cache = make_cache(SPECS, 3, 32, jnp.float32)
    assert [x.shape for x in cache.k] == [(3, 2, 32, 4), (3, 2, 32, 4), (3, 1, 32, 8)]
    assert cache.page_table_BxT is None and cache.capacity == 32 and cache.batch == 3
    np.testing.assert_array_equal(cache.length_B, [0, 0, 0])


def test_paged_layout_points_at_no_page():
    cache = make_cache(SPECS, 2, 32, jnp.float32, page_size=8)
    assert cache.k[0].shape == (8, 2, 8, 4) and cache.capacity == 32
    np.testing.assert_array_equal(cache.page_table_BxT, np.full((2, 4), 8))
    small = make_cache(SPECS, 2, 32, jnp.float32, page_size=8, num_pages=5)
    assert small.k[0].shape == (5, 2, 8, 4) and small.capacity == 32
    np.testing.assert_array_equal(small.page_table_BxT, np.full((2, 4), 5))


def test_heads_lie_on_the_tensor_axis_and_pages_on_the_data_axis():
    mesh = sharding.make_mesh(4, 2)
    cache = make_cache(SPECS, 4, 32, jnp.float32, page_size=8, mesh=mesh)
    assert cache.k[0].sharding.spec == P("data", "tensor", None, None)
    assert cache.k[2].sharding.spec == P("data", None, None, None)  # one head is not cut in two
    assert cache.page_table_BxT.sharding.spec == P("data", None)
    assert cache.length_B.sharding.spec == P("data")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch": 3, "mesh": (2, 1)}, r"batch is 3, must be a multiple of the mesh's data axis \(2\)"),
        ({"page_size": 5}, "page_size 5 does not divide the capacity 32"),
        ({"num_pages": 4}, "num_pages is 4, but the contiguous layout has a page a row; set page_size"),
        ({"num_pages": 3, "page_size": 8, "mesh": (2, 1)}, r"num_pages is 3, must be a positive multiple of .* \(2\)"),
        ({"num_pages": 0, "page_size": 8}, "num_pages is 0"),
    ],
)
def test_refusals(options, message):
    options = {"batch": 2} | options
    if "mesh" in options:
        options["mesh"] = sharding.make_mesh(*options["mesh"])
    with pytest.raises(ValueError, match=message):
        make_cache(SPECS, options.pop("batch"), 32, jnp.float32, **options)


def test_b22_pages_have_one_owner_and_come_all_or_not_at_all():
    pool = PageAllocator(6)
    first, second = pool.allocate(0, 2), pool.allocate(1, 3)
    assert not set(first) & set(second) and pool.free_pages == 1
    assert pool.allocate(2, 2) is None and pool.free_pages == 1  # nothing was taken
    with pytest.raises(ValueError, match="owner 0 already holds pages"):
        pool.allocate(0, 1)
    pool.free(0)
    with pytest.raises(ValueError, match="owner 0 holds no pages: freed twice or never allocated"):
        pool.free(0)
    with pytest.raises(ValueError, match="owner 2 holds no pages"):
        pool.free(2)
    assert set(pool.allocate(2, 3)) == set(range(6)) - set(second)
    pool.free(1), pool.free(2)
    assert set(pool.allocate(7, 6)) == set(range(6)) and pool.free_pages == 0
    with pytest.raises(ValueError, match="0 pages asked for owner 8"):
        pool.allocate(8, 0)


def test_pages_of_an_owner_lie_on_one_shard():
    pool = PageAllocator(8, shards=2)
    assert set(pool.allocate(0, 3, shard=1)) <= {4, 5, 6, 7}
    assert pool.allocate(1, 2, shard=1) is None  # five pages are free, but not there
    assert set(pool.allocate(1, 4, shard=0)) == {0, 1, 2, 3}
    pool.free(0)
    assert set(pool.allocate(2, 4, shard=1)) == {4, 5, 6, 7}
    with pytest.raises(ValueError, match=r"num_pages is 7, must be a positive multiple of shards \(2\)"):
        PageAllocator(7, shards=2)


def test_random_traffic_never_shares_a_page():
    rng, pool, owned = np.random.default_rng(0), PageAllocator(24, shards=3), {}
    for owner in range(400):
        if owned and rng.random() < 0.5:
            gone = rng.choice(list(owned))
            pool.free(gone)
            del owned[gone]
        shard, count = int(rng.integers(3)), int(rng.integers(1, 6))
        held = sum(len(p) for p in owned.values() if p[0] // 8 == shard)
        pages = pool.allocate(owner, count, shard)
        assert (pages is None) == (count > 8 - held)
        if pages is not None:
            owned[owner] = pages
            assert all(p // 8 == shard for p in pages)
        everyone = [p for pages in owned.values() for p in pages]
        assert len(everyone) == len(set(everyone)) == 24 - pool.free_pages
