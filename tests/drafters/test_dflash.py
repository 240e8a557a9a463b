"""DFlash against the reference's numbers, and the rules that a wrong acceptance would hide."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import CASES, load_golden

from dflash_jax.checkpoints.load_drafter import random_drafter, shared_weights
from dflash_jax.config import FULL, SLIDING, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.drafters.contract import Drafter, SharedWeights, Verified
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.kernels.anchor_attention import block_mask, context_mask
from dflash_jax.kernels.block_attention import block_attention
from dflash_jax.kernels.kv_cache import KVCache, advance
from dflash_jax.models.target import random_target

TOLERANCE = 1e-4
CAPACITY = 32


def empty_cache(config: DrafterConfig, batch: int = 1, fill: float = 7.0) -> KVCache:
    """A contiguous cache whose rows hold garbage: whatever reads an uncommitted row shows."""
    target_layers = (jnp.zeros((batch, 1, CAPACITY, 2)),) * config.num_target_layers
    shape = (batch, config.num_kv_heads, CAPACITY, config.head_dim)
    own = tuple(jnp.full(shape, fill) for _ in range(config.num_layers))
    return KVCache(target_layers + own, target_layers + own, None, jnp.zeros((batch,), jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def absorb(graphdef, params, shared, cache, taps_BxMxTD, count_B) -> KVCache:
    """The drafter's absorb, then the commit that the decoding step does."""
    b, m = taps_BxMxTD.shape[:2]
    hidden_BxMxD = jnp.zeros((b, m, shared.embedding_VxD.shape[1]))
    verified = Verified(jnp.zeros((b, m), jnp.int32), taps_BxMxTD, hidden_BxMxD, count_B)
    return advance(nnx.merge(graphdef, params).absorb(shared, cache, verified), count_B)


@functools.partial(jax.jit, static_argnums=0)
def draft(graphdef, params, shared, cache, token_BxK) -> tuple[jax.Array, jax.Array]:
    """(hidden_BxKxD, logits_BxKxV) of a block."""
    module = nnx.merge(graphdef, params)
    hidden_BxKxD = module.block_hidden(shared, cache, token_BxK)
    return hidden_BxKxD, module.logits(shared, hidden_BxKxD)


@functools.partial(jax.jit, static_argnums=0)
def layer_outputs(graphdef, params, shared, cache, token_BxK) -> list[jax.Array]:
    """Hidden states after each layer: the drafter cut there, without its last norm."""
    outputs = []
    for i in range(nnx.merge(graphdef, params).config.num_layers):
        module = nnx.merge(graphdef, params)
        module.layers = nnx.List(list(module.layers)[: i + 1])
        module.norm = lambda x: x
        outputs.append(module.block_hidden(shared, cache, token_BxK))
    return outputs


@functools.partial(jax.jit, static_argnums=(0, 7))
def propose(graphdef, params, shared, cache, root_B, temperature_B, key_B, block_size):
    """The drafter's propose, and the whole-block logits it starts from."""
    module = nnx.merge(graphdef, params)
    hidden_BxKxD = module.block_hidden(shared, cache, module.block_tokens(root_B, block_size))
    draft = module.propose(shared, cache, root_B, temperature_B, key_B, block_size)
    return draft, hidden_BxKxD, module.logits(shared, hidden_BxKxD)


def propose_with(drafter: Drafter, root_B, temperature_B=None, key_B=None, block_size=4, cache=None):
    root_B = jnp.asarray(root_B, jnp.int32)
    cache = empty_cache(drafter.config, root_B.shape[0]) if cache is None else cache
    return propose(drafter.graphdef, drafter.params, drafter.shared, cache, root_B, temperature_B, key_B, block_size)


def run(drafter: Drafter, taps_BxMxTD, token_BxK, count_B=None, cache=None):
    taps_BxMxTD = jnp.asarray(taps_BxMxTD)
    b, m = taps_BxMxTD.shape[:2]
    count_B = jnp.full((b,), m, jnp.int32) if count_B is None else jnp.asarray(count_B, jnp.int32)
    cache = empty_cache(drafter.config, b) if cache is None else cache
    cache = absorb(drafter.graphdef, drafter.params, drafter.shared, cache, taps_BxMxTD, count_B)
    return *draft(drafter.graphdef, drafter.params, drafter.shared, cache, jnp.asarray(token_BxK, jnp.int32)), cache


