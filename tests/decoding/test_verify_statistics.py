"""Verification end to end, keys and draws included: frequencies of emitted tokens against exact laws.

A tiny target without a network: the law of a token depends on its position and on the token before it, so the law
of the first three tokens is known exactly. N rows decode it at once, each with its own seed. A verdict on the
verifier is the p-value of a chi-square test; the same test must condemn wrong verifiers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_laws import chi_square, warp_reference

from dflash_jax.decoding.sampling import Sampling, categorical, make_sampling, round_keys, row_keys, warp
from dflash_jax.decoding.verify import Verdict, verify
from dflash_jax.drafters.contract import Draft

N, V, WANTED, SLOTS = 102_000, 8, 3, 3
POSITIONS = WANTED + SLOTS
ACCEPT, REFUTE = 1e-4, 1e-9  # p-values: a right verifier is above the first, a wrong one below the second

RULES = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
}


def noise(seed: int, scale: float) -> np.ndarray:
    """[position, previous token, token] logits."""
    return (np.random.default_rng(seed).normal(size=(POSITIONS, V, V)) * scale).astype(np.float32)


TARGET = noise(1, 1.2)
DRAFTER = TARGET + noise(2, 0.8)  # like the target, but wrong enough


@functools.partial(jax.jit, static_argnames=("verifier", "kind", "slots"))
def decode(target_PxVxV, drafter_PxVxV, sampling: Sampling, seed, *, verifier=verify, kind="drawn", slots=SLOTS):
    """`sampling` has a row for each of RULES, which serves N / 6 neighbouring rows.

    Returns: tokens [N, WANTED] behind the root token 0, and the drafted tokens kept in the first round [N].

    Args:
      kind: how a block is drafted from the root. "argmax" is a deterministic proposal, "drawn" carries its law,
        "lying" drafts the argmax but claims that it was drawn.
    """
    place_M, batch = jnp.arange(slots), jnp.arange(N)
    sampling = jax.tree.map(lambda x: jnp.repeat(x, N // len(RULES)), sampling)
    key_B = row_keys(jnp.arange(N, dtype=jnp.uint32) + seed * jnp.uint32(N))

    def one_round(_, state):
        root_B, length_B, out_BxW, first_B = state
        place_BxM = jnp.minimum(length_B[:, None] + place_M[None], POSITIONS - 1)
        draft_key_B, verify_key_B = jnp.unstack(jax.vmap(jax.random.split)(round_keys(key_B, length_B)), axis=1)
        # slot i is drafted for the position before its own row of logits, knowing the root only
        drafter_BxMxV = drafter_PxVxV[jnp.maximum(place_BxM - 1, 0), root_B[:, None]]
        if kind == "drawn":
            noise_BxMxV = jax.vmap(lambda key: jax.random.gumbel(key, (slots, V)))(draft_key_B)
            token_BxM = jnp.argmax(drafter_BxMxV + noise_BxMxV, axis=-1)
        else:
            token_BxM = jnp.argmax(drafter_BxMxV, axis=-1)
        token_BxM = token_BxM.at[:, 0].set(root_B).astype(jnp.int32)
        draft = Draft(token_BxM, None if kind == "argmax" else jax.nn.softmax(drafter_BxMxV))
        logits_BxMxV = target_PxVxV[place_BxM, token_BxM]
        verdict = verifier(draft, logits_BxMxV, sampling, verify_key_B, jnp.full((N,), slots - 1, jnp.int32))
        n_B, next_root_B = verdict.n_accepted_B, verdict.next_root_B
        shifted_BxM = jnp.concatenate([token_BxM[:, 1:], next_root_B[:, None]], axis=1)
        emitted_BxM = jnp.where(place_M[None] == n_B[:, None], next_root_B[:, None], shifted_BxM)
        slot_BxM = jnp.where(place_M[None] <= n_B[:, None], length_B[:, None] + place_M[None], WANTED)
        out_BxW = out_BxW.at[batch[:, None], slot_BxM].set(emitted_BxM, mode="drop")
        return next_root_B, length_B + n_B + 1, out_BxW, jnp.where(length_B == 0, n_B, first_B)

    zero_B = jnp.zeros((N,), jnp.int32)
    state = (zero_B, zero_B, jnp.full((N, WANTED), -1, jnp.int32), zero_B)
    _, _, out_BxW, first_B = jax.lax.fori_loop(0, WANTED, one_round, state)  # a round emits at least one
    return out_BxW, first_B


def joint_law(target, rule) -> np.ndarray:
    """[V, V, V]: the law of the first three tokens behind token 0."""
    law = np.apply_along_axis(warp_reference, -1, target[:WANTED], **rule)
    return law[0, 0][:, None, None] * law[1][:, :, None] * law[2][None]


def p_values(tokens, law) -> dict[str, float]:
    """Of the first token, of the first two, and of all three."""
    counts = np.bincount(np.ravel_multi_index(np.asarray(tokens).T, (V,) * WANTED), minlength=V**WANTED)
    counts = counts.reshape((V,) * WANTED)
    return {
        "first": chi_square(counts.sum((1, 2)), law.sum((1, 2))),
        "pair": chi_square(counts.sum(2), law.sum(2)),
        "triple": chi_square(counts, law),
    }


def judge_verifier(rule, seed, drafter=DRAFTER, **how) -> dict[str, float]:
    tokens, _ = decode(TARGET, drafter, make_sampling(len(RULES), **rule), seed, **how)
    return p_values(tokens, joint_law(TARGET, rule))


@pytest.mark.parametrize("kind", ["argmax", "drawn"])
@pytest.mark.parametrize("name", RULES)
def test_emitted_law_is_the_targets(name, kind):
    for name_of_law, p in judge_verifier(RULES[name], seed=3, kind=kind).items():
        assert p > ACCEPT, (name_of_law, p)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_plain_decoding_has_the_same_law(name):
    for name_of_law, p in judge_verifier(RULES[name], seed=4, kind="argmax", slots=1).items():
        assert p > ACCEPT, (name_of_law, p)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_b35_tokens_outside_a_pruned_draft_vocabulary_are_emitted_all_the_same(name):
    """A law over three draft ids, scattered to the target's vocabulary: the residual gives the others back."""
    draft_ids, drafter = [1, 4, 6], np.full_like(DRAFTER, -np.inf)
    drafter[..., draft_ids] = DRAFTER[..., draft_ids]
    law = joint_law(TARGET, RULES[name])
    assert np.delete(law.sum((1, 2)), draft_ids).sum() > 0.2
    for name_of_law, p in judge_verifier(RULES[name], seed=11, drafter=drafter, kind="drawn").items():
        assert p > ACCEPT, (name_of_law, p)


