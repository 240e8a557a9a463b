"""Packed rows in the step (B72): a document among others is the document alone."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import CHUNKED, FULL, LINEAR, SLIDING, DeltaConfig, LatentConfig, MoeConfig
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.responses import Sample
from dflash_jax.models.target import place, random_target
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.sharding import make_mesh
from dflash_jax.training.anchors import sample_anchors, slot_labels, valid_anchors
from dflash_jax.training.loop import train
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.step import Frozen, StepConfig, make_loss, put_batch
from tests.training import toy

KEY = jax.random.key(5)
CONFIG = toy.drafter_config(markov_rank=4)
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
# Every kind of layer whose sight or memory a neighbour could enter.
MIXED = toy.target_config(
    num_layers=5, layer_types=(SLIDING, LINEAR, CHUNKED, LINEAR, FULL), sliding_window=5, attention_chunk=4,
    nope_layers=(4,), attention_temperature=(3.0, 0.5), attention_sinks=True,
    delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_width=4),
    moe=MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16, layers=(2,)),
)  # fmt: skip
LATENT = toy.target_config(num_layers=2, layer_types=(FULL,) * 2, latent=LatentConfig(8, 8, 4, 8))
ROW = 24
LENGTHS = (10, 14, 24, 9, 7, 5)


def documents(seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(4, toy.VOCAB, n).astype(np.int32) for n in LENGTHS]
    return [Sample(str(i), x, np.arange(len(x)) >= 2) for i, x in enumerate(tokens)]


@functools.cache
def batch_of(packing: bool) -> dict[str, np.ndarray]:
    """All documents in one batch: at most four rows packed, six alone."""
    rows = 4 if packing else len(LENGTHS)
    batches = make_iterator(documents(), batch_size=rows, seq_len=ROW, seed=1, packing=packing, num_epochs=1)
    (batch,) = batches
    return batch


def alone(batch: dict[str, np.ndarray], row_S: np.ndarray, position_S: np.ndarray) -> np.ndarray:
    """What a [B, S, ...] result of the unpacked batch says of each token of a packed row."""
    row_of = {int(i): row for row, i in enumerate(batch_of(False)["id_B"])}
    return np.stack([batch[row_of[int(i)], p] for i, p in zip(row_S, position_S, strict=True)])


@pytest.mark.parametrize("config", [MIXED, LATENT], ids=["every-layer-kind", "latent"])
def test_b72_features_of_a_packed_document_are_those_of_the_document_alone(config):
    target = random_target(config, 3)
    run = jax.jit(
        lambda *arrays: forward_rows(nnx.merge(target.graphdef, target.params), arrays[0], (0, 1), *arrays[1:])
    )
    packed, single = batch_of(True), batch_of(False)
    result = run(packed["tokens_BxS"], packed["position_BxS"], packed["document_BxS"])
    expected = run(single["tokens_BxS"])
    for name in ("taps_BxMxTD", "hidden_BxMxD"):
        ours, theirs = np.asarray(getattr(result, name)), np.asarray(getattr(expected, name))
        for row in np.flatnonzero(packed["length_B"]):
            n = packed["length_B"][row]
            reference = alone(theirs, packed["document_BxS"][row, :n], packed["position_BxS"][row, :n])
            np.testing.assert_allclose(ours[row, :n], reference, atol=1e-5 * np.abs(theirs).max(), err_msg=name)
    # Whatever a document holds, not a bit of the next one's states changes.
    row = next(i for i in range(4) if np.sum(packed["position_BxS"][i, : packed["length_B"][i]] == 0) > 1)
    first = packed["document_BxS"][row] == packed["document_BxS"][row, 0]
    changed = packed["tokens_BxS"].copy()
    changed[row, first] = 4 + (changed[row, first] + 7) % (toy.VOCAB - 4)
    other = run(changed, packed["position_BxS"], packed["document_BxS"])
    rest = ~first & (packed["document_BxS"][row] >= 0)
    np.testing.assert_array_equal(other.hidden_BxMxD[row, rest], result.hidden_BxMxD[row, rest])
    assert not np.array_equal(other.hidden_BxMxD[row, first], result.hidden_BxMxD[row, first])


@functools.cache
def loss_and_grad(num_anchors: int, mesh=None):
    """Of a step that runs the target itself."""
    target = random_target(toy.target_config(layer_types=(SLIDING,) + (FULL,) * 4, sliding_window=5), 3)
    step = StepConfig(
        num_anchors, CONFIG.block_size, LossConfig({"hard": 0.3, "forward_kl": 0.7}, gamma=2.0, chunk_slots=24)
    )
    loss = make_loss(step, GRAPHDEF, CONFIG, target.config, target.graphdef)
    frozen = Frozen(shared_weights(target), target=place(target.params, mesh))
    if mesh is not None:
        frozen = frozen.replace(shared=jax.device_put(frozen.shared, jax.sharding.NamedSharding(mesh, jax.P())))

    def total(params, batch):
        sums = loss(params, KEY, frozen, batch)
        return sums.loss, sums

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    return lambda batch: run(place(PARAMS, mesh), put_batch(batch, mesh))


def assert_same(ours, theirs):
    (_, sums), grads = ours
    (_, expected), expected_grads = theirs
    for name in ("loss", "weight", "denominator", "count_J", "correct_J", "chain", "blocks"):
        np.testing.assert_allclose(getattr(sums, name), getattr(expected, name), rtol=1e-5, err_msg=name)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-3)
        np.testing.assert_allclose(
            np.asarray(a) / scale, np.asarray(b) / scale, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        )


def test_b72_loss_and_gradient_of_packed_documents_are_those_of_the_documents_alone():
    packed, single = loss_and_grad(ROW)(batch_of(True)), loss_and_grad(ROW)(batch_of(False))
    assert single[0][1].blocks == sum(n - 3 for n in LENGTHS)  # every valid anchor is taken
    assert_same(packed, single)


def test_b76_packed_rows_on_a_mesh_are_those_of_one_device():
    assert_same(loss_and_grad(ROW, make_mesh(4, 2))(batch_of(True)), loss_and_grad(ROW)(batch_of(True)))


draw = jax.jit(sample_anchors, static_argnums=5)


def anchors(batch, num_anchors):
    given = {name: None if batch.get(name) is None else jnp.asarray(batch[name]) for name in
             ("id_B", "epoch_B", "loss_mask_BxS", "length_B", "document_BxS", "position_BxS")}  # fmt: skip
    rows = (given["epoch_B"], given["id_B"], given["loss_mask_BxS"], given["length_B"])
    return draw(KEY, *rows, num_anchors, given["document_BxS"], given["position_BxS"])


def by_document(batch, num_anchors):
    """{sample id: positions of its anchors}."""
    anchor_BxA, keep_BxA = anchors(batch, num_anchors)
    found = {i: set() for i in range(len(LENGTHS))}
    for row in range(len(anchor_BxA)):
        for p in np.asarray(anchor_BxA[row])[np.asarray(keep_BxA[row])]:
            if "id_B" in batch:
                found[int(batch["id_B"][row])].add(int(p))
            else:
                found[int(batch["document_BxS"][row, p])].add(int(batch["position_BxS"][row, p]))
    return found


def test_b69_packed_documents_have_the_first_of_their_own_anchors():
    """All of them where the row has room; else those of lowest rank, so a smaller draw alone tells which."""
    assert by_document(batch_of(True), ROW) == by_document(batch_of(False), ROW)
    few = by_document(batch_of(True), 3)
    valid_BxS = valid_anchors(*(jnp.asarray(batch_of(True)[n]) for n in ("loss_mask_BxS", "length_B", "document_BxS")))
    assert sum(map(len, few.values())) == np.minimum(valid_BxS.sum(1), 3).sum() < valid_BxS.sum()
    for i, chosen in few.items():
        if chosen:
            assert chosen == by_document(batch_of(False), len(chosen))[i]


def test_b72_no_anchor_or_label_crosses_into_the_next_document():
    """Documents A (10) and B (14), all tokens supervised: A's last token starts no block, its last three none whole."""
    position = jnp.concatenate([jnp.arange(10), jnp.arange(14)])[None]
    document = jnp.concatenate([jnp.full(10, 7), jnp.full(14, 3)])[None]
    token = jnp.arange(100, 124, dtype=jnp.int32)[None]
    mask, length = jnp.ones((1, 24), bool), jnp.asarray([24])
    assert np.flatnonzero(~valid_anchors(mask, length, document)[0]).tolist() == [9, 23]
    anchor = jnp.asarray([[7, 8, 9, 10]])
    label, counts = slot_labels(token, mask, length, anchor, jnp.ones((1, 4), bool), 4, document)
    assert counts[0].tolist() == [[True, True, False], [True, False, False], [False] * 3, [True] * 3]
    assert label[0].tolist() == [[108, 109, 0], [109, 0, 0], [0, 0, 0], [111, 112, 113]]
    zeros = jnp.zeros(1, jnp.int32)
    drawn, keep = sample_anchors(KEY, zeros, None, mask, length, 24, document, position)
    assert sorted(np.asarray(drawn)[np.asarray(keep)].tolist()) == [*range(9), *range(10, 23)]


