"""The decode step's arguments as shapes with shardings: what there is to compile, and to weigh, without weights.

Everything comes from what lays the real arrays out (`make_cache`, parameters' logical axes, `RULES` of sharding.py),
so a program compiled from these is the one that an engine of the same sizes runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decoding.cache import abstract_cache
from dflash_jax.decoding.logits_rules import LOGITS_AXES, LogitsRules
from dflash_jax.decoding.request import MAX_STOP_IDS
from dflash_jax.decoding.sampling import Sampling, row_keys
from dflash_jax.decoding.step import DecodeState, Rules, Skeleton, StepConfig, Weights
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import abstract_model, place_abstract
from dflash_jax.models.transformer import Transformer, layer_specs


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """Arguments of `step.step`: step.lower(a.config, a.weights, a.state, a.rules)."""

    config: StepConfig
    weights: Weights
    state: DecodeState
    rules: Rules


def abstract_step(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    mesh: Mesh | None,
    *,
    dtype: Any,
    batch: int,
    capacity: int,
    page_size: int | None = None,
    num_pages: int | None = None,
    block_size: int | None = None,
    greedy: bool = True,
    drawn_proposal: bool = False,
    logits_rules: bool = False,
) -> AbstractStep:
    """The step of an engine with these sizes; see `Engine` for what they mean.

    Args:
      target, drafter: architectures; drafter None is plain decoding.
      mesh: may be made of devices that are not there.
      dtype: of the parameters of both, and of the cache.

    Raises:
      ValueError: sizes that the mesh or each other do not divide; see `abstract_cache`.
    """
    graphdef, params = laid_out(mesh, Transformer, target, dtype)
    target_skeleton, target_leaves = Skeleton.of(graphdef, params)
    specs = layer_specs(target)
    drafter_skeleton = drafter_leaves = shared = None
    if drafter is not None:
        shared = abstract_shared(params, target, mesh)
        graphdef, params = laid_out(mesh, DFlash, drafter, dtype)
        drafter_skeleton, drafter_leaves = Skeleton.of(graphdef, params)
        specs += nnx.merge(graphdef, params).layer_specs()
        if drafter.markov_rank:
            shape = (drafter.markov_rank, target.vocab_size)
            columns = sharding.abstract_array(mesh, shape, jnp.dtype(dtype), (None, "vocab"))
            shared = shared.replace(markov_RxV=columns)
    config = StepConfig(
        target=target_skeleton,
        drafter=drafter_skeleton,
        tap_ids=() if drafter is None else drafter.target_layer_ids,
        block_size=1 if drafter is None else block_size or drafter.block_size,
        greedy=greedy,
        drawn_proposal=drawn_proposal,
        logits_rules=logits_rules,
        mesh=mesh,
    )
    cache = abstract_cache(specs, batch, capacity, dtype, page_size=page_size, num_pages=num_pages, mesh=mesh)
    vocab = target.vocab_size if logits_rules else None
    state = DecodeState(
        cache, rows(mesh, batch), abstract_keys(mesh, batch), rows(mesh, batch),
        None if vocab is None else sharding.abstract_array(mesh, (batch, vocab), jnp.int32, LOGITS_AXES),
    )  # fmt: skip
    weights = Weights(target_leaves, drafter_leaves, shared)
    return AbstractStep(config, weights, state, abstract_rules(mesh, batch, vocab))


def laid_out(mesh: Mesh | None, make: type[nnx.Module], *args: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, abstract params) of a module class, each parameter with its sharding."""
    graphdef, params = abstract_model(make, *args)
    return graphdef, place_abstract(params, mesh)


def abstract_shared(params: nnx.State, target: TargetConfig, mesh: Mesh | None) -> SharedWeights:
    """Table and head as `load_drafter.shared_weights` lays them out, over the whole vocabulary."""
    table = params["embedding_VxD"].get_value()
    if "head_DxV" in params:
        return SharedWeights(table, params["head_DxV"].get_value())
    head_shape = (target.hidden_size, target.vocab_size)
    return SharedWeights(table, sharding.abstract_array(mesh, head_shape, table.dtype, ("embed", "vocab")))


def rows(mesh: Mesh | None, count: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """One number a row."""
    return sharding.abstract_array(mesh, (count,), dtype, ("batch",))


def abstract_keys(mesh: Mesh | None, count: int) -> jax.ShapeDtypeStruct:
    """One PRNG key a row."""
    keys = jax.eval_shape(lambda: row_keys([0] * count))
    return sharding.abstract_array(mesh, keys.shape, keys.dtype, ("batch",))


def abstract_rules(mesh: Mesh | None, count: int, vocab: int | None = None) -> Rules:
    """Rules of so many rows; with bias and penalties where `vocab`, the size of the vocabulary, is given."""
    number = rows(mesh, count, jnp.float32)
    stops = sharding.abstract_array(mesh, (count, MAX_STOP_IDS), jnp.int32, ("batch", None))
    logits = None
    if vocab is not None:
        bias, seen = (
            sharding.abstract_array(mesh, (count, vocab), dtype, LOGITS_AXES) for dtype in (jnp.float32, jnp.bool)
        )
        logits = LogitsRules(number, number, number, bias, seen)
    return Rules(Sampling(number, rows(mesh, count), number, number), stops, logits)