# Negative controls: wrong verifiers, condemned by the test above ------------------------------------------------


def redrawn(draft, logits, sampling, key, limit, law_BxV, only_behind_refusal) -> Verdict:
    """The right number of kept tokens; the next root is drawn anew from `law_BxV` of its row."""
    verdict = verify(draft, logits, sampling, key, limit)
    drawn = jax.vmap(categorical)(jax.vmap(lambda k: jax.random.fold_in(k, 9))(key), law_BxV(verdict.n_accepted_B))
    wrong_B = (verdict.n_accepted_B < limit) if only_behind_refusal else (verdict.n_accepted_B == limit)
    return verdict.replace(next_root_B=jnp.where(wrong_B, drawn, verdict.next_root_B))


def row_of(x_BxMxV, row_B):
    return jnp.take_along_axis(x_BxMxV, row_B[:, None, None], axis=1)[:, 0]


def correction_from_p(draft, logits, sampling, key, limit):
    """Behind a refusal, draws from the target's law instead of the residual."""
    law = lambda n_B: row_of(warp(logits, sampling), n_B)  # noqa: E731
    return redrawn(draft, logits, sampling, key, limit, law, only_behind_refusal=True)


def unwarped_bonus(draft, logits, sampling, key, limit):
    """Behind a wholly kept chain, draws from softmax(logits): no temperature, no filter."""
    law = lambda n_B: jax.nn.softmax(row_of(logits, n_B))  # noqa: E731
    return redrawn(draft, logits, sampling, key, limit, law, only_behind_refusal=False)


def ratio_to_the_top_probability(draft, logits, sampling, key, limit):
    """Keeps x with p(x) / max p, whatever it was drawn from; the residual is right."""
    p_BxMxV = warp(logits, sampling)
    claimed = draft.replace(
        proposal_BxMxV=jnp.concatenate([draft.proposal_BxMxV[:, :1], jnp.broadcast_to(
            p_BxMxV[:, :-1].max(-1, keepdims=True), p_BxMxV[:, 1:].shape)], axis=1)
    )  # fmt: skip
    n_B = verify(claimed, logits, sampling, key, limit).n_accepted_B
    q_BxV = row_of(draft.proposal_BxMxV, jnp.minimum(n_B + 1, logits.shape[1] - 1))
    p_BxV = row_of(p_BxMxV, n_B)
    weight_BxV = jnp.where((n_B < limit)[:, None], jnp.maximum(p_BxV - q_BxV, 0), p_BxV)
    drawn = jax.vmap(categorical)(jax.vmap(lambda k: jax.random.fold_in(k, 9))(key), weight_BxV)
    return Verdict(n_B, drawn)


