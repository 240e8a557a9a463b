"""Conversion to Orbax: the same parameters on any mesh, killed and gone on with, refused where it can not be right."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import golden_family
from flax import nnx
from gguf_files import architecture_fields, byte_level_fields, write_gguf
from safetensors.numpy import load_file, save_file
from tiny_tokenizers import byte_level, write_directory

from dflash_jax.checkpoints import converted
from dflash_jax.checkpoints.convert import convert, dry_run
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.layout import mesh_sizes
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError, RopeConfig
from dflash_jax.sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[2]


def write(directory: pathlib.Path, name: str, **fields) -> pathlib.Path:
    """A golden checkpoint as a directory."""
    config, weights = golden_family(name)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return directory


def flat(target) -> dict[str, np.ndarray]:
    return {str(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(target.params)}


def assert_same(found, wanted) -> None:
    found, wanted = flat(found), flat(wanted)
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        assert found[path].dtype == value.dtype, path
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """(a Qwen3.5 with experts as it is published, the same converted to bfloat16). Do not change."""
    directory = tmp_path_factory.mktemp("experts")
    source = write(directory / "source", "qwen3_5_moe")
    return source, convert(source, directory / "out", dtype="bfloat16")


MESHES = [None, {"data": 2, "expert": 2, "tensor": 2}, {"fsdp": 8}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_parameters_on_any_mesh(experts, mesh):
    """Converted on one device, loaded on others; parameters that are float32 whatever the dtype stay so."""
    source, out = experts
    mesh = None if mesh is None else make_mesh(**mesh)
    calls = []
    ours = load_target(out, mesh=mesh, progress=lambda *call: calls.append(call))
    theirs = load_target(source, dtype="bfloat16", mesh=mesh)
    assert_same(ours, theirs)
    assert (ours.config, ours.dtype, ours.eos_token_ids) == (theirs.config, jnp.bfloat16, (2, 7))
    for (path, a), (_, b) in zip(nnx.to_flat_state(ours.params), nnx.to_flat_state(theirs.params), strict=True):
        if mesh is not None:
            assert a.get_value().sharding == b.get_value().sharding, path
    assert calls[-1][:2] == (sum(x.nbytes for x in jax.tree.leaves(ours.params)),) * 2


def test_another_dtype_when_it_is_loaded(experts):
    source, out = experts
    ours, exact = load_target(out, dtype="float32"), flat(load_target(source, dtype="float32"))
    for path, value in flat(ours).items():
        assert value.dtype == np.float32
        same = (exact[path], exact[path].astype(jnp.bfloat16).astype(np.float32))
        assert any(np.array_equal(value, x) for x in same), path


def test_converted_on_a_mesh_and_in_the_dtype_of_the_source(tmp_path):
    source = write(tmp_path / "source", "deepseek_v3", dtype="float16")
    out = convert(source, tmp_path / "out", mesh=make_mesh(expert=4, tensor=2))
    assert load_target(out).dtype == jnp.float16
    assert_same(load_target(out), load_target(source))
    assert_same(load_target(out, mesh=make_mesh(data=8)), load_target(source))


def test_a_tied_head_is_stored_once(tmp_path):
    source = write(tmp_path / "source", "qwen2")
    target = load_target(convert(source, tmp_path / "out"), mesh=make_mesh(tensor=2))
    assert "head_DxV" in target.params  # on CPU
    assert_same(target, load_target(source))
    assert not any("head" in name for name in converted.read_manifest(tmp_path / "out").groups["outside"])


def test_a_gguf_file_with_its_tokenizer(tmp_path):
    config, weights = golden_family("llama3_rope")
    config = dataclasses.replace(target_config_from_hf(config), rope=RopeConfig(), vocab_size=352)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = np.ones((352, config.hidden_size), np.float16)
    backend = byte_level()
    merges = json.loads(backend.to_str())["model"]["merges"]
    metadata = {**architecture_fields("llama", config), **byte_level_fields(backend, "gpt-2", merges)}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    path = write_gguf(tmp_path / "model.gguf", "llama", {**metadata, "tokenizer.ggml.eos_token_id": 3}, weights)
    out = convert(path, tmp_path / "out", dtype="bfloat16")
    ours, theirs = load_target(out), load_target(path, dtype="bfloat16")
    assert_same(ours, theirs)
    assert (ours.config, ours.eos_token_ids) == (theirs.config, theirs.eos_token_ids)
    assert ours.tokenizer.encode("hello world") == theirs.tokenizer.encode("hello world")
    assert convert(path, out, dtype="bfloat16") == out


def test_text_files_lie_beside_the_weights(tmp_path):
    source = write(tmp_path / "source", "llama3_rope", vocab_size=340)
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.zeros((340, 32), np.float32)
    save_file(weights, source / "model.safetensors")
    write_directory(source, byte_level(), eos_token="<|im_end|>")
    out = convert(source, tmp_path / "out")
    for path in source.iterdir():
        if path.name != "model.safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert not list(out.glob("*.safetensors"))
    assert load_target(out).tokenizer.encode("abc") == load_target(source).tokenizer.encode("abc")


# Interrupted, and gone on with.


def test_killed_and_started_again(tmp_path):
    """The process is killed while it writes; the same command writes what is missing, and nothing twice."""
    source, out = write(tmp_path / "source", "gemma3_text"), tmp_path / "out"  # five parts
    command = [sys.executable, "-m", "dflash_jax.checkpoints.convert", f"--source={source}", f"--out={out}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "params" / "layers.000").is_dir():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    groups = set(converted.read_manifest(out).groups)
    written = {path.name: path.stat().st_mtime_ns for path in (out / "params").iterdir() if path.name in groups}
    assert 1 <= len(written) < len(groups)
    with pytest.raises(CheckpointError, match=rf"not complete, {len(groups) - len(written)} of {len(groups)} parts"):
        load_target(out)
    half = out / "params" / "layers.003.orbax-checkpoint-tmp-1"
    half.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is complete" in done.stderr
    assert {path.name for path in (out / "params").iterdir()} == groups
    assert all((out / "params" / name).stat().st_mtime_ns == at for name, at in written.items())
    assert_same(load_target(out), load_target(source))


def test_a_part_that_is_lost_is_written_again(experts, tmp_path):
    source, out = experts
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "params" / "layers.001")
    with pytest.raises(CheckpointError, match="1 of 4 parts are missing; run it again"):
        load_target(tmp_path / "out")
    parts = []
    convert(source, tmp_path / "out", dtype="bfloat16", progress=lambda done, total, what: parts.append(what))
    assert parts == ["layers.001", "converted"]
    assert_same(load_target(tmp_path / "out"), load_target(out))
    convert(source, tmp_path / "out", dtype="bfloat16", progress=lambda *_: pytest.fail("nothing was to be done"))


def test_a_changed_source_is_refused(experts, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(experts[0], source)
    shutil.copytree(experts[1], out)
    convert(source, out, dtype="bfloat16")  # the same in another place
    with pytest.raises(CheckpointError, match="begun with other dtype bfloat16, not float16"):
        convert(source, out, dtype="float16")
    weights = load_file(source / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"out is a conversion of .*source; remove it, or choose another --out"):
        convert(source, out, dtype="bfloat16")


def test_what_is_refused(experts, tmp_path):
    source, out = experts
    with pytest.raises(CheckpointError, match="is converted already"):
        convert(out, tmp_path / "again")
    with pytest.raises(CheckpointError, match="holds files and no conversion"):
        convert(source, source)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file, must be a directory"):
        convert(source, tmp_path / "file")
    shutil.copytree(out, tmp_path / "out")
    for values, match in (
        ({"format": 2}, "not of format 1"),
        ({"format": 1, "source": "x"}, "is broken"),
        ([], "must be a JSON object"),
    ):
        (tmp_path / "out" / converted.MANIFEST).write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=match):
            load_target(tmp_path / "out")


def test_damage_is_named(experts, tmp_path):
    shutil.copytree(experts[1], tmp_path / "out")
    for path in (tmp_path / "out" / "params" / "layers.002").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"layers\.002 can not be read"):
        load_target(tmp_path / "out")
    manifest = converted.read_manifest(experts[1])
    groups = {**manifest.groups, "outside": {**manifest.groups["outside"], "norm.scale": ["bfloat16", [7]]}}
    converted.write_manifest(tmp_path / "out", converted.Manifest(**{**vars(manifest), "groups": groups}))
    with pytest.raises(CheckpointError, match=r"holds outside\.norm\.scale with shape \[7\]"):
        load_target(tmp_path / "out")


# Layout.


def test_dry_run_prints_what_each_device_holds(experts):
    source, out = experts
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    text = dry_run(source, "data=2,expert=2,tensor=2", dtype="bfloat16")
    params = load_target(source, dtype="bfloat16", mesh=make_mesh(**sizes)).params
    leaves = jax.tree.leaves(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert f"bytes a device: {held:,}" in text
    assert f"parameters: {sum(x.size for x in leaves):,}" in text
    assert "mesh: data 2 x expert 2 x tensor 2, 8 devices" in text
    (line,) = (line for line in text.splitlines() if line.startswith("layers/*/moe/down_ExFxD"))
    e, f, d = params["layers"][0]["moe"]["down_ExFxD"].get_value().shape
    assert f"3  {e} x {f} x {d}" in line
    assert f"{e}/expert, {f}/tensor" in line
    assert f"{3 * 2 * e * f * d / 1000:.2f} kB" in line
    assert dry_run(out, "data=2,expert=2,tensor=2") == text


def test_dry_run_reads_no_weights_and_checks_names(tmp_path):
    source = write(tmp_path / "source", "mixtral")
    file = source / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    os.truncate(file, header)
    os.truncate(file, size)  # a hole: reading it would give zeros
    assert "mesh: 1 device" in dry_run(source, "")
    weights = load_file(file)
    weights.pop("model.norm.weight")
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        dry_run(source, "")


def test_meshes_of_the_flag():
    assert mesh_sizes("expert=8,tensor=4") == {"data": 1, "fsdp": 1, "expert": 8, "tensor": 4}
    for text in ("model=2", "data", "data=0", "data=two", "data=2,data=2"):
        with pytest.raises(ConfigError, match=r"AXIS=SIZE with one of data, fsdp, expert, tensor"):
            mesh_sizes(text)
