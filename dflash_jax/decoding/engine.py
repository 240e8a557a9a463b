"""The host side of decoding: a batch of rows that prompts enter and leave while rounds go on.

`generate` and `stream` are loops over it; so is the regeneration of training data.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import sharding
from dflash_jax.decoding.cache import PageAllocator, make_cache
from dflash_jax.decoding.sampling import Sampling, make_sampling, row_keys
from dflash_jax.decoding.step import (
    Admission,
    DecodeState,
    Emission,
    Rules,
    Skeleton,
    StepConfig,
    Weights,
    admit,
    place_rules,
    prefill_chunk,
    step,
)
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import layer_specs

CAPACITY_BUCKETS = (128, 256, 512, 1024)  # then multiples of 1024
MAX_STOP_IDS = 8


@dataclasses.dataclass
class Request:
    """One prompt and how to answer it.

    Attributes:
      prompt_ids: token ids, at least one.
      max_tokens: the most tokens to emit.
      temperature, top_k, top_p, min_p: sampling; temperature 0 is greedy.
      seed: of the row's own random stream.
      stop_token_ids: ids that end the answer (they are part of it).
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()


@dataclasses.dataclass
class _Row:
    """A request in a batch row: its index, its budget, what it has emitted, the ids that end it."""

    index: int
    budget: int
    stop_ids: frozenset[int]
    emitted: int = 0


@dataclasses.dataclass
class Event:
    """Tokens of one request from one round (round 0 is the prefill's first token)."""

    index: int
    token_ids: list[int]
    finish_reason: str | None


