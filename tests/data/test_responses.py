"""The store of answers: killed writers, doubled rows, other settings; and regeneration into it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tiny

from dflash_jax.config import ConfigError
from dflash_jax.data import regenerate as regeneration
from dflash_jax.data.fingerprints import fingerprint, weights_digest
from dflash_jax.data.prompts import Prompt
from dflash_jax.data.regenerate import regenerate, store_natural
from dflash_jax.data.responses import (
    Response,
    ResponseStore,
    StoreError,
    read_samples,
    sample_of,
)

MADE_BY = {"target": "t", "tokenizer": "k", "temperature": 0.0}


def response(i, length=3):
    return Response(f"r{i}", "test", (1, 2, 3), tuple(range(4, 4 + length)), "stop", i, "greedy")


def test_rows_come_back_as_they_were(tmp_path):
    rows = [response(0), Response("r1", "test", (1, 2, 3, 4), (9,), "length", 7, "natural", ((1, 3),))]
    with ResponseStore(tmp_path / "store", MADE_BY) as store:
        store.append(rows)
    assert list(ResponseStore(tmp_path / "store").rows()) == rows


def test_an_incomplete_last_line_is_dropped_and_written_anew(tmp_path):
    with ResponseStore(tmp_path, MADE_BY) as store:
        store.append(response(i) for i in range(3))
    file = tmp_path / "responses.jsonl"
    whole = file.read_bytes()
    for cut in (1, 10, len(whole.splitlines()[-1])):  # the newline alone missing, half a line, all but nothing
        file.write_bytes(whole[:-cut])
        assert [r.id for r in ResponseStore(tmp_path).rows()] == ["r0", "r1"]
        with ResponseStore(tmp_path, MADE_BY) as store:
            assert len(store) == 2 and "r2" not in store
            store.append([response(2)])
        assert file.read_bytes() == whole


def test_a_killed_writer_loses_and_doubles_nothing(tmp_path):
    script = textwrap.dedent("""
        import sys
        from dflash_jax.data.responses import Response, ResponseStore
        with ResponseStore(sys.argv[1], {"target": "t"}) as store:
            i = len(store)
            while True:
                store.append([Response(f"r{i}", "test", (1,), tuple(range(2, 900)), "stop", 0, "greedy")])
                i += 1
    """)
    seen = 0
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env={**os.environ})
        deadline = time.monotonic() + 60
        file = tmp_path / "responses.jsonl"
        start = file.stat().st_size if file.exists() else 0
        while time.monotonic() < deadline and (not file.exists() or file.stat().st_size < start + 200_000):
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        ids = [r.id for r in ResponseStore(tmp_path).rows()]
        assert ids == [f"r{i}" for i in range(len(ids))] and len(ids) > seen
        seen = len(ids)


def test_two_writers_are_refused(tmp_path):
    with (
        ResponseStore(tmp_path, MADE_BY),
        pytest.raises(StoreError, match="is being written by another process"),
    ):
        ResponseStore(tmp_path, MADE_BY)
    ResponseStore(tmp_path, MADE_BY).close()


@pytest.mark.parametrize("field", sorted(MADE_BY))
def test_another_fingerprint_is_refused_by_field(tmp_path, field):
    ResponseStore(tmp_path, MADE_BY).close()
    with pytest.raises(StoreError, match=f"was made with {field} = "):
        ResponseStore(tmp_path, {**MADE_BY, field: "other"})


def test_misuse_is_named(tmp_path):
    with pytest.raises(StoreError, match="is no response store"):
        ResponseStore(tmp_path)
    with ResponseStore(tmp_path, MADE_BY) as store:
        store.append([response(0)])
        with pytest.raises(StoreError, match="already has response r0"):
            store.append([response(0)])
    with pytest.raises(StoreError, match="open for reading"):
        ResponseStore(tmp_path).append([response(1)])
    with pytest.raises(StoreError, match="mode is 'guess'"):
        Response("r", "s", (1,), (2,), "stop", 0, "guess")
    with open(tmp_path / "responses.jsonl", "r+b") as f:
        f.write(b"#")  # a damaged line inside the file is no killed writer: it is an error
    with pytest.raises(StoreError, match="line 1: no response"):
        ResponseStore(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt_ids": None}, "not iterable"),
        ({"answer_ids": [5, "x"]}, "response r1: answer_ids holds 'x'"),
        ({"answer_ids": [5, 1.5]}, "answer_ids holds 1.5"),
        ({"answer_ids": [True]}, "answer_ids holds True"),
        ({"answer_ids": [5, 48]}, r"answer_ids holds 48, token ids of the target lie in \[0, 48\)"),
        ({"prompt_ids": [-1, 5]}, "response r1: prompt_ids holds -1"),
        ({"answer_ids": []}, "at least one token"),
        ({"mode": "guess"}, "mode is 'guess'"),
        ({"source": 3}, "source is 3, must be a text"),
        ({"earlier_spans": [[0, 9]]}, "span"),
        ({"earlier_spans": 3}, "not iterable"),
        ({"beams": 2}, "beams"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, change, why):
    with ResponseStore(tmp_path, MADE_BY) as store:
        store.append(response(i) for i in range(3))
    assert len(read_samples(ResponseStore(tmp_path), vocab_size=48)) == 3
    file = tmp_path / "responses.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    file.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(StoreError, match=rf"responses\.jsonl, line 2: no response .*{why}.*; take this line out"):
        read_samples(ResponseStore(tmp_path), vocab_size=48)


def test_a_line_without_its_fields_is_named(tmp_path):
    ResponseStore(tmp_path, MADE_BY).close()
    file = tmp_path / "responses.jsonl"
    for line, why in (('{"id":"x","foo":1}', "'prompt_ids' is missing"), ('{"id":3}', "id is 3"), ("3", "subscript")):
        file.write_text(f"{line}\n")
        with pytest.raises(StoreError, match=rf"responses\.jsonl, line 1: no response \(.*{why}"):
            read_samples(ResponseStore(tmp_path))


@pytest.mark.parametrize("text", ["{", "", "3", '{"format": 1}', '{"format": 1, "fingerprint": 3}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    ResponseStore(tmp_path, MADE_BY).close()
    (tmp_path / "manifest.json").write_text(text)
    for fingerprint_ in (None, MADE_BY):
        with pytest.raises(StoreError, match=r"manifest\.json is damaged .*; move the folder away"):
            ResponseStore(tmp_path, fingerprint_)


def test_samples_mask_the_prompt_and_drop_what_can_not_be_trained_on(tmp_path):
    with ResponseStore(tmp_path / "a", MADE_BY) as store:
        store.append([response(0), response(1, length=1), response(2, length=5)])
    samples = read_samples(ResponseStore(tmp_path / "a"), max_length=5)
    assert [s.id for s in samples] == ["r0", "r2"]  # one supervised token alone gives no block
    for s in samples:
        np.testing.assert_array_equal(s.loss_mask_S, [False, False, False, True, True])
    store = ResponseStore(tmp_path / "a")
    assert [s.id for s in read_samples(store, max_length=5, prompts=[{"r2", "r9"}])] == ["r2"]
    with ResponseStore(tmp_path / "b", {**MADE_BY, "temperature": 1.0}) as other:
        other.append([response(0), dataclasses.replace(response(2, length=5), answer_ids=(9, 9, 9))])
    both = read_samples([ResponseStore(tmp_path / "a"), ResponseStore(tmp_path / "b")])
    # r0 is the same answer in both and counts once; r2 was answered otherwise, and both answers are samples.
    assert [s.id for s in both] == ["r0", "r2", "r2"]
    assert both[2].token_S.tolist()[-2:] == [9, 9]
    ResponseStore(tmp_path / "c", {**MADE_BY, "tokenizer": "other"}).close()
    with pytest.raises(StoreError, match="different tokenizers"):
        read_samples([ResponseStore(tmp_path / "a"), ResponseStore(tmp_path / "c")])


# Regeneration ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny.target()


PROMPTS = [Prompt(f"p{i}", ({"role": "user", "content": "ab" * (i % 4 + 1)},), "test") for i in range(9)]
SETTINGS = {"batch_size": 4, "max_new_tokens": 12, "progress": False}


@pytest.fixture(scope="module")
def straight(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("straight")
    report = regenerate(target, [*PROMPTS, PROMPTS[3]], path, **SETTINGS)
    assert report.answered == 9 and report.tokens > 0
    return {r.id: r for r in ResponseStore(path).rows()}


def test_regenerated_answers_are_the_targets_own(target, straight):
    from dflash_jax.decoding.generate import generate

    prompts = [list(straight[p.id].prompt_ids) for p in PROMPTS]
    for p, result in zip(PROMPTS, generate(target, None, prompts, max_tokens=12), strict=True):
        row = straight[p.id]
        assert row.prompt_ids == tuple(target.tokenizer.apply_chat_template(p.messages))
        assert row.answer_ids == tuple(result.token_ids)
        assert row.finish_reason == result.finish_reason and row.mode == "greedy"
        assert (row.answer_ids[-1] == tiny.END) == (row.finish_reason == "stop")
        sample = sample_of(row)
        assert sample.loss_mask_S.sum() == len(row.answer_ids)


def test_interrupted_regeneration_goes_on_where_it_was(target, straight, tmp_path, monkeypatch):
    true_answers = regeneration.answers
    asked = []

    def interrupted(target, drafter, requests, batch, max_length):
        asked.append(len(requests))
        for number, answer in enumerate(true_answers(target, drafter, requests, batch, max_length)):
            if number == 4 and len(asked) == 1:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(regeneration, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, PROMPTS, tmp_path, **SETTINGS)
    assert len(ResponseStore(tmp_path)) == 4
    report = regenerate(target, PROMPTS, tmp_path, **SETTINGS)
    assert (report.found, report.answered, asked) == (4, 5, [9, 5])
    assert {r.id: r for r in ResponseStore(tmp_path).rows()} == straight
    assert regenerate(target, PROMPTS, tmp_path, **SETTINGS).answered == 0
    with pytest.raises(StoreError, match="max_new_tokens = 12, now it is 13"):
        regenerate(target, PROMPTS, tmp_path, **{**SETTINGS, "max_new_tokens": 13})


def test_sampled_answers_depend_on_the_prompt_and_the_seed_alone(target, tmp_path):
    settings = {**SETTINGS, "temperature": 0.9, "seed": 5}
    regenerate(target, PROMPTS[:4], tmp_path / "some", **settings)
    regenerate(target, PROMPTS[:4][::-1], tmp_path / "reversed", **settings)
    regenerate(target, PROMPTS[:4], tmp_path / "other", **{**settings, "seed": 6})
    some, backwards, other = (
        {r.id: r.answer_ids for r in ResponseStore(tmp_path / name).rows()} for name in ("some", "reversed", "other")
    )
    assert some == backwards
    assert some != other
    assert {r.mode for r in ResponseStore(tmp_path / "some").rows()} == {"sampled"}


def test_long_prompts_are_counted_and_bad_requests_named(target, tmp_path):
    report = regenerate(target, PROMPTS[:4], tmp_path / "a", **SETTINGS, max_prompt_tokens=10)
    assert (report.too_long, report.answered) == (4, 0)
    with pytest.raises(ConfigError, match="max_new_tokens is 256, must lie in"):
        regenerate(target, PROMPTS, tmp_path / "b", max_new_tokens=256)
    answered = Prompt("q", (*PROMPTS[0].messages, {"role": "assistant", "content": "c"}), "test")
    with pytest.raises(ConfigError, match="q ends with an answer; use store_natural"):
        regenerate(target, [answered], tmp_path / "b", **SETTINGS)
    twin = Prompt("p0", PROMPTS[1].messages, "test")
    with pytest.raises(ConfigError, match="p0 stands for two different conversations"):
        regenerate(target, [PROMPTS[0], twin], tmp_path / "b", **SETTINGS)
    with pytest.raises(ConfigError, match="p0 has no answer; use regenerate"):
        store_natural(target, PROMPTS, tmp_path / "c")


def test_natural_answers_are_stored_with_their_masks(target, tmp_path):
    talk = (
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"}, {"role": "assistant", "content": "efg"},
    )  # fmt: skip
    prompts = [Prompt("n0", talk, "test"), Prompt("n1", talk[:2], "test")]
    report = store_natural(target, prompts, tmp_path)
    assert report.answered == 2
    samples = read_samples(ResponseStore(tmp_path))
    text = [target.tokenizer.decode(s.token_S[s.loss_mask_S], skip_special_tokens=False) for s in samples]
    assert text == ["bc<|im_end|>efg<|im_end|>", "bc<|im_end|>"]
    assert store_natural(target, prompts, tmp_path).found == 2
    assert json.loads((tmp_path / "manifest.json").read_text())["fingerprint"]["chat_template_kwargs"] == {}


def test_weights_digest_tells_targets_apart(target):
    import jax

    assert weights_digest(target.params) == weights_digest(tiny.target().params)
    assert weights_digest(target.params) != weights_digest(tiny.target(seed=1).params)
    nudged = jax.tree.map(lambda x: x * 1.001, target.params)
    assert weights_digest(nudged) != weights_digest(target.params)
    assert fingerprint(target, max_new_tokens=3)["dtype"] == "float32"
