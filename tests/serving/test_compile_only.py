"""serve.py --compile_only: what it prints and writes, what it refuses, and that the shipped configs are right."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.config import ConfigError, default_target_layer_ids
from dflash_jax.evaluation.ahead_of_time import mesh_on, missing_bytes, readable
from dflash_jax.serving.compile_only import capacity, verdict
from dflash_jax.serving.config import read_config
from dflash_jax.sharding import MeshConfig
from dflash_jax.tpu_topology import Topology, tpu_topology
from dflash_jax.training.adapter import configured_drafter

HERE, ROOT = pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install libtpu)"
)


def compile_only(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "serve.py"), f"--config={HERE / 'tiny_compile.py'}", "--compile_only", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=ROOT)


@needs_libtpu
def test_fits_and_says_what_it_takes(tmp_path):
    done = compile_only("--topology=v5e:2x2", "--tau=2,4", f"--stats_json={tmp_path / 'stats.json'}")
    assert done.returncode == 0, done.stderr[-3000:]
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["fits"], stats["missing_bytes"], stats["devices"]) == (True, 0, 4)
    assert stats["available_bytes"] == 16 * 2**30
    assert set(stats["programs"]) == {"dflash", "plain"}
    dflash, plain = stats["programs"]["dflash"], stats["programs"]["plain"]
    assert (dflash["block_size"], plain["block_size"]) == (8, 1)
    kinds = dflash["bytes_per_device"]
    # Keys and values of three layers, 4 rows x 512 tokens, one of two heads of 128, bf16; and the page table.
    assert kinds["cache"] == 3 * 2 * 4 * 512 * 128 * 2 + 4 * 8 * 4
    assert kinds["recurrent_states"] == plain["bytes_per_device"]["drafter_weights"] == 0
    assert kinds["total"] == sum(size for kind, size in kinds.items() if kind != "total")
    assert dflash["xla"]["arguments"] >= kinds["target_weights"] + kinds["drafter_weights"] + kinds["cache"]
    for program in (dflash, plain):
        assert min(program[key] for key in ("flops", "bytes", "link_bytes", "roofline_seconds")) > 0
        # XLA's own count is of the same programs: of this one, with few tokens, within a factor of a few.
        assert 0.3 < program["xla"]["flops"] / program["flops"] < 3
    ratio = plain["roofline_seconds"] / dflash["roofline_seconds"]
    assert stats["speedup"] == {"2": pytest.approx(2 * ratio), "4": pytest.approx(4 * ratio)}
    assert stats["break_even_tau"] == pytest.approx(1 / ratio)
    assert "It fits: 16.00 GiB" in done.stdout
    assert "plain decoding" in done.stdout


@needs_libtpu
def test_a_misfit_is_named_with_the_number_missing(tmp_path):
    flags = ("--config.cache.rows=8192", "--config.cache.max_length=4096", f"--stats_json={tmp_path / 'stats.json'}")
    done = compile_only("--topology=v5e:2x2", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert not stats["fits"]
    cache = stats["programs"]["dflash"]["bytes_per_device"]["cache"]
    assert cache == pytest.approx(48 * 2**30, rel=1e-3)
    assert cache - 16 * 2**30 <= stats["missing_bytes"] < cache
    assert f"It does not fit: {readable(stats['missing_bytes'])} are missing" in done.stdout
    assert "RESOURCE_EXHAUSTED" in done.stdout


@needs_libtpu
def test_wrong_flags_are_refused_in_a_line():
    done = compile_only("--topology=v5e:2x4")
    assert done.returncode == 1
    assert "expert 2 x tensor 2 = 4 devices, but v5e:2x4 has 8" in done.stderr
    assert "Traceback" not in done.stderr


def test_mesh_and_topology_must_agree():
    place = Topology("tpu7x:2x2x1", "tpu7x", 4, tuple(range(8)))
    with pytest.raises(
        ConfigError, match=r"= 4 devices, but tpu7x:2x2x1 has 8 \(4 chips of 2\): .* must be 8, such as"
    ):
        mesh_on(MeshConfig(tensor=4), place)
    for given, shown in (
        (MeshConfig(fsdp=16), "such as --config.mesh.fsdp=8$"),
        (MeshConfig(data=2, fsdp=2), "such as --config.mesh.fsdp=8 --config.mesh.data=1$"),
        (MeshConfig(fsdp=8, tensor=8), "--config.mesh.expert=1 --config.mesh.tensor=8 --config.mesh.fsdp=1 "),
    ):
        with pytest.raises(ConfigError, match=shown):
            mesh_on(given, place)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "must be a TPU generation"),
        ("h100:2x2", "must be a TPU generation"),
        ("v5p:4x4", "v5p slices have 3 axes"),
        ("v5e:2x2x2", "v5e slices have 2 axes"),
        ("v5e:2x2,slices=0", r"several slices are 'v5e:16x16,slices=2'"),
    ],
)
def test_no_such_topology(name, message):
    with pytest.raises(ConfigError, match=message):
        tpu_topology(name)


def test_what_xla_says_is_missing():
    assert (
        missing_bytes("RESOURCE_EXHAUSTED: Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.") == 4.75 * 2**30
    )
    said = (
        "the total memory required for HLO temporaries (48.50G) exceeds available HBM (15.75G). HLO module: jit_step."
    )
    assert missing_bytes(said) == 32.75 * 2**30
    smem = "RESOURCE_EXHAUSTED: Allocation (size=1282048) would exceed memory (size=1048576) ... space=smem"
    assert missing_bytes(smem) == 0


def test_a_lack_of_another_memory_is_said():
    xla = {"refusal": "RESOURCE_EXHAUSTED: ... space=smem"}
    said = verdict({"fits": False, "missing_bytes": 0, "available_bytes": 2**34, "programs": {"plain": {"xla": xla}}})
    assert "another kind than HBM" in said
    assert "space=smem" in said


@pytest.mark.parametrize("field", ["data", "fsdp", "expert", "tensor"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_mesh_axes_are_whole_numbers(field, value):
    with pytest.raises(ConfigError, match=rf"mesh.{field} is .*, must be a whole number"):
        MeshConfig(**{field: value})


@pytest.mark.parametrize(("name", "billions"), [("qwen35_397b_a17b", 397), ("deepseek_v3", 671)])
def test_shipped_configs(name, billions):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    settings = read_config(config)
    target, _ = read_architectures(settings.target.source, settings.target.architecture)
    drafter = configured_drafter(config.drafter, target)
    moe = target.moe
    experts = len(moe.layers) * moe.num_experts * 3 * target.hidden_size * moe.intermediate_size
    assert 0.96 * billions < experts / 1e9 < billions  # nearly all parameters are experts'
    assert drafter.target_layer_ids == default_target_layer_ids(target.num_layers, 5)
    assert drafter.block_size == 16
    assert (settings.cache.rows, capacity(settings, target)) == (32, 8192)
    assert settings.mesh.size == 128


def test_cache_longer_than_the_context():
    spec = importlib.util.spec_from_file_location("tiny_compile", HERE / "tiny_compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.cache.max_length = 5000
    settings = read_config(config)
    target, _ = read_architectures("", settings.target.architecture)
    with pytest.raises(ConfigError, match=r"cache.max_length is 5000, but the target's context is 4096"):
        capacity(settings, target)
