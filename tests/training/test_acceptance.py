"""Evaluation in the loop: what decoding measured, and what that is worth in time on this device."""

import json

import numpy as np
import pytest

from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import ConfigError
from dflash_jax.training import acceptance
from dflash_jax.training.dry_run import tiny_target
from dflash_jax.training.initialise import drafter_config

SECTION = {"prompts": {"instruction": 3, "json": 2}, "max_tokens": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    draft = drafter_config(target.config, num_layers=1, block_size=4, mask_token_id=2, target_layer_ids=(1, 3))
    return target, random_drafter(draft, target, seed=3)


def timed(target_s, draft_s, calls):
    def call_seconds(target, drafter, **arguments):
        calls.append(arguments)
        return target_s, draft_s

    return call_seconds


def test_the_speedup_follows_from_tau_and_the_costs_of_this_device(pair, monkeypatch):
    calls = []
    monkeypatch.setattr(acceptance, "call_seconds", timed({1: 0.010, 4: 0.012}, {4: 0.003}, calls))
    evaluate = acceptance.open_evaluation({**SECTION, "cost_repeats": 7}, pair[0])
    first, second = evaluate(*pair), evaluate(*pair)
    assert (first["target_1_ms"], first["target_block_ms"], first["draft_ms"]) == pytest.approx((10, 12, 3))
    assert first["predicted_speedup"] == pytest.approx(first["tau"] * 10 / 15)
    assert second["predicted_speedup"] == first["predicted_speedup"]
    assert len(calls) == 1  # timed once a run
    (call,) = calls
    assert (call["widths"], call["block_sizes"], call["repeats"]) == ((1, 4), (4,), 7)
    # These numbers come from rounds that really were decoded.
    assert sum(first["histogram"]) == first["rounds"] and first["histogram"][0] == 0
    emitted = sum(i * n for i, n in enumerate(first["histogram"]))
    assert first["tau"] == pytest.approx(emitted / first["rounds"])
    assert {"tau_instruction", "tau_json", "tau_per_answer", "accept_1"} <= set(first)
    json.dumps(first)


def test_the_real_calls_are_timed(pair):
    numbers = acceptance.open_evaluation({**SECTION, "cost_repeats": 2}, pair[0])(*pair)
    costs = [numbers[name] for name in ("target_1_ms", "target_block_ms", "draft_ms")]
    assert min(costs) > 0 and np.isfinite(numbers["predicted_speedup"])
    assert numbers["predicted_speedup"] == pytest.approx(numbers["tau"] * costs[0] / (costs[1] + costs[2]))


def test_without_repeats_nothing_is_timed(pair, monkeypatch):
    monkeypatch.setattr(acceptance, "call_seconds", None)
    numbers = acceptance.open_evaluation({**SECTION, "cost_repeats": 0}, pair[0])(*pair)
    assert "predicted_speedup" not in numbers and "target_1_ms" not in numbers
    with pytest.raises(ConfigError, match=r"evaluation\.cost_repeats is -1"):
        acceptance.open_evaluation({**SECTION, "cost_repeats": -1}, pair[0])


def test_a_smaller_block_is_timed_at_its_own_size(pair, monkeypatch):
    calls = []
    monkeypatch.setattr(acceptance, "call_seconds", timed({1: 1.0, 2: 1.0}, {2: 1.0}, calls))
    evaluate = acceptance.open_evaluation({**SECTION, "block_size": 2}, pair[0])
    numbers = evaluate(*pair)
    assert calls[0]["widths"] == (1, 2) and len(numbers["histogram"]) <= 3
