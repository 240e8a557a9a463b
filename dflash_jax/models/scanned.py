"""A target whose like layers lie stacked and are run by a loop: one layer is compiled, however many there are.

A scan reads its weights from one array a parameter, so they must lie stacked; stacking inside a step would copy the
whole target every time. Here they are stacked once. Layers are alike where their modules are the same but for their
numbers; a target may repeat a pattern of several (three with a recurrence, one with attention), and begin or end with
layers that fit no pattern (dense ones before experts), which are run one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.kernels.kv_cache import KVCache, pages
from dflash_jax.models.attention import BlockContext
from dflash_jax.models.target import place_abstract
from dflash_jax.models.transformer import ROWS

_LONGEST_PATTERN = 12


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Layers first .. first + period * repeats - 1 are `repeats` times the same `period` layers."""

    first: int
    period: int
    repeats: int

    @property
    def scanned(self) -> range:
        return range(self.first, self.first + self.period * self.repeats)


@struct.dataclass
class StackedTarget:
    """A target's parameters with the layers of a plan stacked.

    Attributes:
      rest: the parameters without those layers.
      stacked: for each layer of the pattern its parameters, every array [repeats, ...].
    """

    rest: nnx.State
    stacked: tuple[nnx.State, ...]
    plan: LayerPlan = struct.field(pytree_node=False)
    config: TargetConfig = struct.field(pytree_node=False)


