"""Drafter checkpoints as files: strict loading, round trips, pruned vocabularies, layouts."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import ArrayReader, load_golden
from safetensors.numpy import load_file, save_file

from dflash_jax import sharding
from dflash_jax.checkpoints import load_drafter as load_module
from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, draft_to_target_ids
from dflash_jax.checkpoints.drafter_names import drafter_placements
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.load_drafter import drafter_from_reader, load_drafter, random_drafter, shared_weights
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import FULL, SLIDING, ConfigError, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import place, random_target

CONFIG = DrafterConfig(
    hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=6, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5), vocab_size=40, block_size=4, mask_token_id=39, target_layer_ids=(0, 1),
    num_target_layers=3, layer_types=(SLIDING, FULL), max_positions=128, sliding_window=8,
)  # fmt: skip
USED_IDS = np.array([3, 5, 6, 11])


@functools.cache
def target(tied: bool = True, mesh=None, **fields):
    values = {
        "family": "llama",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_positions": 128,
        "layer_types": (FULL,) * 3,
        "tie_embeddings": tied,
    }
    return random_target(TargetConfig(**(values | fields)), mesh=mesh)


@functools.cache
def random_params(config: DrafterConfig = CONFIG, dtype=jnp.float32):
    """Parameters without two equal numbers in a row anywhere: norms and biases are random as well."""
    params = nnx.split(DFlash(config, dtype, nnx.Rngs(7)))[1]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(7)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=x.shape), dtype) for x in leaves])


def export(directory, config=CONFIG, params=None, **kwargs):
    return export_drafter(directory, config, random_params(config) if params is None else params, **kwargs)


def edit(directory, *, config=None, tensors=None):
    """Rewrites an export: config(dict), tensors(dict) change their argument in place."""
    if config is not None:
        path = directory / "config.json"
        hf = json.loads(path.read_text())
        config(hf)
        path.write_text(json.dumps(hf))
    if tensors is not None:
        path = directory / "model.safetensors"
        arrays = load_file(path)
        tensors(arrays)
        save_file(arrays, path, metadata={"format": "pt"})


def assert_same_params(params, expected):
    flat, expected = dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(expected))
    assert flat.keys() == expected.keys()
    for path, variable in flat.items():
        x, y = variable.get_value(), expected[path].get_value()
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


# ---------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda x: jnp.dtype(x).name)
def test_round_trip_is_bit_exact(tmp_path, dtype, bias):
    config = dataclasses.replace(CONFIG, attention_bias=bias)
    params = random_params(config, dtype)
    export(tmp_path / "d", config, params, dtype=dtype)
    drafter = load_drafter(tmp_path / "d", target(), dtype=dtype)
    assert drafter.config == config
    assert (drafter.block_size, drafter.tap_ids, drafter.source) == (4, (0, 1), str(tmp_path / "d"))
    assert_same_params(drafter.params, params)


def test_round_trip_of_the_golden_weights(tmp_path):
    """From the reference's tensors to the tree, to a file, and the file has the reference's tensors."""
    _, drafter, golden = load_golden("tr_qwen3_sliding")
    export(tmp_path / "d", drafter.config, drafter.params, dtype=jnp.float32)
    stored = load_file(tmp_path / "d" / "model.safetensors")
    reference = {k.removeprefix("draft_w."): v for k, v in golden.items() if k.startswith("draft_w.")}
    assert stored.keys() == reference.keys()
    for name, array in reference.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)


def test_eleven_tensors_a_layer_and_three(tmp_path):
    export(tmp_path / "d")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert len(stored) == 11 * 2 + 3
    assert stored["fc.weight"].shape == (16, 32)
    assert stored["layers.1.self_attn.q_proj.weight"].shape == (48, 16)
    assert stored["layers.1.self_attn.k_proj.weight"].shape == (24, 16)
    assert stored["layers.1.self_attn.o_proj.weight"].shape == (16, 48)
    assert stored["layers.0.mlp.down_proj.weight"].shape == (16, 24)
    assert {x.dtype.name for x in stored.values()} == {"bfloat16"}
    five = dataclasses.replace(CONFIG, num_layers=5, layer_types=(FULL,) * 5)
    assert sum(len(p.tensors) for p in drafter_placements(five)) == 58


def test_projections_to_another_width_come_back_bit_for_bit_and_nobody_else_takes_them(tmp_path):
    config = dataclasses.replace(CONFIG, target_hidden_size=24)
    directory = export(tmp_path / "d", config, dtype=jnp.float32, training={"step": 3})
    stored = load_file(directory / "model.safetensors")
    assert stored["embed_projection.weight"].shape == (16, 24) and stored["head_projection.weight"].shape == (24, 16)
    assert stored["fc.weight"].shape == (16, 2 * 24) and len(stored) == 5 + 11 * 2
    hf = json.loads((directory / "config.json").read_text())
    assert hf["architectures"] == ["DFlashProjectedDraftModel"] and "auto_map" not in hf
    assert hf["dflash_jax"] == {"target_hidden_size": 24, "training": {"step": 3}}
    loaded = load_drafter(directory, target(hidden_size=24))
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, random_params(config))
    with pytest.raises(ConfigError, match=r"hidden_size is 24, the target's hidden_size is 16: .* drafter\.trunk"):
        load_drafter(directory, target())
    edit(directory, config=lambda hf: hf.update(architectures=["DFlashDraftModel"]))
    with pytest.raises(ConfigError, match="DFlashProjectedDraftModel and that field belong together"):
        load_drafter(directory, target(hidden_size=24))


def test_a_markov_head_comes_back_bit_for_bit_and_nobody_else_takes_it(tmp_path):
    config = dataclasses.replace(CONFIG, markov_rank=3)
    directory = export(tmp_path / "d", config, dtype=jnp.float32)
    stored = load_file(directory / "model.safetensors")
    assert stored["markov_head.markov_w1.weight"].shape == stored["markov_head.markov_w2.weight"].shape == (40, 3)
    assert len(stored) == 5 + 11 * 2
    hf = json.loads((directory / "config.json").read_text())
    assert hf["architectures"] == ["DFlashMarkovDraftModel"] and hf["dflash_jax"] == {"markov_rank": 3}
    assert "auto_map" not in hf
    loaded = load_drafter(directory, target())
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, random_params(config))
    np.testing.assert_array_equal(loaded.shared.markov_RxV, stored["markov_head.markov_w2.weight"].T)
    both = dataclasses.replace(config, target_hidden_size=24)
    directory = export(tmp_path / "both", both, draft_to_target=USED_IDS)
    assert "DFlashProjectedMarkovDraftModel" in (directory / "config.json").read_text()
    loaded = load_drafter(directory, target(hidden_size=24))
    assert loaded.config == both
    np.testing.assert_array_equal(loaded.shared.markov_RxV, loaded.params["markov"]["w2_VxR"][...][USED_IDS].T)
    assert load_drafter(directory, target(hidden_size=24), draft_vocab=False).shared.markov_RxV.shape == (3, 40)

    broken = {
        "architecture DFlashMarkovDraftModel and that field belong": {"architectures": ["DFlashDraftModel"]},
        "architecture DFlashMarkovDraftModel and that": {"architectures": ["DFlashProjectedMarkovDraftModel"]},
        r"has no target_hidden_size or markov_rank: .* DFlashMarkovDraftModel and": {"dflash_jax": {}},
        "markov_rank is 0, must be at least 1": {"dflash_jax": {"markov_rank": 0}},
        "markov_rank is set: that belongs to DSpark": {"markov_rank": 3},
    }
    for i, (message, change) in enumerate(broken.items()):
        directory = export(tmp_path / f"{i}", config)
        edit(directory, config=lambda hf, change=change: hf.update(change))
        with pytest.raises(ConfigError, match=message):
            load_drafter(directory, target())


def test_the_dtype_is_the_targets_unless_given(tmp_path):
    export(tmp_path / "d", params=random_params(CONFIG, jnp.bfloat16))
    low = dataclasses.replace(target(), dtype=jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(load_drafter(tmp_path / "d", low).params)} == {"bfloat16"}
    widened = load_drafter(tmp_path / "d", low, dtype="float32").params
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), random_params(CONFIG, jnp.bfloat16))
    assert_same_params(widened, exact)
    with pytest.raises(ConfigError, match="int8"):
        load_drafter(tmp_path / "d", low, dtype="int8")


# ------------------------------------------------------------------------------------------------ strict loading

BROKEN = {
    "missing": (lambda t: t.pop("hidden_norm.weight"), r"hidden_norm\.weight is missing, expected shape \(16,\)"),
    "missing in a layer": (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is miss"),
    "unknown": (lambda t: t.update({"prefix_gru.weight": np.zeros(3, np.float32)}), r"prefix_gru\.weight .* unknown"),
    "one layer more": (
        lambda t: t.update({"layers.2.input_layernorm.weight": np.zeros(16, np.float32)}),
        r"layers\.2\.input_layernorm\.weight .* unknown",
    ),
    "misshapen": (
        lambda t: t.update({"fc.weight": np.zeros((16, 48), np.float32)}),
        r"fc\.weight has shape \(16, 48\), expected \(16, 32\)",
    ),
    "transposed": (
        lambda t: t.update({"layers.0.mlp.down_proj.weight": np.zeros((24, 16), np.float32)}),
        r"down_proj\.weight has shape \(24, 16\), expected \(16, 24\)",
    ),
    "integers": (lambda t: t.update({"norm.weight": np.zeros(16, np.int32)}), r"norm\.weight has type I32"),
    "own head": (
        lambda t: t.update({"lm_head.weight": np.zeros((40, 16), np.float32)}),
        r"its own lm_head\.weight, which z-lab's format does not have",
    ),
    "own table": (
        lambda t: t.update({"embed_tokens.weight": np.zeros((40, 16), np.float32)}),
        r"its own embed_tokens\.weight, which z-lab's format does not have",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, case):
    change, message = BROKEN[case]
    export(tmp_path / "d")
    edit(tmp_path / "d", tensors=change)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path / "d", target())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 24}, "hidden_size is 16, the target's hidden_size is 24"),
        ({"vocab_size": 48}, "vocab_size is 40, the target's vocab_size is 48"),
        ({"num_layers": 4, "layer_types": (FULL,) * 4}, "num_target_layers is 3, the target's num_layers is 4"),
    ],
)
def test_another_target_is_refused(tmp_path, fields, message):
    export(tmp_path / "d")
    with pytest.raises(ConfigError, match=message):
        load_drafter(tmp_path / "d", target(**fields))


def test_b23_taps_beyond_the_target_are_refused_at_load(tmp_path):
    export(tmp_path / "d")
    for taps, bad in (([0, 3], 3), ([-1, 1], -1)):
        edit(tmp_path / "d", config=lambda hf, taps=taps: hf["dflash_config"].update(target_layer_ids=taps))
        with pytest.raises(ConfigError, match=f"target_layer_ids holds {bad}"):
            load_drafter(tmp_path / "d", target())


def test_broken_files_are_named(tmp_path):
    directory = export(tmp_path / "d")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no complete safetensors file"):
        load_drafter(directory, target())
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load_drafter(directory, target())
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        load_drafter(directory, target())
    (directory / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, must be a JSON object"):
        load_drafter(directory, target())
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_drafter(directory, target())


# ------------------------------------------------------------------------------------------------------- sources


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="asset:none-such does not come with this package"):
        load_drafter("asset:none-such", target())
    with pytest.raises(CheckpointError, match=r"asset:\.\./x does not come"):
        load_drafter("asset:../x", target())
    with pytest.raises(CheckpointError, match="is no directory"):
        load_drafter(tmp_path / "nothing", target())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load_drafter(tmp_path / "file", target())


def test_an_asset_is_a_directory_in_the_package(tmp_path, monkeypatch):
    export(tmp_path / "assets" / "some-drafter")
    monkeypatch.setattr(load_module.importlib.resources, "files", lambda package: tmp_path)
    assert load_drafter("asset:some-drafter", target()).source == "asset:some-drafter"
    with pytest.raises(CheckpointError, match="it has some-drafter"):
        load_drafter("asset:other", target())


def test_hub_names_go_to_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    export(tmp_path / "d")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(tmp_path / "d")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_drafter("someone/some-drafter", target()).source == "someone/some-drafter"
    load_drafter("someone/some-drafter@v2", target())
    assert asked == [("someone/some-drafter", None), ("someone/some-drafter", "v2")]

    def offline(name, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"someone/else is no local directory, and .* did not give it: no network"
    ):
        load_drafter("someone/else", target())


# ----------------------------------------------------------------------------------------------- table and head


def test_the_tables_of_the_target_are_shared_not_copied():
    untied = target(tied=False)
    shared = shared_weights(untied)
    assert shared.embedding_VxD is untied.params["embedding_VxD"].get_value()
    assert shared.head_DxV is untied.params["head_DxV"].get_value()
    assert shared.draft_to_target_V is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ids", [None, USED_IDS], ids=["whole", "pruned"])
def test_the_head_is_the_targets(tied, ids):
    params = target(tied=tied).params
    whole = params["embedding_VxD"].get_value().T if tied else params["head_DxV"].get_value()
    shared = shared_weights(target(tied=tied), ids)
    np.testing.assert_array_equal(shared.head_DxV, whole if ids is None else whole[:, ids])
    np.testing.assert_array_equal(shared.embedding_VxD, params["embedding_VxD"].get_value())


def test_a_drafter_that_is_bound_again_compiles_nothing(caplog):
    """A run binds one at each evaluation."""
    tied = target(tied=True)
    shared_weights(tied, USED_IDS)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        shared_weights(tied, USED_IDS)
    assert not [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("data", "tensor"), [(2, 4), (8, 1)])
def test_parameters_lie_on_the_targets_mesh(tmp_path, data, tensor, tied):
    mesh = sharding.make_mesh(data, tensor)
    export(tmp_path / "d", dtype=jnp.float32, draft_to_target=USED_IDS)
    alone = load_drafter(tmp_path / "d", target(tied=tied))
    spread = load_drafter(tmp_path / "d", target(tied=tied, mesh=mesh))
    assert_same_params(spread.params, alone.params)
    for part in ("embedding_VxD", "head_DxV", "draft_to_target_V"):
        np.testing.assert_array_equal(getattr(spread.shared, part), getattr(alone.shared, part), err_msg=part)
        assert getattr(spread.shared, part).sharding.device_set == set(mesh.devices.flat), part
    heads = dict(nnx.to_flat_state(spread.params))[("layers", 0, "attention", "q_DxGxRxH")].get_value()
    assert {s.data.shape for s in heads.addressable_shards} == {(16, 4 // tensor, 2, 6)}
    assert {s.data.shape for s in spread.shared.head_DxV.addressable_shards} == {(16, 4 // tensor)}
    whole = load_drafter(tmp_path / "d", target(tied=tied, mesh=mesh), draft_vocab=False)
    assert {s.data.shape for s in whole.shared.head_DxV.addressable_shards} == {(16, 40 // tensor)}


def test_random_drafters_fit_their_target():
    mesh = sharding.make_mesh(2, 4)
    drafter = random_drafter(CONFIG, target(mesh=mesh), seed=1)
    assert_same_params(drafter.params, place(nnx.split(DFlash(CONFIG, jnp.float32, nnx.Rngs(1)))[1], mesh))
    with pytest.raises(ConfigError, match="made for another target"):
        random_drafter(CONFIG, target(vocab_size=48))


# --------------------------------------------------------------------------------------------- draft vocabularies


def test_b35_tables_are_offsets_or_absolute_and_must_agree():
    offsets = np.array([3, 4, 4, 8])
    marks = np.isin(np.arange(40), USED_IDS)
    for tables in (
        {"d2t": offsets},
        {"draft_to_target": USED_IDS},
        {"d2t": offsets, "draft_to_target": USED_IDS.astype(np.int32)},
        {"d2t": offsets, "t2d": marks},
    ):
        ids = draft_to_target_ids(tables, 40, "file")
        assert ids.tolist() == USED_IDS.tolist() and ids.dtype == np.int32
        assert ids[2] == 6
    assert draft_to_target_ids({"d2t": np.zeros(40, np.int64)}, 40, "file").tolist() == list(range(40))
    even = {"d2t": np.arange(4), "draft_to_target": np.arange(0, 8, 2)}  # offsets that look like ids, but are none
    assert draft_to_target_ids(even, 40, "file").tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "neither draft_to_target nor d2t"),
        ({"d2t": np.arange(4)}, "d2t counts 0, 1, 2"),
        ({"d2t": np.array([3, 5, 6, 38])}, "holds 41, target ids lie in"),
        ({"d2t": np.array([-1, 4])}, "holds -1, target ids lie in"),
        ({"draft_to_target": np.array([3, 40])}, "holds 40"),
        ({"draft_to_target": np.array([3, 5, 5])}, "5 is followed by 5"),
        ({"draft_to_target": np.array([5, 3])}, "5 is followed by 3"),
        ({"draft_to_target": np.array([3.0, 5.0])}, "must be integers"),
        ({"draft_to_target": np.zeros((2, 2), int)}, "must be integers"),
        ({"draft_to_target": np.zeros(0, int)}, "must be integers"),
        ({"draft_to_target": USED_IDS, "d2t": np.array([3, 4, 4, 9])}, "name different target ids"),
        ({"draft_to_target": USED_IDS, "t2d": np.ones(40, bool)}, "t2d does not mark"),
        ({"draft_to_target": USED_IDS, "t2d": np.ones(4, bool)}, "t2d does not mark"),
    ],
)
def test_b35_tables_that_can_not_be_are_refused(tables, message):
    with pytest.raises(CheckpointError, match=message):
        draft_to_target_ids(tables, 40, "file")


def test_b35_a_pruned_vocabulary_lies_beside_the_weights(tmp_path):
    export(tmp_path / "d", draft_to_target=USED_IDS)
    stored = load_file(tmp_path / "d" / DRAFT_VOCAB_FILE)
    assert stored["draft_to_target"].tolist() == [3, 5, 6, 11] and stored["d2t"].tolist() == [3, 4, 4, 8]
    for asked in (None, True):
        drafter = load_drafter(tmp_path / "d", target(), draft_vocab=asked)
        assert drafter.shared.draft_to_target_V.tolist() == [3, 5, 6, 11]
        assert drafter.shared.head_DxV.shape == (16, 4)
    whole = load_drafter(tmp_path / "d", target(), draft_vocab=False)
    assert whole.shared.draft_to_target_V is None and whole.shared.head_DxV.shape == (16, 40)


def test_b35_a_reduced_vocabulary_without_its_table_is_refused(tmp_path):
    export(tmp_path / "d")
    with pytest.raises(CheckpointError, match="draft_vocab is True, but"):
        load_drafter(tmp_path / "d", target(), draft_vocab=True)
    edit(tmp_path / "d", config=lambda hf: hf.update(draft_vocab_size=4))
    with pytest.raises(CheckpointError, match="draft_vocab_size is 4, but"):
        load_drafter(tmp_path / "d", target())
    assert load_drafter(tmp_path / "d", target(), draft_vocab=False).shared.draft_to_target_V is None
    edit(tmp_path / "d", config=lambda hf: hf.update(draft_vocab_size=40))
    assert load_drafter(tmp_path / "d", target()).shared.draft_to_target_V is None


def test_b35_a_broken_table_is_named(tmp_path):
    export(tmp_path / "d", draft_to_target=USED_IDS)
    path = tmp_path / "d" / DRAFT_VOCAB_FILE
    save_file({"d2t": np.array([3, 4, 4, 8]), "other": np.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="holds 'other'"):
        load_drafter(tmp_path / "d", target())
    path.write_bytes(b"{")
    with pytest.raises(CheckpointError, match="no complete safetensors file"):
        load_drafter(tmp_path / "d", target())


# ------------------------------------------------------------------------------------------------------ mask id


def test_b36_a_mask_that_ends_answers_or_pads_is_refused(tmp_path):
    class Padding:
        pad_token_id = 39

    export(tmp_path / "d")
    ending = dataclasses.replace(target(), eos_token_ids=(2, 39))
    with pytest.raises(ConfigError, match="mask_token_id is 39, which is an end of text"):
        load_drafter(tmp_path / "d", ending)
    with pytest.raises(ConfigError, match="mask_token_id is 39, which is padding"):
        load_drafter(tmp_path / "d", dataclasses.replace(target(), tokenizer=Padding()))
    assert load_drafter(tmp_path / "d", ending, allow_end_as_mask=True).config.mask_token_id == 39


def test_b36_the_export_has_the_mask_id_and_the_table_keeps_its_size(tmp_path):
    export(tmp_path / "d")
    hf = json.loads((tmp_path / "d" / "config.json").read_text())
    assert hf["dflash_config"]["mask_token_id"] == hf["mask_token_id"] == 39
    drafter = load_drafter(tmp_path / "d", target())
    module = nnx.merge(drafter.graphdef, drafter.params)
    assert module.block_tokens(jnp.array([7]), 4).tolist() == [[7, 39, 39, 39]]
    assert drafter.shared.embedding_VxD.shape == (40, 16)

    def beyond(hf):
        hf["dflash_config"]["mask_token_id"] = 40

    edit(tmp_path / "d", config=beyond)
    with pytest.raises(ConfigError, match="mask_token_id is 40, must lie in"):
        load_drafter(tmp_path / "d", target())


def test_b27_a_gemma_like_target_lends_its_factors(tmp_path):
    export(tmp_path / "d")
    gemma = target(embedding_scale=4.0, final_logit_softcap=30.0)
    config = load_drafter(tmp_path / "d", gemma).config
    assert (config.embedding_scale, config.final_logit_softcap) == (4.0, 30.0)
    # Written again, the factors are in the file: readers of raw tables need them there.
    export(tmp_path / "e", config)
    hf = json.loads((tmp_path / "e" / "config.json").read_text())
    assert hf["dflash_config"]["input_embedding_scale"] == 4.0
    assert hf["dflash_config"]["final_logit_softcapping"] == 30.0


def test_reading_arrays_is_as_strict_as_reading_files():
    arrays = {"norm.weight": np.zeros(16, np.float32)}
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        drafter_from_reader(CONFIG, ArrayReader(arrays), target())
