"""Drafters in z-lab's and speculators' formats: through each and back, bit by bit, and what a format can not hold."""

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.convert_drafter import convert_drafter
from dflash_jax.checkpoints.drafter_config import drafter_config_from_hf
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import load_drafter, shared_weights
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.speculators_config import speculators_config, zlab_from_speculators
from dflash_jax.config import FULL, SLIDING, ConfigError, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.decoding.generate import generate
from dflash_jax.sharding import make_mesh
from dflash_jax.training.from_config import first_params
from dflash_jax.training.initialise import Statistics
from tests.checkpoints.test_drafter_files import CONFIG, USED_IDS, assert_same_params, random_params, target

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
REFERENCE_TARGET = TargetConfig(
    family="llama", vocab_size=48, hidden_size=32, intermediate_size=48, num_layers=5, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=128, layer_types=(FULL,) * 5, tie_embeddings=True,
)  # fmt: skip
YARN = RopeConfig(theta=1e4, kind="yarn", factor=8.0, original_max_positions=16, beta_fast=16.0)
CASES = {
    "sliding and full": CONFIG,
    "biases": dataclasses.replace(CONFIG, attention_bias=True, layer_types=(FULL, FULL), sliding_window=None),
    "yarn": dataclasses.replace(CONFIG, rope=YARN),
}


@functools.cache
def model_directory(tmp_path_factory_dir, tied=True):
    return export_target(tmp_path_factory_dir / f"target {tied}", target(tied))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{tied: a directory with the target}."""
    root = tmp_path_factory.mktemp("targets")
    return {tied: model_directory(root, tied) for tied in (True, False)}


def files(directory):
    """All that a drafter's directory says: its config and the bytes of its tensors."""
    tensors = {
        f"{path.name}:{name}": (x.dtype.name, x.shape, x.tobytes())
        for path in directory.glob("*.safetensors")
        for name, x in load_file(path).items()
    }
    return json.loads((directory / "config.json").read_text()), tensors


def edit_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("ids", [None, USED_IDS], ids=["whole", "pruned"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("case", CASES)
def test_through_every_format_and_back_bit_by_bit(models, tmp_path, case, dtype, ids):
    config = CASES[case]
    params = random_params(config, dtype)
    made = export_drafter(
        tmp_path / "made", config, params, dtype=dtype, draft_to_target=ids, readme="# Card\n", training={"step": 7}
    )
    by_name = [("zlab_old", None), ("speculators", models[False]), ("zlab", models[False])]
    at = made
    for to, model in by_name:
        at = convert_drafter(at, tmp_path / to, to, target=model, verifier="owner/name" if model else None)
        drafter = load_drafter(at, target(False), dtype=dtype)
        assert drafter.config == config and not drafter.own_vocabulary
        assert_same_params(drafter.params, params)
        found = drafter.shared.draft_to_target_V
        assert (found is None) if ids is None else np.array_equal(found, ids)
        np.testing.assert_array_equal(drafter.shared.head_DxV, shared_weights(target(False), ids).head_DxV)
        assert (at / "README.md").read_text() == "# Card\n"
    assert files(at) == files(made)  # config.json too


def test_what_a_speculators_checkpoint_holds(models, tmp_path):
    export_drafter(tmp_path / "d", CONFIG, random_params(), draft_to_target=USED_IDS)
    convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="owner/name")
    hf, _ = files(tmp_path / "s")
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert hf["speculators_model_type"] == hf["speculators_config"]["algorithm"] == "dflash"
    assert hf["aux_hidden_state_layer_ids"] == [1, 2]  # of layers 0 and 1: hidden state 0 is the embedding
    assert hf["draft_vocab_size"] == 4 and hf["mask_token_id"] == 39 and hf["block_size"] == 4
    assert hf["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert hf["speculators_config"]["verifier"]["name_or_path"] == "owner/name"
    inner = hf["transformer_layer_config"]
    assert inner["layer_types"] == [SLIDING, FULL] and inner["sliding_window"] == 8 and inner["model_type"] == "qwen3"
    assert not {"dflash_config", "block_size", "num_target_layers"} & set(inner)
    np.testing.assert_array_equal(tensors["d2t"], USED_IDS - np.arange(4))
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), USED_IDS)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    table_VxD = np.asarray(target().params["embedding_VxD"].get_value())
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], table_VxD.astype(jnp.bfloat16))
    np.testing.assert_array_equal(tensors["lm_head.weight"], table_VxD[USED_IDS].astype(jnp.bfloat16))  # tied
    assert not (tmp_path / "s" / "draft_vocab.safetensors").exists()


