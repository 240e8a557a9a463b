"""`config.json` of drafters: both spellings, what is refused and by which name, and the way back."""

import copy
import warnings

import numpy as np
import pytest
from golden_cases import GOLDEN, golden_json, load_golden

from dflash_jax.checkpoints.drafter_config import bind_to_target, drafter_config_from_hf, drafter_config_to_hf
from dflash_jax.checkpoints.rope_config import rope_config_from_hf, rope_config_to_hf
from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    default_target_layer_ids,
)
from dflash_jax.models.layers import rope_frequencies

# The fields of a published five-layer drafter for a 36-layer, 2560-wide target, in the older spelling. Its
# heads times head_dim (4096) is not its width.
OLD = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 5,
    "layer_types": [FULL] * 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}

TINY = DrafterConfig(
    hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5), vocab_size=40, block_size=4, mask_token_id=39, target_layer_ids=(1, 3, 4),
    num_target_layers=6, layer_types=(SLIDING, FULL), max_positions=128, sliding_window=8,
)  # fmt: skip


def changed(base: dict, **fields) -> dict:
    """A copy of `base` with fields set; `dflash__x` sets x of dflash_config; ... deletes."""
    result = copy.deepcopy(base)
    for name, value in fields.items():
        where = result
        if name.startswith("dflash__"):
            where, name = result["dflash_config"], name.removeprefix("dflash__")
        if value is ...:
            del where[name]
        else:
            where[name] = value
    return result


def target_like(config: DrafterConfig, **fields) -> TargetConfig:
    values = {
        "family": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 32,
        "num_layers": config.num_target_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_positions": 128,
        "layer_types": (FULL,) * config.num_target_layers,
    }
    return TargetConfig(**(values | fields))


def test_old_spelling():
    config = drafter_config_from_hf(OLD)
    assert (config.hidden_size, config.num_heads, config.head_dim, config.num_kv_heads) == (2560, 32, 128, 8)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.layer_types == (FULL,) * 5 and config.sliding_window is None and config.causal is None
    assert config.rope == RopeConfig(theta=1e6)
    assert config.embedding_scale is None and config.output_multiplier == 1.0 and config.final_logit_softcap is None


def test_new_spelling_is_the_same():
    new = changed(
        OLD,
        block_size=...,
        dflash__block_size=16,
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_theta": 1_000_000, "rope_type": "default"},
        num_target_layers=...,
        dflash__num_target_layers=36,
    )
    assert drafter_config_from_hf(new) == drafter_config_from_hf(OLD)


def test_dflash_config_wins_over_the_top_level():
    both = changed(OLD, block_size=8, dflash__block_size=16, mask_token_id=7)
    config = drafter_config_from_hf(both)
    assert (config.block_size, config.mask_token_id) == (16, 151669)


def test_sliding_layers_and_factors():
    hf = changed(
        OLD,
        layer_types=[SLIDING] * 4 + [FULL],
        sliding_window=2048,
        use_sliding_window=True,
        dflash__input_embedding_scale=73.5,
        dflash__output_multiplier=0.5,
        final_logit_softcapping=30,
    )
    config = drafter_config_from_hf(hf)
    assert config.layer_types == (SLIDING,) * 4 + (FULL,) and config.sliding_window == 2048
    assert (config.embedding_scale, config.output_multiplier, config.final_logit_softcap) == (73.5, 0.5, 30.0)
    assert [config.layer_is_causal(i) for i in range(5)] == [True] * 4 + [False]


def test_layers_without_layer_types():
    assert drafter_config_from_hf(changed(OLD, layer_types=...)).layer_types == (FULL,) * 5
    hf = changed(OLD, layer_types=..., use_sliding_window=True, sliding_window=64, max_window_layers=3)
    assert drafter_config_from_hf(hf).layer_types == (FULL,) * 3 + (SLIDING,) * 2


@pytest.mark.parametrize(
    ("top", "inner", "expected"),
    [(None, None, None), (False, True, False), (True, False, True), (None, True, True), (None, False, False)],
)
def test_is_causal_wins_over_dflash_causal_wins_over_layer_types(top, inner, expected):
    hf = changed(OLD, is_causal=top, dflash__causal=inner, layer_types=[SLIDING] * 4 + [FULL], sliding_window=64)
    hf["use_sliding_window"] = True
    config = drafter_config_from_hf(hf)
    assert config.causal is expected
    by_layer = [True] * 4 + [False] if expected is None else [expected] * 5
    assert [config.layer_is_causal(i) for i in range(5)] == by_layer