@pytest.mark.parametrize("name", CASES)
def test_parity_with_the_reference(name):
    _, drafter, golden = load_golden(name)
    module = nnx.merge(drafter.graphdef, drafter.params)
    taps = jnp.asarray(golden["draft.target_hidden_concat"])
    np.testing.assert_allclose(module.fuse(taps), golden["draft.fused_ctx"], atol=TOLERANCE, rtol=0)
    block = jnp.asarray(golden["draft.block_ids"], jnp.int32)
    np.testing.assert_array_equal(module.block_tokens(block[:, 0], drafter.block_size), block)
    np.testing.assert_array_equal(module.embed(drafter.shared, block), golden["draft.noise_embedding"])
    hidden, logits, _ = run(drafter, taps, block)
    np.testing.assert_allclose(hidden, golden["draft.hidden"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits, golden["draft.logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_parity_of_every_layer(name):
    _, drafter, golden = load_golden(name)
    _, _, cache = run(drafter, golden["draft.target_hidden_concat"], golden["draft.block_ids"])
    block = jnp.asarray(golden["draft.block_ids"], jnp.int32)
    outputs = layer_outputs(drafter.graphdef, drafter.params, drafter.shared, cache, block)
    assert len(outputs) == 2
    for i, out in enumerate(outputs):
        np.testing.assert_allclose(out, golden[f"draft.layer{i}_out"], atol=TOLERANCE, rtol=0, err_msg=f"layer {i}")


@pytest.mark.parametrize("name", CASES)
def test_parity_with_a_cache_that_grows(name):
    """9 context rows and a block, then 4 more rows and a block: block rows must leave no trace."""
    _, drafter, golden = load_golden(name)
    taps, block = golden["draft.target_hidden_concat"], golden["draft.block_ids"]
    early_block = np.concatenate([golden["target.input_ids"][:, 9:10], block[:, 1:]], axis=1)
    hidden, _, cache = run(drafter, taps[:, :9], early_block)
    np.testing.assert_allclose(hidden, golden["draft.inc_step1_hidden"], atol=TOLERANCE, rtol=0)
    hidden, _, cache = run(drafter, taps[:, 9:], block, cache=cache)
    np.testing.assert_allclose(hidden, golden["draft.inc_step2_hidden"], atol=TOLERANCE, rtol=0)
    assert cache.length_B.tolist() == [13]


def test_padded_rows_are_not_absorbed():
    """Slots at or beyond count change nothing, whatever they hold."""
    _, drafter, golden = load_golden("tr_qwen3_sliding")
    taps, block = golden["draft.target_hidden_concat"], golden["draft.block_ids"]
    expected, _, _ = run(drafter, taps[:, :9], block)
    padded = np.concatenate([taps[:, :9], np.full_like(taps[:, :4], 1e3)], axis=1)
    hidden, _, cache = run(drafter, padded, block, count_B=[9])
    np.testing.assert_allclose(hidden, expected, atol=1e-6, rtol=0)
    assert cache.length_B.tolist() == [9]


def test_b19_rows_of_a_batch_draft_as_alone():
    """Rows of different lengths in one batch give the logits they give alone, in any order."""
    _, drafter, golden = load_golden("tr_qwen3_sliding")
    rng = np.random.default_rng(0)
    lengths = np.array([13, 1, 5, 0])
    taps = rng.normal(size=(4, 13, golden["draft.target_hidden_concat"].shape[-1])).astype(np.float32)
    block = np.full((4, 4), 95)
    block[:, 0] = [3, 14, 15, 92]
    _, together, _ = run(drafter, taps, block, count_B=lengths)
    order = np.array([2, 0, 3, 1])
    _, permuted, _ = run(drafter, taps[order], block[order], count_B=lengths[order])
    np.testing.assert_allclose(permuted, together[order], atol=1e-5, rtol=0)
    for i, length in enumerate(lengths):
        _, alone, _ = run(drafter, taps[i : i + 1], block[i : i + 1], count_B=[length])
        np.testing.assert_allclose(together[i], alone[0], atol=1e-5, rtol=0, err_msg=f"row {i}")


def visible_keys(num_context: int, anchor: int, visibility: jax.Array, window: int | None) -> list[set[int]]:
    """Which keys each slot of a block really attends to: context rows, then the block at num_context + slot.

    Scores are all equal and values are one-hot, so a weight that is not zero is a key that was seen.
    """
    num_slots = visibility.shape[0]
    width = num_context + num_slots
    values = jnp.eye(width)[None, None]
    zeros = jnp.zeros_like(values)
    out = block_attention(
        jnp.zeros((1, num_slots, 1, width)),
        zeros[:, :, :num_context], values[:, :, :num_context],
        zeros[:, :, num_context:], values[:, :, num_context:],
        length_B=jnp.array([anchor]), position_BxM=anchor + jnp.arange(num_slots)[None],
        visibility=visibility, window=window, scale=1.0,
    )  # fmt: skip
    return [set(np.flatnonzero(np.asarray(out[0, slot, 0])).tolist()) for slot in range(num_slots)]


def tiny_config(**fields) -> DrafterConfig:
    values = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "vocab_size": 24,
        "block_size": 4,
        "mask_token_id": 23,
        "target_layer_ids": (0, 1),
        "num_target_layers": 3,
        "layer_types": (SLIDING,),
        "sliding_window": 4,
        "max_positions": 64,
    }
    return DrafterConfig(**(values | fields))


def tiny_target(**fields):
    values = {
        "family": "llama",
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_positions": 64,
        "layer_types": (FULL,) * 3,
        "tie_embeddings": True,
    }
    return random_target(TargetConfig(**(values | fields)), seed=3)


@functools.cache
def layer_of(**fields):
    return DFlash(tiny_config(**fields), jnp.float32, nnx.Rngs(0)).layers[0].attention


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [{3, 4, 5, 12}, {4, 5, 12, 13}, {5, 12, 13, 14}, {12, 13, 14, 15}]),
        ({"causal": False}, [{3, 4, 5, 12, 13, 14, 15}, {4, 5, 12, 13, 14, 15}, {5, 12, 13, 14, 15}, {12, 13, 14, 15}]),
        ({"causal": False, "sliding_window": 2}, [{5, 12, 13}, {12, 13, 14}, {13, 14, 15}, {14, 15}]),
        ({"layer_types": (FULL,)}, [{0, 1, 2, 3, 4, 5, 12, 13, 14, 15}] * 4),
        ({"layer_types": (FULL,), "causal": True}, [set(range(6)) | set(range(12, 13 + i)) for i in range(4)]),
    ],
    ids=["sliding", "sliding two-sided", "window under the block", "full", "full causal"],
)
def test_b31_mask_table(fields, expected):
    """Anchor 6 in 12 rows of context, block 4, window 4; trainer and server see the same keys."""
    attention = layer_of(**fields)
    assert visible_keys(12, 6, attention.visibility(4), attention.window) == expected

    anchor_BxA, keep_BxA = jnp.array([[6]]), jnp.array([[True]])
    context_KxS = np.broadcast_to(context_mask(anchor_BxA, keep_BxA, 4, 12, attention.window)[0, 0], (4, 12))
    block_KxK = np.broadcast_to(block_mask(keep_BxA, attention.visibility(4), attention.window)[0, 0], (4, 4))
    trained = np.concatenate([context_KxS, block_KxK], axis=1)
    assert [set(np.flatnonzero(row).tolist()) for row in trained] == expected


