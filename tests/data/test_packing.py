"""Packed rows (B72, B79): whole samples, each once an epoch, in rows that any process finds again."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.config import ConfigError
from dflash_jax.data.batches import make_iterator, sample_ids
from dflash_jax.data.features import compute_features
from dflash_jax.data.packing import PackedRows, pack, sample_order

SETTINGS = {"batch_size": 2, "seq_len": 48, "seed": 7, "packing": True}
COUNT = 31


def rows_of(batches):
    """[(epoch, (sample ids of the row))] of the rows that hold anything."""
    found = []
    for batch in batches:
        for epoch, length, document_S, position_S in zip(
            batch["epoch_B"], batch["length_B"], batch["document_BxS"], batch["position_BxS"], strict=True
        ):
            if length:
                starts = (document_S >= 0) & (position_S == 0)
                found.append((int(epoch), tuple(document_S[starts].tolist())))
    return found


@pytest.fixture(scope="module")
def samples():
    return tiny.samples(COUNT)


@pytest.fixture(scope="module")
def straight(samples):
    return rows_of(itertools.islice(make_iterator(samples, **SETTINGS), 40))


@settings(deadline=None, max_examples=80)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), window=st.integers(1, 8))
def test_every_item_is_packed_once_and_fits(lengths, window):
    rows = pack(lengths, 20, window)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 20 for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # As long as no row was closed, an item opens a row only where none had room for it.
    if len(rows) <= window:
        for number, row in enumerate(rows):
            for earlier in rows[:number]:
                taken = sum(lengths[i] for i in earlier if i < row[0])
                assert taken + lengths[row[0]] > 20


def test_the_fit_is_best_and_the_window_closes_the_fullest_row():
    assert pack([6, 7, 4, 3], 10) == [[0, 2], [1, 3]]  # 4 goes where it leaves nothing
    assert pack([9, 5, 6, 1], 10, window=1) == [[0], [1, 3], [2]]
    assert pack([9, 5, 6, 1], 10) == [[0, 3], [1], [2]]
    with pytest.raises(ConfigError, match=r"item 1 has length 11, must lie in \[1, 10\]"):
        pack([3, 11], 10)
    with pytest.raises(ConfigError, match="window is 0"):
        pack([3], 10, 0)


def test_packing_saves_padding(samples):
    lengths = [s.length for s in samples]
    plan = PackedRows(lengths, sample_order(COUNT, 0), 48).rows_of(0)
    assert sum(lengths) / (48 * len(plan)) > 0.85 > 0.6 > sum(lengths) / (48 * COUNT)


def test_b72_rows_hold_whole_samples_with_positions_of_their_own(samples):
    seen = []
    for batch in make_iterator(samples, **SETTINGS, num_epochs=1):
        assert "id_B" not in batch
        assert batch["document_BxS"].dtype == batch["position_BxS"].dtype == np.int32
        for row in range(2):
            end = 0
            length, document_S = batch["length_B"][row], batch["document_BxS"][row]
            while end < length:
                i = document_S[end]
                kept = slice(end, end + samples[i].length)
                np.testing.assert_array_equal(batch["tokens_BxS"][row, kept], samples[i].token_S)
                np.testing.assert_array_equal(batch["loss_mask_BxS"][row, kept], samples[i].loss_mask_S)
                np.testing.assert_array_equal(document_S[kept], i)
                np.testing.assert_array_equal(batch["position_BxS"][row, kept], np.arange(samples[i].length))
                end = kept.stop
                seen.append(i)
            assert end == length <= 48
            assert (document_S[end:] == -1).all() and not batch["loss_mask_BxS"][row, end:].any()
        assert sample_ids(batch).tolist() == [i for row in rows_of([batch]) for i in row[1]]
    assert sorted(seen) == list(range(COUNT))


def test_samples_longer_than_a_row_keep_their_head():
    long = tiny.samples(5, longest=90)
    assert max(s.length for s in long) > 48
    for batch in make_iterator(long, **SETTINGS, num_epochs=1):
        for row in range(2):
            for i in set(batch["document_BxS"][row].tolist()) - {-1}:
                own = batch["document_BxS"][row] == i
                np.testing.assert_array_equal(batch["tokens_BxS"][row][own], long[i].token_S[:48])


def test_b79_every_sample_once_an_epoch_and_no_row_of_two(straight):
    for epoch in range(3):
        ids = [i for e, row in straight if e == epoch for i in row]
        assert sorted(ids) == list(range(COUNT))
    assert straight[0][1] != next(row for e, row in straight if e == 1)
    # The first of each epoch's rows begins with the sample that comes first unpacked.
    order = sample_order(COUNT, SETTINGS["seed"])
    for epoch in range(3):
        assert next(row for e, row in straight if e == epoch)[0] == order[epoch * COUNT]


@pytest.mark.parametrize("stop", [1, 9, 21])
def test_b79_the_position_is_restored_exactly_through_packing(samples, straight, stop):
    first = make_iterator(samples, **SETTINGS, prefetch=4)
    before = rows_of(itertools.islice(first, stop))
    state = json.loads(json.dumps(first.get_state()))
    expected = next(first)
    second = make_iterator(samples, **SETTINGS, prefetch=4)
    second.set_state(state)
    again = next(second)
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert before + rows_of([again]) + rows_of(itertools.islice(second, 39 - stop)) == straight


def test_b79_two_processes_share_each_epoch_of_packed_rows(samples, straight):
    shares = [
        rows_of(itertools.islice(make_iterator(samples, **SETTINGS, process_index=i, process_count=2), 20))
        for i in (0, 1)
    ]
    interleaved = [row for pair in zip(*shares, strict=True) for row in pair]
    assert interleaved == straight[: len(interleaved)]
    for epoch in (0, 1):
        ids = [i for share in shares for e, row in share if e == epoch for i in row]
        assert sorted(ids) == list(range(COUNT))
    resumed = make_iterator(samples, **SETTINGS, process_index=1, process_count=2)
    next(resumed)
    state = resumed.get_state()
    other = make_iterator(samples, **SETTINGS, process_index=1, process_count=2)
    other.set_state(state)
    assert rows_of(itertools.islice(other, 19)) == shares[1][2:]


def test_finite_data_end_with_empty_rows(samples):
    batches = list(make_iterator(samples, **{**SETTINGS, "batch_size": 4}, num_epochs=2))
    plan = PackedRows([s.length for s in samples], sample_order(COUNT, 7, 2), 48, 2)
    assert len(plan) == len(plan.rows_of(0)) + len(plan.rows_of(1)) == len(rows_of(batches))
    assert len(batches) == -(-len(plan) // 4)
    assert sorted(np.concatenate([sample_ids(b) for b in batches]).tolist()) == sorted([*range(COUNT)] * 2)
    last = batches[-1]
    for row in np.flatnonzero(last["length_B"] == 0):
        assert (last["document_BxS"][row] == -1).all() and not last["loss_mask_BxS"][row].any()


def test_b79_a_killed_packed_run_with_workers_goes_on_where_it_was_saved(samples, straight, tmp_path):
    """kill -9 three batches behind the saved state, with packing, two workers and four batches read ahead."""
    script = textwrap.dedent("""
        import json, os, pathlib, sys, time
        sys.path.insert(0, sys.argv[2])
        import tiny
        from dflash_jax.data.batches import make_iterator, sample_ids
        if __name__ == "__main__":
            folder = pathlib.Path(sys.argv[1])
            settings = json.loads(sys.argv[3])
            batches = make_iterator(tiny.samples(31), **settings, prefetch=4, num_workers=2)
            log = open(folder / "ids", "w")
            for step, batch in enumerate(batches, 1):
                print(*sample_ids(batch), file=log, flush=True)
                if step == 10:
                    (folder / "state").write_text(json.dumps(batches.get_state()))
                if step == 13:
                    print("ready", flush=True)
                    time.sleep(60)
    """)
    (tmp_path / "run.py").write_text(script)  # workers are spawned: they import the main module
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path), os.path.dirname(__file__), json.dumps(SETTINGS)],
        stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    try:
        assert run.stdout.readline() == "ready\n"
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    logged = [[int(i) for i in line.split()] for line in (tmp_path / "ids").read_text().splitlines()]
    assert len(logged) == 13
    resumed = make_iterator(samples, **SETTINGS, prefetch=4, num_workers=2)
    resumed.set_state(json.loads((tmp_path / "state").read_text()))
    rest = rows_of(itertools.islice(resumed, 10))
    everything = list(itertools.chain(*logged[:10])) + [i for _, row in rest for i in row]
    assert everything == [i for _, row in straight[: 2 * 20] for i in row]


def test_features_travel_with_their_samples(tmp_path):
    some = tiny.samples(7, longest=30)
    store = compute_features(tiny.target(), some, tmp_path, (1,))
    for batch in make_iterator(some, store, **SETTINGS, num_epochs=1):
        for row in range(2):
            document_S = batch["document_BxS"][row]
            for i in set(document_S.tolist()) - {-1}:
                taps, hidden = store.read(some[i])
                np.testing.assert_array_equal(batch["taps_BxSxTD"][row][document_S == i], taps)
                np.testing.assert_array_equal(batch["hidden_BxSxD"][row][document_S == i], hidden)
            assert not batch["taps_BxSxTD"][row][document_S == -1].any()
