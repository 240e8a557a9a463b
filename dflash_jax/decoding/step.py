"""One round of draft, verify, commit and absorb, in one jitted call; and the prefill before the first.

Everything that depends on lengths, stops and budgets is decided on the device, so the host may dispatch
round n + 1 before it has read round n. Nothing here depends on which drafter runs; without one the same
step with M = 1 is plain decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.decoding.cache import POOL_AXES
from dflash_jax.decoding.logits_rules import LOGITS_AXES, LogitsRules, bend, count_emitted
from dflash_jax.decoding.sampling import Sampling, round_keys
from dflash_jax.decoding.verify import Verdict, verify
from dflash_jax.drafters.contract import Draft, SharedWeights, Verified
from dflash_jax.kernels.delta_rule import STATE_AXES, RecurrentState
from dflash_jax.kernels.kv_cache import KVCache, advance, write
from dflash_jax.models.attention import causal

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """An NNX module without its parameters.

    The parameters travel apart, as a tuple of arrays: a call flattens its arguments in Python when they
    are an `nnx.State`, which took 0.25 ms a round for 207 arrays, and in C++ when they are tuples (0.005).
    """

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, graphdef: nnx.GraphDef, params: nnx.State) -> tuple[Skeleton, tuple[jax.Array, ...]]:
        """(skeleton, leaves)."""
        leaves, treedef = jax.tree.flatten(params)
        return cls(graphdef, treedef), tuple(leaves)

    def build(self, leaves: tuple[jax.Array, ...]) -> nnx.Module:
        """The module, to be called inside jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What is compiled into the programs.

    Attributes:
      target, drafter: the modules without parameters; drafter None is plain decoding.
      tap_ids: target layers whose output the drafter absorbs.
      block_size: tokens of one target call in a round, root included; 1 without a drafter.
      greedy: every row is greedy: argmax programs without keys.
      drawn_proposal: draft tokens are drawn from the drafter's law (p/q verification) instead of its argmax.
      logits_rules: rows may have a bias and penalties, and tokens are counted for them. Without, programs neither
        count nor bend, and `Rules.logits` and `DecodeState.count_BxV` are None.
      mesh: None for one device.
    """

    target: Skeleton
    drafter: Skeleton | None
    tap_ids: tuple[int, ...]
    block_size: int
    greedy: bool
    drawn_proposal: bool
    logits_rules: bool
    mesh: Mesh | None

    # Hashing a graphdef walks the whole module; a config is hashed once a call, so remember it.
    @functools.cached_property
    def _hash(self) -> int:
        flags = (self.greedy, self.drawn_proposal, self.logits_rules)
        return hash((self.target, self.drafter, self.tap_ids, self.block_size, flags))

    def __hash__(self) -> int:
        return self._hash

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """While tracing: tells kernels that must be mapped by hand which mesh they run on."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


@struct.dataclass
class Weights:
    """Parameters of one decode program, as plain tuples of arrays (see `Skeleton`)."""

    target: tuple[jax.Array, ...]
    drafter: tuple[jax.Array, ...] | None = None
    shared: SharedWeights | None = None


@struct.dataclass
class Rules:
    """What each row is decoded by. Arrays, so that no value of theirs recompiles anything.

    Attributes:
      sampling: per-row temperature, top-k, top-p, min-p (not read by greedy programs).
      stop_id_BxI: ids that end a row; -1 where there are fewer than I.
      logits: per-row bias and penalties.
    """

    sampling: Sampling
    stop_id_BxI: jax.Array
    logits: LogitsRules | None = None


@struct.dataclass
class DecodeState:
    """All that a round changes. Donated to each step.

    Attributes:
      cache: target and drafter layers.
      root_B: the last emitted token, in no cache yet.
      key_B: one PRNG key a row.
      remaining_B: tokens that the row may still emit; 0 is a finished (or empty) row.
      count_BxV: int32, how often each row has emitted each token.
    """

    cache: KVCache
    root_B: jax.Array
    key_B: jax.Array
    remaining_B: jax.Array
    count_BxV: jax.Array | None = None


@struct.dataclass
class Emission:
    """What rounds gave to the host, int32: tokens, then their count in the last column.

    Attributes:
      packed: [B, M + 1] of one round, [R, B, M + 1] of several; a round that did not take place has counts 0.
    """

    packed: jax.Array


