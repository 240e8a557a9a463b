"""Writing a drafter's directory: all of its files at once, or none of them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints.placement import CheckpointError
from tests.checkpoints.test_drafter_files import CONFIG, USED_IDS, export, random_params


def test_export_writes_a_model_card_and_nothing_else(tmp_path):
    assert export(tmp_path / "new" / "d", readme="# Card\n") == tmp_path / "new" / "d"
    assert sorted(p.name for p in (tmp_path / "new" / "d").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert (tmp_path / "new" / "d" / "README.md").read_text() == "# Card\n"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["d"]


def test_export_replaces_an_export_whole(tmp_path):
    export(tmp_path / "d", draft_to_target=USED_IDS, readme="old")
    export(tmp_path / "d")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_export_leaves_other_files_alone(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        export(tmp_path / "d")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["notes.txt"]
    with pytest.raises(CheckpointError, match="is a file"):
        export(tmp_path / "d" / "notes.txt")


def test_export_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    export(tmp_path / "d", readme="first")
    before = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()}

    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("dflash_jax.checkpoints.export_drafter.write_safetensors", full_disk)
    with pytest.raises(OSError, match="no space left"):
        export(tmp_path / "d", readme="second")
    assert {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_export_that_can_not_take_its_place_puts_the_earlier_one_back(tmp_path, monkeypatch):
    export(tmp_path / "d", readme="first")
    rename = pathlib.Path.rename

    def refuse_new(self, to):
        if self.name == "new":
            raise OSError("no such right")
        return rename(self, to)

    monkeypatch.setattr(pathlib.Path, "rename", refuse_new)
    with pytest.raises(OSError, match="no such right"):
        export(tmp_path / "d", readme="second")
    assert (tmp_path / "d" / "README.md").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_export_refuses_numbers_that_are_none(tmp_path):
    params = jax.tree.map(lambda x: x, random_params())
    params["norm"]["scale"] = params["norm"]["scale"].replace(jnp.full((16,), jnp.nan))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values that are not finite in bfloat16"):
        export(tmp_path / "d", params=params)
    params["norm"]["scale"] = params["norm"]["scale"].replace(jnp.full((16,), 1e6))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values that are not finite in float16"):
        export(tmp_path / "d", params=params, dtype=jnp.float16)
    with pytest.raises(CheckpointError, match="dtype is int8"):
        export(tmp_path / "d", dtype=jnp.int8)
    assert not (tmp_path / "d").exists()


def test_export_warns_where_readers_tap_after_the_final_norm(tmp_path):
    config = dataclasses.replace(CONFIG, target_layer_ids=(1, 2))
    with pytest.warns(UserWarning, match="after the final norm"):
        export(tmp_path / "d", config)
