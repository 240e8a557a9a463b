"""The cost curve on a tiny pair: every size is timed, and what is derived from times follows from them."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import pytest
from tiny_benchmark import pair

from dflash_jax.config import ConfigError
from dflash_jax.evaluation import cost_curve as module
from dflash_jax.evaluation.cost_curve import cost_curve, markdown, read_bandwidth, weight_bytes
from dflash_jax.models.target import random_target


def toy(dtype=jnp.float32, **changes):
    one_layer = {"num_layers": 1, "layer_types": pair()[0].config.layer_types[:1]}
    return random_target(dataclasses.replace(pair()[0].config, **one_layer, **changes), dtype=dtype)


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_bandwidth", lambda: 2e6)
        return cost_curve(*pair(), context=20, capacity=64, widths=(1, 2, 4), repeats=3)


def test_every_size_is_timed(report):
    assert list(report["target_s"]) == ["1", "2", "4"]
    assert list(report["draft_s"]) == ["2", "3", "4"]
    assert all(s > 0 for name in ("target_s", "draft_s") for s in report[name].values())


def test_what_follows_from_the_times(report):
    target_s, draft_s = report["target_s"], report["draft_s"]
    assert report["break_even_tau"].keys() == {"2", "4"}
    for k, tau in report["break_even_tau"].items():
        assert tau == pytest.approx((target_s[k] + draft_s[k]) / target_s["1"])
    assert report["read_s"] == report["weight_bytes"] / 2e6
    assert report["plain_over_read"] == pytest.approx(target_s["1"] / report["read_s"])


def test_markdown(report):
    setup = {"dtype": "float32", "target": "T", "drafter": "D", "machine": "M"}
    text = markdown(json.loads(json.dumps({"setup": setup, **report}, allow_nan=False)))
    assert "| tokens of a target call | 1 | 2 | 4 |" in text
    assert "| block size | 2 | 3 | 4 |" in text
    assert "0.0 GB/s" in text and "## float32: context 20 of 64, medians of 3" in text


def test_without_a_call_of_one_token_nothing_is_derived(monkeypatch):
    monkeypatch.setattr(module, "read_bandwidth", lambda: 2e6)
    report = cost_curve(*pair(), context=20, capacity=64, widths=(2,), repeats=1)
    assert report["break_even_tau"] == {} and report["plain_over_read"] is None


def test_weights_that_a_token_reads():
    target, _ = pair()
    config, total = target.config, weight_bytes(target)
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    norms = config.hidden_size * (2 * config.num_layers + 1)
    assert "head_DxV" not in target.params, "the head is the table, read as a whole"
    assert total == 4 * (layer * config.num_layers + norms + config.vocab_size * config.hidden_size)


def test_a_separate_head_is_read_instead_of_the_table():
    tied, own = toy(tie_embeddings=True), toy(tie_embeddings=False)
    assert weight_bytes(tied) == weight_bytes(own)


def test_bandwidth_is_that_of_large_reads():
    assert 1e8 < read_bandwidth(1 << 24) < 1e13


def test_contexts_that_leave_no_room_are_refused():
    with pytest.raises(ConfigError, match=r"context is 61, must lie in \[1, 60\]"):
        cost_curve(*pair(), context=61, capacity=64, widths=(1,), repeats=1)


def test_bfloat16_weights_are_half():
    assert 2 * weight_bytes(toy(jnp.bfloat16)) == weight_bytes(toy())
