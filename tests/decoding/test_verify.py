"""Verification of a chain: the rule by exact enumeration, and the properties that need no statistics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_laws import warp_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding.sampling import make_sampling, round_keys, row_keys
from dflash_jax.decoding.verify import judge, verify
from dflash_jax.drafters.contract import Draft

jit_verify = jax.jit(verify)
jit_judge = jax.jit(judge)

# Exact enumeration ------------------------------------------------------------------------------------------
#
# The coins of `judge` are integrated out without assuming its rule: for every drafted chain the probability that
# slot j is kept is measured as the largest coin that keeps it (found by bisection), and the law behind a refusal
# as the weights that judge returns. Completed by the target's own conditionals, the law of the first tokens must
# be the target's.

V, M = 4, 4
CHAINS = np.asarray(list(itertools.product(range(V), repeat=M - 1)))  # all 64 drafts behind the root
RULES = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.35},
    "all": {"temperature": 1.2, "top_k": 3, "top_p": 0.85, "min_p": 0.1},
    "greedy": {"temperature": 0.0},
}


def target_tree(seed: int) -> list[np.ndarray]:
    """Logits of every token given every prefix: shapes [V], [V, V], ..., M of them."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(V,) * (depth + 1)) * 1.5).astype(np.float32) for depth in range(M)]


def warped_tree(tree, rule) -> list[np.ndarray]:
    return [np.apply_along_axis(warp_reference, -1, level, **rule) for level in tree]


def joint(laws) -> np.ndarray:
    """[V] * M: the target's law of the next M tokens."""
    total = laws[0]
    for law in laws[1:]:
        total = total[..., None] * law
    return total


def emitted_laws(judge_fn, tree, laws, rule, proposal, limit) -> np.ndarray:
    """Law [64] + [V] * M of the next M tokens, for each chain drafted for certain."""
    chains, slots = len(CHAINS), M - 1
    logits = np.stack(
        [np.stack([tree[i][tuple(chain[:i])] for i in range(M)]) for chain in CHAINS]
    )  # [64, M, V]: row i is conditioned on the drafted tokens before it
    token = np.concatenate([np.zeros((chains, 1), int), CHAINS], axis=1).astype(np.int32)
    rows = lambda x: jnp.asarray(np.tile(x, (slots + 1,) + (1,) * (x.ndim - 1)))  # noqa: E731  a copy for each question
    draft = Draft(rows(token), None if proposal is None else rows(proposal[None].repeat(chains, 0)))
    sampling = make_sampling(chains * (slots + 1), **rule)
    logits, limits = rows(logits), jnp.full((chains * (slots + 1),), limit, jnp.int32)

    def ask(coin_SxC):
        """Copy j < M - 1 asks about slot j, with coins of 0 (kept if possible at all) elsewhere; the last, of none."""
        coin = np.zeros((slots + 1, chains, slots), np.float32)
        for j in range(slots):
            coin[j, :, j] = coin_SxC[j]
        n, weight = judge_fn(draft, logits, sampling, jnp.asarray(coin.reshape(-1, slots)), limits)
        return np.asarray(n).reshape(slots + 1, chains), np.asarray(weight).reshape(slots + 1, chains, V)

    low, high = np.zeros((slots, chains)), np.ones((slots, chains))
    for _ in range(26):
        middle = ((low + high) / 2).astype(np.float32)
        kept = ask(middle)[0][:slots] > np.arange(slots)[:, None]
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    keep_SxC = (low + high) / 2
    n_SxC, weight_SxCxV = ask(np.full((slots, chains), 1 - 2.0**-24))

    out = np.zeros((chains,) + (V,) * M)
    for c, chain in enumerate(CHAINS):
        reach = 1.0
        for j in range(slots + 1):
            ended = j in (slots, limit)
            refuse = 1.0 if ended else 1.0 - keep_SxC[j, c]
            if reach * refuse > 1e-7:
                source = slots if ended else j
                assert n_SxC[source, c] == j
                weight = weight_SxCxV[source, c].astype(np.float64)
                rest = joint([law[tuple(chain[:j])] for law in laws[j:]]) / np.maximum(
                    laws[j][tuple(chain[:j])].reshape((V,) + (1,) * (M - 1 - j)), 1e-300
                )  # the target's law of what follows the next root
                next_root = (weight / weight.sum()).reshape((V,) + (1,) * (M - 1 - j))
                out[c][tuple(chain[:j])] += reach * refuse * next_root * rest
            if ended:
                break
            reach *= keep_SxC[j, c]
    return out