def _pin(config: StepConfig, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Pins the layout of a result, so that what comes out of a program can go into it again."""
    if config.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding.named_sharding(config.mesh, axes, x.shape))


def _for_the_host(config: StepConfig, emission: Emission) -> Emission:
    """What the host reads, whole on each device where a host has only some of the mesh."""
    if not sharding.spans_processes(config.mesh):
        return emission
    return Emission(_pin(config, emission.packed, (None,) * emission.packed.ndim))


def _pin_rows(config: StepConfig, tree: T) -> T:
    """`_pin` of arrays whose first axis is the batch."""
    return jax.tree.map(lambda x: _pin(config, x, ("batch",) + (None,) * (x.ndim - 1)), tree)


def _pin_logits(config: StepConfig, tree: T) -> T:
    """`_pin` of arrays [B] and [B, V]; None stays None."""
    return jax.tree.map(lambda x: _pin(config, x, LOGITS_AXES[: x.ndim]), tree)


def _pin_state(config: StepConfig, state: DecodeState) -> DecodeState:
    cache = state.cache
    rows = _pin_rows(config, state.replace(cache=cache.replace(k=(), v=(), recurrent=()), count_BxV=None))
    parts = {side: tuple(_pin(config, x, POOL_AXES) for x in getattr(cache, side)) for side in ("k", "v")}
    parts["recurrent"] = _pin_recurrent(config, cache.recurrent)
    return rows.replace(cache=rows.cache.replace(**parts), count_BxV=_pin_logits(config, state.count_BxV))


def _pin_recurrent(config: StepConfig, states: tuple[RecurrentState, ...]) -> tuple[RecurrentState, ...]:
    return tuple(jax.tree.map(functools.partial(_pin, config), state, STATE_AXES) for state in states)


def _pin_rules(config: StepConfig, rules: Rules) -> Rules:
    return _pin_rows(config, rules.replace(logits=None)).replace(logits=_pin_logits(config, rules.logits))


def _verdict(
    config: StepConfig,
    draft: Draft,
    logits_BxMxV: jax.Array,
    visible_MxM: jax.Array,
    rules: Rules,
    count_BxV: jax.Array | None,
    key_B: jax.Array | None,
    limit_B: jax.Array,
) -> Verdict:
    """The one way from the target's logits to tokens: bent by the row's rules, slot by slot, then verified."""
    if config.logits_rules:
        logits_BxMxV = bend(logits_BxMxV, rules.logits, count_BxV, draft.token_BxM, visible_MxM)
    return verify(draft, logits_BxMxV, None if config.greedy else rules.sampling, key_B, limit_B)


def _cut_at_stop(token_BxM: jax.Array, count_B: jax.Array, stop_id_BxI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(count up to and including the first stop id among the emitted tokens, whether there was one)."""
    slot_M = jnp.arange(token_BxM.shape[1], dtype=jnp.int32)
    is_stop_BxM = (token_BxM[:, :, None] == stop_id_BxI[:, None, :]).any(-1) & (slot_M[None] < count_B[:, None])
    first_B = jnp.argmax(is_stop_BxM, axis=1).astype(jnp.int32)
    stopped_B = is_stop_BxM.any(-1)
    return jnp.where(stopped_B, first_B + 1, count_B), stopped_B


def _emit(
    state: DecodeState, token_BxM: jax.Array, count_B: jax.Array, rules: Rules
) -> tuple[DecodeState, Emission, jax.Array]:
    """Cuts the tokens at a stop, counts them, books them against the budget. Returns also how many are left."""
    count_B, stopped_B = _cut_at_stop(token_BxM, count_B, rules.stop_id_BxI)
    last_B = jnp.take_along_axis(token_BxM, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
    if state.count_BxV is not None:
        state = state.replace(count_BxV=count_emitted(state.count_BxV, token_BxM, count_B))
    state = state.replace(
        root_B=jnp.where(count_B > 0, last_B, state.root_B),
        remaining_B=jnp.where(stopped_B, 0, state.remaining_B - count_B),
    )
    return state, Emission(jnp.concatenate([token_BxM, count_B[:, None]], axis=1)), count_B


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(config: StepConfig, weights: Weights, state: DecodeState, rules: Rules) -> tuple[DecodeState, Emission]:
    """One round for every row: propose, target forward, verify, commit, absorb.

    A row with remaining 0 emits nothing and its cache stays as it is. A row may emit at most `remaining`
    tokens, so near the end of its budget or of its cache the block shortens by itself.
    """
    with config.on_mesh():
        state, emission = _round(config, weights, state, rules)
    return state, _for_the_host(config, emission)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def steps(
    config: StepConfig, limit: int, weights: Weights, state: DecodeState, rules: Rules, pause: jax.Array
) -> tuple[DecodeState, Emission]:
    """Up to `limit` rounds without the host, for when nobody watches. Ends early when no row is left.

    Args:
      pause: bool scalar: end also after a round in which some row finished, since a prompt waits for its place.

    Returns:
      (state, emission of `limit` rounds).
    """
    active_B = state.remaining_B > 0

    def going(carry: tuple[jax.Array, DecodeState, jax.Array]) -> jax.Array:
        done, state, _ = carry
        still_B = state.remaining_B > 0
        return (done < limit) & still_B.any() & ~(pause & (still_B != active_B).any())

    def body(carry: tuple[jax.Array, DecodeState, jax.Array]) -> tuple[jax.Array, DecodeState, jax.Array]:
        done, state, packed_RxBxM1 = carry
        state, emission = _round(config, weights, state, rules)
        return done + 1, state, packed_RxBxM1.at[done].set(emission.packed)

    empty_RxBxM1 = jnp.zeros((limit, *active_B.shape, config.block_size + 1), jnp.int32)
    with config.on_mesh():
        _, state, packed_RxBxM1 = jax.lax.while_loop(going, body, (jnp.int32(0), state, empty_RxBxM1))
    return state, _for_the_host(config, Emission(packed_RxBxM1))


def _round(config: StepConfig, weights: Weights, state: DecodeState, rules: Rules) -> tuple[DecodeState, Emission]:
    target = config.target.build(weights.target)
    cache, root_B = state.cache, state.root_B
    active_B = state.remaining_B > 0
    draft_key_B = verify_key_B = None
    if not config.greedy:
        round_key_B = round_keys(state.key_B, cache.length_B)
        draft_key_B, verify_key_B = (
            jax.vmap(jax.random.fold_in)(round_key_B, jnp.full_like(root_B, i)) for i in (0, 1)
        )

    if config.drafter is None:
        draft = Draft(root_B[:, None])
    else:
        drafter = config.drafter.build(weights.drafter)
        temperature_B = rules.sampling.temperature_B if config.drawn_proposal and not config.greedy else None
        with jax.named_scope("propose"):
            draft = drafter.propose(weights.shared, cache, root_B, temperature_B, draft_key_B, config.block_size)

    num_tokens = draft.token_BxM.shape[1]
    position_BxM = cache.length_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    with jax.named_scope("target"):
        visible_MxM = causal(num_tokens)
        forward = target(draft.token_BxM, position_BxM, cache, visible_MxM, config.tap_ids)
        logits_BxMxV = target.logits(forward.hidden_BxMxD)
    with jax.named_scope("verify"):
        limit_B = jnp.maximum(state.remaining_B - 1, 0)
        verdict = _verdict(config, draft, logits_BxMxV, visible_MxM, rules, state.count_BxV, verify_key_B, limit_B)

    # Emitted: the accepted drafts (slots 1..n), then the correction or bonus.
    slot_M = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    shifted_BxM = jnp.roll(draft.token_BxM, -1, axis=1)
    emitted_BxM = jnp.where(slot_M < verdict.n_accepted_B[:, None], shifted_BxM, verdict.next_root_B[:, None])
    count_B = jnp.where(active_B, verdict.n_accepted_B + 1, 0)
    state, emission, count_B = _emit(state, emitted_BxM, count_B, rules)

    with jax.named_scope("commit"):
        # Committed: the root and the accepted drafts, as many rows as tokens were emitted.
        cache = write(cache, forward.block_kv, 0, count_B)
        if config.drafter is not None:
            verified = Verified(draft.token_BxM, forward.taps_BxMxTD, forward.hidden_BxMxD, count_B)
            cache = drafter.absorb(weights.shared, cache, verified)
        cache = advance(cache, count_B)
    return _pin_state(config, state.replace(cache=cache)), emission


@struct.dataclass
class Prefill:
    """How far the prompts of A rows have been taken in.

    Attributes:
      length_A: tokens so far.
      hidden_AxD: hidden state of each row's last token so far.
      recurrent: as `KVCache.recurrent`, of these rows: a state has no pages, so it enters the batch with its row.
    """

    length_A: jax.Array
    hidden_AxD: jax.Array
    recurrent: tuple[RecurrentState, ...] = ()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def prefill_chunk(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    table_AxT: jax.Array,
    prefill: Prefill,
    token_AxM: jax.Array,
    count_A: jax.Array,
) -> tuple[DecodeState, Prefill]:
    """Takes up to M prompt tokens of A rows into the pool of `state`, target and drafter layers alike.

    The rows lie in the pool's pages `table_AxT` (contiguous layout: a page a row) and need not be rows of
    the batch yet; other rows of the pool are not touched.

    Returns:
      (state, prefill after the chunk).
    """
    target = config.target.build(weights.target)
    pool = state.cache
    view = KVCache(pool.k, pool.v, table_AxT, prefill.length_A, prefill.recurrent)
    num_tokens = token_AxM.shape[1]
    position_AxM = prefill.length_A[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    with config.on_mesh():
        forward = target(token_AxM, position_AxM, view, causal(num_tokens), config.tap_ids)
        view = write(view, forward.block_kv, 0, count_A)
        if config.drafter is not None:
            drafter = config.drafter.build(weights.drafter)
            verified = Verified(token_AxM, forward.taps_BxMxTD, forward.hidden_BxMxD, count_A)
            view = drafter.absorb(weights.shared, view, verified)
    view = advance(view, count_A)
    last_A = jnp.maximum(count_A - 1, 0)[:, None, None]
    hidden_AxD = jnp.take_along_axis(forward.hidden_BxMxD, last_A, axis=1)[:, 0]
    hidden_AxD = jnp.where((count_A > 0)[:, None], hidden_AxD, prefill.hidden_AxD)
    state = state.replace(cache=pool.replace(k=view.k, v=view.v))
    rows = _pin_rows(config, Prefill(view.length_B, hidden_AxD))
    return _pin_state(config, state), rows.replace(recurrent=_pin_recurrent(config, view.recurrent))


@struct.dataclass
class Admission:
    """A rows that enter the batch after their prefill.

    Attributes:
      slot_A: batch row of each; out of range for padding.
      table_AxT: their pages; None in the contiguous layout.
      seed_key_A: PRNG keys.
      budget_A: tokens that each may emit in all.
      rules: of these rows.
    """

    slot_A: jax.Array
    table_AxT: jax.Array | None
    seed_key_A: jax.Array
    budget_A: jax.Array
    rules: Rules


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def admit(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    rules: Rules,
    admission: Admission,
    prefill: Prefill,
) -> tuple[DecodeState, Rules, Emission]:
    """Puts prefilled rows into the batch and emits the first token of each.

    Args:
      rules: of the batch.
      prefill: of the admitted rows, their prompts whole.

    Returns:
      (state, rules, emission [A, 2]).
    """
    target = config.target.build(weights.target)
    logits_Ax1xV = target.logits(prefill.hidden_AxD[:, None])
    key_A = None if config.greedy else round_keys(admission.seed_key_A, prefill.length_A - 1)
    nothing, zero_A = Draft(jnp.zeros((logits_Ax1xV.shape[0], 1), jnp.int32)), jnp.zeros_like(admission.slot_A)
    zero_AxV = jnp.zeros(logits_Ax1xV[:, 0].shape, jnp.int32) if config.logits_rules else None
    verdict = _verdict(config, nothing, logits_Ax1xV, causal(1), admission.rules, zero_AxV, key_A, zero_A)
    cache, table = state.cache, state.cache.page_table_BxT
    fresh = DecodeState(cache, verdict.next_root_B, admission.seed_key_A, admission.budget_A, zero_AxV)
    count_A = (admission.budget_A > 0).astype(jnp.int32)
    fresh, emission, _ = _emit(fresh, verdict.next_root_B[:, None], count_A, admission.rules)

    def put(x_B: jax.Array, x_A: jax.Array) -> jax.Array:
        return x_B.at[admission.slot_A].set(x_A, mode="drop")

    cache = cache.replace(
        length_B=put(cache.length_B, prefill.length_A),
        recurrent=jax.tree.map(put, cache.recurrent, prefill.recurrent),
        page_table_BxT=None if table is None else put(table, admission.table_AxT),
    )
    state = DecodeState(
        cache=cache,
        root_B=put(state.root_B, fresh.root_B),
        key_B=put(state.key_B, admission.seed_key_A),
        remaining_B=put(state.remaining_B, fresh.remaining_B),
        count_BxV=jax.tree.map(put, state.count_BxV, fresh.count_BxV),
    )
    rules = _pin_rules(config, jax.tree.map(put, rules, admission.rules))
    return _pin_state(config, state), rules, _for_the_host(config, emission)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def release(config: StepConfig, state: DecodeState, keep_B: jax.Array) -> DecodeState:
    """Ends the rows where `keep_B` is False: they emit and write nothing from here on."""
    return _pin_state(config, state.replace(remaining_B=jnp.where(keep_B, state.remaining_B, 0)))
