"""What lies in memory while a run trains: one state, cut as its mesh cuts it, and nothing beside it."""

import gc

import jax
import numpy as np
import optax
import pytest

from dflash_jax.sharding import make_mesh
from dflash_jax.training.loop import train
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import init_state, state_shardings
from tests.training import toy

TAPS = (0, 1, 2, 3)
FC = (len(TAPS) * toy.HIDDEN, toy.HIDDEN)  # no other array has this shape


def alive(shape, dtype=np.float32):
    gc.collect()
    return [x for x in jax.live_arrays() if x.shape == shape and x.dtype == dtype]


def test_the_first_parameters_are_let_go_of(tmp_path):
    """Parameters, average, two moments, and the drafter that is evaluated. What it shares with the target is there
    once: the step's."""
    before, counts, shared = len(alive(FC)), [], []

    def evaluate(target, drafter):
        counts.append(len(alive(FC)) - before)
        shared.append(drafter.shared)
        return {"tau": 1.5}

    config = toy.experiment(stop_after=2, eval_every=1)
    config.drafter.target_layer_ids = TAPS
    train(config, tmp_path, target=toy.target(), data=toy.data(), evaluate=evaluate)
    assert counts[0] == 5  # before a checkpoint is written, which is made of copies
    assert shared[0].head_DxV.shape[1] < toy.VOCAB and shared[0].head_DxV is shared[1].head_DxV


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_is_never_whole_on_one_device(kind):
    """The optimiser makes its moments of parameters that lie on the mesh, and where they lie."""
    made = make_optimizer(OptimizerConfig(kind=kind))
    seen = []

    def init(params):
        seen.append((params, made.init(params)))
        return seen[-1][1]

    params = toy.drafter(toy.drafter_config())[1]
    state = init_state(params, optax.GradientTransformation(init, made.update), 0, make_mesh(2, 2, fsdp=2), ema=True)
    wanted = state_shardings(state, make_mesh(2, 2, fsdp=2))
    for ours, theirs in zip(seen[0], (wanted.params, wanted.opt_state), strict=True):
        for (path, x), layout in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
            assert x.ndim < 2 or x.sharding.is_equivalent_to(layout, x.ndim), jax.tree_util.keystr(path)
    cut = [x for x in jax.tree.leaves(seen[0]) if x.ndim and not x.sharding.is_fully_replicated]
    assert len(cut) > 20