def drawn_law(seed: int) -> np.ndarray:
    """[M, V] laws of a drafter, some tokens of which it never drafts; row 0 is not read, so it is poisoned."""
    rng = np.random.default_rng(seed)
    proposal = rng.dirichlet(np.ones(V), size=M)
    proposal[1, 2] = proposal[3, 0] = 0
    proposal /= proposal.sum(-1, keepdims=True)
    proposal[0] = np.nan
    return proposal.astype(np.float32)


@pytest.mark.parametrize("limit", [0, 2, M - 1])
@pytest.mark.parametrize("name", RULES)
def test_exact_law_of_deterministic_drafts(name, limit):
    tree, rule = target_tree(10), RULES[name]
    laws = warped_tree(tree, rule)
    emitted = emitted_laws(jit_judge, tree, laws, rule, None, limit)
    np.testing.assert_allclose(emitted, np.broadcast_to(joint(laws), emitted.shape), atol=1e-6)


@pytest.mark.parametrize("limit", [0, 2, M - 1])
@pytest.mark.parametrize("name", RULES)
def test_exact_law_of_drawn_drafts(name, limit):
    tree, rule, proposal = target_tree(11), RULES[name], drawn_law(12)
    laws = warped_tree(tree, rule)
    emitted = emitted_laws(jit_judge, tree, laws, rule, proposal, limit)
    drafted = np.prod([proposal[i + 1, CHAINS[:, i]] for i in range(M - 1)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.tensordot(drafted, emitted, 1), joint(laws), atol=1e-6)


@pytest.mark.parametrize("kind", ["equal", "disjoint", "one-hot"])
def test_exact_law_of_extreme_proposals(kind):
    tree = target_tree(13)
    tree = [np.broadcast_to(level[(0,) * (level.ndim - 1)], level.shape).copy() for level in tree]  # no memory
    if kind == "disjoint":
        for level in tree:
            level[..., :2] = -np.inf
    laws = warped_tree(tree, RULES["plain"])
    proposal = {
        "equal": np.stack([law[(0,) * (law.ndim - 1)] for law in [laws[0], *laws[:-1]]]),
        "disjoint": np.tile([0.3, 0.7, 0.0, 0.0], (M, 1)),
        "one-hot": np.tile([0.0, 0.0, 0.0, 1.0], (M, 1)),
    }[kind].astype(np.float32)
    emitted = emitted_laws(jit_judge, tree, laws, RULES["plain"], proposal, M - 1)
    drafted = np.prod([proposal[i + 1, CHAINS[:, i]] for i in range(M - 1)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.tensordot(drafted, emitted, 1), joint(laws), atol=1e-6)


@pytest.mark.parametrize("drawn", [False, True])
def test_enumeration_sees_a_correction_drawn_from_p(drawn):
    """Negative control of the two tests above: the right acceptance with the wrong law behind a refusal."""
    tree, rule = target_tree(11), RULES["plain"]
    laws, proposal = warped_tree(tree, rule), drawn_law(12) if drawn else None

    def wrong(draft, logits, sampling, coin, limit):
        n, _ = jit_judge(draft, logits, sampling, coin, limit)
        return n, np.exp(np.take_along_axis(np.asarray(logits), np.asarray(n)[:, None, None], axis=1)[:, 0])

    emitted = emitted_laws(wrong, tree, laws, rule, proposal, M - 1)
    if drawn:
        drafted = np.prod([proposal[i + 1, CHAINS[:, i]] for i in range(M - 1)], axis=0, dtype=np.float64)
        emitted = np.tensordot(drafted, emitted, 1)
    assert np.abs(emitted - joint(laws)).max() > 0.01


def judge_row(p_V, token, q_V, coin, limit=M - 1):
    """(n_accepted, normalised law of the next root) of one row without memory whose draft repeats `token`."""
    rows = len(CHAINS) * M  # the shape that is compiled already
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(np.float32(p_V)), (rows, M, 1))
    draft = Draft(np.full((rows, M), token, np.int32), None if q_V is None else np.tile(np.float32(q_V), (rows, M, 1)))
    coins = np.full((rows, M - 1), coin, np.float32)
    n, weight = jit_judge(draft, logits, make_sampling(rows, 1.0), coins, np.full(rows, limit, np.int32))
    return int(n[0]), np.asarray(weight[0] / weight[0].sum())


def test_b41_acceptance_ratio_is_p_over_q():
    """A draft drawn from q is kept with min(1, p / q) = 1, 3/7, 1; an argmax draft of token 1 with p = .3."""
    p, q = [0.5, 0.3, 0.2, 0.0], [0.2, 0.7, 0.1, 0.0]
    for token, coin, kept in ((0, 0.9999, 1), (1, 0.42, 1), (1, 0.44, 0), (2, 0.9999, 1)):
        n, law = judge_row(p, token, q, coin, limit=1)
        assert n == kept
        np.testing.assert_allclose(law, p if kept else [0.75, 0, 0.25, 0], atol=1e-6)
    for coin, kept in ((0.29, 1), (0.31, 0)):
        n, law = judge_row(p, 1, None, coin, limit=1)
        assert n == kept
        np.testing.assert_allclose(law, p if kept else [5 / 7, 0, 2 / 7, 0], atol=1e-6)


def test_no_mass_behind_a_refusal_falls_back_to_the_target():
    """Only rounding can refuse where p equals q; a coin of 1, which is never drawn, stands for it."""
    p = [0.5, 0.25, 0.125, 0.125]
    n, law = judge_row(p, 0, p, 1.0)
    assert n == 0
    np.testing.assert_allclose(law, p, atol=1e-6)


BATCH = 5, 4, 12  # rows, slots, vocabulary: the shape most tests below share, so that it compiles once
KEYS = row_keys(range(5))

# Greedy -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(-1, 5), min_size=5, max_size=5))
def test_greedy_keeps_the_matching_prefix(seed, limits):
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, size=BATCH).astype(np.float32)  # ties are the rule here
    best = logits.argmax(-1)
    token = np.concatenate([rng.integers(0, 12, (5, 1)), best[:, :-1]], axis=1)
    token = np.where(rng.random((5, 4)) < 0.25, rng.integers(0, 12, (5, 4)), token).astype(np.int32)
    limit = np.asarray(limits, np.int32)
    verdict = jit_verify(Draft(token), logits, None, None, limit)
    for row in range(5):
        n = 0
        while n < min(max(limit[row], 0), 3) and token[row, n + 1] == best[row, n]:
            n += 1
        assert verdict.n_accepted_B[row] == n
        assert verdict.next_root_B[row] == best[row, n]
    assert verdict.n_accepted_B.dtype == jnp.int32 and verdict.next_root_B.dtype == jnp.int32
    # rows of temperature 0 in a sampled batch: the same, also with a drawn proposal
    proposal = rng.dirichlet(np.ones(12), size=(5, 4)).astype(np.float32)
    for law in (None, proposal):
        sampled = jit_verify(Draft(token, law), logits, make_sampling(5, 0.0, 2, 0.9, 0.1), KEYS, limit)
        np.testing.assert_array_equal(sampled.n_accepted_B, verdict.n_accepted_B)
        np.testing.assert_array_equal(sampled.next_root_B, verdict.next_root_B)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_b39c_a_constructed_tie_goes_to_the_lowest_id_everywhere(dtype):
    """Ids 3 and 9 tie. Verification, plain decoding and greedy rows of a sampled batch all pick 3."""
    logits = np.zeros(BATCH, np.float32)
    logits[..., [3, 9]] = 5.0
    tied, limit = jnp.asarray(logits, dtype), np.full(5, 3, np.int32)
    ways = [(None, None), (make_sampling(5, 0.0), KEYS)] if dtype == jnp.float32 else [(None, None)]
    for rules, keys in ways:
        for drafted, n in ((3, 3), (9, 0)):
            verdict = jit_verify(Draft(np.full((5, 4), drafted, np.int32)), tied, rules, keys, limit)
            assert verdict.n_accepted_B.tolist() == [n] * 5
            assert verdict.next_root_B.tolist() == [3] * 5
        plain = jit_verify(Draft(np.full((5, 1), 9, np.int32)), tied[:, :1], rules, keys, limit)
        assert plain.n_accepted_B.tolist() == [0] * 5
        assert plain.next_root_B.tolist() == [3] * 5


