"""The host side of decoding: a batch of rows that prompts enter and leave while rounds go on.

`generate` and `stream` are loops over it; so is the regeneration of training data.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import sharding
from dflash_jax.decoding.cache import PageAllocator, make_cache, make_states
from dflash_jax.decoding.logits_rules import LOGITS_AXES, make_logits_rules
from dflash_jax.decoding.request import MAX_STOP_IDS, Request, check_request, is_whole
from dflash_jax.decoding.sampling import MIN_TEMPERATURE, Sampling, make_sampling, row_keys
from dflash_jax.decoding.sizes import PrefillSizes, capacity_bucket, power_of_two_at_least, power_of_two_at_most
from dflash_jax.decoding.step import (
    Admission,
    DecodeState,
    Emission,
    Prefill,
    Rules,
    Skeleton,
    StepConfig,
    Weights,
    admit,
    prefill_chunk,
    release,
    step,
    steps,
)
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target
from dflash_jax.models.transformer import layer_specs


@dataclasses.dataclass(eq=False)
class _Row:
    """A request in a batch row: its index, its row, its budget, the ids that end it, what it has emitted."""

    index: int
    slot: int
    budget: int
    stop_ids: frozenset[int]
    emitted: int = 0


@dataclasses.dataclass
class Seat:
    """A free row, and in the paged layout pages, set aside for a request."""

    slot: int
    index: int
    request: Request
    pages: np.ndarray | None


@dataclasses.dataclass
class Event:
    """Tokens of one request from one round (round 0 is the prefill's first token)."""

    index: int
    token_ids: list[int]
    finish_reason: str | None


def check_max_length(max_length: int | None, target: Target) -> int:
    """The context to use: the target's where None.

    Raises:
      ValueError: it is longer than the target's, or too short for a prompt and an answer.
    """
    limit = target.config.max_positions
    max_length = limit if max_length is None else max_length
    if not is_whole(max_length) or not 2 <= max_length <= limit:
        raise ValueError(f"max_length is {max_length!r}, must lie in [2, {limit}] (the target's context)")
    return max_length


class Engine:
    """Rows of one batch, decoded together. Prompts are admitted whenever rows are free.

    Args:
      target, drafter: what to decode with; drafter None is plain decoding.
      batch: rows; rounded up to a multiple of the mesh's data axis.
      max_length: prompt and answer together, per row.
      block_size: tokens verified in a round, root included; at most the drafter's trained size.
      greedy: compile programs without sampling; every request must then have temperature 0.
      proposal: "argmax" or "drawn": how draft tokens are chosen in sampled decoding. Both are exact.
      logits_rules: take requests with a bias or penalties, at any time, beside others without. All rounds then count
        tokens and pass over the logits once more, needed or not; without, such requests are refused and nothing is
        paid. It is a choice for the engine's life, as `greedy` is: a server that changed programs when the first
        penalty came would compile amid traffic, and its other rows would go on in a program that may round
        differently. Rows without rules get the tokens that they get alone.
      page_size: None for the contiguous cache, else slots a page.
      num_pages: of the pool (paged only), rounded up to a multiple of the mesh's data axis; None: enough for
        every row at max_length. With fewer, prompts wait until there are pages for them and their answers.
      prefill_chunk_size: prompt tokens of one prefill call; the end of a prompt is taken in smaller ones (see
        `PrefillSizes`). None: 128 on CPU, 512 elsewhere.
      lookahead: calls dispatched before the host reads the first of them. None: 0 on CPU, where a wasted
        round costs as much as a used one, 1 elsewhere.
      rounds_per_call: rounds that the device does without the host (see `step.steps`); their tokens come at once.

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
        logits_rules: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        prefill_chunk_size: int | None = None,
        lookahead: int | None = None,
        rounds_per_call: int = 1,
    ):
        if proposal not in ("argmax", "drawn"):
            raise ValueError(f"proposal is {proposal!r}, must be 'argmax' or 'drawn'")
        on_cpu = jax.default_backend() == "cpu"
        lookahead = (0 if on_cpu else 1) if lookahead is None else lookahead
        prefill_chunk_size = (128 if on_cpu else 512) if prefill_chunk_size is None else prefill_chunk_size
        at_least = {
            "batch": (batch, 1), "prefill_chunk_size": (prefill_chunk_size, 1), "lookahead": (lookahead, 0),
            "rounds_per_call": (rounds_per_call, 1), "page_size": (page_size, 1), "num_pages": (num_pages, 1),
        }  # fmt: skip
        for name, (value, least) in at_least.items():
            optional = name in ("page_size", "num_pages") and value is None
            if not optional and (not is_whole(value) or value < least):
                raise ValueError(f"{name} is {value!r}, must be a whole number >= {least}")
        max_length = check_max_length(max_length, target)
        self.block_size = _check_block_size(block_size, drafter)
        if drafter is not None and max(drafter.tap_ids, default=0) >= target.config.num_layers:
            raise ValueError(
                f"the drafter taps layer {max(drafter.tap_ids)}, the target has {target.config.num_layers} layers: "
                "it was made for another target"
            )
        self.target, self.drafter = target, drafter
        self._shards = sharding.data_parallel_size(target.mesh)
        self.batch = self._whole_shards(batch)
        self.capacity = capacity_bucket(max_length, target.config.max_positions)
        if page_size is not None:
            self.capacity = -(-self.capacity // page_size) * page_size
        self.max_length = max_length
        self.prefill_sizes = PrefillSizes.of(min(prefill_chunk_size, self.capacity), on_cpu)
        self.lookahead, self.rounds_per_call = lookahead, rounds_per_call
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
            block_size=self.block_size,
            greedy=greedy,
            drawn_proposal=proposal == "drawn",
            logits_rules=logits_rules,
            mesh=target.mesh,
        )
        specs = layer_specs(target.config)
        if drafter is not None:
            specs += nnx.merge(drafter.graphdef, drafter.params).layer_specs()
        num_pages = None if num_pages is None else self._whole_shards(num_pages)
        cache = make_cache(
            specs, self.batch, self.capacity, target.dtype,
            page_size=page_size, num_pages=num_pages, mesh=target.mesh,
        )  # fmt: skip
        self.pages = None if page_size is None else PageAllocator(cache.k[0].shape[0], self._shards)
        self.page_size = page_size
        root_B, remaining_B = (self._put(np.zeros(self.batch, np.int32)) for _ in range(2))
        vocab = target.config.vocab_size
        count_BxV = self._put(np.zeros((self.batch, vocab), np.int32), LOGITS_AXES) if logits_rules else None
        self.state = DecodeState(cache, root_B, self._keys([0] * self.batch), remaining_B, count_BxV)
        self.rules = self._rules([None] * self.batch)
        self._rows: list[_Row | None] = [None] * self.batch
        self._dropped: set[int] = set()  # rows that the host has given up and the device has not
        self._inflight: deque[tuple[Emission, tuple[_Row | None, ...]]] = deque()
        self.rounds = 0  # verify rounds whose tokens have been read

    # Placing host arrays -------------------------------------------------------------------------------

    def _whole_shards(self, count: int) -> int:
        return -(-count // self._shards) * self._shards

    def _put(self, x: np.ndarray, axes: tuple[str | None, ...] = ("batch",)) -> jax.Array:
        """A host array on the device(s), laid out by its logical axes. Always a copy."""
        return self._place(np.array(x), axes)  # the runtime may alias a numpy buffer on CPU; never hand out one in use

    def _place(self, x: np.ndarray | jax.Array, axes: tuple[str | None, ...] = ("batch",)) -> jax.Array:
        mesh = self.target.mesh
        if mesh is None:
            return jnp.asarray(x)
        axes = (axes + (None,) * x.ndim)[: x.ndim]
        return sharding.put(x, sharding.named_sharding(mesh, axes, x.shape))

    def _keys(self, seeds: Sequence[int]) -> jax.Array:
        keys = row_keys(seeds)
        return keys if self.target.mesh is None else self._place(keys)

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
        logits = make_logits_rules(requests, self.target.config.vocab_size) if self.config.logits_rules else None
        return Rules(
            jax.tree.map(lambda x: self._put(np.asarray(x)), sampling),
            self._put(stops),
            jax.tree.map(lambda x: self._put(x, LOGITS_AXES), logits),
        )

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
          ValueError: a request that can not be decoded, an index that is being decoded already, or more requests
            than there are free rows or pages. Nothing has changed then.
        """
        if len({index for index, _ in requests}) < len(requests):
            raise ValueError(f"the indices {[index for index, _ in requests]} name a prompt twice")
        for index, request in requests:
            self._check(index, request)
        seats = self._seat(requests)
        if len(seats) < len(requests):
            self._unseat(seats)
            index, request = requests[len(seats)]
            raise ValueError(
                f"{len(requests)} prompts for {self.free_rows} free rows"
                if self.pages is None
                else f"{len(requests)} prompts for {self.free_rows} free rows and {self.pages.free_pages} free pages: "
                f"none are left for prompt {index}, which needs {self._pages_needed(request)} pages (on one data "
                "shard); lower max_tokens or raise num_pages"
            )
        return self.enter(seats)

    def _check(self, index: int, request: Request) -> None:
        check_request(request, index, self.max_length, self.target.config.vocab_size)
        if self.config.greedy and request.temperature >= MIN_TEMPERATURE:
            raise ValueError(f"temperature of prompt {index} is {request.temperature} in a greedy engine")
        if not self.config.logits_rules and (asked := request.logits_rules()):
            name, value = next(iter(asked.items()))
            raise ValueError(
                f"{name} of prompt {index} is {value!r} in an engine without rules for logits; make it with "
                "logits_rules=True"
            )
        if any(row is not None and row.index == index for row in self._rows):
            raise ValueError(f"prompt {index} is being decoded already")

    def _budget(self, request: Request) -> int:
        return min(request.max_tokens, self.max_length - len(request.prompt_ids))

    def _pages_needed(self, request: Request) -> int:
        return -(-(len(request.prompt_ids) + self._budget(request)) // self.page_size)

    def _seat(self, requests: Iterable[tuple[int, Request]]) -> list[Seat]:
        """A free row, and pages of that row's data shard, for each of the first requests that fit, in order."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        seats = []
        for index, request in requests:
            for slot in free:
                pages = None
                if self.pages is not None:
                    shard = slot * self._shards // self.batch
                    pages = self.pages.allocate(slot, self._pages_needed(request), shard)
                if self.pages is None or pages is not None:
                    free.remove(slot)
                    seats.append(Seat(slot, index, request, pages))
                    break
            else:
                break
        return seats

    def _unseat(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            if seat.pages is not None:
                self.pages.free(seat.slot)

    def enter(self, seats: Sequence[Seat]) -> list[Event]:
        """Prefills seated requests; what `admit` and `run` have in common."""
        if not seats:
            return []
        # Few different sizes, each a multiple of the data axis: each is a program.
        rows = min(self._whole_shards(power_of_two_at_least(len(seats))), self.batch)
        requests = [seat.request for seat in seats] + [None] * (rows - len(seats))
        slot_A = np.full(rows, self.batch, np.int32)  # out of range: dropped
        slot_A[: len(seats)] = [seat.slot for seat in seats]
        length_A, budget_A = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        table_AxT = slot_A[:, None]  # contiguous: page b is row b
        if self.pages is not None:
            table_AxT = np.full((rows, self.capacity // self.page_size), self.pages.num_pages, np.int32)
        for i, seat in enumerate(seats):
            length_A[i], budget_A[i] = len(seat.request.prompt_ids), self._budget(seat.request)
            if seat.pages is not None:
                table_AxT[i, : len(seat.pages)] = seat.pages
        try:
            self._end_dropped()
            prefill = self._prefill(requests, length_A, table_AxT)
            admission = Admission(
                slot_A=self._put(slot_A),
                table_AxT=None if self.pages is None else self._put(table_AxT),
                seed_key_A=self._keys([0 if r is None else r.seed for r in requests]),
                budget_A=self._put(budget_A),
                rules=self._rules(requests),
            )
            self.state, self.rules, emission = admit(
                self.config, self.weights, self.state, self.rules, admission, prefill
            )
        except BaseException:
            self._unseat(seats)
            raise
        for i, seat in enumerate(seats):
            stop_ids = frozenset(seat.request.stop_token_ids)
            self._rows[seat.slot] = _Row(seat.index, seat.slot, int(budget_A[i]), stop_ids)
        return self._read(np.asarray(emission.packed), [self._rows[seat.slot] for seat in seats])

    def abort(self, index: int) -> bool:
        """Drops a request: its row and its pages are free at once. False if it is not being decoded."""
        doomed = [row for row in self._rows if row is not None and row.index == index]
        self._drop(doomed)
        return bool(doomed)

    def clear(self) -> None:
        """Drops all requests, and the tokens of calls in flight."""
        self._inflight.clear()
        self._drop([row for row in self._rows if row is not None])

    def _drop(self, rows: Sequence[_Row]) -> None:
        # Host only, so that it can not fail while an error passes through; the device hears of it before it is used.
        for row in rows:
            self._free(row)
            self._dropped.add(row.slot)

    def _end_dropped(self) -> None:
        if not self._dropped:
            return
        keep_B = np.ones(self.batch, bool)
        keep_B[list(self._dropped)] = False
        self.state = release(self.config, self.state, self._put(keep_B))
        self._dropped.clear()

    def _free(self, row: _Row) -> None:
        self._rows[row.slot] = None
        if self.pages is not None:
            self.pages.free(row.slot)

    def _prefill(self, requests: Sequence[Request | None], length_A: np.ndarray, table_AxT: np.ndarray) -> Prefill:
        """Takes the prompts into the cache, a chunk a call."""
        rows, dtype = len(requests), self.target.dtype
        table = self._put(table_AxT)
        hidden = self._put(np.zeros((rows, self.target.config.hidden_size), np.float32).astype(dtype))
        states = make_states(layer_specs(self.target.config), rows, dtype, self.target.mesh)
        prefill = Prefill(self._put(np.zeros(rows, np.int32)), hidden, states)
        for start, width in self.prefill_sizes.pieces(int(length_A.max())):
            token = np.zeros((rows, width), np.int32)
            count = np.clip(length_A - start, 0, width).astype(np.int32)
            for i, request in enumerate(requests):
                if count[i]:
                    token[i, : count[i]] = request.prompt_ids[start : start + count[i]]
            self.state, prefill = prefill_chunk(
                self.config, self.weights, self.state, table, prefill, self._put(token), self._put(count)
            )
        return prefill

    # Rounds --------------------------------------------------------------------------------------------

    def round(self, waiting: bool = False) -> list[Event]:
        """Dispatches one call of rounds; returns the events of the oldest call that is not in flight any more.

        With calls in flight a row may have been released and taken again meanwhile: each call remembers whose
        rows it was made for, and nobody else's tokens are read from it.

        Args:
          waiting: a prompt waits for a row: with several rounds a call, come back as soon as one ends.
        """
        self._end_dropped()
        if self.rounds_per_call == 1:
            self.state, emission = step(self.config, self.weights, self.state, self.rules)
        else:
            self.state, emission = steps(
                self.config, self.rounds_per_call, self.weights, self.state, self.rules, np.bool_(waiting)
            )
        self._inflight.append((emission, tuple(self._rows)))
        if len(self._inflight) <= self.lookahead:
            return []
        emission, rows = self._inflight.popleft()
        packed_RxBxM1 = np.asarray(emission.packed).reshape(-1, self.batch, self.block_size + 1)  # waits
        self.rounds += int(packed_RxBxM1[:, :, -1].any(axis=1).sum())
        return [event for packed_BxM1 in packed_RxBxM1 for event in self._read(packed_BxM1, rows)]

    def _read(self, packed_BxM1: np.ndarray, rows: Sequence[_Row | None]) -> list[Event]:
        """The events of an emission whose line i belongs to rows[i]."""
        events = []
        for line, row in zip(packed_BxM1, rows, strict=False):  # an admission has padding lines behind
            count = int(line[-1])
            if row is None or count == 0 or self._rows[row.slot] is not row:
                continue
            tokens = line[:count].tolist()
            row.emitted += count
            reason = "stop" if tokens[-1] in row.stop_ids else "length" if row.emitted >= row.budget else None
            events.append(Event(row.index, tokens, reason))
            if reason is not None:
                self._free(row)
        return events

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Answers all requests, admitting them in order as rows come free; yields events as they come.

        All requests are checked before the first is decoded. Left early (the iterator is closed, or an error
        passes through it), it drops what it has not finished, and the engine can be used again.

        Raises:
          ValueError: a request can not be decoded, or the engine is decoding other ones.
        """
        queue = deque(enumerate(requests))
        if self.active_rows:
            raise ValueError(f"the engine is decoding {self.active_rows} requests; finish or abort them first")
        for index, request in queue:
            self._check(index, request)
        try:
            while queue or self.active_rows:
                wanted = min(len(queue), self.free_rows)
                # A prefill call costs the same for one row as for a few: wait for some unless nothing else runs. Its
                # rows are padded to a power of two: while others run, what exceeds one may as well come next.
                few = power_of_two_at_most(max(1, self.batch // 8))
                if wanted and (wanted >= min(len(queue), few) or not self.active_rows):
                    if self.active_rows and wanted > few:
                        wanted = power_of_two_at_most(wanted)
                    seats = self._seat(itertools.islice(queue, wanted))
                    if not seats and not self.active_rows:
                        yield from self.admit([queue[0]])  # says why it never fits
                    for _ in seats:
                        queue.popleft()
                    yield from self.enter(seats)
                if self.active_rows:
                    yield from self.round(waiting=bool(queue))
        finally:
            self.clear()


def _check_block_size(block_size: int | None, drafter: Drafter | None) -> int:
    if drafter is None:
        if block_size not in (None, 1):
            raise ValueError(f"block_size is {block_size!r}, but without a drafter a round is one token")
        return 1
    block_size = drafter.block_size if block_size is None else block_size
    if not is_whole(block_size) or not 2 <= block_size <= drafter.block_size:
        raise ValueError(
            f"block_size is {block_size!r}, must lie in [2, {drafter.block_size}]: a drafter runs at its "
            "trained block size or below"
        )
    return block_size


def timed_events(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[float, Event]]:
    """`Engine.run` with the wall clock (seconds since the call) of each event."""
    start = time.perf_counter()
    for event in engine.run(requests):
        yield time.perf_counter() - start, event
