"""SamplingParams: what a request asks of the sampler, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer_jax.errors import InputError

MAX_LOGPROBS = 1024
"""Most alternatives per token whose log-probabilities can be asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request is continued. Immutable; checked on construction.

    Filters apply in this order: temperature, min_p, top_k, top_p. A filter never removes the most probable token.

    Attributes:
        n: Samples per prompt.
        temperature: Logits are divided by it; 0 takes the most probable token (the lowest id among equals).
        top_p: Keep the most probable tokens until their sum reaches this; 1 is off.
        top_k: Keep this many; 0 is off.
        min_p: Keep tokens with at least this share of the most probable one's probability; 0 is off.
        seed: The draw at a position is a function of (seed, number of the sample, position) and of nothing else. None
            takes a seed from the prompt's number in the call, so that a call repeated gives the same.
        max_tokens: Most tokens to generate; None is up to the length limit.
        min_tokens: No end-of-sequence and no stop id before this many tokens; stop strings are not looked for.
        stop: Strings that end the sample. The text ends before the string.
        include_stop: Keep the stop string, or the text of the stop id, in the text.
        stop_token_ids: Ids that end the sample, beside the end-of-sequence id.
        ignore_eos: The end-of-sequence id is a token like any other (`stop_token_ids` still stop).
        logprobs: None for none; 0 for the chosen token's; k for the chosen one's and those of the k most probable.
            Natural logarithms of the model's own distribution, before temperature and filters.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        InputError: With every field that is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str | bytes):
                object.__setattr__(self, name, tuple(value))
        faults = list(self._faults())
        if faults:
            raise InputError("sampling parameters out of range", faults)

    def _faults(self) -> Iterable[str]:
        yield from _whole("n", self.n, 1, 65536)
        yield from _real("temperature", self.temperature, 0, math.inf)
        yield from _real("top_p", self.top_p, 0, 1, open_low=True)
        yield from _whole("top_k", self.top_k, 0, None)
        yield from _real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            yield from _whole("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            yield from _whole("max_tokens", self.max_tokens, 1, None)
        yield from _whole("min_tokens", self.min_tokens, 0, None)
        if _is_whole(self.max_tokens) and _is_whole(self.min_tokens) and self.min_tokens > (self.max_tokens or 0):
            yield f"min_tokens: found {self.min_tokens}, expected at most max_tokens {self.max_tokens}"
        if self.logprobs is not None:
            yield from _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            yield f"stop: found {self.stop!r}, expected strings that are not empty"
        if not isinstance(self.stop_token_ids, tuple):
            yield f"stop_token_ids: found {self.stop_token_ids!r}, expected token ids"
        else:
            for token in self.stop_token_ids:
                yield from _whole("stop_token_ids", token, 0, None)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                yield f"{name}: found {getattr(self, name)!r}, expected True or False"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The inverse of `to_dict`; missing fields have their defaults. Raises InputError for unknown ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        faults = []
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                faults.append(f"{name}: unknown" + (f", did you mean {close[0]}?" if close else ""))
        if faults:
            raise InputError("sampling parameters", faults)
        return cls(**values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: Any, low: int, high: int | None) -> Iterable[str]:
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if not _is_whole(value) or value < low or (high is not None and value > high):
        yield f"{name}: found {value!r}, expected {expected}"


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> Iterable[str]:
    expected = f"a number {'above' if open_low else 'of at least'} {low}"
    if high < math.inf:
        expected += f" and at most {high}"
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or value > high or (open_low and value == low):
        yield f"{name}: found {value!r}, expected {expected}"