def capacity_bucket(length: int, max_positions: int) -> int:
    """The smallest bucket that holds `length` rows: cache sizes, and so programs, are few."""
    for bucket in CAPACITY_BUCKETS:
        if length <= bucket:
            return min(bucket, max_positions)
    return min(-(-length // 1024) * 1024, max_positions)


def power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def check_request(request: Request, index: int, max_length: int, vocab_size: int) -> None:
    """Refuses what can not be decoded, before any device work.

    Raises:
      ValueError: names the prompt, the field, the value and the bound.
    """
    where = f"prompt {index}"
    if len(request.prompt_ids) == 0:
        raise ValueError(f"{where} is empty: at least one token is needed to start from")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{where} holds token id {bad}, ids must lie in [0, {vocab_size})")
    if request.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens is {request.max_tokens}, must be at least 1")
    if len(request.prompt_ids) >= max_length:
        raise ValueError(
            f"{where} has {len(request.prompt_ids)} tokens, the context holds {max_length}: nothing is left to "
            "answer with; shorten the prompt or raise max_length"
        )
    if len(request.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(f"{where}: {len(request.stop_token_ids)} stop_token_ids, at most {MAX_STOP_IDS} are supported")


class Engine:
    """Rows of one batch, decoded together. Prompts are admitted whenever rows are free.

    Args:
      target, drafter: what to decode with; drafter None is plain decoding.
      batch: rows; rounded up to a multiple of the mesh's data axis.
      max_length: prompt and answer together, per row.
      block_size: tokens verified in a round, root included; at most the drafter's trained size.
      greedy: compile programs without sampling; every request must then have temperature 0.
      proposal: "argmax" or "drawn": how draft tokens are chosen in sampled decoding. Both are exact.
      page_size: None for the contiguous cache, else slots a page.
      prefill_chunk_size: prompt tokens of one prefill call.
      lookahead: rounds dispatched before the host reads the first of them. None: 0 on CPU, where a wasted
        round costs as much as a used one, 1 elsewhere.

    Raises:
      ValueError: a field out of range, named.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        batch: int = 1,
        max_length: int | None = None,
        block_size: int | None = None,
        greedy: bool = True,
        proposal: str = "argmax",
        page_size: int | None = None,
        prefill_chunk_size: int = 64,
        lookahead: int | None = None,
    ):
        if proposal not in ("argmax", "drawn"):
            raise ValueError(f"proposal is {proposal!r}, must be 'argmax' or 'drawn'")
        if batch < 1:
            raise ValueError(f"batch is {batch}, must be at least 1")
        max_length = target.config.max_positions if max_length is None else max_length
        if not 2 <= max_length <= target.config.max_positions:
            raise ValueError(
                f"max_length is {max_length}, must lie in [2, {target.config.max_positions}] (the target's context)"
            )
        if drafter is None:
            if block_size not in (None, 1):
                raise ValueError(f"block_size is {block_size}, but without a drafter a round is one token")
            block_size = 1
        else:
            block_size = drafter.block_size if block_size is None else block_size
            if not 2 <= block_size <= drafter.block_size:
                raise ValueError(
                    f"block_size is {block_size}, must lie in [2, {drafter.block_size}]: a drafter runs at its "
                    "trained block size or below"
                )
        self.target, self.drafter, self.block_size = target, drafter, block_size
        shards = sharding.data_parallel_size(target.mesh)
        self.batch = -(-batch // shards) * shards
        self.capacity = capacity_bucket(max_length, target.config.max_positions)
        if page_size is not None:
            self.capacity = -(-self.capacity // page_size) * page_size
        self.max_length = max_length
        self.chunk = min(prefill_chunk_size, self.capacity)
        self.lookahead = (0 if jax.default_backend() == "cpu" else 1) if lookahead is None else lookahead
        target_skeleton, target_leaves = Skeleton.of(target.graphdef, target.params)
        drafter_skeleton = drafter_leaves = shared = None
        if drafter is not None:
            drafter_skeleton, drafter_leaves = Skeleton.of(drafter.graphdef, drafter.params)
            shared = drafter.shared
        self.weights = Weights(target_leaves, drafter_leaves, shared)
        self.config = StepConfig(
            target=target_skeleton,
            drafter=drafter_skeleton,
            tap_ids=() if drafter is None else drafter.tap_ids,
            block_size=block_size,
            greedy=greedy,
            drawn_proposal=proposal == "drawn",
            mesh=target.mesh,
        )
        specs = layer_specs(target.config)
        if drafter is not None:
            specs += nnx.merge(drafter.graphdef, drafter.params).layer_specs()
        cache = make_cache(specs, self.batch, self.capacity, target.dtype, page_size=page_size, mesh=target.mesh)
        self.pages = None if page_size is None else PageAllocator(cache.k[0].shape[0])
        self.page_size = page_size
        zeros = self._put(np.zeros(self.batch, np.int32))
        keys = row_keys(jnp.zeros((self.batch,), jnp.uint32))
        if target.mesh is not None:
            keys = jax.device_put(keys, sharding.named_sharding(target.mesh, ("batch",), keys.shape))
        self.state = DecodeState(cache.replace(length_B=zeros), zeros + 0, keys, zeros + 0)
        self.rules = self._rules([None] * self.batch)
        self._rows: list[_Row | None] = [None] * self.batch
        self._inflight: deque[Emission] = deque()
        self.rounds = 0

    # Placing host arrays -------------------------------------------------------------------------------

    def _put(self, x: np.ndarray) -> jax.Array:
        """A host array on the device(s), its first axis over the mesh's data axis. Always a copy."""
        mesh = self.target.mesh
        x = np.array(x)  # the runtime may alias a numpy buffer on CPU; never hand out one that is reused
        if mesh is None:
            return jnp.asarray(x)
        return jax.device_put(x, sharding.named_sharding(mesh, ("batch",) + (None,) * (x.ndim - 1), x.shape))

    def _rules(self, requests: Sequence[Request | None]) -> Rules:
        stops = np.full((len(requests), MAX_STOP_IDS), -1, np.int32)
        for i, request in enumerate(requests):
            if request is not None:
                ids = list(request.stop_token_ids)
                stops[i, : len(ids)] = ids
        pick = lambda name, default: [default if r is None else getattr(r, name) for r in requests]  # noqa: E731
        sampling: Sampling = make_sampling(
            len(requests), pick("temperature", 0.0), pick("top_k", 0), pick("top_p", 1.0), pick("min_p", 0.0)
        )
        return Rules(jax.tree.map(lambda x: self._put(np.asarray(x)), sampling), self._put(stops))

    # Rows ----------------------------------------------------------------------------------------------

    @property
    def free_rows(self) -> int:
        return self._rows.count(None)

    @property
    def active_rows(self) -> int:
        return self.batch - self.free_rows

    def admit(self, requests: Sequence[tuple[int, Request]]) -> list[Event]:
        """Prefills (index, request) pairs into free rows and returns their first tokens.

        Raises:
          ValueError: more requests than free rows or pages, or a request that can not be decoded.
        """
        if len(requests) > self.free_rows:
            raise ValueError(f"{len(requests)} requests for {self.free_rows} free rows")
        for index, request in requests:
            check_request(request, index, self.max_length, self.target.config.vocab_size)
            if self.config.greedy and request.temperature > 0:
                raise ValueError(f"prompt {index} has temperature {request.temperature} in a greedy engine")
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        rows = min(power_of_two_at_least(len(requests)), self.batch)
        rows = max(rows, sharding.data_parallel_size(self.target.mesh))
        padded = [r for _, r in requests] + [None] * (rows - len(requests))
        slot_A = np.full(rows, self.batch, np.int32)  # out of range: dropped
        slot_A[: len(requests)] = free[: len(requests)]
        budget_A = np.asarray(
            [0 if r is None else min(r.max_tokens, self.max_length - len(r.prompt_ids)) for r in padded], np.int32
        )
        table_AxT = self._tables(requests, padded, budget_A, slot_A)
        length_A = np.asarray([0 if r is None else len(r.prompt_ids) for r in padded], np.int32)
        hidden = self._prefill(padded, length_A, table_AxT)
        seeds = jnp.asarray([0 if r is None else r.seed & 0xFFFFFFFF for r in padded], jnp.uint32)
        slots, new_rules = self._put(slot_A), self._rules(padded)
        admission = Admission(
            slots, None if self.page_size is None else self._put(table_AxT), self._put(length_A), row_keys(seeds),
            self._put(budget_A),
        )  # fmt: skip
        self.state, emission = admit(self.config, self.weights, self.state, new_rules, admission, hidden)
        self.rules = place_rules(self.rules, new_rules, slots)
        for i, (index, request) in enumerate(requests):
            self._rows[free[i]] = _Row(index, int(budget_A[i]), frozenset(request.stop_token_ids))
        return self._read(emission, free[: len(requests)])

    def _tables(self, requests, padded, budget_A, slot_A) -> np.ndarray:
        """Pages of the rows to admit; all or nothing."""
        if self.pages is None:
            return slot_A[:, None]  # contiguous: page b is row b
        per_row = self.capacity // self.page_size
        table = np.full((len(padded), per_row), self.pages.num_pages, np.int32)
        taken = []
        for i, (_, request) in enumerate(requests):
            need = -(-(len(request.prompt_ids) + int(budget_A[i])) // self.page_size)
            pages = self.pages.allocate(int(slot_A[i]), need)
            if pages is None:
                for slot in taken:
                    self.pages.free(slot)
                raise ValueError(f"{need} pages are needed for a prompt, {self.pages.free_pages} are free")
            taken.append(int(slot_A[i]))
            table[i, :need] = pages
        return table

    def _prefill(self, padded, length_A: np.ndarray, table_AxT: np.ndarray) -> jax.Array:
        rows = len(padded)
        done = self._put(np.zeros(rows, np.int32))
        table = self._put(table_AxT)
        hidden = self._put(np.zeros((rows, self.target.config.hidden_size), np.float32).astype(self.target.dtype))
        for start in range(0, max(int(length_A.max()), 1), self.chunk):
            token = np.zeros((rows, self.chunk), np.int32)
            count = np.clip(length_A - start, 0, self.chunk).astype(np.int32)
            for i, request in enumerate(padded):
                if count[i]:
                    token[i, : count[i]] = request.prompt_ids[start : start + count[i]]
            self.state, done, hidden = prefill_chunk(
                self.config, self.weights, self.state, table, done, self._put(token), self._put(count), hidden
            )
        return hidden

    # Rounds --------------------------------------------------------------------------------------------

    def round(self) -> list[Event]:
        """Dispatches one round; returns the events of the oldest round that is not in flight any more.

        With rounds in flight a row may have been released and taken again meanwhile. That is safe: the
        device knew that the old request had finished, so the round holds nothing for it.
        """
        self.state, emission = step(self.config, self.weights, self.state, self.rules)
        self.rounds += 1
        self._inflight.append(emission)
        if len(self._inflight) <= self.lookahead:
            return []
        return self._read(self._inflight.popleft(), range(self.batch))

    def _read(self, emission: Emission, slots: Sequence[int]) -> list[Event]:
        """The events of an emission whose line i belongs to batch row slots[i]. Waits for the device."""
        packed = np.asarray(emission.packed_BxM1)
        events = []
        for line, slot in zip(packed, slots, strict=False):
            row, count = self._rows[slot], int(line[-1])
            if row is None or count == 0:
                continue
            tokens = line[:count].tolist()
            row.emitted += count
            reason = "stop" if tokens[-1] in row.stop_ids else "length" if row.emitted >= row.budget else None
            events.append(Event(row.index, tokens, reason))
            if reason is not None:
                self._rows[slot] = None
                if self.pages is not None:
                    self.pages.free(slot)
        return events

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Answers all requests, admitting them in order as rows come free; yields events as they come."""
        queue = deque(enumerate(requests))
        while queue or self.active_rows:
            wanted = min(len(queue), self.free_rows)
            # A prefill call costs the same for one row as for a few: wait for some unless nothing else runs.
            if wanted and (wanted >= min(len(queue), max(1, self.batch // 8)) or not self.active_rows):
                yield from self.admit([queue.popleft() for _ in range(wanted)])
            if self.active_rows:
                yield from self.round()
        self._inflight.clear()


def timed_events(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[float, Event]]:
    """`Engine.run` with the wall clock (seconds since the call) of each event."""
    start = time.perf_counter()
    for event in engine.run(requests):
        yield time.perf_counter() - start, event