REFUSED = {
    "block size missing": ({"block_size": ...}, "block_size is not set"),
    "block size 1": ({"block_size": 1}, "block_size is 1"),
    "block size a text": ({"block_size": "16"}, "block_size holds '16'"),
    "mask a fraction": ({"dflash__mask_token_id": 1.5}, "mask_token_id holds 1.5"),
    "tap beyond the target": ({"dflash__target_layer_ids": [1, 36]}, "target_layer_ids holds 36"),
    "tap negative": ({"dflash__target_layer_ids": [-1, 1]}, "target_layer_ids holds -1"),
    "taps not ascending": ({"dflash__target_layer_ids": [9, 1]}, "strictly ascending"),
    "taps twice": ({"dflash__target_layer_ids": [1, 1]}, "strictly ascending"),
    "taps empty": ({"dflash__target_layer_ids": []}, "target_layer_ids is empty"),
    "taps a number": ({"dflash__target_layer_ids": 5}, "target_layer_ids is 5"),
    "head_dim odd": ({"head_dim": 127}, "head_dim is 127"),
    "head_dim unclear": ({"head_dim": None, "hidden_size": 2561}, "head_dim is not set"),
    "heads do not group": ({"num_key_value_heads": 5}, "num_kv_heads 5"),
    "hidden size missing": ({"hidden_size": ...}, "hidden_size is not set"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "target layers missing": ({"num_target_layers": ...}, "num_target_layers is not set"),
    "layer kind": ({"layer_types": [FULL] * 4 + ["linear_attention"]}, "layer type 'linear_attention'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "model type": ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
    "architecture": ({"architectures": ["DFlash2DraftModel"]}, "architectures is .*DFlash2DraftModel"),
    "projector": ({"projector_type": "dspark"}, "projector_type is 'dspark'"),
    "projector inside": ({"dflash__projector_type": "domino"}, "projector_type is 'domino'"),
    "DFlash 2 convolution": ({"dflash__conv_kernel_size": 2}, "conv_kernel_size is set: .*DFlash 2"),
    "DFlash 2 selector": ({"selector_rank": 256}, "selector_rank is set: .*DFlash 2"),
    "DSpark": ({"markov_rank": 256}, "markov_rank is set: .*DSpark"),
    "Domino": ({"dflash__gru_hidden_dim": 1024}, "gru_hidden_dim is set: .*Domino"),
    "MiMo": ({"use_swa": True}, "use_swa is set: .*MiMo"),
    "taps as inputs": ({"eagle_aux_hidden_state_layer_ids": [2]}, "eagle_aux_hidden_state_layer_ids is set"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    "shifted slots": ({"dflash__sample_from_anchor": True}, "sample_from_anchor is true"),
    "unknown field": ({"dflash__new_trick": 3}, "dflash_config has the field 'new_trick'"),
    "dflash_config no mapping": ({"dflash_config": [1]}, r"dflash_config is \[1\]"),
    "causal no flag": ({"is_causal": 1}, "is_causal is 1"),
    "scale": ({"dflash__input_embedding_scale": 0}, "input_embedding_scale is 0"),
    "partial rotary": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    "rope kind": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
    "rope by layer": ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "rotary embedding of its own"),
    "rope base": ({"rope_theta": -1}, "rope_theta is -1"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "no factor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    fields, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        drafter_config_from_hf(changed(OLD, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"projector_type": "dflash"},
        {"dflash__sample_from_anchor": False},
        {"markov_rank": None, "enable_confidence_head": False},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"partial_rotary_factor": 1.0},
        {"architectures": None},
    ],
)
def test_fields_that_say_nothing_new_are_accepted(fields):
    assert drafter_config_from_hf(changed(OLD, **fields)) == drafter_config_from_hf(OLD)


def test_yarn_scales_from_the_original_length():
    hf = changed(OLD, rope_theta=150000, rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False})
    hf["rope_scaling"]["original_max_position_embeddings"] = 4096
    rope = drafter_config_from_hf(hf).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions, rope.truncate) == (
        "yarn", 150000.0, 32.0, 4096, False,
    )  # fmt: skip
    del hf["rope_scaling"]["original_max_position_embeddings"]
    assert drafter_config_from_hf(hf).rope.original_max_positions == 40960


