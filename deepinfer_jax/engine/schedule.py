"""Which request runs in which slot: the host's side of generation.

The device decides what is generated and when a slot ends; the host fills empty slots, sends prompts in chunks, and
reads tokens one dispatch late, so that the device does not wait for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from deepinfer_jax.engine.sizes import Sizes, top_logprobs
from deepinfer_jax.generate import Programs, State, Tokens
from deepinfer_jax.model.step import Batch
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.sampling import SamplerRows, seed_words, stop_bits
from deepinfer_jax.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A checked request.

    Attributes:
        ids: int32[S] prompt.
        params: As asked; `max_tokens` is filled in.
        seed: 64 bits.
        stop_ids: Ids that end it.
    """

    ids: np.ndarray
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]

    @property
    def end(self) -> int:
        """Length at which a sample stops."""
        assert self.params.max_tokens is not None
        return len(self.ids) + self.params.max_tokens


class Update(NamedTuple):
    """New tokens of a sample.

    Attributes:
        request, sample: Numbers.
        ids: New token ids.
        logprobs: float32[len(ids)] and, per id, (float32[K], int32[K]) of the most probable; or None.
        finish: Why the sample is over, or None.
    """

    request: int
    sample: int
    ids: list[int]
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    finish: FinishReason | None


@dataclasses.dataclass(eq=False)
class _Running:
    request: int
    sample: int
    slot: int
    seen: int = 0
    """Tokens that the host has read."""
    sent: int = 0
    """Tokens that were asked for in dispatches."""
    over: bool = False


