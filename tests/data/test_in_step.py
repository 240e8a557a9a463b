"""Processes of which none has the target whole make answers and features in step: here threads that share a target."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tiny

from dflash_jax.data.features import FeatureStore, compute_features
from dflash_jax.data.prompts import Prompt
from dflash_jax.data.regenerate import InStep, regenerate
from dflash_jax.data.responses import ResponseStore, StoreError

COUNT = 3
QUESTION, REPLY = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
PROMPTS = [Prompt(f"p{i}", (QUESTION, REPLY, {"role": "user", "content": "d" * (i + 1)}), "test") for i in range(5)]
SETTINGS = {"batch_size": 2, "max_new_tokens": 32, "temperature": 1.0, "multi_turn": True, "progress": False}


@pytest.fixture(scope="module")
def target():
    return tiny.ending_often()


def in_step(run):
    """The results of run(index, wait) by `COUNT` threads, or what they raised."""
    barrier, heard = threading.Barrier(COUNT, timeout=100), [[] for _ in range(COUNT)]

    def one(index):
        def wait(what):
            heard[index].append(what)
            barrier.wait()

        return run(index, wait)

    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        futures = [pool.submit(one, index) for index in range(COUNT)]
        concurrent.futures.wait(futures)
    assert all(found == heard[0] for found in heard)
    errors = [future.exception() for future in futures]
    return errors if any(errors) else [future.result() for future in futures]


def rows(path):
    return {response.id: response for response in ResponseStore(path).rows()}


def test_one_writes_what_all_answer(target, tmp_path):
    def answer(prompts, store, **changes):
        def run(index, wait):
            return regenerate(target, prompts, store, **SETTINGS | changes, in_step=InStep(index == 0, wait))

        return in_step(run)

    def counts(reports):
        return [(report.found, report.answered, report.tokens, report.cut) for report in reports]

    alone = regenerate(target, PROMPTS, tmp_path / "alone", **SETTINGS)
    assert alone.answered > len(PROMPTS)  # second turns too
    first = answer(PROMPTS[:2], tmp_path / "store")
    assert len(set(counts(first))) == 1 and 0 < first[0].answered < alone.answered
    file = tmp_path / "store" / "responses.jsonl"
    file.write_bytes(file.read_bytes()[:-9])  # as a kill leaves it
    again = answer(PROMPTS, tmp_path / "store")
    assert len(set(counts(again))) == 1
    assert again[0].found == first[0].answered - 1 and again[0].found + again[0].answered == alone.answered
    assert rows(tmp_path / "store") == rows(tmp_path / "alone")
    assert counts(answer(PROMPTS, tmp_path / "store")) == [(alone.answered, 0, 0, 0)] * COUNT

    refused = answer(PROMPTS, tmp_path / "store", seed=1)  # at once: none waits for another
    assert all(isinstance(error, StoreError) and "with seed = 0, now it is 1" in str(error) for error in refused)


def test_each_writes_its_share_of_the_features_that_all_compute(target, tmp_path):
    samples = tiny.samples(13, longest=100)

    def compute(samples):
        def run(index, wait):
            return compute_features(
                target, samples, tmp_path / "parts", (0, 2), tokens_per_batch=128, part=index, parts=COUNT, wait=wait,
                progress=False,
            )  # fmt: skip

        return in_step(run)

    alone = compute_features(target, samples, tmp_path / "alone", (0, 2), tokens_per_batch=128, progress=False)
    compute(samples[:4])
    compute(samples)
    store = FeatureStore(tmp_path / "parts")
    parts = [tmp_path / "parts", tmp_path / "parts" / "part-1", tmp_path / "parts" / "part-2"]
    assert all((part / "index.jsonl").stat().st_size for part in parts)
    assert len(store) == len(samples) and store.num_tokens == alone.num_tokens  # none is there twice
    for sample in samples:
        for ours, theirs in zip(store.read(sample), alone.read(sample), strict=True):
            np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), atol=0.02, rtol=2**-7)
    before = [(part / "index.jsonl").read_bytes() for part in parts]
    compute(samples)
    assert [(part / "index.jsonl").read_bytes() for part in parts] == before
