"""Cached features: equal to the target's, never stale, resumable, growing."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dflash_jax.config import ConfigError
from dflash_jax.data import features
from dflash_jax.data.features import FeatureStore, compute_features, feature_fingerprint, padded_length
from dflash_jax.data.responses import Sample, StoreError
from dflash_jax.models.whole_rows import forward_rows

TAPS = (0, 2)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def samples():
    return tiny.samples(13, longest=100)


@pytest.fixture(scope="module")
def store(target, samples, tmp_path_factory):
    return compute_features(target, samples, tmp_path_factory.mktemp("features"), TAPS, tokens_per_batch=256)


def test_features_are_the_targets(target, samples, store):
    """Each sample alone, unpadded, in float32, against what batches and buckets wrote in bfloat16."""
    assert len(store) == 13 and store.num_tokens == sum(s.length for s in samples)
    reopened = FeatureStore(store.path, feature_fingerprint(target, TAPS))
    forward = jax.jit(lambda params, token: forward_rows(nnx.merge(target.graphdef, params), token, TAPS))
    shortest, longest = min(samples, key=lambda s: s.length), max(samples, key=lambda s: s.length)
    for sample in (shortest, longest):
        expected = forward(target.params, jnp.asarray(sample.token_S)[None])
        taps_SxTD, hidden_SxD = reopened.read(sample)
        assert taps_SxTD.dtype == hidden_SxD.dtype == jnp.bfloat16
        assert taps_SxTD.shape == (sample.length, 2 * 16) and hidden_SxD.shape == (sample.length, 16)
        scale = float(jnp.abs(expected.taps_BxMxTD).max())
        np.testing.assert_allclose(
            taps_SxTD.astype(np.float32), expected.taps_BxMxTD[0], atol=2**-8 * scale, rtol=2**-8
        )
        np.testing.assert_allclose(hidden_SxD.astype(np.float32), expected.hidden_BxMxD[0], atol=0.02, rtol=2**-8)


def test_every_sample_finds_its_own_rows(samples, store):
    """Tap 0 of the first token depends on that token alone; rows of other samples would differ elsewhere too."""
    read = {s.id: store.read(s)[1].astype(np.float32) for s in samples}
    for a in samples:
        for b in samples:
            if a.id != b.id:
                n = min(a.length, b.length)
                assert not np.allclose(read[a.id][:n], read[b.id][:n], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "field"), [({"taps": (0, 1)}, "tap_ids"), ({"seed": 1}, "target"), ({"weights": True}, "weights")]
)
def test_stale_features_are_refused_by_name(target, samples, store, change, field):
    other = tiny.target(change.get("seed", 0))
    if "weights" in change:
        other.params = jax.tree.map(lambda x: 1.01 * x, other.params)
    with pytest.raises(StoreError, match=f"was made with {field} = "):
        compute_features(other, samples, store.path, change.get("taps", TAPS))


def test_a_sample_that_is_not_there_is_named(store):
    stranger = tiny.samples(1, seed=99)[0]
    assert stranger not in store
    with pytest.raises(StoreError, match="has nothing for sample s0"):
        store.read(stranger)


def test_features_resume_and_grow(target, samples, store, tmp_path, monkeypatch):
    """Killed between the arrays and the index, or inside a line of it, a store computes only what is missing."""
    compute_features(target, samples[:8], tmp_path, TAPS, tokens_per_batch=256)
    index = tmp_path / "index.jsonl"
    whole = index.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) > 1
    index.write_bytes(b"".join(lines[:-1]) + lines[-1][:7])
    left = FeatureStore(tmp_path)
    done = [s for s in samples if s in left]
    assert 0 < len(done) < 8

    computed = []
    true_append = FeatureStore.append

    def spy(self, batch, taps, hidden):
        computed.extend(s.id for s in batch)
        true_append(self, batch, taps, hidden)

    monkeypatch.setattr(FeatureStore, "append", spy)
    grown = compute_features(target, samples, tmp_path, TAPS, tokens_per_batch=256)
    assert sorted(computed) == sorted(s.id for s in samples if s not in done)
    for s in samples:
        for a, b in zip(grown.read(s), store.read(s), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.02, rtol=0.01)
    computed.clear()
    compute_features(target, samples, tmp_path, TAPS)
    assert not computed


def test_processes_write_parts_at_the_same_time_and_read_all_of_them(target, samples, store, tmp_path):
    """Three in parallel, none of which sees the others' samples; then one alone finds nothing left to do."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(compute_features, target, samples, tmp_path, TAPS, tokens_per_batch=256, part=i, parts=3)
            for i in range(3)
        ]
        written = [future.result()._own for future in futures]
    assert sum(len(part.where) for part in written) == 13 and all(part.where for part in written)
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} >= {"part-1", "part-2", "taps", "hidden"}
    whole = FeatureStore(tmp_path, feature_fingerprint(target, TAPS))
    assert len(whole) == 13 and whole.num_tokens == store.num_tokens
    for s in samples:
        for a, b in zip(whole.read(s), store.read(s), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.02, rtol=0.01)
    more = [*samples, *tiny.samples(5, longest=30, seed=4)]
    for parts in (2, 1):  # with another number of processes only what is new is computed
        for i in range(parts):
            compute_features(target, more, tmp_path, TAPS, part=i, parts=parts)
        assert len(FeatureStore(tmp_path)) == 18
    assert FeatureStore(tmp_path).num_tokens == sum(s.length for s in more)


