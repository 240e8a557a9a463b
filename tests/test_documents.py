"""README and pages: commands and links that hold."""

import ast
import importlib
import pathlib
import re

import pytest
from ml_collections import ConfigDict

from configs import qwen3_8b, smollm2_135m_dflash
from dflash_jax.config import from_config_dict
from dflash_jax.training.corpus import AnswerConfig, DataConfig

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_ci_runs_the_test_command_of_the_readme_word_for_word():
    (command,) = [
        line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines() if "pytest" in line
    ]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1] == command and "set -e" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def anchors(page: pathlib.Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_imports_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?:configs|notebooks|tests|dflash_jax|docs)/[\w/]+\.(?:py|ipynb|md)\b", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (dflash_jax[\w.]*)", text):
        importlib.import_module(module)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_commands_are_fields_of_their_configs(page):
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            config = re.search(r"--config=(configs/\w+)\.py(?::(\w+))?", line)
            if not config:
                continue
            spec = importlib.util.spec_from_file_location("shown_config", ROOT / f"{config[1]}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            fields = module.get_config(*([config[2]] if config[2] else []))
            for path in re.findall(r"--config\.([\w.]+)=", line):
                node = fields
                for name in path.split("."):
                    assert name in node, f"{config[1]}.py has no field {path}"
                    node = node[name]


def test_guarantee_is_said_in_the_same_words_everywhere():
    """B39 (d): the README and the page on decoding state it, with the bounds that the tests and benchmarks use."""
    from dflash_jax.evaluation.near_ties import MAX_MARGIN_FLOAT32, MAX_ULPS

    for page in (ROOT / "README.md", ROOT / "docs" / "decoding.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert "**Greedy, float32:** the tokens are those of plain decoding." in text
        assert f"less than {MAX_MARGIN_FLOAT32:g}".replace("1e-05", "1e-5") in text
        assert f"at most {MAX_ULPS:g} bfloat16 ulps apart" in text
        assert "**Ties** go to the lowest token id" in text


def test_the_example_of_own_text_fits_the_configs():
    """docs/training.md, "Your own text": its lines at the end of a config make what the run reads."""
    (example,) = [block for block in blocks(ROOT / "docs" / "training.md", "python") if "config.data.answers" in block]
    for module in (smollm2_135m_dflash, qwen3_8b):
        config = module.get_config()
        exec(example, {"config": config, "ConfigDict": ConfigDict})
        data = from_config_dict(DataConfig, config.data.to_dict(), "data")
        assert len(AnswerConfig.of("mine", data.answers["mine"]).prompts) == 3
        assert data.natural == (("finished.jsonl", None),)