def test_the_target_names_itself_where_others_can_load_it(models, tmp_path):
    export_drafter(tmp_path / "d", CONFIG, random_params())
    convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True])
    verifier = files(tmp_path / "s")[0]["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(models[True])}


def test_two_sided_sliding_layers_have_a_flag_of_their_own(models, tmp_path):
    config = dataclasses.replace(CONFIG, causal=False)
    export_drafter(tmp_path / "d", config, random_params())
    convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    assert files(tmp_path / "s")[0]["sliding_window_non_causal"] is True
    assert load_drafter(tmp_path / "s", target()).config == config


@pytest.fixture
def own_head(models, tmp_path):
    """A speculators checkpoint whose head is not the target's."""
    export_drafter(tmp_path / "d", CONFIG, random_params(), dtype=jnp.float32, draft_to_target=USED_IDS)
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")

    def change(tensors):
        tensors["lm_head.weight"][2, 5] += 1e-3

    edit_tensors(made, change)
    return made


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_a_head_of_its_own_is_kept(own_head, mesh):
    on = target(True, mesh=None if mesh is None else make_mesh(*mesh))
    drafter = load_drafter(own_head, on)
    assert drafter.own_vocabulary
    stored = load_file(own_head / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(drafter.shared.head_DxV, stored.T)
    assert drafter.shared.embedding_VxD is on.params["embedding_VxD"].get_value()  # that one is the target's
    with pytest.raises(CheckpointError, match=r"draft_vocab is False, but lm_head\.weight .* own .* its 4 ids only"):
        load_drafter(own_head, on, draft_vocab=False)


def test_training_does_not_start_from_a_head_of_its_own(own_head):
    config = ConfigDict({"drafter": {"init_from": str(own_head), "trunk": "trained"}})
    with pytest.raises(ConfigError, match="has a table or head of its own, and training uses the target's"):
        first_params(config, target(), CONFIG, Statistics(tap_rms=()))


def test_decoding_with_a_head_of_its_own_is_lossless(own_head):
    drafter = load_drafter(own_head, target())
    prompts = [[7, 9, 4], [11]]
    drafted = generate(target(), drafter, prompts, max_tokens=12, batch=2)
    plain = generate(target(), None, prompts, max_tokens=12, batch=2)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert drafter.own_vocabulary and all(sum(r.acceptance) == 11 for r in drafted)


def test_a_head_of_its_own_is_passed_on_or_refused(own_head, models, tmp_path):
    again = convert_drafter(own_head, tmp_path / "again", "speculators", target=models[True], verifier="x")
    assert files(again) == files(own_head)
    with pytest.raises(CheckpointError, match=r"its own lm_head\.weight, which is not the one of .*; zlab holds none"):
        convert_drafter(own_head, tmp_path / "z", "zlab", target=models[True])
    assert not (tmp_path / "z").exists()


def test_the_targets_own_head_serves_the_whole_vocabulary(models, tmp_path):
    export_drafter(tmp_path / "d", CONFIG, random_params(), draft_to_target=USED_IDS)
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    drafter = load_drafter(made, target(), draft_vocab=False)
    assert drafter.shared.draft_to_target_V is None and drafter.shared.head_DxV.shape == (16, 40)


@pytest.mark.parametrize(
    ("fields", "to", "message"),
    [
        ({"markov_rank": 3}, "speculators", "markov_rank is 3, which the speculators format can not hold"),
        ({"markov_rank": 3}, "zlab_old", "markov_rank is 3, which the old spelling"),
        ({"embedding_scale": 4.0}, "speculators", "embedding_scale is 4.0, which the speculators format can not hold"),
        ({"output_multiplier": 0.5}, "speculators", "output_multiplier is 0.5"),
        ({"final_logit_softcap": 30.0}, "speculators", "final_logit_softcap is 30.0"),
        ({"causal": True}, "speculators", "causal is True"),
        ({"causal": False, "layer_types": (FULL, FULL)}, "speculators", "causal is False"),
        ({"target_hidden_size": 16}, "speculators", "target_hidden_size is 16"),
        ({"target_hidden_size": 16}, "zlab_old", "target_hidden_size is 16, which the old spelling"),
        ({"embedding_scale": 4.0}, "zlab_old", "input_embedding_scale is 4.0, which the old spelling"),
        ({"output_multiplier": 0.5}, "zlab_old", "output_multiplier is 0.5, which the old spelling"),
        ({"final_logit_softcap": 30.0}, "zlab_old", "final_logit_softcapping is 30.0, which the old spelling"),
        ({"causal": True}, "zlab_old", "causal is True, which the old spelling"),
    ],
)  # fmt: skip
def test_what_a_format_can_not_hold_is_refused_by_name(models, tmp_path, fields, to, message):
    config = dataclasses.replace(CONFIG, **fields)
    export_drafter(tmp_path / "d", config, random_params(config))
    with pytest.raises(ConfigError, match=message):
        convert_drafter(tmp_path / "d", tmp_path / "out", to, target=models[True], verifier="x")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:target_layer_ids holds the last layer")
def test_the_last_layer_can_not_be_said_in_speculators_format(models, tmp_path):
    export_drafter(tmp_path / "d", dataclasses.replace(CONFIG, target_layer_ids=(1, 2)), random_params())
    with pytest.raises(ConfigError, match=r"holds the last layer \(2\), which the speculators format keeps"):
        convert_drafter(tmp_path / "d", tmp_path / "out", "speculators", target=models[True], verifier="x")


def test_what_is_missing_is_named(models, tmp_path):
    export_drafter(tmp_path / "d", CONFIG, random_params())
    with pytest.raises(ConfigError, match="--target is not set"):
        convert_drafter(tmp_path / "d", tmp_path / "s", "speculators")
    convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    with pytest.raises(ConfigError, match=r"does not say how many layers the target has.*--target"):
        convert_drafter(tmp_path / "s", tmp_path / "z", "zlab")
    with pytest.raises(ConfigError, match="format is 'gguf', must be one of zlab, zlab_old, speculators"):
        convert_drafter(tmp_path / "d", tmp_path / "g", "gguf")


BROKEN_CONFIGS = {
    "another method": ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
    "shifted slots": ({"sample_from_anchor": True}, "sample_from_anchor is true"),
    "tap on the embedding": ({"aux_hidden_state_layer_ids": [0, 1]}, "holds 0, the embedding itself"),
    "no taps": ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
    "no mask": ({"mask_token_id": None}, "mask_token_id is not set"),
    "no block": ({"block_size": None}, "block_size is not set"),
    "other width": ({"target_hidden_size": 24}, "target_hidden_size is 24"),
    "no layers": ({"transformer_layer_config": 3}, "transformer_layer_config is 3"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    "ids of nothing": ({"draft_vocab_size": 5}, r"draft_vocab_size is 5 of 40 ids, but d2t is not among"),
    "no size": ({"draft_vocab_size": None}, "draft_vocab_size is not set"),
}


def test_speculators_checkpoints_that_can_not_be_right(models, tmp_path):
    export_drafter(tmp_path / "d", CONFIG, random_params())
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    good = (made / "config.json").read_text()
    for change, message in BROKEN_CONFIGS.values():
        edit_config(made, **change)
        with pytest.raises((ConfigError, CheckpointError), match=message):
            load_drafter(made, target())
        (made / "config.json").write_text(good)

    def unfilled(tensors):
        tensors["lm_head.weight"][:] = np.nan

    edit_tensors(made, unfilled)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds values that are not finite; it was never filled"):
        load_drafter(made, target())

    def narrow(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:20]

    edit_tensors(made, narrow)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is BF16 \(20, 16\), expected numbers \(40, 16\)"):
        load_drafter(made, target())


def test_what_speculators_writes_is_read():
    """config.json of version 0.9.0, by its own save_pretrained: fields of Hugging Face and of its own beside ours."""
    hf = json.loads((GOLDEN / "speculators_0.9.0.json").read_text())
    config = drafter_config_from_hf(zlab_from_speculators(hf, REFERENCE_TARGET), REFERENCE_TARGET)
    assert config == DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5), vocab_size=48, block_size=6, mask_token_id=47, target_layer_ids=(0, 2),
        num_target_layers=5, layer_types=(FULL,) * 3, max_positions=128,
    )  # fmt: skip
    written = speculators_config(config, "float32", 20, "owner/name", ["LlamaForCausalLM"])
    for name in set(written) - {"transformer_layer_config", "speculators_config"}:
        assert written[name] == hf[name], name
    assert written["speculators_config"] == hf["speculators_config"]
    inner = written["transformer_layer_config"]
    for name in set(inner) & set(hf["transformer_layer_config"]):
        assert inner[name] == hf["transformer_layer_config"][name], name


@pytest.mark.parametrize("left", ["embed_tokens.weight", "lm_head.weight"])
def test_newer_versions_leave_out_what_is_the_targets(models, tmp_path, left):
    export_drafter(tmp_path / "d", CONFIG, random_params())
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    whole = files(made)
    edit_tensors(made, lambda tensors: tensors.pop(left))
    drafter = load_drafter(made, target())
    assert not drafter.own_vocabulary and drafter.shared.head_DxV.shape == (16, 40)
    again = convert_drafter(made, tmp_path / "again", "speculators", target=models[True], verifier="x")
    assert files(again) == whole


def test_a_gemma_like_target_does_not_lend_its_factors_to_speculators(models, tmp_path):
    """That format has none: what was trained there was trained on the bare table and head."""
    export_drafter(tmp_path / "d", CONFIG, random_params())
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[True], verifier="x")
    config = load_drafter(made, target(embedding_scale=4.0, final_logit_softcap=30.0)).config
    assert (config.embedding_scale, config.final_logit_softcap) == (1.0, 0.0)


def test_the_target_is_read_in_its_own_dtype(models, tmp_path):
    """A target in float32 and a checkpoint in bfloat16: the head counts as the target's."""
    export_drafter(tmp_path / "d", CONFIG, random_params())
    made = convert_drafter(tmp_path / "d", tmp_path / "s", "speculators", target=models[False], verifier="x")
    low = load_target(models[False], dtype="bfloat16")
    assert not load_drafter(made, low).own_vocabulary and not load_drafter(made, target(False)).own_vocabulary
    assert load_drafter(made, target(True)).own_vocabulary  # another head