def test_another_rendering_is_another_sample(target, samples, store):
    """Features are found by the tokens themselves: a changed template can not be served old states."""
    changed = features.Sample("s0", np.concatenate([[9], samples[0].token_S]), np.append(False, samples[0].loss_mask_S))
    assert samples[0] in store and changed not in store


def test_two_writers_are_refused_and_readers_are_not(target, samples, store):
    import fcntl

    with open(store.path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = compute_features(target, samples, store.path, TAPS)  # all there: nothing to write
        assert all(sample in found for sample in samples)
        with pytest.raises(StoreError, match="is being written by another process"):
            compute_features(target, [*samples, *tiny.samples(1, longest=30, seed=9)], store.path, TAPS)


def test_bad_requests_are_named(target, samples, tmp_path):
    for taps in ((), (2, 0), (0, 3), (-1, 1)):
        with pytest.raises(ConfigError, match="tap_ids is"):
            compute_features(target, samples, tmp_path, taps)
    with pytest.raises(ConfigError, match=r"part is 2, must lie in \[0, 2\)"):
        compute_features(target, samples, tmp_path, TAPS, part=2, parts=2)
    with pytest.raises(ConfigError, match="s0 has 300 tokens, the target's context is 256"):
        long = features.Sample("s0", np.zeros(300, np.int32), np.ones(300, bool))
        compute_features(target, [long], tmp_path, TAPS)
    with pytest.raises(StoreError, match="is no feature store"):
        FeatureStore(tmp_path / "nothing")


def test_lengths_come_in_few_buckets():
    assert [padded_length(n) for n in (1, 64, 65, 300, 1024, 1025, 2049)] == [64, 64, 128, 384, 1024, 2048, 3072]


@pytest.fixture
def of_one_sample(tmp_path):
    sample = Sample("a", np.arange(5, dtype=np.int32), np.ones(5, bool))
    store = FeatureStore(tmp_path / "features-0-1", {"hidden_size": 2, "tap_ids": [0, 1]}, create=True)
    store.append([sample], [np.ones((5, 4), np.float32)], [np.ones((5, 2), np.float32)])
    return store.path, sample


@pytest.mark.parametrize("damage", ["lost", "cut", "empty", "no array", "cut array", "other array"])
def test_lost_or_damaged_states_are_an_error_and_not_zeros(of_one_sample, damage):
    path, sample = of_one_sample
    [chunk] = (file for file in (path / "taps" / "c").rglob("*") if file.is_file())
    array = path / "taps" / "zarr.json"
    {
        "lost": lambda: chunk.unlink(),
        "cut": lambda: chunk.write_bytes(chunk.read_bytes()[:100]),
        "empty": lambda: chunk.write_bytes(b""),
        "no array": lambda: array.unlink(),
        "cut array": lambda: array.write_text("{"),
        "other array": lambda: array.write_text(array.read_text().replace("bfloat16", "float32")),
    }[damage]()
    with pytest.raises(StoreError, match=rf"{path}: the states of sample a are lost or damaged .*; delete the folder"):
        FeatureStore(path).read(sample)


@pytest.mark.parametrize(
    "line", ["garbage", "[]", '{"samples": 3}', '{"samples": [["a"]]}', '{"samples": [["a", "x"]]}']
)
def test_a_damaged_index_is_named_by_its_line(of_one_sample, line):
    path, _ = of_one_sample
    with (path / "index.jsonl").open("a") as index:
        index.write(f"{line}\n")
    with pytest.raises(StoreError, match=r"index\.jsonl, line 2: no samples .*; delete the folder"):
        FeatureStore(path)


@pytest.mark.parametrize("text", ["{", "", "[]", '{"format": 1}', '{"format": 1, "fingerprint": {"tap_ids": [1]}}'])
def test_a_damaged_manifest_is_named(of_one_sample, text):
    path, _ = of_one_sample
    (path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json is damaged.*; delete the folder"):
        FeatureStore(path)
