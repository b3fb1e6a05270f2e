"""The schedule against a device that is written in numpy and checks what it is told."""

import types

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.schedule import Request, Schedule
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.generate import Tokens
from deepinfer_jax.sampling_params import SamplingParams

VOCAB = 50
END = 1


def token_at(prompt, sample, position):
    """What the device draws: a function of the request, as the real one is."""
    return 2 + (sum(prompt) * 7 + sample * 13 + position * 5) % (VOCAB - 2)


class Device:
    """Slots as Python lists. Every transition checks that it is possible."""

    def __init__(self, shards, slots):
        layout = types.SimpleNamespace(shards=shards, put_rows=lambda tree: tree)
        config = types.SimpleNamespace(text_config=types.SimpleNamespace(vocab_size=VOCAB))
        self.setup = types.SimpleNamespace(layout=layout, config=config)
        self.local = slots // shards
        self.held = [[] for _ in range(slots)]
        self.active, self.limit = np.zeros(slots, bool), np.zeros(slots, int)
        self.prompt, self.sample = [0] * slots, [0] * slots
        self.stops = [set() for _ in range(slots)]
        self.prefills = 0

    def init(self, slots, max_length):
        self.max_length = max_length
        return self

    def admit(self, state, mask, end, rows):
        for slot in np.flatnonzero(mask):
            assert not self.active[slot], "a slot is given away while it generates"
            assert 0 < end[slot] <= self.max_length
            self.held[slot], self.limit[slot], self.sample[slot] = [], end[slot], int(rows.sample[slot])
            self.prompt[slot] = 0
            self.stops[slot] = {t for t in range(VOCAB) if rows.stop[slot, t // 32] >> (t % 32) & 1}
        return self

    def prefill(self, params, state, batch, *, context):
        self.prefills += 1
        per_shard = len(batch.slots) // self.setup.layout.shards
        for row, positions in enumerate(batch.positions):
            real = positions[positions >= 0]
            if len(real):
                slot = row // per_shard * self.local + batch.slots[row]
                assert real.tolist() == list(range(len(self.held[slot]), len(self.held[slot]) + len(real)))
                assert real[-1] < context
                assert not self.active[slot]
                self.held[slot] += batch.tokens[row, : len(real)].tolist()
                self.prompt[slot] = len(self.held[slot])
        return self

    def copy_slot(self, state, source, target):
        for shard, (a, b) in enumerate(zip(source, target, strict=True)):
            if b < self.local:
                a, b = shard * self.local + a, shard * self.local + b
                assert self.held[a]
                assert not self.held[b]
                self.held[b], self.prompt[b] = list(self.held[a]), self.prompt[a]
        return self

    def switch(self, state, on, off):
        assert all(self.held[slot] for slot in np.flatnonzero(on))
        self.active = (self.active | on) & ~off
        return self

    def decode(self, params, state, *, steps, context, top_logprobs):
        ids = np.full((steps, len(self.held)), -1, np.int32)
        for step in range(steps):
            for slot in np.flatnonzero(self.active):
                held, size = self.held[slot], self.prompt[slot]
                token = token_at(held[:size], self.sample[slot], len(held))
                ids[step, slot] = token
                held.append(token)
                assert len(held) <= context
                self.active[slot] = len(held) < self.limit[slot] and token not in self.stops[slot]
        return self, Tokens(ids, None)


@st.composite
def cases(draw):
    shards = draw(st.sampled_from([1, 2, 4]))
    slots = shards * draw(st.integers(1, 3))
    prompts = draw(st.lists(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=12))
    requests = []
    for prompt in prompts:
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)), n=draw(st.integers(1, 5)))
        stops = draw(st.frozensets(st.integers(2, VOCAB - 1), max_size=3))
        requests.append(Request(np.array(prompt, np.int32), params, 0, stops | {END}))
    sizes = Sizes(slots, 64, steps=draw(st.integers(1, 9)), chunk=draw(st.sampled_from([1, 5, 16, 64])))
    return shards, requests, sizes


def expected(request, sample):
    out, prompt = [], request.ids.tolist()
    while len(out) < request.params.max_tokens:
        out.append(token_at(prompt, sample, len(prompt) + len(out)))
        if out[-1] in request.stop_ids:
            return out, "stop"
    return out, "length"


@given(cases())
@settings(max_examples=150)
def test_every_sample_gets_its_tokens_once_and_in_order(case):
    shards, requests, sizes = case
    got, finished = {}, {}
    schedule = Schedule(Device(shards, sizes.slots), None, requests, sizes, fetch=lambda tokens: tokens)
    for update in schedule.updates():
        key = update.request, update.sample
        assert key not in finished
        got.setdefault(key, []).extend(update.ids)
        if update.finish:
            finished[key] = update.finish
    want = {(i, s): expected(r, s) for i, r in enumerate(requests) for s in range(r.params.n)}
    assert {key: (got[key], finished[key]) for key in finished} == want


@given(cases(), st.integers(1, 6))
@settings(max_examples=60)
def test_samples_that_are_stopped_early_leave_the_others_alone(case, keep):
    """Every other sample is stopped when it has a few tokens."""
    shards, requests, sizes = case
    got = {}
    schedule = Schedule(Device(shards, sizes.slots), None, requests, sizes, fetch=lambda tokens: tokens)
    for update in schedule.updates():
        key = update.request, update.sample
        got.setdefault(key, []).extend(update.ids)
        if sum(key) % 2 and len(got[key]) >= keep and not update.finish:
            schedule.stop(*key)
    for i, request in enumerate(requests):
        for s in range(request.params.n):
            want = expected(request, s)[0]
            assert got[i, s] == (want if not (i + s) % 2 else want[: len(got[i, s])])
            assert len(got[i, s]) >= min(keep, len(want))


def test_samples_of_a_prompt_share_one_prefill():
    request = Request(np.arange(2, 12, dtype=np.int32), SamplingParams(max_tokens=3, n=4), 0, frozenset({END}))
    device = Device(1, 4)
    list(Schedule(device, None, [request], Sizes(4, 64, 2), fetch=lambda tokens: tokens).updates())
    assert device.prefills == 1
