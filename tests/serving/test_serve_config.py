"""serve.py's config: what can not be right is refused by name before anything is loaded."""

import importlib.util
import math
import pathlib

import pytest
from ml_collections import ConfigDict
from serving.tiny_pair import MAX_TOKENS, config, pair, terminal

from dflash_jax.config import ConfigError
from dflash_jax.decoding.generate import generate
from dflash_jax.serving.config import read_config
from dflash_jax.serving.run import serve
from dflash_jax.serving.session import DFLASH, PLAIN, Session

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def shipped(name: str) -> ConfigDict:
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def test_shipped_config_is_valid():
    settings = read_config(shipped("smollm2_135m"))
    assert settings.target.dtype == "float32"  # exactness is the default
    assert settings.generation.temperature == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("generation.max_tokens", 0, "generation.max_tokens is 0, must be at least 1"),
        ("generation.temperature", -1.0, "generation.temperature is -1.0"),
        ("generation.temperature", float("nan"), "generation.temperature is nan"),
        ("generation.top_p", 0.0, r"generation.top_p is 0.0, must be in \(0, 1\]"),
        ("generation.top_k", -2, "generation.top_k is -2"),
        ("generation.min_p", 2.0, "generation.min_p is 2.0"),
        ("generation.presence_penalty", 2.5, r"generation.presence_penalty is 2.5, must be in \[-2, 2\]"),
        ("generation.frequency_penalty", float("nan"), "generation.frequency_penalty is nan"),
        ("generation.repetition_penalty", 0.0, r"generation.repetition_penalty is 0.0, must be in \[0.01, 100\]; 1"),
        ("generation.logit_bias", {"x": 1.0}, "generation.logit_bias holds token id 'x', ids must be whole numbers"),
        ("generation.logit_bias", {"7": 1e9}, r"is 1000000000.0 for token 7, must be a number in \[-1000, 1000\]"),
        ("generation.logit_bias", 3.0, "generation.logit_bias is 3.0, must be a dict"),
        ("generation.max_tokens", "many", "generation.max_tokens is 'many'"),
        ("drafter.block_size", 1, "drafter.block_size is 1, must be at least 2"),
        ("drafter.proposal", "best", "drafter.proposal is 'best', must be argmax or drawn"),
        ("comparison.repeats", 0, "comparison.repeats is 0"),
        ("mesh.data", 0, "mesh.data is 0"),
        ("generation.beams", 4, "has no field 'beams'"),
        ("speculation.on", True, "section 'speculation'"),
    ],
)
def test_wrong_values_are_named(field, value, message):
    with pytest.raises(ConfigError, match=message):
        read_config(config(**{field: value}))


def test_missing_source_is_named():
    with pytest.raises(ConfigError, match="needs the field 'source'"):
        read_config(ConfigDict({"target": {}}))
    with pytest.raises(ConfigError, match="needs the field 'target'"):
        read_config(ConfigDict({}))


@pytest.mark.parametrize(
    ("prompt", "stats_json", "changes", "message"),
    [
        (" ", None, {}, "--prompt is empty"),
        ("\udcff", None, {}, "--prompt is no valid UTF-8 at character 0"),
        (None, "stats.json", {}, "--stats_json is set, but a chat"),
        ("Hi", "no/such/dir/stats.json", {}, "--stats_json is 'no/such/dir/stats.json'"),
        (None, None, {"generation.chat_template": False}, "a chat needs the template"),
        ("Hi", None, {"generation.logit_bias": {"99999": 1.0}, "drafter.source": ""}, "logit_bias holds .* 99999"),
        ("Hi", None, {"mesh.data": 64}, "mesh: .* needs 64 devices"),
        ("Hi", None, {"target.dtype": "float8"}, "float8"),
    ],
)
def test_wrong_arguments_are_named(prompt, stats_json, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    changes = {"target.source": str(tmp_path / "dir")} | changes
    if "target.dtype" in changes or "generation.logit_bias" in changes:
        from serving.tiny_pair import exported

        changes["target.source"] = str(exported(tmp_path)[0])
    with pytest.raises(ConfigError, match=message):
        serve(config(**changes), prompt, stats_json, terminal=terminal())


def test_penalties_and_bias_reach_the_decoder():
    target, drafter = pair()
    [free] = generate(target, None, [[3, 1, 4]], max_tokens=MAX_TOKENS)
    rules = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {free.token_ids[0]: -math.inf}}
    [bent] = generate(target, None, [[3, 1, 4]], max_tokens=MAX_TOKENS, **rules)
    assert bent.token_ids != free.token_ids
    rules["logit_bias"] = {str(token): bias for token, bias in rules["logit_bias"].items()}  # as JSON has it
    settings = read_config(config(**{f"generation.{name}": value for name, value in rules.items()}))
    session = Session(target, drafter, settings.generation, settings.drafter)
    for mode in (PLAIN, DFLASH):
        pieces = session.stream(mode, session.request([3, 1, 4]))
        assert [token for piece in pieces for token in piece.token_ids] == bent.token_ids


def test_mesh_of_several_devices_decodes_alike(tmp_path):
    from serving.tiny_pair import exported

    target, drafter = exported(tmp_path)
    results = []
    for data, tensor in ((1, 1), (1, 2)):
        changes = {
            "target.source": str(target), "drafter.source": str(drafter), "comparison.repeats": 1,
            "mesh.data": data, "mesh.tensor": tensor,
        }  # fmt: skip
        screen = terminal()
        stats = serve(config(**changes), "Say it.", terminal=screen)
        assert stats["devices"] == data * tensor
        results.append((screen.out.file.getvalue().split("\n\n")[0], stats["dflash"]["histogram"], stats["identical"]))
    assert results[0] == results[1] and results[0][2] is True