class Schedule:
    """One run over a list of requests. Everything that changes lives here and ends with it."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        requests: Sequence[Request],
        sizes: Sizes,
        *,
        fetch: Callable[[Any], Any] = jax.device_get,
    ):
        """
        Args:
            requests: Every one fits into `sizes.max_length`.
            fetch: Reads results from the device, waiting for them.
        """
        self.programs, self.params, self.requests, self.sizes = programs, params, requests, sizes
        self.fetch = fetch
        self.shards = programs.setup.layout.shards
        self.vocab = programs.setup.config.text_config.vocab_size
        self.waiting: collections.deque[tuple[int, int]] = collections.deque(
            (r, s) for r, request in enumerate(requests) for s in range(request.params.n)
        )
        self.running: dict[int, _Running] = {}
        self.top = max((t for r in requests if (t := top_logprobs(r.params.logprobs)) is not None), default=None)
        self.stopped: set[int] = set()

    def updates(self) -> Iterator[Update]:
        """Generate everything; yields new tokens as they are read."""
        if not self.requests:
            return
        state = self.programs.init(self.sizes.slots, self.sizes.max_length)
        flight: collections.deque[tuple[Tokens, list[_Running]]] = collections.deque()
        while self.waiting or self.running:
            if self.stopped:
                state = self.programs.switch(state, self._mask(()), self._mask(self.stopped))
                self.stopped.clear()
            if self.waiting and len(self.running) < self.sizes.slots:
                state = self._fill(state)
            dispatched = any(self._left(run) > 0 for run in self.running.values())
            if dispatched:
                state, tokens = self._decode(state)
                flight.append((tokens, list(self.running.values())))
            # One dispatch stays in flight while the one before it is read.
            while flight and (len(flight) > 1 or not dispatched):
                yield from self._read(*flight.popleft())
                dispatched = True

    def stop(self, request: int, sample: int) -> None:
        """End a sample early: its text holds a stop string."""
        for run in list(self.running.values()):
            if (run.request, run.sample) == (request, sample):
                self._end(run)
                self.stopped.add(run.slot)

    # ------------------------------------------------------------------------------ filling slots

    def _fill(self, state: State) -> State:
        """Give free slots to waiting samples: prompts are run once for all samples of a request that start together."""
        groups = self._place()
        started = [run for group in groups for run in group]
        mask = self._mask(run.slot for run in started)
        state = self.programs.admit(state, mask, *self._sampler_rows(started))
        state = self._prefill(state, [group[0] for group in groups])
        copies = [[(group[0].slot, run.slot) for run in group[1:]] for group in groups]
        for pairs in _in_step(copies, lambda pair: self._shard(pair[1]), self.shards):
            state = self._copy(state, pairs)
        return self.programs.switch(state, mask, self._mask(()))

    def _place(self) -> list[list[_Running]]:
        """Take waiting samples, in order, into free slots; samples of one request on one device if it has room."""
        local = self.sizes.slots // self.shards
        free = [[s for s in range(d * local, (d + 1) * local) if s not in self.running] for d in range(self.shards)]
        groups = []
        while self.waiting and any(free):
            slots = max(free, key=len)
            request = self.waiting[0][0]
            group = []
            while self.waiting and slots and self.waiting[0][0] == request:
                run = _Running(*self.waiting.popleft(), slot=slots.pop(0))
                self.running[run.slot] = run
                group.append(run)
            groups.append(group)
        return groups

    def _sampler_rows(self, started: list[_Running]) -> tuple[Any, SamplerRows]:
        slots = self.sizes.slots
        end = np.zeros(slots, np.int32)
        real, whole = np.zeros((3, slots), np.float32), np.zeros((2, slots), np.int32)
        seed, sample = np.zeros((slots, 2), np.uint32), np.zeros(slots, np.uint32)
        stop = np.zeros((slots, -(-self.vocab // 32)), np.uint32)
        for run in started:
            request = self.requests[run.request]
            p, slot = request.params, run.slot
            end[slot] = request.end
            real[:, slot] = p.temperature, p.top_p, p.min_p
            whole[:, slot] = min(p.top_k, self.vocab), len(request.ids) + p.min_tokens
            seed[slot], sample[slot] = seed_words(request.seed), run.sample
            stop[slot] = stop_bits(request.stop_ids, self.vocab)
        rows = SamplerRows(real[0], real[1], whole[0], real[2], seed, sample, stop, whole[1])  # type: ignore[arg-type]
        return self._put((end, rows))

    def _prefill(self, state: State, runs: list[_Running]) -> State:
        """Run the prompts in chunks, the longest remainders first; short ones share a call."""
        local = self.sizes.slots // self.shards
        left = {run.slot: (self.requests[run.request].ids, 0) for run in runs}
        while left:
            remaining = {slot: len(ids) - done for slot, (ids, done) in left.items()}
            length = self.sizes.length(max(remaining.values()))
            per_shard = self.sizes.rows(length, local)
            shape = (self.shards, per_shard)
            tokens, positions = np.zeros((*shape, length), np.int32), np.full((*shape, length), -1, np.int32)
            slots, taken, context = np.zeros(shape, np.int32), [0] * self.shards, 1
            for slot in sorted(left, key=lambda s: -remaining[s]):
                shard = self._shard(slot)
                row = taken[shard]
                if row == per_shard:
                    continue
                taken[shard] += 1
                ids, done = left[slot]
                part = ids[done : done + length]
                tokens[shard, row, : len(part)] = part
                positions[shard, row, : len(part)] = np.arange(done, done + len(part))
                slots[shard, row] = slot % local
                context = max(context, done + len(part))
                left[slot] = (ids, done + len(part))
                if done + len(part) == len(ids):
                    del left[slot]
            batch = Batch(tokens.reshape(-1, length), positions.reshape(-1, length), slots.reshape(-1))  # type: ignore[arg-type]
            context = self.sizes.context(context)
            state = self.programs.prefill(self.params, state, self._put(batch), context=context)
        return state

    def _copy(self, state: State, pairs: list[tuple[int, int] | None]) -> State:
        local = self.sizes.slots // self.shards
        source = np.array([0 if pair is None else pair[0] % local for pair in pairs], np.int32)
        target = np.array([local if pair is None else pair[1] % local for pair in pairs], np.int32)
        return self.programs.copy_slot(state, *self._put((source, target)))

    # -------------------------------------------------------------------------------- decoding

    def _decode(self, state: State) -> tuple[State, Tokens]:
        reached = 1
        for run in self.running.values():
            run.sent += self.sizes.steps
            request = self.requests[run.request]
            reached = max(reached, min(len(request.ids) + run.sent, request.end))
        context = self.sizes.context(reached)
        return self.programs.decode(self.params, state, steps=self.sizes.steps, context=context, top_logprobs=self.top)

    def _read(self, tokens: Tokens, runs: list[_Running]) -> Iterator[Update]:
        """Hand out what a dispatch generated, to the samples that were in the slots then."""
        ids, shown = self.fetch(tokens)
        for run in runs:
            if run.over:
                continue
            request = self.requests[run.request]
            new = [int(token) for token in ids[:, run.slot] if token >= 0]
            run.seen += len(new)
            finish: FinishReason | None = None
            if new and new[-1] in request.stop_ids and run.seen > request.params.min_tokens:
                finish = "stop"
            elif run.seen == request.params.max_tokens:
                finish = "length"
            logprobs = None
            if shown is not None and request.params.logprobs is not None:
                k = min(request.params.logprobs, self.vocab)
                part = slice(0, len(new)), run.slot
                logprobs = (shown.chosen[part], shown.top[part][:, :k], shown.top_ids[part][:, :k])
            if finish is not None:
                self._end(run)
            if new or finish:
                yield Update(run.request, run.sample, new, logprobs, finish)

    # ---------------------------------------------------------------------------------- the rest

    def _left(self, run: _Running) -> int:
        max_tokens = self.requests[run.request].params.max_tokens
        assert max_tokens is not None
        return max_tokens - run.sent

    def _end(self, run: _Running) -> None:
        run.over = True
        if self.running.get(run.slot) is run:
            del self.running[run.slot]

    def _shard(self, slot: int) -> int:
        return slot // (self.sizes.slots // self.shards)

    def _mask(self, slots: Any) -> Any:
        mask = np.zeros(self.sizes.slots, bool)
        mask[list(slots)] = True
        return self._put(mask)

    def _put(self, tree: Any) -> Any:
        return self.programs.setup.layout.put_rows(tree)


def _in_step(lists: list[list[Any]], shard: Callable[[Any], int], shards: int) -> Iterator[list[Any]]:
    """One item per device at a time (None for a device that has none left)."""
    queues: list[collections.deque] = [collections.deque() for _ in range(shards)]
    for item in (item for items in lists for item in items):
        queues[shard(item)].append(item)
    while any(queues):
        yield [queue.popleft() if queue else None for queue in queues]


def warm_up(programs: Programs, params: Params, sizes: Sizes, logprobs: Sequence[int | None] = (None,)) -> None:
    """Compile every program that a run with these sizes may need, by running each on nothing.

    Args:
        logprobs: Values of `SamplingParams.logprobs` to be ready for.
    """
    schedule = Schedule(programs, params, (), sizes)
    local, shards = sizes.slots // schedule.shards, schedule.shards
    state = programs.init(sizes.slots, sizes.max_length)
    none = schedule._mask(())
    state = programs.admit(state, none, *schedule._sampler_rows([]))
    state = programs.switch(state, none, none)
    state = schedule._copy(state, [None] * shards)
    for context in sizes.contexts:
        for length in sizes.lengths:
            rows = sizes.rows(length, local) * shards
            empty = np.zeros((rows, length), np.int32)
            batch = schedule._put(Batch(empty, empty - 1, empty[:, 0]))  # type: ignore[arg-type]
            state = programs.prefill(params, state, batch, context=context)
        for top in sorted({top_logprobs(k) for k in logprobs}, key=str):
            state, _ = programs.decode(params, state, steps=sizes.steps, context=context, top_logprobs=top)
    jax.block_until_ready(state)
