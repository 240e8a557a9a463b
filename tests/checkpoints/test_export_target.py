"""Exported targets come back the same, here and in transformers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from tiny_tokenizers import CHATML, adds_bos, byte_level

from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import FULL, SLIDING, RopeConfig, TargetConfig
from dflash_jax.models.target import random_target

CHAT = [{"role": "user", "content": "the cat"}]


def make(family: str, dtype=jnp.float32, **fields):
    config = TargetConfig(
        family=family, vocab_size=344, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(5000.0), max_positions=64,
        **{"layer_types": (FULL, FULL), **fields},
    )  # fmt: skip
    target = random_target(config, 3, dtype)
    target.eos_token_ids = (4, 2)
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    target.tokenizer = Tokenizer(adds_bos(byte_level()), **special, chat_template=CHATML)
    return target


@pytest.mark.parametrize(
    ("family", "dtype", "fields"),
    [
        ("llama", jnp.float32, {"tie_embeddings": True}),
        ("llama", jnp.float16, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        ("mistral", jnp.bfloat16, {"layer_types": (SLIDING, SLIDING), "sliding_window": 4}),
        ("qwen2", jnp.float32, {"qkv_bias": True, "tie_embeddings": True}),
        ("qwen3", jnp.bfloat16, {"qk_norm": True, "layer_types": (SLIDING, FULL), "sliding_window": 4}),
    ],
)
def test_there_and_back(family, dtype, fields, tmp_path):
    target = make(family, dtype, **fields)
    again = load_target(export_target(tmp_path / "out", target))
    assert again.config == target.config
    assert again.dtype == dtype
    assert again.eos_token_ids == target.eos_token_ids
    found = {str(path): v.get_value() for path, v in nnx.to_flat_state(again.params)}
    for path, variable in nnx.to_flat_state(target.params):
        np.testing.assert_array_equal(np.asarray(found[str(path)]), np.asarray(variable.get_value()), err_msg=str(path))
    assert again.tokenizer.apply_chat_template(CHAT) == target.tokenizer.apply_chat_template(CHAT)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tokenizer_in_transformers(tmp_path):
    target = make("llama")
    reference = transformers.AutoTokenizer.from_pretrained(export_target(tmp_path / "out", target))
    assert reference.encode("the cat") == target.tokenizer.encode("the cat")
    chat = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat == target.tokenizer.apply_chat_template(CHAT)
    assert reference.pad_token_id == target.tokenizer.pad_token_id


def test_without_a_tokenizer(tmp_path):
    target = make("llama")
    target.tokenizer = None
    assert load_target(export_target(tmp_path / "out", target)).tokenizer is None


def test_existing_files_are_never_overwritten(tmp_path):
    target = make("llama")
    export_target(tmp_path, target)  # empty: taken
    with pytest.raises(CheckpointError, match="no empty directory"):
        export_target(tmp_path, target)