def test_b23_default_taps_are_the_reference_formula():
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(11, 3) == (1, 4, 8)  # 4.5 rounds to the even 4
    with np.load(GOLDEN / "sampling_and_layer_ids.npz") as file:
        tables = {key: file[key] for key in file.files if key.startswith("layer_ids_")}
    assert len(tables) == 11
    for key, ids in tables.items():
        num_layers, num_taps = map(int, key.removeprefix("layer_ids_").split("_"))
        assert default_target_layer_ids(num_layers, num_taps) == tuple(ids), key


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 2), (2, 2), (3, 2), (1, 3)])
def test_b23_default_taps_of_a_shallow_target_are_refused(num_layers, num_taps):
    with pytest.raises(ConfigError, match="set target_layer_ids explicitly"):
        default_target_layer_ids(num_layers, num_taps)
    hf = changed(OLD, num_target_layers=num_layers, num_hidden_layers=num_taps, layer_types=[FULL] * num_taps)
    del hf["dflash_config"]["target_layer_ids"]
    with pytest.raises(ConfigError, match="set target_layer_ids explicitly"):
        drafter_config_from_hf(hf)


def test_b23_explicit_taps_win_and_missing_ones_follow_the_rule():
    assert drafter_config_from_hf(changed(OLD, dflash__target_layer_ids=[2, 3])).target_layer_ids == (2, 3)
    assert drafter_config_from_hf(changed(OLD, dflash__target_layer_ids=...)).target_layer_ids == (1, 9, 17, 25, 33)


def test_b23_tapping_the_last_layer_warns_of_the_final_norm():
    with pytest.warns(UserWarning, match="before the final norm"):
        drafter_config_from_hf(changed(OLD, dflash__target_layer_ids=[1, 35]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 16, the target's hidden_size is 32"),
        ({"vocab_size": 41}, "vocab_size is 40, the target's vocab_size is 41"),
        ({"num_layers": 7, "layer_types": (FULL,) * 7}, "num_target_layers is 6, the target's num_layers is 7"),
    ],
)
def test_another_target_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        bind_to_target(TINY, target_like(TINY, **fields))


def test_num_target_layers_may_come_from_the_target():
    hf = drafter_config_to_hf(TINY, "bfloat16")
    del hf["num_target_layers"]
    assert drafter_config_from_hf(hf, target_like(TINY)) == TINY


def test_b27_what_the_drafter_leaves_open_is_the_targets():
    gemma = target_like(TINY, embedding_scale=4.0, final_logit_softcap=30.0)
    bound = bind_to_target(TINY, gemma)
    assert (bound.embedding_scale, bound.final_logit_softcap) == (4.0, 30.0)
    assert bind_to_target(TINY, target_like(TINY)) == TINY


def test_b27_what_the_drafter_sets_is_kept():
    gemma = target_like(TINY, embedding_scale=4.0, final_logit_softcap=30.0)
    hf = drafter_config_to_hf(TINY, "float32")
    hf["dflash_config"] |= {"input_embedding_scale": 1.0, "final_logit_softcapping": 0}
    bound = drafter_config_from_hf(hf, gemma)
    assert (bound.embedding_scale, bound.final_logit_softcap) == (1.0, 0.0)
    hf["dflash_config"] |= {"input_embedding_scale": 2.5, "final_logit_softcapping": 20}
    bound = drafter_config_from_hf(hf, gemma)
    assert (bound.embedding_scale, bound.final_logit_softcap) == (2.5, 20.0)


ROPE_SPELLINGS = {
    "A": {"rope_theta": 1e6},
    "B": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "C": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e4},
    "D": {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}},
    "both dicts": {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_theta": 1e4}, "rope_theta": 1e5},
}


@pytest.mark.parametrize("case", ROPE_SPELLINGS)
def test_b28_all_spellings_of_the_rope_base_give_one_table(case):
    bare = changed(OLD, rope_theta=..., rope_scaling=...)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = drafter_config_from_hf(bare | ROPE_SPELLINGS[case])
    freq, factor = rope_frequencies(config.rope, config.head_dim)
    expected, _ = rope_frequencies(RopeConfig(theta=1e6), 128)
    np.testing.assert_array_equal(freq, expected)
    assert factor == 1.0


