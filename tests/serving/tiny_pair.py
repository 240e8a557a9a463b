"""A tiny target with a byte tokenizer and chat template, drafters for it, and its configs."""

import io
import json
import pathlib

import numpy as np
from decoding.scripted import script_table, scripted_drafter
from ml_collections import ConfigDict

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import FULL, DrafterConfig
from dflash_jax.decoding.generate import generate
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target
from dflash_jax.serving.terminal import Terminal
from dflash_jax.training.dry_run import tiny_target

BLOCK, MAX_TOKENS = 4, 14


def pair() -> tuple[Target, Drafter]:
    """A random target of width 32 and a random drafter of one layer."""
    target = tiny_target(0)
    c = target.config
    config = DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_layers=1, num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, rope=c.rope,
        vocab_size=c.vocab_size, block_size=BLOCK, mask_token_id=2, target_layer_ids=(1, 3),
        num_target_layers=c.num_layers, layer_types=(FULL,), max_positions=c.max_positions,
    )  # fmt: skip
    return target, random_drafter(config, target)


def oracle(target: Target, prompt_ids: list[int]) -> Drafter:
    """A drafter that knows the target's greedy answer to one prompt: every draft is right."""
    answer = generate(target, None, [prompt_ids], max_tokens=MAX_TOKENS)[0].token_ids
    vocab = target.config.vocab_size
    table = script_table([prompt_ids], [answer], vocab)
    return scripted_drafter(table, BLOCK, target.config.num_layers)


def exported(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Directories of the pair's target and drafter on disk."""
    target, drafter = pair()
    path = export_drafter(directory / "drafter", drafter.config, drafter.params, dtype=np.float32)
    return export_target(directory / "target", target), path


def config(**changes) -> ConfigDict:
    """A config as `configs/` has them, for the pair; "section.field" = value changes it."""
    sections = {
        "target": {"source": "tiny", "dtype": "float32"},
        "drafter": {"source": "tiny"},
        "generation": {"max_tokens": MAX_TOKENS},
        "comparison": {"repeats": 2},
    }
    for path, value in changes.items():
        section, field = path.split(".")
        sections.setdefault(section, {})[field] = value
    return ConfigDict(sections)


def terminal(stdin: str = "") -> Terminal:
    """One that reads a script; `.out.file` and `.err.file` hold what it showed."""
    return Terminal(io.StringIO(stdin), io.StringIO(), io.StringIO())


def strict_json(text: str) -> dict:
    """Parses JSON, refusing NaN and Infinity."""

    def refuse(name: str):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
