"""Loss and gradient of a step that runs the target itself, on every mesh, against the slow reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import ConfigError
from dflash_jax.models.scanned import stack_layers
from dflash_jax.models.target import place, random_target
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.sharding import MeshConfig
from dflash_jax.training.anchors import sample_anchors
from dflash_jax.training.objectives import OBJECTIVES, LossConfig
from dflash_jax.training.step import Frozen, StepConfig, make_loss, put_batch
from tests.training import slow_reference, toy

KEY = jax.random.key(8)
CONFIG = toy.drafter_config(markov_rank=4)
GRAPHDEF, PARAMS = toy.drafter(CONFIG)
CAP = 6.0
DRAFT_IDS = np.sort(np.random.default_rng(5).permutation(toy.VOCAB)[:32]).astype(np.int32)
LOSS = LossConfig({name: 0.3 + 0.2 * i for i, name in enumerate(OBJECTIVES)}, "dpace", dpace_alpha=0.4, chunk_slots=48)
NUM_ANCHORS = 3


def target(mesh=None):
    return random_target(toy.target_config(final_logit_softcap=CAP), 2, mesh=mesh)


def batch():
    """Eight rows of 0 to 3 anchors, so that shards weigh differently and one device's share is empty."""
    return toy.batch(rows=8, length=12, starts=(5,) * 8, ends=(9, 7, 5, 7, 9, 9, 7, 9), features=False)


def inverse_vocabulary():
    inverse_V = np.full(toy.VOCAB, -1, np.int32)
    inverse_V[DRAFT_IDS] = np.arange(len(DRAFT_IDS))
    return inverse_V


@functools.cache
def expected():
    """(loss, denominator, {path: gradient}), the target run over one row at a time, without what pads it."""
    whole = target()
    model = nnx.merge(whole.graphdef, whole.params)
    rows = batch()
    shape = (*rows["tokens_BxS"].shape, toy.HIDDEN)
    rows["taps_BxSxTD"] = np.zeros((*shape[:2], 2 * toy.HIDDEN), np.float32)
    rows["hidden_BxSxD"] = np.zeros(shape, np.float32)
    for row, length in enumerate(rows["length_B"]):
        result = forward_rows(model, jnp.asarray(rows["tokens_BxS"][row : row + 1, :length]), CONFIG.target_layer_ids)
        rows["taps_BxSxTD"][row, :length] = result.taps_BxMxTD[0]
        rows["hidden_BxSxD"][row, :length] = result.hidden_BxMxD[0]
    fields = (jnp.asarray(rows[n]) for n in ("epoch_B", "id_B", "loss_mask_BxS", "length_B"))
    anchor_BxA, keep_BxA = map(np.asarray, sample_anchors(KEY, *fields, NUM_ANCHORS))
    anchors = {row: anchor_BxA[row][keep_BxA[row]].tolist() for row in range(8)}
    assert [len(a) for a in anchors.values()] == [3, 1, 0, 1, 3, 3, 1, 3]
    loss, denominator, gradient = slow_reference.loss_and_gradient(
        GRAPHDEF, PARAMS, shared_weights(whole, DRAFT_IDS), shared_weights(whole).head_DxV, rows, anchors,
        CONFIG.block_size, LOSS, inverse_vocabulary(), CAP,
    )  # fmt: skip
    return loss, denominator, {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(gradient)}


@pytest.mark.parametrize(
    ("mesh", "scan"),
    [
        (MeshConfig(), False),
        (MeshConfig(data=8), False),
        (MeshConfig(data=4, tensor=2), False),
        (MeshConfig(data=2, tensor=4), False),
        (MeshConfig(tensor=8), False),
        (MeshConfig(fsdp=8), False),
        (MeshConfig(data=2, fsdp=2, tensor=2), False),
        (MeshConfig(), True),
        (MeshConfig(data=2, fsdp=2, tensor=2), True),
    ],
    ids=lambda x: ("scanned" if x else "") if isinstance(x, bool) else f"{x.data}x{x.fsdp}x{x.tensor}",
)
def test_b76_loss_and_gradient_on_a_mesh_equal_the_slow_reference(mesh, scan):
    mesh = mesh.make()
    whole = target(mesh)
    held = Frozen(
        shared_weights(whole, DRAFT_IDS),
        jnp.asarray(inverse_vocabulary()),
        whole.params,
        shared_weights(whole).head_DxV,
    )
    step = StepConfig(NUM_ANCHORS, CONFIG.block_size, LOSS)
    loss = make_loss(step, GRAPHDEF, CONFIG, whole.config, whole.graphdef)

    def total(params, frozen, batch):
        sums = loss(params, KEY, frozen, batch)
        return sums.loss, sums

    with sharding.use(mesh):
        run = jax.jit(jax.value_and_grad(total, has_aux=True))
        (value, sums), gradient = run(place(PARAMS, mesh), held, put_batch(batch(), mesh))
    by_hand, denominator, by_hand_gradient = expected()
    np.testing.assert_allclose(value, by_hand, rtol=1e-5)
    np.testing.assert_allclose(sums.denominator, denominator, rtol=1e-6)
    for path, x in jax.tree_util.tree_leaves_with_path(gradient):
        reference = np.asarray(by_hand_gradient[jax.tree_util.keystr(path)])
        scale = np.abs(reference).max()
        assert scale > 0
        np.testing.assert_allclose(
            np.asarray(x) / scale, reference / scale, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        )


def test_scanning_a_target_that_is_not_run_is_refused():
    step = StepConfig(NUM_ANCHORS, CONFIG.block_size, LossConfig("hard"), scan_target=True)
    whole = target()
    loss = make_loss(step, GRAPHDEF, CONFIG, whole.config, whole.graphdef)
    cached = put_batch(toy.batch(rows=1), None)
    with pytest.raises(ConfigError, match=r"step.scan_target is True, but batches hold the target's states"):
        loss(PARAMS, KEY, Frozen(shared_weights(whole)), cached)
    step = dataclasses.replace(step, scan_target=False)
    loss = make_loss(step, GRAPHDEF, CONFIG, whole.config, whole.graphdef)
    stacked = Frozen(shared_weights(whole), target=stack_layers(whole.params, whole.graphdef, None))
    with pytest.raises(ValueError, match=r"scan_target is False, but the step's target is .*StackedTarget"):
        loss(PARAMS, KEY, stacked, put_batch(batch(), None))
