"""A random target with a byte tokenizer: a whole run, data to export, in under a minute and without downloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from jax.sharding import Mesh
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import FULL, ConfigError, RopeConfig, TargetConfig
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target, random_target
from dflash_jax.training.initialise import drafter_config

TINY = "random:tiny"
_VOCAB = 259
_SPECIAL = ("<|end|>", "<|start|>", "<|mask|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, ids 3 .. 258; special tokens 0 (end), 1 (start of turn) and 2 (mask)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*_SPECIAL, *alphabet])}, merges=[])
    )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in _SPECIAL])
    return Tokenizer(backend, eos_token="<|end|>", chat_template=_TEMPLATE)


def tiny_target(
    seed: int = 0,
    mesh: Mesh | None = None,
    architecture: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> Target:
    """A target with random weights and `byte_tokenizer`: a Llama of five layers and width 32, or another.

    Args:
      architecture: what config.json of the other would hold.
      dtype: `target.dtype` of a config; None or "float32", nothing else is made.

    Raises:
      ConfigError: another dtype, a vocabulary smaller than the tokenizer's, or see `target_config_from_hf`.
    """
    if dtype not in (None, "float32"):
        raise ConfigError(f"target.dtype is {dtype!r}, but {TINY} is made in float32")
    if architecture is not None:
        config = target_config_from_hf(architecture)
        if config.vocab_size < _VOCAB:
            raise ConfigError(
                f"target.architecture has vocab_size {config.vocab_size}, {TINY} needs {_VOCAB}: 256 bytes and 3 more"
            )
    else:
        config = _llama()
    target = random_target(config, seed, mesh=mesh)
    target.tokenizer, target.eos_token_ids, target.source = byte_tokenizer(), (0,), TINY
    return target


def tiny_drafter(target: Target) -> Drafter:
    """A drafter with random weights for a `tiny_target`: one layer, two taps, blocks of four."""
    config = drafter_config(
        target.config, num_layers=1, block_size=4, mask_token_id=_SPECIAL.index("<|mask|>"), target_layer_ids=2
    )  # fmt: skip
    return random_drafter(config, target)


def _llama() -> TargetConfig:
    layers = 5
    return TargetConfig(
        family="llama", vocab_size=_VOCAB, hidden_size=32, intermediate_size=64, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(10_000.0), max_positions=1024,
        layer_types=(FULL,) * layers, tie_embeddings=True,
    )  # fmt: skip