def plan_layers(params: nnx.State, graphdef: nnx.GraphDef) -> LayerPlan:
    """The plan that leaves the fewest layers to run one by one; of those the one with the shortest pattern.

    Args:
      params: arrays or their shapes.

    Raises:
      ConfigError: no two neighbouring patterns are alike: there is nothing to scan.
    """
    model = nnx.merge(graphdef, params)
    kinds: list[Any] = []
    for layer in model.layers:
        layer_graphdef, layer_params = nnx.split(layer)
        shapes = [(jax.tree_util.keystr(p), x.shape) for p, x in jax.tree_util.tree_leaves_with_path(layer_params)]
        kinds.append((layer_graphdef, shapes))
    best = LayerPlan(0, 1, 1)
    for period in range(1, min(_LONGEST_PATTERN, len(kinds) // 2) + 1):
        for first in range(len(kinds) - 2 * period + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - first) // period
            if repeats > 1 and period * repeats > best.period * best.repeats:
                best = LayerPlan(first, period, repeats)
    if best.repeats == 1:
        raise ConfigError(
            f"the target's {len(kinds)} layers repeat no pattern of up to {_LONGEST_PATTERN}: nothing to scan, "
            "run them one by one (step.scan_target = False)"
        )
    return best


def stack_layers(params: nnx.State, graphdef: nnx.GraphDef, mesh: Mesh | None) -> StackedTarget:
    """The same parameters for `forward_rows`; new arrays for the stacked layers, laid out as each layer was.

    Args:
      params: arrays; or shapes, which give shapes with the shardings that the arrays would have.
    """
    plan = plan_layers(params, graphdef)

    def one(*variables: nnx.Variable) -> nnx.Variable:
        axes = variables[0].get_metadata("axes")
        return _with_axes(variables[0], jnp.stack([v.get_value() for v in variables]), (None, *axes))

    def stack(layers: tuple[tuple[nnx.State, ...], ...]) -> tuple[nnx.State, ...]:
        return tuple(jax.tree.map(one, *same, is_leaf=lambda x: isinstance(x, nnx.Variable)) for same in layers)

    layers = params["layers"]
    alike = tuple(tuple(layers[i] for i in plan.scanned[r :: plan.period]) for r in range(plan.period))
    shapes = place_abstract(jax.eval_shape(stack, alike), mesh)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
    if abstract:
        stacked = shapes
    else:
        layout = None if mesh is None else jax.tree.map(lambda x: x.sharding, shapes)
        stacked = jax.jit(stack, out_shardings=layout)(alike)
    kept = {i: layer for i, layer in layers.items() if i not in plan.scanned}
    rest = nnx.State({**{name: x for name, x in params.items() if name != "layers"}, "layers": nnx.State(kept)})
    return StackedTarget(rest, stacked, plan, nnx.merge(graphdef, params).config)


def run_layers(
    target: StackedTarget, graphdef: nnx.GraphDef, token_BxM: jax.Array, block: BlockContext, cache: KVCache,
    tap_ids: Sequence[int],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """(hidden_BxMxD after the final norm, taps_BxMxTD) of tokens over a context that is empty in every layer.

    Args:
      block, cache: as `Transformer.__call__` makes and takes them; the cache holds no committed token.
    """
    plan = target.plan
    model = _merge(target, graphdef)
    states, taps, recurrent = iter(cache.recurrent), {}, {}
    for i, layer in enumerate(model.layers):
        if layer.is_recurrent:
            recurrent[i] = next(states)

    def rows(i: int) -> Any:
        return recurrent[i] if i in recurrent else pages(cache, i)

    x_BxMxD = model.embed(token_BxM)

    def one_by_one(layers: range, x_BxMxD: jax.Array) -> jax.Array:
        for i in layers:
            with jax.named_scope(f"layer_{i}"):
                x_BxMxD, _ = model.layers[i](x_BxMxD, rows(i), block)
            if i in tap_ids:
                taps[i] = x_BxMxD
        return x_BxMxD

    pattern = [nnx.split(model.layers[plan.first + r])[0] for r in range(plan.period)]
    wanted = [i for i in tap_ids if i in plan.scanned]
    # Where layer [repeat][place in the pattern] writes its output; the last row is for those that nobody wants.
    slot_RxP = [
        [wanted.index(i) if i in wanted else len(wanted) for i in plan.scanned[n * plan.period :][: plan.period]]
        for n in range(plan.repeats)
    ]

    def body(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, tuple[nnx.State, ...]]) -> Any:
        (x_BxMxD, found_TxBxMxD), (slot_P, params) = carry, now
        # Anew: what a context remembers belongs to the loop that it was made in.
        own = BlockContext(block.position_BxM, block.length_B, block.visibility, block.restarts)
        for r, layer_graphdef in enumerate(pattern):
            layer = nnx.merge(layer_graphdef, _one_of(params[r], lambda x: x))  # the scan has taken its slice
            x_BxMxD, _ = layer(x_BxMxD, rows(plan.first + r), own)
            if any(slots[r] < len(wanted) for slots in slot_RxP):
                found_TxBxMxD = found_TxBxMxD.at[slot_P[r]].set(x_BxMxD, mode="drop")
        return (x_BxMxD, sharding.constrain(found_TxBxMxD, (None, *ROWS))), None

    x_BxMxD = one_by_one(range(plan.first), x_BxMxD)
    found_TxBxMxD = jnp.zeros((len(wanted), *x_BxMxD.shape), x_BxMxD.dtype)
    with jax.named_scope("scanned_layers"):
        (x_BxMxD, found_TxBxMxD), _ = jax.lax.scan(
            body, (x_BxMxD, found_TxBxMxD), (jnp.asarray(slot_RxP, jnp.int32), target.stacked)
        )
    taps |= {i: found_TxBxMxD[n] for n, i in enumerate(wanted)}
    x_BxMxD = one_by_one(range(plan.scanned.stop, len(model.layers)), x_BxMxD)
    return model.norm(x_BxMxD), jnp.concatenate([taps[i] for i in tap_ids], axis=-1) if tap_ids else None


def _merge(target: StackedTarget, graphdef: nnx.GraphDef) -> Any:
    """The model, its stacked layers standing for all of their kind: only the others are run as they are."""
    plan = target.plan
    layers = dict(target.rest["layers"].items())
    for n, i in enumerate(plan.scanned):
        layers[i] = _one_of(target.stacked[n % plan.period], lambda x: x[0])
    whole = {**{name: x for name, x in target.rest.items() if name != "layers"}, "layers": nnx.State(layers)}
    return nnx.merge(graphdef, nnx.State(whole))


def _one_of(stacked: nnx.State, take: Any) -> nnx.State:
    """A layer's parameters out of stacked ones, with a layer's logical axes: experts read theirs."""
    return jax.tree.map(
        lambda v: _with_axes(v, take(v.get_value()), v.get_metadata("axes")[1:]),
        stacked, is_leaf=lambda x: isinstance(x, nnx.Variable),
    )  # fmt: skip


def _with_axes(variable: nnx.Variable, value: jax.Array, axes: tuple[str | None, ...]) -> nnx.Variable:
    variable = variable.replace(value)
    variable.set_metadata("axes", axes)
    return variable