def test_b28_no_rope_field_is_the_documented_default_with_a_warning():
    bare = changed(OLD, rope_theta=..., rope_scaling=...)
    with pytest.warns(UserWarning, match="no rope_theta"):
        assert drafter_config_from_hf(bare).rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e6),
        RopeConfig(theta=1e4, kind="linear", factor=4.0),
        RopeConfig(
            theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        ),
        RopeConfig(
            theta=1.5e5, kind="yarn", factor=32.0, original_max_positions=4096, beta_fast=16.0, beta_slow=2.0,
            attention_factor=1.2, truncate=False,
        ),
        RopeConfig(theta=1e4, kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=0.7),
    ],
    ids=lambda rope: rope.kind,
)  # fmt: skip
def test_b28_export_writes_every_schema(rope):
    written = rope_config_to_hf(rope)
    assert rope_config_from_hf(written) == rope
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == rope.theta
    # A reader of one schema alone gets the same embedding: the new one, the old one with its top-level base.
    assert rope_config_from_hf({"rope_parameters": written["rope_parameters"]}) == rope
    assert rope_config_from_hf({k: written[k] for k in ("rope_theta", "rope_scaling")}) == rope


def test_b31_layer_types_must_fit_the_layers_and_the_window():
    with pytest.raises(ConfigError, match="layer_types has 4 entries for 5 layers"):
        drafter_config_from_hf(changed(OLD, layer_types=[FULL] * 4))
    with pytest.raises(ConfigError, match="sliding_window is None"):
        drafter_config_from_hf(changed(OLD, layer_types=[SLIDING] * 5, use_sliding_window=True))


def test_b31_explicit_sliding_layers_keep_their_window_and_warn_of_the_flag():
    hf = changed(OLD, layer_types=[SLIDING] * 5, sliding_window=64, use_sliding_window=False)
    with pytest.warns(UserWarning, match="use_sliding_window is false"):
        config = drafter_config_from_hf(hf)
    assert config.layer_types == (SLIDING,) * 5 and config.sliding_window == 64


def test_b36_mask_id_is_never_guessed():
    hf = changed(OLD, dflash__mask_token_id=..., pad_token_id=0, eos_token_id=2)
    with pytest.raises(ConfigError, match="mask_token_id is not set"):
        drafter_config_from_hf(hf)
    assert drafter_config_from_hf(changed(OLD, dflash__mask_token_id=..., mask_token_id=5)).mask_token_id == 5


@pytest.mark.parametrize("mask", [151936, 200000, -1])
def test_b36_mask_id_beyond_the_table_is_refused(mask):
    with pytest.raises(ConfigError, match=f"mask_token_id is {mask}, must lie in"):
        drafter_config_from_hf(changed(OLD, dflash__mask_token_id=mask))


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        bind_to_target(TINY, target_like(TINY, embedding_scale=4.0, final_logit_softcap=30.0)),
        drafter_config_from_hf(OLD),
        drafter_config_from_hf(changed(OLD, is_causal=False, dflash__output_multiplier=0.25, attention_bias=True)),
    ],
    ids=["sliding", "gemma", "published", "causal"],
)
def test_written_and_read_again_is_the_same(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drafter_config_from_hf(drafter_config_to_hf(config, "bfloat16")) == config


def test_written_config_has_both_spellings():
    hf = drafter_config_to_hf(TINY, "bfloat16")
    assert hf["block_size"] == hf["dflash_config"]["block_size"] == 4
    assert hf["mask_token_id"] == hf["dflash_config"]["mask_token_id"] == 39
    assert hf["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert hf["rope_theta"] == hf["rope_parameters"]["rope_theta"] == 5e5
    assert hf["architectures"] == ["DFlashDraftModel"] and hf["model_type"] == "qwen3"
    assert hf["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert hf["layer_types"] == [SLIDING, FULL] and hf["use_sliding_window"] and hf["sliding_window"] == 8
    assert hf["num_target_layers"] == 6 and hf["dtype"] == hf["torch_dtype"] == "bfloat16"


def test_golden_configurations_are_read():
    _, drafter, _ = load_golden("tr_qwen3_sliding")
    assert drafter.config.layer_types == (SLIDING, FULL) and drafter.config.sliding_window == 8
    hf = golden_json("tr_qwen3_full_a")["draft"]
    assert drafter_config_from_hf(hf).target_layer_ids == (1, 3, 4)
