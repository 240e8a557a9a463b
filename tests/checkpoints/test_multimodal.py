"""Decoders inside multimodal checkpoints, under every nesting that is published; and what else lies in them."""

from __future__ import annotations

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import golden_family
from flax import nnx
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.spelling import other_modality
from dflash_jax.checkpoints.target_names import is_harmless

FAMILIES = ("gemma2", "gemma3_text", "gemma4_text", "qwen3_next", "qwen3_5", "qwen3_5_moe", "llama4_text")
# (golden case, model_type of the whole, prefix of the decoder, name of the head, other tensors)
NESTED = [
    ("gemma3_text", "gemma3", "language_model.model", "language_model.lm_head.weight",
     ["vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_input_projection_weight"]),
    ("gemma3_text", "gemma3", "model.language_model", "lm_head.weight",
     ["model.vision_tower.vision_model.post_layernorm.bias", "model.multi_modal_projector.mm_soft_emb_norm.weight"]),
    ("gemma4_text", "gemma4", "model.language_model", "lm_head.weight",
     ["model.vision_tower.encoder.layers.0.input_layernorm.weight", "model.audio_tower.layers.0.norm_out.weight",
      "model.embed_vision.embedding_projection.weight"]),
    ("qwen3_5", "qwen3_5", "model.language_model", "lm_head.weight",
     ["model.visual.blocks.0.attn.qkv.weight", "mtp.norm.weight"]),
    ("qwen3_5_moe", "qwen3_5_moe", "model.language_model", "lm_head.weight", ["model.visual.pos_embed.weight"]),
    ("llama4_text", "llama4", "language_model.model", "language_model.lm_head.weight",
     ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"]),
]  # fmt: skip


def write(directory, config: dict, weights: dict[str, np.ndarray], **files):
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def nested(case: str, model_type: str, prefix: str, head: str, others: list[str]):
    """(config.json, weights) of a multimodal checkpoint with this decoder."""
    text, weights = golden_family(case)
    tied = text.get("tie_word_embeddings", False)
    inside = {head if k == "lm_head.weight" else f"{prefix}.{k.removeprefix('model.')}": v for k, v in weights.items()}
    whole = {"model_type": model_type, "text_config": text, "vision_config": {}, "tie_word_embeddings": tied}
    return whole, {**inside, **{name: np.ones(2, np.float16) for name in others}}


def flat(target) -> dict[str, np.ndarray]:
    return {str(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(target.params)}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("case", NESTED, ids=lambda case: f"{case[1]}-{case[2]}")
def test_decoder_of_a_multimodal_checkpoint(case, tmp_path, caplog):
    plain = load_target(write(tmp_path / "plain", *golden_family(case[0])))
    with caplog.at_level(logging.INFO, "absl"):
        whole = load_target(write(tmp_path / "whole", *nested(*case)))
    assert whole.config == plain.config
    assert_same(flat(whole), flat(plain))
    skipped = [name for name in case[4] if not name.startswith("mtp.")]
    line = f"{len(skipped)} tensors of other modalities are skipped, such as {min(skipped)}"
    assert any(line in message for message in caplog.messages)
    # What is written is a text model.
    written = export_target(tmp_path / "written", whole)
    names = load_file(written / "model.safetensors").keys()
    assert all(name == "lm_head.weight" or name.startswith("model.") for name in names)
    assert not any("language_model" in name for name in names)


def test_only_known_parts_are_skipped(tmp_path):
    config, weights = nested(*NESTED[3])
    unknown = {**weights, "model.memory.weight": np.ones(2, np.float16)}
    with pytest.raises(CheckpointError, match=r"model\.memory\.weight with shape \(2,\) is unknown"):
        load_target(write(tmp_path, config, unknown))
    missing = "model.language_model.layers.0.linear_attn.A_log"
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        load_target(write(tmp_path, config, {k: v for k, v in weights.items() if k != missing}))


def test_text_families_skip_no_vision_tensors():
    config = target_config_from_hf(golden_family("qwen3_next")[0])
    assert not is_harmless(config, "model.visual.pos_embed.weight")
    assert other_modality("model.visual.pos_embed.weight")
    assert not other_modality("model.layers.0.visual.weight")
    assert not other_modality("model.language_model.norm.weight")


def test_ends_and_dtype_inside_text_config(tmp_path):
    config, weights = nested(*NESTED[3])
    config["text_config"] |= {"eos_token_id": 44, "dtype": "bfloat16"}
    target = load_target(write(tmp_path / "one", config, weights, generation_config={"eos_token_id": [46, 44]}))
    assert target.eos_token_ids == (46, 44)
    assert target.dtype == jnp.bfloat16
    config["dtype"], config["eos_token_id"] = "float16", 7
    target = load_target(write(tmp_path / "two", config, weights))
    assert target.eos_token_ids == (7, 44)
    assert target.dtype == jnp.float16


def test_tied_heads_of_a_multimodal_checkpoint(tmp_path):
    """tie_word_embeddings beside text_config decides, as in transformers; a head in the file is then junk."""
    config, weights = nested(*NESTED[3])
    assert config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    junk = {**weights, "lm_head.weight": np.ones((64, 32), np.float16)}
    target = load_target(write(tmp_path, config, junk))
    assert target.config.tie_embeddings
    table = weights["model.language_model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(target.params["embedding_VxD"][...], table)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_again(name, tmp_path):
    target = load_target(write(tmp_path / "published", *golden_family(name)), dtype="float32")
    first = export_target(tmp_path / "first", target)
    again = load_target(first)
    assert again.config == target.config
    assert_same(flat(again), flat(target))
    second = export_target(tmp_path / "second", again)
    for file in ("model.safetensors", "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
