"""Batches (B79): every sample once an epoch, positions exactly restored; and the draft vocabulary."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dflash_jax.config import ConfigError
from dflash_jax.data.batches import make_iterator, sample_ids
from dflash_jax.data.features import compute_features
from dflash_jax.data.responses import Sample, StoreError
from dflash_jax.data.vocabulary import coverage, draft_vocabulary

SETTINGS = {"batch_size": 4, "seq_len": 24, "seed": 7}


def ids_of(batches):
    return [int(i) for batch in batches for i in batch["id_B"] if i >= 0]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_b79_every_sample_once_an_epoch_in_new_orders(prefetch):
    samples = tiny.samples(22)
    batches = list(make_iterator(samples, **SETTINGS, num_epochs=3, prefetch=prefetch))
    rows = [(int(e), int(i)) for b in batches for e, i in zip(b["epoch_B"], b["id_B"], strict=True) if i >= 0]
    orders = [[i for e, i in rows if e == epoch] for epoch in range(3)]
    assert [e for e, _ in rows] == sorted(e for e, _ in rows)
    for order in orders:
        assert sorted(order) == list(range(22))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = list(make_iterator(samples, **SETTINGS, num_epochs=3, prefetch=0))
    assert ids_of(again) == [i for _, i in rows]
    assert ids_of(make_iterator(samples, **{**SETTINGS, "seed": 8}, num_epochs=1)) != orders[0]


@pytest.mark.parametrize("packing", [False, True])
def test_one_sample_a_batch_without_an_end(packing):
    batches = make_iterator(tiny.samples(2), **{**SETTINGS, "batch_size": 1}, packing=packing)
    tokens = [tuple(next(batches)["tokens_BxS"][0].tolist()) for _ in range(8)]
    assert len(set(tokens)) <= 2 and len({tuple(sorted(tokens[i : i + 2])) for i in range(0, 8, 2)}) == 1


@pytest.mark.parametrize("stop", [1, 5, 10])
def test_b79_the_position_is_restored_exactly(stop):
    """From a state taken while four batches are read ahead, in a fresh iterator, across the end of an epoch."""
    samples = tiny.samples(22)
    straight = ids_of(itertools.islice(make_iterator(samples, **SETTINGS), 20))
    first = make_iterator(samples, **SETTINGS, prefetch=4)
    before = ids_of(itertools.islice(first, stop))
    state = json.loads(json.dumps(first.get_state()))
    next(first)  # going on must not move the saved state
    second = make_iterator(samples, **SETTINGS, prefetch=4)
    second.set_state(state)
    assert before + ids_of(itertools.islice(second, 20 - stop)) == straight


def test_b79_workers_restore_their_position():
    samples = tiny.samples(22)
    settings = {**SETTINGS, "num_epochs": 2, "num_workers": 2}
    first = make_iterator(samples, **settings)
    before, state = ids_of(itertools.islice(first, 5)), first.get_state()
    rest = ids_of(first)
    second = make_iterator(samples, **settings)
    second.set_state(state)
    assert ids_of(second) == rest
    assert sorted(before + rest) == sorted([*range(22)] * 2)
    assert before + rest == ids_of(make_iterator(samples, **{**settings, "num_workers": 0}))


def test_b79_a_killed_run_goes_on_where_it_was_saved(tmp_path):
    """kill -9 some steps after the state was saved at step 10; the resumed run continues with step 10."""
    script = textwrap.dedent("""
        import json, os, pathlib, sys, time
        sys.path.insert(0, sys.argv[2])
        import tiny
        from dflash_jax.data.batches import make_iterator
        folder = pathlib.Path(sys.argv[1])
        batches = make_iterator(tiny.samples(22), batch_size=4, seq_len=24, seed=7, prefetch=4)
        log = open(folder / "ids", "w")
        for step, batch in enumerate(batches, 1):
            print(*batch["id_B"], file=log, flush=True)
            if step == 10:
                (folder / "state").write_text(json.dumps(batches.get_state()))
            if step == 13:
                print("ready", flush=True)
                time.sleep(60)
    """)
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), os.path.dirname(__file__)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    logged = [[int(i) for i in line.split()] for line in (tmp_path / "ids").read_text().splitlines()]
    resumed = make_iterator(tiny.samples(22), **SETTINGS)
    resumed.set_state(json.loads((tmp_path / "state").read_text()))
    straight = ids_of(itertools.islice(make_iterator(tiny.samples(22), **SETTINGS), 20))
    assert list(itertools.chain(*logged[:10])) + ids_of(itertools.islice(resumed, 10)) == straight
    assert len(logged) == 13


def test_hosts_share_an_epoch():
    samples = tiny.samples(22)
    shares = [
        ids_of(make_iterator(samples, **SETTINGS, num_epochs=1, process_index=i, process_count=2)) for i in (0, 1)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(22))
    assert abs(len(shares[0]) - len(shares[1])) <= 1


@pytest.mark.parametrize("packing", [False, True])
def test_any_number_of_processes_goes_on_with_the_same_rows(packing):
    samples = tiny.samples(22)

    def steps(count, state, number):
        """({samples of a step} for each step, position behind them) of so many processes."""
        settings = {**SETTINGS, "batch_size": SETTINGS["batch_size"] // count, "packing": packing}
        shares = [make_iterator(samples, **settings, process_index=i, process_count=count) for i in range(count)]
        for share in shares if state is not None else ():
            share.set_state(state)
        taken = [sorted(i for share in shares for i in sample_ids(next(share)).tolist()) for _ in range(number)]
        return taken, json.loads(json.dumps(shares[0].get_state()))

    straight, _ = steps(1, None, 12)
    first, state = steps(2, None, 3)
    then, state = steps(4, state, 4)
    last, _ = steps(1, state, 5)
    assert first + then + last == straight


def test_rows_are_padded_cropped_and_masked():
    samples = tiny.samples(22, longest=60)
    assert any(s.length > 24 for s in samples) and any(s.length < 24 for s in samples)
    for batch in make_iterator(samples, **SETTINGS, num_epochs=1):
        assert batch["tokens_BxS"].shape == batch["loss_mask_BxS"].shape == (4, 24)
        assert batch["tokens_BxS"].dtype == batch["length_B"].dtype == np.int32 and batch["loss_mask_BxS"].dtype == bool
        for token_S, mask_S, length, i in zip(
            batch["tokens_BxS"], batch["loss_mask_BxS"], batch["length_B"], batch["id_B"], strict=True
        ):
            if i < 0:
                assert length == 0 and not mask_S.any()
                continue
            kept = min(samples[i].length, 24)
            assert length == kept
            np.testing.assert_array_equal(token_S[:kept], samples[i].token_S[:kept])
            np.testing.assert_array_equal(mask_S[:kept], samples[i].loss_mask_S[:kept])
            assert not token_S[kept:].any() and not mask_S[kept:].any()


def test_features_travel_with_their_rows(tmp_path):
    samples = tiny.samples(6, longest=40)
    store = compute_features(tiny.target(), samples, tmp_path, (1,))
    for batch in make_iterator(samples, store, **{**SETTINGS, "batch_size": 3}, num_epochs=1):
        assert batch["taps_BxSxTD"].shape == (3, 24, 16) and batch["taps_BxSxTD"].dtype == jnp.bfloat16
        for row, i in enumerate(batch["id_B"]):
            taps, hidden = store.read(samples[i])
            n = batch["length_B"][row]
            np.testing.assert_array_equal(batch["taps_BxSxTD"][row, :n], taps[:n])
            np.testing.assert_array_equal(batch["hidden_BxSxD"][row, :n], hidden[:n])
            assert not batch["taps_BxSxTD"][row, n:].any() and not batch["hidden_BxSxD"][row, n:].any()
    with pytest.raises(StoreError, match="has nothing for sample"):  # at once, not when its turn comes
        make_iterator([*samples, *tiny.samples(1, seed=3)], store, **SETTINGS)


def test_bad_requests_are_named():
    with pytest.raises(ConfigError, match="there are no samples"):
        make_iterator([], **SETTINGS)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        make_iterator(tiny.samples(3), **{**SETTINGS, "batch_size": 0})
    with pytest.raises(ConfigError, match=r"process_index is 2, must lie in \[0, 2\)"):
        make_iterator(tiny.samples(3), **SETTINGS, process_index=2, process_count=2)


# Draft vocabulary ------------------------------------------------------------------------------------------


def counted(*ids):
    """A sample whose supervised tokens are these."""
    token_S = np.asarray([9, 9, 9, *ids], np.int32)
    return Sample("v", token_S, np.arange(len(token_S)) >= 3)


def test_draft_vocabulary_keeps_the_frequent_and_fills_with_low_ids():
    samples = [counted(7, 7, 7, 5, 5, 12, 2)]
    vocabulary = draft_vocabulary(samples, 6, 20)
    assert vocabulary.draft_to_target_U.tolist() == [0, 1, 2, 5, 7, 12]  # 9 is prompt only and counts for nothing
    assert vocabulary.draft_to_target_U.dtype == np.int32
    assert vocabulary.seen == 4 and vocabulary.coverage == 1.0
    small = draft_vocabulary(samples, 2, 20)
    assert small.draft_to_target_U.tolist() == [5, 7] and small.coverage == pytest.approx(5 / 7)
    kept = draft_vocabulary(samples, 2, 20, keep=(15,))
    assert kept.draft_to_target_U.tolist() == [7, 15] and kept.coverage == pytest.approx(3 / 7)
    assert coverage([counted(7, 3)], small.draft_to_target_U, 20) == 0.5


def test_draft_vocabulary_errors_are_named():
    with pytest.raises(ConfigError, match="size is 21, must lie in"):
        draft_vocabulary([counted(1)], 21, 20)
    with pytest.raises(ConfigError, match="keep holds"):
        draft_vocabulary([counted(1)], 1, 20, keep=(1, 2))
    with pytest.raises(ConfigError, match="holds id 25, the vocabulary has 20"):
        draft_vocabulary([counted(25)], 4, 20)
