"""What a training step does, counted from shapes."""

import dataclasses

from dflash_jax.config import FULL, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.evaluation.roofline import Placement, all_reduce
from dflash_jax.evaluation.training_work import OPTIMISER_BYTES, TrainingLoad, training_work
from dflash_jax.sharding import make_mesh

V, RANK = 96, 6
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 4096,
}  # fmt: skip
TARGET = TargetConfig("llama", num_layers=2, layer_types=(FULL, FULL), **SHAPE)
DRAFTER = DrafterConfig(
    num_layers=1, layer_types=(FULL,), block_size=4, mask_token_id=1, target_layer_ids=(0, 1), num_target_layers=2,
    **SHAPE,
)  # fmt: skip
LOAD = TrainingLoad(rows=8, tokens=64, anchors=5, block=4, online=False, teacher=False, draft_vocab=40)


def added_by_a_markov_head(placement):
    headed, plain = (
        training_work(TARGET, dataclasses.replace(DRAFTER, markov_rank=rank), LOAD, placement) for rank in (RANK, 0)
    )
    return headed.flops - plain.flops, headed.bytes - plain.bytes, headed.link_bytes - plain.link_bytes


def test_a_markov_head_adds_its_bias_and_the_gradients_of_both_sides_over_the_draft_vocabulary():
    flops, read, sent = added_by_a_markov_head(Placement())
    assert flops == 3 * 2 * (8 * 5 * 3) * RANK * 40  # eight rows of five blocks with three scored slots
    assert read == OPTIMISER_BYTES * 2 * V * RANK  # the tables and their moments; of the tables some rows besides
    assert sent == 0


def test_its_gradients_are_summed_once_over_the_rows_devices():
    flops, _, sent = added_by_a_markov_head(Placement(make_mesh(data=4, tensor=2)))
    assert flops == 3 * 2 * (2 * 5 * 3) * RANK * 40 / 2
    assert sent == all_reduce(4 * 2 * V * RANK / 2, 4)
