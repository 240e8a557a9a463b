"""The roofline's arithmetic against numbers made by hand, and against published speedups."""

import dataclasses

import jax.numpy as jnp
import pytest

from dflash_jax import sharding
from dflash_jax.config import (
    CHUNKED,
    FULL,
    LINEAR,
    SLIDING,
    DeltaConfig,
    DrafterConfig,
    MoeConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.evaluation import roofline_check
from dflash_jax.evaluation.roofline import (
    CHIPS,
    Chip,
    Load,
    Placement,
    Work,
    all_reduce,
    chosen_experts,
    round_work,
    seconds,
    speedup,
    target_work,
)

D, F, V = 32, 64, 96
SHAPE = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_positions": 4096,
}  # fmt: skip
ATTENTION, MLP, NORMS = D * (4 + 2 * 2) * 8 + 4 * 8 * D, 3 * D * F, 2 * D
DENSE = TargetConfig("llama", num_layers=2, layer_types=(FULL, SLIDING), sliding_window=100, **SHAPE)
WEIGHTS = 2 * (ATTENTION + MLP + NORMS) + D + D * V  # with the head, without the table
LOAD = Load(batch=4, block=8, context=1000)


def test_time_is_the_longer_of_two_and_the_links_and_the_layers():
    chip = Chip(hbm=1.0, bandwidth=100.0, flops=1000.0, link=10.0, source="")
    assert seconds(Work(flops=500, bytes=10), chip) == 0.5
    assert seconds(Work(flops=500, bytes=100), chip) == 1.0
    assert seconds(Work(flops=500, bytes=100, link_bytes=20, layers=3), chip, layer_seconds=0.5) == 1.0 + 2.0 + 1.5
    assert speedup(4.0, plain_seconds=1.0, round_seconds=2.0) == 2.0


def test_small_rules():
    assert chosen_experts(512, 10, 1) == pytest.approx(10 / 512)
    assert chosen_experts(8, 2, 2) == pytest.approx(1 - (6 / 8) ** 2)
    assert all_reduce(100.0, 1) == 0
    assert all_reduce(100.0, 4) == 150.0


def test_a_dense_target_by_hand():
    work = target_work(DENSE, LOAD, Placement())
    tokens, context = 4 * 8, 1000 + 100  # of a full layer and of a window
    assert work.flops == 2 * tokens * WEIGHTS + 2 * tokens * 4 * context * (8 + 8)
    assert work.bytes == 2 * WEIGHTS + 4 * context * 2 * (8 + 8) * 2 + 8 * tokens * V
    assert (work.link_bytes, work.layers) == (0, 2)


def test_tensor_parallel_devices_share_evenly():
    one, two = (target_work(DENSE, LOAD, Placement(parts=parts)) for parts in (1, 2))
    assert (two.flops, two.bytes) == (one.flops / 2, one.bytes / 2)
    assert two.link_bytes == 2 * 2 * (4 * 8 * D * 2)  # two sums a layer, each sent once by a ring of two
    # Two KV heads on four devices: every device reads both.
    four = target_work(DENSE, LOAD, Placement(parts=4))
    kv = 4 * 1100 * 2 * (8 + 8) * 2
    assert four.bytes == (one.bytes - kv) / 4 + kv


def test_a_mesh_counts_as_its_shardings_cut():
    whole = target_work(DENSE, LOAD, Placement())
    rows = target_work(DENSE, LOAD, Placement(sharding.make_mesh(data=2)))
    assert rows.flops == whole.flops / 2
    assert rows.bytes == 2 * WEIGHTS + (whole.bytes - 2 * WEIGHTS) / 2
    gathered = target_work(DENSE, LOAD, Placement(sharding.make_mesh(fsdp=2)))
    assert gathered.bytes == rows.bytes  # weights are whole where they are used
    norms = 5 * D  # not cut
    heads = target_work(DENSE, LOAD, Placement(sharding.make_mesh(tensor=2)))
    assert heads.bytes == pytest.approx((whole.bytes - 2 * norms) / 2 + 2 * norms)


def test_experts_are_read_as_far_as_someone_chooses_them():
    moe = MoeConfig(num_experts=16, experts_per_token=2, intermediate_size=8, layers=(1,), shared_intermediate_size=8)
    target = dataclasses.replace(DENSE, moe=moe)
    experts, others = 16 * 3 * D * 8, D * 16 + 3 * D * 8  # router and shared expert
    work, dense = target_work(target, LOAD, Placement()), target_work(DENSE, LOAD, Placement())
    read = 2 * (others - MLP + experts * chosen_experts(16, 2, 32))
    assert work.bytes - dense.bytes == pytest.approx(read)
    assert work.flops - dense.flops == pytest.approx(2 * 32 * (others - MLP + experts * 2 / 16))
    parts = target_work(target, LOAD, Placement(sharding.make_mesh(expert=4)))
    assert parts.bytes < work.bytes