@pytest.mark.parametrize(("kind", "far_matters"), [(SLIDING, False), (FULL, True)])
def test_b31_a_far_context_row_moves_full_layers_only(kind, far_matters):
    drafter = random_drafter(tiny_config(layer_types=(kind,)), tiny_target())
    rng = np.random.default_rng(1)
    taps = rng.normal(size=(1, 9, 32)).astype(np.float32)
    block = [[5, 23, 23, 23]]
    near, far = taps.copy(), taps.copy()
    near[0, 6] += 1.0  # 3 before the anchor at 9: the first slot's oldest key
    far[0, 5] += 1.0  # 4 before
    hidden, _, _ = run(drafter, taps, block)
    moved_near, _, _ = run(drafter, near, block)
    moved_far, _, _ = run(drafter, far, block)
    assert np.abs(moved_near - hidden)[0, 0].max() > 1e-3
    if far_matters:
        assert np.abs(moved_far - hidden)[0].max(-1).min() > 1e-4
    else:
        np.testing.assert_array_equal(moved_far, hidden)


def test_b27_block_embeddings_and_draft_logits_follow_the_target():
    target = tiny_target(embedding_scale=4.0, final_logit_softcap=30.0)
    # Weights large enough that the cap bends the logits.
    params = jax.tree.map(lambda x: x, target.params)
    params["embedding_VxD"] = params["embedding_VxD"].replace(params["embedding_VxD"].get_value() * 20)
    target = dataclasses.replace(target, params=params)
    drafter = random_drafter(tiny_config(layer_types=(FULL,)), target)
    module = nnx.merge(drafter.graphdef, drafter.params)
    block = jnp.array([[5, 23, 23, 23]])
    table = np.asarray(params["embedding_VxD"].get_value())
    np.testing.assert_allclose(module.embed(drafter.shared, block)[0], 4.0 * table[np.asarray(block[0])], rtol=1e-6)

    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 16)), jnp.float32)
    raw = np.asarray(hidden) @ table.T
    assert np.abs(raw).max() > 40
    logits = module.logits(drafter.shared, hidden)
    np.testing.assert_allclose(logits, 30 * np.tanh(raw / 30), atol=1e-4)
    assert np.abs(logits).max() < 30
    own_cap = dataclasses.replace(drafter.config, final_logit_softcap=0.0)
    uncapped = nnx.merge(nnx.split(DFlash(own_cap, jnp.float32, nnx.Rngs(0)))[0], drafter.params)
    np.testing.assert_allclose(uncapped.logits(drafter.shared, hidden), raw, atol=1e-4)