# Rows are independent ---------------------------------------------------------------------------------------


def mixed_batch(seed: int):
    """Drafts that are often right, every kind of rule, every limit."""
    rng, (batch, slots, vocab) = np.random.default_rng(seed), BATCH
    logits = (rng.normal(size=BATCH) * 2).astype(np.float32)
    token = np.concatenate([np.zeros((batch, 1), int), logits.argmax(-1)[:, :-1]], axis=1).astype(np.int32)
    proposal = rng.dirichlet(np.ones(vocab), size=(batch, slots)).astype(np.float32)
    rules = [rng.choice([0.0, 0.7, 1.0], batch), rng.choice([0, 3], batch), rng.choice([0.8, 1.0], batch)]
    limit = rng.integers(0, slots, batch).astype(np.int32)
    return token, proposal, logits, rules, rng.choice([0.0, 0.1], batch), limit


def run(batch, rows, seeds, drawn):
    token, proposal, logits, rules, min_p, limit = batch
    sampling = make_sampling(len(rows), *[r[rows].tolist() for r in rules], min_p[rows].tolist())
    draft = Draft(token[rows], proposal[rows] if drawn else None)
    verdict = jit_verify(draft, logits[rows], sampling, row_keys([seeds[r] for r in rows]), limit[rows])
    return np.stack([verdict.n_accepted_B, verdict.next_root_B])


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_permute_and_stand_alone(drawn):
    rng = np.random.default_rng(20)
    different = 0
    for seed in range(12):
        batch, seeds = mixed_batch(seed), rng.integers(0, 2**62, 5).tolist()
        together = run(batch, np.arange(5), seeds, drawn)
        order = rng.permutation(5)
        np.testing.assert_array_equal(run(batch, order, seeds, drawn), together[:, order])
        for row in range(5):
            np.testing.assert_array_equal(run(batch, np.asarray([row]), seeds, drawn), together[:, [row]])
        different += (run(batch, np.arange(5), [s + 1 for s in seeds], drawn) != together).any()
    assert different >= 6  # seeds matter


