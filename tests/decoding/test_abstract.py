"""The abstract decode step is the real one: same shapes, dtypes and layouts as an engine's, leaf by leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import FULL, LINEAR, DeltaConfig, DrafterConfig, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.decoding.abstract import abstract_step
from dflash_jax.decoding.engine import Engine
from dflash_jax.models.target import random_target

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 128,
}  # fmt: skip
TARGET = TargetConfig(
    "qwen3_next", num_layers=2, layer_types=(LINEAR, FULL), delta=DeltaConfig(2, 4, 8, 8, 4),
    moe=MoeConfig(4, 2, 16, (1,)), **SHAPE,
)  # fmt: skip
DRAFTER = DrafterConfig(
    num_layers=1, layer_types=(FULL,), block_size=4, mask_token_id=1, target_layer_ids=(0, 1), num_target_layers=2,
    **SHAPE,
)  # fmt: skip


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "sharding", None)), tree)


@pytest.mark.parametrize(
    ("axes", "page_size", "logits_rules", "markov_rank"),
    [
        (None, None, True, 4),
        ({"data": 2, "tensor": 2, "expert": 2}, 16, False, 0),
        ({"fsdp": 2, "tensor": 4}, None, True, 4),
    ],
)
def test_same_as_an_engine(axes, page_size, logits_rules, markov_rank):
    mesh = None if axes is None else sharding.make_mesh(**axes)
    target, config = random_target(TARGET, mesh=mesh), dataclasses.replace(DRAFTER, markov_rank=markov_rank)
    drafter = random_drafter(config, target)
    engine = Engine(target, drafter, batch=4, max_length=64, page_size=page_size, logits_rules=logits_rules)
    abstract = abstract_step(
        TARGET, config, mesh, dtype=jnp.float32, batch=4, capacity=engine.capacity, page_size=page_size,
        logits_rules=logits_rules,
    )  # fmt: skip
    for name, real in (("weights", engine.weights), ("state", engine.state), ("rules", engine.rules)):
        ours = getattr(abstract, name)
        if mesh is None:  # an abstract array without a mesh has no sharding
            ours, real = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), t) for t in (ours, real))
        assert described(ours) == described(real), name
    assert abstract.config == engine.config