@pytest.mark.slow
def test_b79_a_packed_run_goes_on_bit_for_bit(tmp_path):
    """Three steps and three equal six: parameters, losses and samples; the metrics say how full the rows were."""

    def run(workdir, stop_after):
        data = toy.data(packing=True)
        train(toy.experiment(stop_after=stop_after), workdir, target=toy.target(), data=data)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return data.batches.seen, {x["step"]: (x["loss"], x["real_tokens"]) for x in lines}

    straight, losses = run(tmp_path / "straight", 6)
    first, _ = run(tmp_path / "halves", 3)
    second, resumed_losses = run(tmp_path / "halves", 6)
    assert first + second == straight and resumed_losses == losses and set(losses) == {1, 2, 3, 4, 5, 6}
    assert all(0.6 < share <= 1 for _, share in losses.values())
    saved = [ocp.training.Checkpointer(tmp_path / name / "checkpoints").load_checkpointables(6)["state"]
             for name in ("straight", "halves")]  # fmt: skip
    for path, value in saved[0].items():
        np.testing.assert_array_equal(np.asarray(saved[1][path]), np.asarray(value), err_msg=path)


def test_packed_rows_need_both_arrays():
    target = toy.target()
    model = nnx.merge(target.graphdef, target.params)
    with pytest.raises(ValueError, match="need both"):
        forward_rows(model, jnp.zeros((1, 4), jnp.int32), (), jnp.zeros((1, 4), jnp.int32))