@pytest.mark.parametrize("kind", ["argmax", "drawn"])
def test_correction_from_p_is_condemned(kind):
    p = judge_verifier(RULES["plain"], seed=5, kind=kind, verifier=correction_from_p)
    assert p["first"] < REFUTE and p["pair"] < REFUTE


@pytest.mark.parametrize("name", ["cold", "top-k", "top-p", "min-p"])
def test_unwarped_bonus_is_condemned(name):
    p = judge_verifier(RULES[name], seed=6, kind="drawn", verifier=unwarped_bonus)
    assert p["triple"] < REFUTE
    assert p["first"] > ACCEPT  # a bonus is never the first token here: the test knows where to look


def constant(p) -> np.ndarray:
    """A table of one law over the first ids, everywhere."""
    with np.errstate(divide="ignore"):
        return np.broadcast_to(np.log(np.pad(np.float32(p), (0, V - len(p)))), (POSITIONS, V, V))


def frequencies(kind, **how):
    p, q = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]
    tokens, first = decode(constant(p), constant(q), make_sampling(len(RULES), 1.0), 7, kind=kind, **how)
    law = joint_law(constant(p), {"temperature": 1.0})
    return np.bincount(tokens[:, 0], minlength=V)[:3] / N, float((first >= 1).mean()), p_values(tokens, law)


def within(value, expected, sigmas=3.0):
    value, expected = np.asarray(value), np.asarray(expected)
    return (np.abs(value - expected) < sigmas * np.sqrt(expected * (1 - expected) / N)).all()


def test_b41_right_ratio_for_drawn_and_for_argmax_drafts():
    for kind, acceptance in (("drawn", 0.6), ("argmax", 0.3)):
        first, kept, p = frequencies(kind)
        assert within(first, [0.5, 0.3, 0.2]), (kind, first)
        assert within(kept, acceptance), (kind, kept)
        assert p["pair"] > ACCEPT  # the block level: nine cells


def test_b41_wrong_ratios_are_condemned():
    """The target's top probability in place of q; a softmax q for a token that was an argmax."""
    first, _, p = frequencies("drawn", verifier=ratio_to_the_top_probability)
    assert within(first, [0.455, 0.42, 0.125], 4)
    assert p["first"] < REFUTE and p["pair"] < REFUTE
    first, _, p = frequencies("lying")
    assert within(first, [3 / 7, 3 / 7, 1 / 7], 4)
    assert p["first"] < REFUTE and p["pair"] < REFUTE


def test_b42_the_drafts_temperature_changes_acceptance_only():
    acceptance = []
    for draft_temperature in (0.3, 1.0, 3.0):
        sampling = make_sampling(len(RULES), 1.0)
        tokens, first = decode(TARGET, DRAFTER / draft_temperature, sampling, 8, kind="drawn")
        p = p_values(tokens, joint_law(TARGET, RULES["plain"]))
        assert p["triple"] > ACCEPT, draft_temperature
        acceptance.append(float(first.mean()))
    assert np.ptp(acceptance) > 0.05


def test_b42_a_temperature_on_the_targets_side_is_seen():
    """Tokens decoded at temperature .6 do not pass for tokens of temperature 1."""
    tokens, _ = decode(TARGET, DRAFTER, make_sampling(len(RULES), 0.6), 9, kind="argmax")
    assert p_values(tokens, joint_law(TARGET, RULES["plain"]))["first"] < REFUTE
    greedy, _ = decode(TARGET, DRAFTER, make_sampling(len(RULES), 0.0), 9, kind="argmax")
    assert len(np.unique(greedy, axis=0)) == 1
    assert (np.asarray(tokens[:20]) != np.asarray(greedy[:20])).any()


def test_rows_of_many_rules_decode_their_own_laws_in_one_batch():
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [rule.get(name, off) for rule in RULES.values()] for name, off in fields.items()}
    sampling = make_sampling(len(RULES), **columns)
    tokens, _ = decode(TARGET, DRAFTER, sampling, 10, kind="drawn")
    for mine, rule in zip(np.split(np.asarray(tokens), len(RULES)), RULES.values(), strict=True):
        assert p_values(mine, joint_law(TARGET, rule))["pair"] > ACCEPT, rule