@pytest.mark.parametrize("drawn", [False, True])
def test_b49_a_seed_names_its_rows_stream_and_nothing_else(drawn):
    """Eight rounds of a row with seed 42: three runs, alone, in a batch, in another slot, among other seeds."""
    rng, (batch, slots, vocab) = np.random.default_rng(21), BATCH
    table = (rng.normal(size=(64, vocab)) * 0.7).astype(np.float32)  # flat: seeds show
    temperature = np.asarray([1.0, 1.0, 0.0, 1.0, 1.0])
    proposal = rng.dirichlet(np.ones(vocab) * 5, size=(64,)).astype(np.float32)

    def decode(seeds, temperatures, lengths):
        rows, length, tokens = len(seeds), np.asarray(lengths), [[] for _ in seeds]
        keys, sampling = row_keys(seeds), make_sampling(rows, list(temperatures))
        for _ in range(8):
            place = length[:, None] - lengths[:, None] + np.arange(slots)
            token = (place * 5 % vocab).astype(np.int32)
            draft = Draft(token, proposal[place] if drawn else None)
            keys_now = round_keys(keys, jnp.asarray(length - lengths))
            verdict = jit_verify(draft, table[place], sampling, keys_now, np.full(rows, slots - 1, np.int32))
            for row, (n, root) in enumerate(zip(verdict.n_accepted_B, verdict.next_root_B, strict=True)):
                tokens[row] += [*token[row, 1 : int(n) + 1].tolist(), int(root)]
            length = length + np.asarray(verdict.n_accepted_B) + 1
        return tokens

    zeros = np.zeros(batch, int)
    first = decode([42, 1, 2, 3, 4], temperature, zeros)
    assert decode([42, 1, 2, 3, 4], temperature, zeros) == first
    alone = decode([42], [1.0], zeros[:1])
    assert alone[0] == first[0]
    assert decode([7, 8, 2, 9, 42], temperature, zeros)[4] == first[0]  # another slot, other neighbours
    assert decode([7, 8, 99, 9, 42], temperature, zeros)[2] == first[2]  # greedy: no seed matters
    assert decode([42, 42, 2, 3, 4], temperature, zeros)[1] == first[0]
    assert decode([43], [1.0], zeros[:1])[0] != first[0]
    assert decode([42 + 2**32], [1.0], zeros[:1])[0] != first[0]