def test_b27_drawn_proposals_carry_the_capped_law():
    target = tiny_target(final_logit_softcap=2.0)
    drafter = random_drafter(tiny_config(layer_types=(FULL,)), target, seed=1)
    keys = jax.random.split(jax.random.key(0), 1)
    proposal, hidden, _ = propose_with(drafter, [5], jnp.array([0.7]), keys)
    raw = np.asarray(hidden[:, 1:]) @ np.asarray(drafter.shared.head_DxV)
    expected = jax.nn.softmax(2.0 * np.tanh(raw / 2.0) / 0.7, axis=-1)
    np.testing.assert_allclose(proposal.proposal_BxMxV[:, 1:], expected, atol=1e-5)


def obvious_walk(drafter: Drafter, hidden_KxD, root: int, choose) -> list[tuple[int, np.ndarray]]:
    """(token, logits over the draft vocabulary) of each slot, one after another, by a Markov head."""
    ids_U = np.asarray(drafter.shared.draft_to_target_V)
    w1_VxR, w2_VxR = (np.asarray(drafter.params["markov"][name].get_value()) for name in ("w1_VxR", "w2_VxR"))
    walked, before = [], root
    for hidden_D in np.asarray(hidden_KxD)[1:]:
        score_U = hidden_D @ np.asarray(drafter.shared.head_DxV) + w2_VxR[ids_U] @ w1_VxR[before]
        logits_U = 1.5 * np.tanh(0.5 * score_U / 1.5)
        before = int(ids_U[choose(len(walked), logits_U)])
        walked.append((before, logits_U))
    return walked


