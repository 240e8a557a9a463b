"""The notebooks run from the first cell to the last, and what is committed of them names no machine."""

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient
from serving.tiny_pair import exported

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.smollm2 import smollm2_gguf

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICKSTART = next(path for path in NOTEBOOKS if path.stem == "quickstart")


def execute(path: pathlib.Path, tmp_path: pathlib.Path, **parameters) -> nbformat.NotebookNode:
    """Runs a notebook with assignments added behind its parameters cell; every other cell is as committed."""
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )  # fmt: skip
    return client.execute()


def outputs(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """All text that a cell showed, HTML included."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    assert not [output for output in cell.outputs if output.output_type == "error"]
    shown = [output.get("text", "") or output.get("data", {}).get("text/html", "") for output in cell.outputs]
    return "".join(shown)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("notebook")
    target, drafter = exported(place)
    return execute(QUICKSTART, place, TARGET=str(target), DRAFTER=str(drafter), MAX_TOKENS=12)


def test_quickstart_runs(tiny_run):
    assert "identical tokens: True" in outputs(tiny_run, "generate")
    assert "target calls: 11 plain" in outputs(tiny_run, "generate")
    assert "reads layers (1, 3)" in outputs(tiny_run, "load")
    assert "acceptance by position:" in outputs(tiny_run, "statistics")


def test_quickstart_shows_where_tokens_came_from(tiny_run):
    shown = outputs(tiny_run, "trace")
    legend, answer, table = shown[: shown.index("<pre")], shown[shown.index("<pre") : shown.index("<table")], shown
    assert all(f'class="{kind}"' in legend for kind in ("first", "accepted", "correction", "bonus", "refused"))
    assert answer.count("<span") == 12 and answer.count('class="first"') == 1
    assert 'class="refused"' in table[table.index("<table") :]


def test_quickstart_plots(tiny_run):
    (cell,) = [cell for cell in tiny_run.cells if cell.id == "statistics"]
    assert any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_quickstart_streams_the_same_answer(tiny_run):
    answer = outputs(tiny_run, "generate").split("\n\nidentical tokens")[0]
    assert outputs(tiny_run, "stream") == answer


@pytest.mark.slow
def test_quickstart_as_committed(tmp_path):
    """With the real model and the drafter that is shipped."""
    try:
        smollm2_gguf()
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 can not be had: {error}")
    notebook = execute(QUICKSTART, tmp_path, MAX_TOKENS=16)
    assert "identical tokens: True" in outputs(notebook, "generate")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_name_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|Users|content|work)/", text)
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or "execution" not in cell.metadata  # start and end times
