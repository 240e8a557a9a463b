"""The warped law, its parameters, its keys and its draws."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_laws import chi_square, warp_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding import sampling
from dflash_jax.decoding.sampling import categorical, lowest_argmax, make_sampling, round_keys, row_keys, warp

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "sampling.npz"
jit_warp = jax.jit(warp)
draw = jax.jit(jax.vmap(categorical, in_axes=(0, None)))


def test_warp_matches_the_reference_implementation():
    golden = np.load(GOLDEN)
    names = [name for name in golden if name != "logits"]
    assert len(names) == 27
    for name in names:
        t, p, k = re.fullmatch(r"probs_t(.+)_p(.+)_k(.+)", name).groups()
        probs = np.asarray(jit_warp(golden["logits"], make_sampling(2, float(t), int(k), float(p))))
        np.testing.assert_allclose(probs, golden[name], atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(probs > 0, golden[name] > 0, err_msg=name)


def test_warp_matches_plain_loops_on_a_grid_of_rules_in_one_batch():
    rules = list(itertools.product((0.0, 0.6, 1.0, 2.0), (-1, 0, 1, 7, 40, 99), (0.2, 0.77, 1.0), (0.0, 0.11, 1.0)))
    logits = np.random.default_rng(0).normal(size=(len(rules), 2, 40)).astype(np.float32) * 2
    probs = np.asarray(jit_warp(logits, make_sampling(len(rules), *map(list, zip(*rules, strict=True)))))
    for row, rule in enumerate(rules):
        for slot in range(2):
            expected = warp_reference(logits[row, slot], *rule)
            np.testing.assert_allclose(probs[row, slot], expected, atol=2e-6, err_msg=str(rule))
            np.testing.assert_array_equal(probs[row, slot] > 0, expected > 0, err_msg=str(rule))
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 9),
    st.sampled_from([0.137, 0.413, 0.731, 0.973, 1.0]),
    st.sampled_from([0.0, 0.09, 0.31]),
)
def test_ties_are_cut_lowest_id_first(halves, temperature, top_k, top_p, min_p):
    logits = np.asarray(halves, np.float32) / 2
    probs = jit_warp(logits[None, None], make_sampling(1, temperature, top_k, top_p, min_p))[0, 0]
    np.testing.assert_allclose(probs, warp_reference(logits, temperature, top_k, top_p, min_p), atol=1e-6)


def test_top_p_keeps_the_crossing_token_and_no_more():
    logits = jnp.log(jnp.asarray([0.1, 0.4, 0.3, 0.2]))[None, None]
    for top_p, expected in ((0.35, [1]), (0.45, [1, 2]), (0.65, [1, 2]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        probs = jit_warp(logits, make_sampling(1, 1.0, 0, top_p))[0, 0]
        assert np.flatnonzero(probs).tolist() == expected, top_p


VOCAB = 3 * sampling.CANDIDATES // 2
WIDE = [  # rules whose cut lies behind the ranked candidates, and rules whose cut does not
    {"temperature": 1.0, "top_k": sampling.CANDIDATES + 100},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 50.0, "top_p": 0.9},
    {"temperature": 0.1, "top_p": 0.9},
    {"temperature": 50.0, "top_k": VOCAB - 1, "top_p": 0.999},
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
]


def wide_sampling(rules):
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return make_sampling(
        len(rules), **{name: [r.get(name, default) for r in rules] for name, default in fields.items()}
    )


def test_a_vocabulary_wider_than_the_candidates():
    logits = np.random.default_rng(1).normal(size=(len(WIDE), 2, VOCAB)).astype(np.float32)
    logits[:, 1] = np.round(logits[:, 1])  # hundreds of tokens tie
    probs = np.asarray(jit_warp(logits, wide_sampling(WIDE)))
    for row, rule in enumerate(WIDE):
        for slot in range(2):
            expected = warp_reference(logits[row, slot], **rule)
            np.testing.assert_allclose(probs[row, slot], expected, atol=1e-6, err_msg=f"{rule} {slot}")
            differing = np.flatnonzero((probs[row, slot] > 0) != (expected > 0))
            # float32 may place a crossing one token of a flat law beside float64's
            assert len(differing) <= ("top_p" in rule), (rule, slot, differing)


def test_a_row_does_not_depend_on_whether_a_neighbour_needs_the_whole_sort():
    logits = np.random.default_rng(2).normal(size=(2, 1, VOCAB)).astype(np.float32)
    for mine in WIDE[1], WIDE[3], WIDE[5], WIDE[6]:
        laws = [np.asarray(jit_warp(logits, wide_sampling([mine, other])))[0] for other in WIDE]
        for law in laws[1:]:
            np.testing.assert_array_equal(law, laws[0])


def test_the_vocabulary_is_ranked_only_inside_a_branch():
    """Neither sort nor top_k may run when no row asks for a filter: they must lie inside a cond."""
    jaxpr = jax.make_jaxpr(warp)(jnp.zeros((2, 3, VOCAB)), make_sampling(2, 1.0))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    inner = str([eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"])
    assert "cond" in names and "top_k" in inner
    assert not {"top_k", "sort", "approx_top_k"} & set(names)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1e-3])
def test_temperatures_near_zero_are_greedy_without_nan(temperature):
    rng = np.random.default_rng(3)
    logits = rng.permutation(np.arange(24)).reshape(1, 1, 24).repeat(4, 0).astype(np.float32)
    logits[1] *= 1e30
    logits[2, 0, rng.permutation(24)[:20]] = -np.inf
    logits[3] -= 1e4
    probs = np.asarray(jit_warp(logits, make_sampling(4, temperature)))
    np.testing.assert_array_equal(probs, np.eye(24)[logits.argmax(-1)])


def test_forbidden_tokens_stay_forbidden_under_every_filter():
    logits = np.full((3, 1, 8), -np.inf, np.float32)
    logits[:, 0, [2, 5]] = [0.0, 1.0]
    probs = np.asarray(jit_warp(logits, make_sampling(3, [1.0, 1.0, 1e3], [0, 6, 0], [1.0, 0.9999, 0.9999])))
    assert not np.isnan(probs).any()
    for row in probs:
        assert np.flatnonzero(row[0]).tolist() == [2, 5]


def test_top_k_one_is_greedy_even_where_a_temperature_rounds_two_logits_together():
    logits = np.zeros((1, 1, 8), np.float32)
    logits[0, 0, 2], logits[0, 0, 6] = 1.0, np.nextafter(np.float32(1), np.float32(2))
    probs = np.asarray(jit_warp(logits, make_sampling(1, 1000.0, top_k=1)))
    np.testing.assert_array_equal(probs[0, 0], np.eye(8)[6])


def test_negative_zero_ties_with_zero():
    logits = np.asarray([[[-1.0, -0.0, 0.0, -0.0, 0.0, -1.0, -1.0, -1.0]]], np.float32)
    for k in (1, 2, 3):
        probs = jit_warp(logits, make_sampling(1, 1.0, top_k=k))[0, 0]
        assert np.flatnonzero(probs).tolist() == [1, 2, 3][:k]
    assert np.flatnonzero(jit_warp(logits, make_sampling(1))[0, 0]).tolist() == [1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowest_argmax_is_argmax_with_the_lowest_id(dtype):
    rng = np.random.default_rng(4)
    logits = jnp.asarray(rng.integers(-4, 4, size=(50, 9)) / 3, dtype)
    best = lowest_argmax(logits)
    assert best.dtype == jnp.int32
    np.testing.assert_array_equal(best, np.argmax(np.asarray(logits, np.float32), axis=-1))
    edge = jnp.asarray([[-jnp.inf, -jnp.inf, -3e38], [-jnp.inf, jnp.inf, 1.0], [-0.0, 0.0, -1.0], [-1e-40, -1.0, -2.0]])
    assert lowest_argmax(edge).tolist() == [2, 1, 0, 0]


def test_filters_that_are_off_change_no_bit():
    logits = np.random.default_rng(5).normal(size=(1, 2, 24)).astype(np.float32)
    plain = np.asarray(jit_warp(logits, make_sampling(1, 0.7)))
    for rule in ({"top_k": -1}, {"top_k": 24}, {"top_k": 2**40}, {"top_p": 1.0}, {"min_p": 0.0}):
        np.testing.assert_array_equal(jit_warp(logits, make_sampling(1, 0.7, **rule)), plain)


def test_values_never_recompile():
    warp_here = jax.jit(lambda logits, rules: warp(logits, rules))
    for rule in ((0.0,), (1.0,), (1.0, 5, 0.5, 0.1), ([0.0, 1.0], [3, 0], [1.0, 0.2])):
        warp_here(jnp.zeros((2, 1, 8)), make_sampling(2, *rule))
    assert warp_here._cache_size() == 1


def test_make_sampling_takes_numbers_lists_and_arrays():
    rules = make_sampling(3, np.float64(0.5), jnp.asarray([1, 2, 3]), (0.1, 0.2, 1), np.asarray([0, 1, 0.5]))
    assert [x.dtype for x in jax.tree.leaves(rules)] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    assert rules.temperature_B.tolist() == [0.5] * 3 and rules.top_k_B.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"temperature": -0.1}, r"temperature of row 0 is -0\.1, must be .*0 decodes greedily"),
        ({"temperature": [1.0, float("nan")]}, r"temperature of row 1 is nan"),
        ({"temperature": float("inf")}, r"temperature of row 0 is inf, must be a finite number"),
        ({"temperature": 1e300}, r"temperature of row 0 is 1e\+300"),
        ({"temperature": "0.5"}, r"temperature of row 0 is '0\.5'"),
        ({"temperature": None}, r"temperature of row 0 is None"),
        ({"temperature": True}, r"temperature of row 0 is True"),
        ({"temperature": [1.0]}, r"temperature has 1 values for 2 rows"),
        ({"temperature": [[1.0], [1.0]]}, r"temperature of row 0 is \[1\.0\]"),
        ({"top_k": 2.5}, r"top_k of row 0 is 2\.5, must be a whole number; 0 or -1"),
        ({"top_k": [1, 2, 3]}, r"top_k has 3 values for 2 rows"),
        ({"top_p": 0.0}, r"top_p of row 0 is 0\.0, must be in \(0, 1\].*top_k=1"),
        ({"top_p": [1.0, 1.2]}, r"top_p of row 1 is 1\.2"),
        ({"top_p": float("nan")}, r"top_p of row 0 is nan"),
        ({"min_p": -0.01}, r"min_p of row 0 is -0\.01, must be in \[0, 1\]"),
        ({"min_p": 1.01}, r"min_p of row 0 is 1\.01"),
    ],
)
def test_make_sampling_refuses_by_name(rule, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, **rule)


def test_make_sampling_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="batch is 0"):
        make_sampling(0)


def test_row_keys_use_every_bit_of_a_seed():
    seeds = [0, 1, -1, 42, 42 + 2**32, 2**63, 2**64 - 2, np.int64(7)]
    data = np.asarray(jax.random.key_data(row_keys(seeds)))
    assert len({tuple(row) for row in data.tolist()}) == len(seeds)
    np.testing.assert_array_equal(jax.random.key_data(row_keys(jnp.asarray([42, 1])))[0], data[3])
    np.testing.assert_array_equal(jax.random.key_data(row_keys(np.asarray([42])))[0], data[3])
    for bad in (2**64, -(2**63) - 1, 1.5, True, "7"):
        with pytest.raises(ValueError, match="seed of row 1 is"):
            row_keys([0, bad])


def test_round_keys_depend_on_the_rows_own_seed_and_length_only():
    keys = jax.random.key_data(round_keys(row_keys([5, 6, 5]), jnp.asarray([10, 10, 11])))
    moved = jax.random.key_data(round_keys(row_keys([9, 5, 8, 6]), jnp.asarray([3, 11, 3, 10])))
    np.testing.assert_array_equal(keys[1], moved[3])
    np.testing.assert_array_equal(keys[2], moved[1])
    assert len({tuple(k) for k in keys.tolist()}) == 3


def test_categorical_draws_the_law_and_never_a_zero():
    rng = np.random.default_rng(6)
    weight = rng.exponential(size=1000).astype(np.float32) * (rng.random(1000) < 0.1)
    weight[300:700] = 0  # a whole cell of nothing, and more
    weight[-1] = weight.max()
    ids = np.asarray(draw(row_keys(jnp.arange(50_000)), weight * 1e-3))  # not normalised
    assert ids.dtype == np.int32
    assert chi_square(np.bincount(ids, minlength=1000), weight) > 1e-4


def test_categorical_finds_a_lone_token_wherever_it_is():
    keys = row_keys(jnp.arange(64))
    for lone in (0, 255, 256, 998, 999):
        assert set(draw(keys, np.eye(1000, dtype=np.float32)[lone] * 1e-20).tolist()) == {lone}


def test_inverse_cdf_gives_each_id_its_share_of_the_uniform():
    invert = jax.jit(jax.vmap(sampling._inverse_cdf, in_axes=(0, None)))
    weight = np.asarray([0.0, 3.0, 0.0, 1.0, 4.0, 0.0], np.float32)
    uniform = (np.arange(1024, dtype=np.float32) + 0.5) / 1024
    counts = np.bincount(np.asarray(invert(uniform, weight)), minlength=6)
    np.testing.assert_array_equal(counts, weight / weight.sum() * 1024)
    ends = np.asarray([0.0, 1 - 2.0**-23, 1 - 2.0**-24, 1.0], np.float32)
    assert invert(ends, weight).tolist() == [1, 4, 4, 4]


def test_b42_temperatures_near_zero_equal_greedy_and_warm_ones_do_not():
    flat = np.random.default_rng(7).normal(size=(1, 1, 16)).astype(np.float32) * 0.1
    greedy = int(flat.argmax())
    keys = row_keys(jnp.arange(20))
    for temperature in (0.0, 1e-6, 1e-3):
        law = jit_warp(flat, make_sampling(1, temperature))[0, 0]
        assert not np.isnan(law).any()
        assert set(draw(keys, law).tolist()) == {greedy}
    assert len(set(draw(keys, jit_warp(flat, make_sampling(1, 0.6))[0, 0]).tolist())) > 1