def test_b45_filters_and_bias_hold_in_every_slot():
    """top_k 1, top_p .5 and logit_bias {7: +100} side by side, block of 4, many keys each."""
    copies, slots, vocab = 64, 4, 10
    rng = np.random.default_rng(22)
    logits = np.tile(rng.normal(size=(3, slots, vocab)).astype(np.float32), (copies, 1, 1))
    logits[2::3, :, 7] += 100.0
    rules = {"temperature": [1.0] * 3 * copies, "top_k": [1, 0, -1] * copies, "top_p": [1.0, 0.5, 1.0] * copies}
    support = [np.flatnonzero(warp_reference(logits[1, i], 1.0, 0, 0.5)) for i in range(slots)]
    assert all(1 < len(ids) < vocab for ids in support)
    token = np.zeros((3 * copies, slots), np.int32)
    for row in range(3 * copies):  # drafts: right, inside the nucleus, the biased token
        inside = [rng.choice(ids) for ids in support[:-1]]
        token[row, 1:] = [logits[row, :-1].argmax(-1), inside, [7] * (slots - 1)][row % 3]
    keys, limit = row_keys(jnp.arange(3 * copies)), np.full(3 * copies, slots - 1, np.int32)
    proposal = rng.dirichlet(np.ones(vocab), size=(3 * copies, slots)).astype(np.float32)
    order = rng.permutation(3 * copies)
    for law in (None, proposal):
        verdict = jit_verify(Draft(token, law), logits, make_sampling(3 * copies, **rules), keys, limit)
        n, root = np.asarray(verdict.n_accepted_B), np.asarray(verdict.next_root_B)
        np.testing.assert_array_equal(root[0::3], logits[0::3].argmax(-1)[np.arange(copies), n[0::3]])
        for row in range(1, 3 * copies, 3):
            emitted = [*token[row, 1 : n[row] + 1], root[row]]
            assert all(x in support[i] for i, x in enumerate(emitted))
        assert set(root[2::3].tolist()) == {7}
        if law is None:
            assert set(n[0::3]) == set(n[2::3]) == {slots - 1}
            assert len(set(n[1::3])) > 1
        permuted_rules = {name: [values[i] for i in order] for name, values in rules.items()}
        permuted = jit_verify(
            Draft(token[order], None if law is None else law[order]),
            logits[order], make_sampling(3 * copies, **permuted_rules), keys[order], limit,
        )  # fmt: skip
        np.testing.assert_array_equal(permuted.n_accepted_B, n[order])
        np.testing.assert_array_equal(permuted.next_root_B, root[order])


def test_b45_a_filtered_draft_is_never_kept():
    """A drafted token outside top-k, top-p or min-p has probability 0, whatever the drafter thinks of it."""
    p = np.float32([0.4, 0.3, 0.2, 0.1] + [1e-9] * 6)
    logits = np.tile(np.log(p), (3 * 64, 4, 1))
    token = np.full((3 * 64, 4), 3, np.int32)
    rules = make_sampling(3 * 64, 1.0, [2, 0, 0] * 64, [1.0, 0.6, 1.0] * 64, [0.0, 0.0, 0.5] * 64)
    law = np.tile(np.eye(10, dtype=np.float32)[3], (3 * 64, 4, 1))
    for proposal in (None, law):
        verdict = jit_verify(
            Draft(token, proposal), logits, rules, row_keys(jnp.arange(192)), np.full(192, 3, np.int32)
        )
        assert not verdict.n_accepted_B.any()
        assert 3 not in verdict.next_root_B.tolist()


def test_values_never_recompile():
    sizes = set()
    for seed in range(4):
        token, _, logits, rules, min_p, limit = mixed_batch(seed)
        sampling = make_sampling(5, *[r.tolist() for r in rules], min_p.tolist())
        jit_verify(Draft(token), logits, sampling, row_keys([seed] * 5), limit)
        sizes.add(jit_verify._cache_size())
    assert len(sizes) == 1


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_a_mesh_gives_the_same_verdicts(shape):
    """Rows over the data axis, the vocabulary over the tensor axis."""
    rows, slots, vocab = 8, 4, 640  # wider than the ranked candidates
    rng = np.random.default_rng(30)
    logits = (rng.normal(size=(rows, slots, vocab)) * 3).astype(np.float32)
    token = np.concatenate([np.zeros((rows, 1), int), logits.argmax(-1)[:, :-1]], axis=1).astype(np.int32)
    proposal = rng.dirichlet(np.ones(vocab) * 0.05, size=(rows, slots)).astype(np.float32)
    rules = make_sampling(rows, [0.0, 1, 1, 1, 0.5, 0.5, 50, 50], [0, 0, 5, 0, 5, 0, 600, 0], [1, 1, 1, 0.9] * 2)
    args = Draft(token, proposal), logits, rules, row_keys(range(rows)), np.full(rows, slots - 1, np.int32)
    alone = jit_verify(*args)
    assert len(set(alone.n_accepted_B.tolist())) > 1
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(x):
        wide = x.ndim == 3
        spec = jax.sharding.PartitionSpec("data", *([None, "tensor"] if wide else [None] * (x.ndim - 1)))
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    sharded = jit_verify(*jax.tree.map(place, args))
    np.testing.assert_array_equal(sharded.n_accepted_B, alone.n_accepted_B)
    np.testing.assert_array_equal(sharded.next_root_B, alone.next_root_B)
