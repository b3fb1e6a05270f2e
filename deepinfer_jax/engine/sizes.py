"""The shapes that programs are compiled for: a few of each kind, so that compilation ends."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.errors import InputError

_FACTOR = 4
_SHORTEST_CHUNK = 16
_SHORTEST_CONTEXT = 256
_LOGPROBS = (0, 32, 1024)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of a run.

    Attributes:
        slots: Sequences generated at once.
        max_length: Most tokens of a sequence, prompt included.
        steps: Tokens that every slot decodes per dispatch.
        chunk: Tokens of a prefill call, over all its rows of a device.
    """

    slots: int
    max_length: int
    steps: int = 8
    chunk: int = 256

    def __post_init__(self):
        faults = [
            f"{name}: found {value!r}, expected a whole number of at least 1"
            for name, value in dataclasses.asdict(self).items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if faults:
            raise InputError("sizes of a run", faults)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context limits, ascending: 256, 1024, ... and `max_length`."""
        return _ladder(_SHORTEST_CONTEXT, self.max_length)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prefill rows, ascending: 16, 64, ... and `chunk`."""
        return _ladder(_SHORTEST_CHUNK, min(self.chunk, self.max_length))

    def context(self, tokens: int) -> int:
        """The least context limit that holds `tokens`."""
        return next(c for c in self.contexts if c >= tokens)

    def length(self, tokens: int) -> int:
        """Length of prefill rows when the longest prompt part left has `tokens`."""
        return next((n for n in self.lengths if n >= tokens), self.lengths[-1])

    def rows(self, length: int, slots: int) -> int:
        """Rows of a prefill call of this length, on a device that has `slots`."""
        return max(1, min(slots, self.chunk // length))


def top_logprobs(wanted: int | None) -> int | None:
    """How many alternatives a decode program reports when `wanted` are asked for."""
    return None if wanted is None else next(n for n in _LOGPROBS if n >= wanted)


def _ladder(low: int, high: int) -> tuple[int, ...]:
    steps = []
    while low < high:
        steps.append(low)
        low *= _FACTOR
    return (*steps, high)