def test_states_and_chunks():
    delta = DeltaConfig(2, 4, 8, 8, 4)
    target = TargetConfig(
        "qwen3_next", num_layers=2, layer_types=(LINEAR, CHUNKED), attention_chunk=64, delta=delta, **SHAPE
    )
    near, far = (target_work(target, dataclasses.replace(LOAD, context=c), Placement()) for c in (64, 1000))
    assert near == far  # neither layer's cost grows with the context
    more = target_work(target, dataclasses.replace(LOAD, batch=5), Placement())
    state, kv, logits = 2 * 4 * (4 * 8 * 8), 64 * 2 * 16 * 2, 8 * 8 * V
    assert more.bytes - far.bytes == state + kv + logits


DRAFTER = DrafterConfig(
    num_layers=1, layer_types=(FULL,), block_size=8, mask_token_id=1, target_layer_ids=(0, 1), num_target_layers=2,
    **SHAPE,
)  # fmt: skip


def test_a_markov_head_is_read_once_a_drafted_token():
    walked, plain = (
        round_work(DENSE, dataclasses.replace(DRAFTER, markov_rank=rank), LOAD, Placement()) for rank in (6, 0)
    )
    assert walked.bytes - plain.bytes == 7 * 2 * 6 * V
    assert walked.flops - plain.flops == 2 * 32 * 6 * V


def test_a_drafter_is_added():
    work, alone = round_work(DENSE, DRAFTER, LOAD, Placement()), round_work(DENSE, None, LOAD, Placement())
    own = 2 * D * D + ATTENTION + 2 * 8 + MLP + NORMS + 2 * D + D * V  # fc, layer with q and k norms, norms, head
    assert work.bytes - alone.bytes == 2 * own + 4 * 1000 * 2 * 16 * 2 + 8 * 32 * V
    assert work.layers == 3


def test_chips_are_what_jax_calls_devices():
    assert CHIPS["tpu7x"].hbm * 2 == 192 * 2**30
    assert CHIPS["v5p"].flops == 459e12
    assert all(chip.source.startswith("https://") for chip in CHIPS.values())


def test_published_measurements():
    chosen = [m for m in roofline_check.MEASURED if m.target in ("Qwen3-8B", "Qwen3.5-397B-A17B")]
    predictions = [roofline_check.predict(m, context=1024) for m in chosen]
    alone = predictions[0]
    # 8.19 B parameters less the table of 0.62 B in bf16, and keys and values of a thousand tokens, at 8 TB/s.
    assert alone.plain_seconds == pytest.approx(((8.19e9 - 0.622e9) * 2 + 36 * 2 * 8 * 128 * 1024 * 2) / 8e12, rel=0.01)
    for prediction in predictions:
        if prediction.measured.tau is not None:  # a lower bound of the time is an upper bound of the speedup here
            assert prediction.speedup(roofline_check.Extra()) > prediction.measured.speedup
    # What plain decoding takes beyond its roofline is about the same a layer, dense on one chip or experts on eight.
    left = [x for p in predictions if (x := p.left_over()) is not None]
    assert len(left) == 2
    assert all(60e-6 < x < 80e-6 for x in left)
    # The line through one series, that of the command, foretells the others.
    extra = roofline_check.Extra(roofline_check.typical_layer_seconds(predictions), 1.83e-3, 0.14e-3)
    errors = [p.speedup(extra) / p.measured.speedup - 1 for p in predictions if p.measured.source == "paper"]
    assert len(errors) == 10
    assert max(map(abs, errors)) < 0.1
    unknown = predictions[-1]
    assert unknown.speedup(extra) is None
    assert 7 < unknown.measured.speedup * unknown.ratio(roofline_check.Extra(extra.a_layer)) < 8.5


def test_the_line_is_fitted_to_times():
    measured = roofline_check.Measured("Qwen3-8B", "b200", 1, "x", 1, 4.0, 2.0, "s")
    predictions = []
    for rows in (1, 2, 4):
        # A round of 2 s and 0.5 s a row besides 1 s: the speedup that such an engine would have.
        speed = 4.0 * 1.0 / (1.0 + 2.0 + 0.5 * rows)
        predictions.append(
            roofline_check.Prediction(dataclasses.replace(measured, rows=rows, speedup=speed), 1.0, 1.0, (1, 1))
        )
    extra = roofline_check.engine_time(predictions, 0.0)
    assert (extra.a_round, extra.a_row) == (pytest.approx(2.0), pytest.approx(0.5))
    assert "+0 %" in "\n".join(roofline_check.lines(predictions, [extra]))


def test_dtype_of_a_load():
    assert Load(1, 1, 1).dtype == jnp.bfloat16
    wide = target_work(DENSE, dataclasses.replace(LOAD, dtype=jnp.float32), Placement())
    assert wide.bytes > 1.5 * target_work(DENSE, LOAD, Placement()).bytes
