"""`verify`: every axis that applies, and a search for the origin of what differs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics_version import numerics_facts, numerics_version
from deepinfer_jax.verify.locate import Finding, Way, search
from deepinfer_jax.verify.passes import drafts, forced, images, rollbacks
from deepinfer_jax.verify.processes import processes
from deepinfer_jax.verify.report import CaseResult, Report
from deepinfer_jax.verify.schedules import (
    BATCH,
    Case,
    batch_sizes,
    chunks,
    devices,
    forks,
    neighbours,
    places,
    rooms,
    steps,
)
from deepinfer_jax.verify.subject import Subject

MOST_MAPS = 35_000
"""Of the 65,530 memory maps that Linux gives a process by default."""


def _pick(short: bool, few: Sequence, many: Sequence) -> Sequence:
    return few if short else many


AXES: dict[str, Callable[[Subject, bool], Iterator[Case]]] = {
    "batch size": lambda s, short: batch_sizes(s, _pick(short, (BATCH,), (*range(1, 34), 48, 64))),
    "place in the batch": lambda s, short: places(s),
    "neighbours": lambda s, short: neighbours(s, 2 if short else 34),
    "context limit": lambda s, short: rooms(s, _pick(short, (4,), (2, 4, 8))),
    "prefill chunk": lambda s, short: chunks(s, _pick(short, (17,), (1, 2, 5, 16, 17, 64, 100)), not short),
    "tokens per dispatch": lambda s, short: steps(s, _pick(short, (3,), (1, 2, 3, 5, 16, 32))),
    "fork": lambda s, short: forks(s, 3),
    "teacher forcing": lambda s, short: forced(s),
    "rollback": lambda s, short: rollbacks(s, _pick(short, (5,), tuple(range(1, 9)))),
    "images": lambda s, short: images(s),
    "drafter": lambda s, short: drafts(s, _pick(short, (3,), (2, 3, 8))),
    "devices": lambda s, short: devices(s, _pick(short, ((1, 2),), ((2, 1), (1, 2), (2, 2)))),
    "process": processes,
}
"""Axes by name: (subject, short) -> cases. An axis without a case does not apply."""

_TOKEN_BY_TOKEN = (Way(), Way(chunk=1))
_IN_A_BATCH = (Way(), Way(batch=BATCH))
_DECODED_IN_A_BATCH = (Way(chunk=1), Way(batch=BATCH, chunk=1))
_WITH_MORE_ROOM = (Way(chunk=1), Way(chunk=1, room=4))

_SEARCHED = {
    "context limit": (_WITH_MORE_ROOM,),
    "prefill chunk": (_TOKEN_BY_TOKEN, (Way(), Way(chunk=17))),
    "teacher forcing": (_TOKEN_BY_TOKEN,),
    "rollback": (_TOKEN_BY_TOKEN,),
}
_SEARCHED_ELSE = (_DECODED_IN_A_BATCH, _IN_A_BATCH, _TOKEN_BY_TOKEN)
"""Ways that are compared when an axis differs."""


def verify(
    subject: Subject,
    *,
    axes: Sequence[str] | None = None,
    short: bool = True,
    progress: Callable[[CaseResult], None] = lambda result: None,
) -> Report:
    """Run axes and look for the origin of a difference.

    Args:
        axes: Names out of `AXES`; default all.
        short: A few cases of each axis; else all.
        progress: Called with each case's result.

    Raises:
        InputError: An axis that does not exist.
    """
    unknown = [a for a in axes or () if a not in AXES]
    if unknown:
        raise InputError(f"axis: found {unknown[0]!r}, expected one of {', '.join(AXES)}")
    results: list[CaseResult] = []
    for axis in axes or AXES:
        for name, case in AXES[axis](subject, short):
            results.append(CaseResult(axis, name, tuple(case())))
            _drop_programs()
            progress(results[-1])
    forked = subject.definition is not None
    return Report(
        tuple(results),
        tuple(axis for axis in axes or AXES if not any(r.axis == axis for r in results)),
        _origin(subject, results),
        numerics_version(subject.numerics, forked=forked),
        numerics_facts(subject.numerics, forked=forked),
    )


def _drop_programs() -> None:
    """Forget compiled programs before there are too many: every case has its own, each takes hundreds of memory maps,
    and the process ends when Linux gives no more. Those needed again come from the compile cache."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _origin(subject: Subject, results: Sequence[CaseResult]) -> Finding | None:
    """Where the first difference comes from that can be traced."""
    for axis in dict.fromkeys(r.axis for r in results if r.differing):
        first = next(c for r in results if r.axis == axis for c in r.comparisons if c.at is not None)
        found = search(subject, first.request, _SEARCHED.get(axis, _SEARCHED_ELSE))
        if found is not None:
            return found
    return None
