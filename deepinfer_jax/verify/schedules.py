"""Axes of the engine: the same requests in other batches, orders, chunks, dispatches, context limits, forks, meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.parallel.mesh import make_mesh
from deepinfer_jax.verify.subject import Comparison, Subject, compared

Case = tuple[str, Callable[[], list[Comparison]]]
"""Name, and what runs it."""

BATCH = 9
"""Batch of the axes that change something else: odd, and more than one tile of rows."""


def batch_sizes(subject: Subject, sizes: Sequence[int]) -> Iterator[Case]:
    """As many requests at once as there are slots."""

    def case(size: int) -> list[Comparison]:
        which = [i % len(subject.workload) for i in range(size)]
        return _generated(subject, which, batch_size=size)

    for size in sizes:
        yield f"{size}", lambda size=size: case(size)


def places(subject: Subject) -> Iterator[Case]:
    """The same requests at other places of the batch."""
    which = list(range(min(BATCH, len(subject.workload))))
    yield "reversed", lambda: _generated(subject, which[::-1], batch_size=BATCH)
    yield "turned by 4", lambda: _generated(subject, which[4:] + which[:4], batch_size=BATCH)


def neighbours(subject: Subject, count: int) -> Iterator[Case]:
    """Other requests, of other lengths, beside one that stays; some join while others are under way."""

    def case(seed: int) -> list[Comparison]:
        random = np.random.default_rng(seed)
        which = [0, *(int(i) for i in random.permutation(np.arange(1, len(subject.workload))))]
        return _generated(subject, which, batch_size=BATCH)

    for seed in range(count):
        yield f"shuffle {seed}", lambda seed=seed: case(seed)


def rooms(subject: Subject, factors: Sequence[int]) -> Iterator[Case]:
    """Room for longer sequences: longer paddings, other buckets."""
    which = range(min(4, len(subject.workload)))
    for factor in factors:
        length = subject.length(factor * subject.room)
        if length > subject.room:
            yield f"{length}", lambda length=length: _generated(subject, which, batch_size=1, max_length=length)


def chunks(subject: Subject, sizes: Sequence[int], whole: bool) -> Iterator[Case]:
    """Prompts cut into chunks of other sizes, or not at all."""
    longest = max(len(p) for p in subject.workload.prompts)
    which = sorted(range(len(subject.workload)), key=lambda i: -len(subject.workload.prompts[i]))[:8]
    for size in sizes:
        yield f"{size}", lambda size=size: _generated(subject, which, batch_size=1, chunk=size)
    if whole:
        yield "whole", lambda: _generated(subject, which, batch_size=1, chunk=1 << (longest - 1).bit_length())


def steps(subject: Subject, counts: Sequence[int]) -> Iterator[Case]:
    """Other numbers of tokens per dispatch."""
    which = range(min(8, len(subject.workload)))
    for count in counts:
        yield f"{count}", lambda count=count: _generated(subject, which, batch_size=1, steps=count)


def forks(subject: Subject, count: int) -> Iterator[Case]:
    """Samples that share a prompt's cache, against samples that each ran the prompt."""

    def case() -> list[Comparison]:
        which = [i for i, s in enumerate(subject.workload.sampling) if s.temperature > 0][:4]
        expected = subject.generate(which, batch_size=1, n=count)
        found = subject.generate(which, batch_size=BATCH, n=count)
        each = [i for i in which for _ in range(count)]
        return compared(each, *([o for request in side for o in request] for side in (expected, found)))

    yield f"{count} samples", case


def devices(subject: Subject, meshes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Slots and experts split over devices. Nothing where JAX has too few of them."""
    which = range(min(4, len(subject.workload)))

    def case(data: int, expert: int) -> list[Comparison]:
        found = subject.generate(which, batch_size=4, mesh=make_mesh(data, expert))
        return compared(which, (subject.alone[i] for i in which), [request[0] for request in found])

    for data, expert in meshes:
        if data * expert <= len(jax.devices()):
            yield f"{data} data x {expert} expert", lambda data=data, expert=expert: case(data, expert)


def _generated(subject: Subject, which: Sequence[int], **options: Any) -> list[Comparison]:
    found = [request[0] for request in subject.generate(which, **options)]
    return compared(which, (subject.alone[i] for i in which), found)
