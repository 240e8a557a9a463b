"""Parity cases of tests/golden: a target and a drafter with the reference's weights, and its numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.checkpoints.drafter_config import drafter_config_from_hf
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.load_drafter import bind_drafter, drafter_from_reader
from dflash_jax.checkpoints.placement import load_params
from dflash_jax.checkpoints.target_names import is_harmless, target_placements
from dflash_jax.drafters.contract import Drafter
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import Target, abstract_model
from dflash_jax.models.transformer import Transformer

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = ("tr_qwen3_full_a", "tr_llama_full", "tr_qwen3_sliding")


class ArrayReader:
    """The tensors of a mapping, as the checkpoint loader reads them; `prefix` is cut from their names."""

    def __init__(self, arrays: Any, prefix: str = "", source: str = "arrays"):
        self.source = source
        self._arrays = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}

    def names(self) -> Collection[str]:
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def dtype(self, name: str) -> str:
        return str(self._arrays[name].dtype)

    def readable(self, name: str) -> bool:
        return jnp.issubdtype(self._arrays[name].dtype, jnp.floating)

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


def golden_json(name: str) -> dict[str, Any]:
    """{"target": ..., "draft": ...}: the Hugging Face configurations of a case."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def load_golden(name: str) -> tuple[Target, Drafter, dict[str, np.ndarray]]:
    """(target, drafter, reference numbers) of a case, float32 on one device. Loaded once; do not mutate.

    The keys of the numbers are described in tests/golden/README.md.
    """
    hf = golden_json(name)
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    config = target_config_from_hf(hf["target"])
    graphdef, abstract = abstract_model(Transformer, config, jnp.float32)
    params = load_params(
        abstract,
        target_placements(config, own_head=False),
        ArrayReader(arrays, "target_w.", name),
        harmless=lambda tensor: is_harmless(config, tensor),
    )
    target = Target(config, graphdef, params, source=name)
    drafter_config = drafter_config_from_hf(hf["draft"], config)
    drafter = drafter_from_reader(drafter_config, ArrayReader(arrays, "draft_w.", name), target, source=name)
    return target, drafter, arrays


@functools.cache
def golden_with_markov_head(name: str, draft_ids: tuple[int, ...] | None = None) -> tuple[Target, Drafter]:
    """The pair of a case, whose drafter has a random Markov head besides: strong enough to change what is drafted."""
    target, drafter, _ = load_golden(name)
    config = dataclasses.replace(drafter.config, markov_rank=3)
    graphdef, params = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(6)))
    flat = dict(nnx.to_flat_state(params)) | dict(nnx.to_flat_state(drafter.params))
    params = nnx.from_flat_state(list(flat.items()))
    ids = None if draft_ids is None else np.asarray(draft_ids)
    return target, bind_drafter(config, graphdef, params, target, ids, name)
