"""Harvested functions are kept, and never when what they were harvested from has changed."""

import os

import pytest

from dflash_jax.data import code_prompts, harvest_cache

SOURCE = '''
def scale(values: list[float], factor: float = 2.0) -> list[float]:
    """Multiply each of the values with the factor and return them in their order."""
    return [value * factor for value in values]
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text(SOURCE)
    return folder


@pytest.fixture
def parsed(monkeypatch):
    """Texts that were parsed since it was last emptied."""
    texts = []
    real = code_prompts.functions_in
    monkeypatch.setattr(code_prompts, "functions_in", lambda text, *rest: texts.append(text) or real(text, *rest))
    return texts


def harvest(root, **options):
    code_prompts._harvest.cache_clear()  # as in another process
    return code_prompts.harvest((str(root),), **options)


def test_the_second_run_reads_no_source_and_gets_the_same(root, parsed):
    first = harvest(root)
    assert [f.name for f in first] == ["scale"] and parsed == [SOURCE]
    parsed.clear()
    assert harvest(root) == first and not parsed


def test_what_changed_is_read_again(root, parsed):
    harvest(root)
    (root / "a.py").write_text(SOURCE.replace("scale", "widen"))
    assert [f.name for f in harvest(root)] == ["widen"]
    (root / "b.py").write_text(SOURCE.replace("each of the values", "all of the given values"))
    assert sorted(f.name for f in harvest(root)) == ["scale", "widen"]
    (root / "a.py").unlink()
    assert [f.name for f in harvest(root)] == ["scale"]
    parsed.clear()
    assert harvest(root, limits=code_prompts.Limits(max_parameters=1)) == () and len(parsed) == 1
    (root / "b.py").touch()
    before = os.stat(root / "b.py")
    os.utime(root / "b.py", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert [f.name for f in harvest(root)] == ["scale"] and len(parsed) == 2


def test_the_held_out_set_is_applied_to_what_was_kept(root, parsed):
    assert harvest(root)
    held = code_prompts.HeldOut(frozenset({"scale"}), frozenset())
    assert harvest(root, held_out=held) == ()


@pytest.mark.parametrize("damage", ["", "{", '{"state": 1}', '{"state": "x", "functions": [{"id": 3}]}'])
def test_a_damaged_file_is_replaced(root, parsed, damage):
    first = harvest(root)
    (file,) = (root.parent / "cache" / "code_prompts").iterdir()
    whole = file.read_text()
    file.write_text(damage)
    assert harvest(root) == first and file.read_text() == whole


def test_where_nothing_can_be_kept_it_is_said_and_goes_on(root, monkeypatch):
    said = []
    monkeypatch.setattr(harvest_cache.logging, "warning", lambda text, *values: said.append(text % values))
    (root.parent / "cache").write_text("no folder")
    assert [f.name for f in harvest(root)] == ["scale"]
    assert len(said) == 1 and "are not kept" in said[0]