def test_a_markov_head_is_walked_token_by_token():
    """Greedy, pruned, with a multiplier and a cap; every row from its own root."""
    config = tiny_config(layer_types=(FULL,), markov_rank=5, output_multiplier=0.5, final_logit_softcap=1.5)
    drafter = random_drafter(config, tiny_target(), seed=1, draft_to_target=np.arange(3, 20))
    proposal, hidden, changed = jax.jit(propose_walked, static_argnums=0)(
        drafter.graphdef, drafter.params, drafter.shared, empty_cache(config, 6), jnp.arange(4, 10), None, None
    )
    assert proposal.proposal_BxMxV is None and changed
    for row, root in enumerate(range(4, 10)):
        walked = obvious_walk(drafter, hidden[row], root, lambda _, logits_U: logits_U.argmax())
        assert proposal.token_BxM[row].tolist() == [root, *(token for token, _ in walked)]


def test_drawn_tokens_of_a_markov_head_carry_their_law_given_the_tokens_before():
    config = tiny_config(layer_types=(FULL,), markov_rank=5, output_multiplier=0.5, final_logit_softcap=1.5)
    drafter = random_drafter(config, tiny_target(), seed=1, draft_to_target=np.arange(3, 20))
    rows, temperature_B = 4000, jnp.asarray([0.7, 0.0] * 2000)
    proposal, hidden, _ = jax.jit(propose_walked, static_argnums=0)(
        drafter.graphdef, drafter.params, drafter.shared, empty_cache(config, rows), jnp.full((rows,), 9),
        temperature_B, jax.random.split(jax.random.key(0), rows),
    )  # fmt: skip
    token_BxM, law_BxMxV = np.asarray(proposal.token_BxM), np.asarray(proposal.proposal_BxMxV)
    for row in range(40):
        drafted = iter(token_BxM[row, 1:] - 3)
        walked = obvious_walk(drafter, hidden[row], 9, lambda slot, logits_U, drafted=drafted: next(drafted))
        for slot, (_, logits_U) in enumerate(walked, 1):
            law_U = np.asarray(jax.nn.softmax(logits_U / 0.7)) if row % 2 == 0 else np.eye(17)[logits_U.argmax()]
            np.testing.assert_allclose(law_BxMxV[row, slot, 3:20], law_U, atol=1e-5)
            assert law_BxMxV[row, slot].sum() == pytest.approx(1, abs=1e-5)
    # What was drawn has that law: the last slot, whose law differs from row to row.
    expected_V, found_V = law_BxMxV[::2, 3].sum(0), np.bincount(token_BxM[::2, 3], minlength=24)
    seen = expected_V > 0
    assert (found_V[~seen] == 0).all()
    off = (found_V - expected_V)[seen] / np.sqrt(expected_V[seen])
    assert np.square(off).sum() < 45  # 17 outcomes: one in ten thousand lies above
    assert np.square((found_V - law_BxMxV[::2, 1].sum(0))[seen] / np.sqrt(expected_V[seen])).sum() > 200


def test_a_markov_head_that_is_not_bound_is_refused():
    drafter = random_drafter(tiny_config(markov_rank=5), tiny_target())
    with pytest.raises(ValueError, match=r"needs shared\.markov_RxV \(bind_drafter\)"):
        nnx.merge(drafter.graphdef, drafter.params).logits(shared_weights(tiny_target()), jnp.zeros((1, 2, 16)))


def propose_walked(graphdef, params, shared, cache, root_B, temperature_B, key_B):
    """(draft, states of the block, whether the Markov head changes an argmax)."""
    module = nnx.merge(graphdef, params)
    draft = module.propose(shared, cache, root_B, temperature_B, key_B, 4)
    hidden_BxKxD = module.block_hidden(shared, cache, module.block_tokens(root_B, 4))
    alone_BxJ = shared.draft_to_target_V[(hidden_BxKxD[:, 1:] @ shared.head_DxV).argmax(-1)]
    return draft, hidden_BxKxD, (draft.token_BxM[:, 1:] != alone_BxJ).any()


def test_b27_the_scale_is_rounded_to_the_dtype_first():
    config = tiny_config(embedding_scale=7.3)
    module = DFlash(config, jnp.bfloat16, nnx.Rngs(0))
    table = jax.random.normal(jax.random.key(0), (24, 16), jnp.bfloat16)
    embedded = module.embed(SharedWeights(table, table.T), jnp.arange(24)[None])
    np.testing.assert_array_equal(embedded[0], table * jnp.bfloat16(7.3))
    assert embedded.dtype == jnp.bfloat16


USED_IDS = np.array([3, 5, 6, 11])


def pruned_drafter() -> Drafter:
    return random_drafter(tiny_config(layer_types=(FULL,)), tiny_target(), seed=2, draft_to_target=USED_IDS)


def test_b35_pruned_drafts_are_target_ids():
    drafter = pruned_drafter()
    proposal, hidden, pruned = propose_with(drafter, [5])
    whole = np.asarray(hidden) @ np.asarray(shared_weights(tiny_target()).head_DxV)
    assert pruned.shape == (1, 4, 4)
    np.testing.assert_allclose(pruned, whole[..., USED_IDS], atol=1e-5)
    expected = USED_IDS[np.argmax(whole[0, 1:][:, USED_IDS], axis=-1)]
    assert proposal.token_BxM.tolist() == [[5, *expected]] and proposal.proposal_BxMxV is None


def test_b35_a_drawn_law_is_over_the_whole_vocabulary():
    drafter = pruned_drafter()
    keys = jax.random.split(jax.random.key(1), 2)
    proposal, _, _ = propose_with(drafter, [5, 7], jnp.array([1.0, 0.0]), keys)
    law = np.asarray(proposal.proposal_BxMxV)[:, 1:]
    assert law.shape == (2, 3, 24)
    np.testing.assert_allclose(law.sum(-1), 1.0, atol=1e-6)
    outside = np.setdiff1d(np.arange(24), USED_IDS)
    assert np.all(law[..., outside] == 0) and np.all(law[0][:, USED_IDS] > 0)
    assert np.all(np.isin(proposal.token_BxM[:, 1:], USED_IDS))
    # Temperature 0: the law is the argmax itself.
    np.testing.assert_array_equal(law[1].argmax(-1), proposal.token_BxM[1, 1:])
    np.testing.assert_array_equal(law[1].max(-1), 1.0)


def test_drawn_tokens_follow_the_law_they_carry():
    drafter = pruned_drafter()
    rows = 4096
    keys = jax.random.split(jax.random.key(5), rows)
    proposal, _, _ = propose_with(drafter, np.full(rows, 5), jnp.full((rows,), 1.3), keys)
    for slot in (1, 2, 3):
        counts = np.bincount(np.asarray(proposal.token_BxM[:, slot]), minlength=24)[USED_IDS]
        expected = np.asarray(proposal.proposal_BxMxV[0, slot])[USED_IDS] * rows
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 21.1, (slot, counts, expected)  # 3 degrees of freedom, p = 1e-4


def test_a_shorter_block_is_the_block_of_that_length():
    """A run-time block below the trained size gives what a drafter sees with that many masks."""
    _, drafter, golden = load_golden("tr_qwen3_full_a")
    _, _, cache = run(drafter, golden["draft.target_hidden_concat"], golden["draft.block_ids"])
    root = int(golden["draft.block_ids"][0, 0])
    short, _, _ = propose_with(drafter, [root], block_size=2, cache=cache)
    _, logits = draft(drafter.graphdef, drafter.params, drafter.shared, cache, jnp.array([[root, 95]]))
    assert short.token_BxM.tolist() == [[root, int(logits[0, 1].argmax())]]


def test_a_drafter_may_run_in_another_dtype_than_its_target():
    """bf16 taps, table and head; float32 drafter: its own products are float32."""
    _, drafter, golden = load_golden("tr_qwen3_full_a")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drafter.shared)
    taps = jnp.asarray(golden["draft.target_hidden_concat"])
    hidden, logits, _ = run(
        dataclasses.replace(drafter, shared=low), taps.astype(jnp.bfloat16), golden["draft.block_ids"]
    )
    assert hidden.dtype == jnp.float32 and logits.dtype == jnp.float32
    assert np.abs(hidden - golden["draft.hidden"]).max() < 0.1
