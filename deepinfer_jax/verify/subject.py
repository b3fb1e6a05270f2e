"""What is verified: a model, requests, and what each request gives alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.outputs import Completion
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.v41 import V41, Params
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.sampling_params import SamplingParams

TOP = 4
"""Alternatives whose log-probabilities are compared beside that of the chosen token."""

LONG = 120
"""Tokens of the longest prompt that a workload adds."""


class Outcome(NamedTuple):
    """What a request gave.

    Attributes:
        ids: Tokens.
        bits: uint32[tokens, 1 + 2 * TOP]: bits of the chosen log-probability, of the best ones, and their ids.
    """

    ids: tuple[int, ...]
    bits: np.ndarray

    @classmethod
    def of(cls, sample: Completion) -> Outcome:
        """From a finished sample."""
        assert sample.logprobs is not None
        rows = [outcome_row(t.logprob, [p for _, p in t.top], [i for i, _ in t.top]) for t in sample.logprobs]
        return cls(sample.token_ids, np.stack(rows))

    def first_difference(self, other: Outcome) -> int | None:
        """Number of the first token at which anything differs, or None."""
        count = min(len(self.ids), len(other.ids))
        same = np.array(self.ids[:count]) == np.array(other.ids[:count])
        same &= (self.bits[:count] == other.bits[:count]).all(axis=1)
        if not same.all():
            return int(np.argmin(same))
        return None if len(self.ids) == len(other.ids) else count


def outcome_row(chosen: float, top: Sequence[float], ids: Sequence[int]) -> np.ndarray:
    """uint32[1 + 2 * TOP] of one token."""
    values = np.array([chosen, *top[:TOP]], np.float32).view(np.uint32)
    return np.concatenate([values, np.asarray(ids[:TOP], np.uint32)])


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests.

    Attributes:
        prompts: Token ids of each.
        sampling: Of each; seeds are set.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], *, count: int, max_tokens: int, seed: int = 0) -> Workload:
        """`count` requests: evenly spaced prompts greedily, then the same ones sampled, then again with other seeds. A
        prompt of them all joined, up to `LONG` tokens, is among them, so that chunks and buckets have something to cut.

        Raises:
            InputError: No prompt, or empty ones.
        """
        faults = [f"prompt {i}: empty, expected at least one token" for i, p in enumerate(prompts) if not len(p)]
        if faults or not prompts:
            raise InputError("prompts: found none, expected at least one" if not prompts else "prompts", faults)
        taken = min(len(prompts), max(1, count // 2 - 1))
        spaced = [prompts[i * len(prompts) // taken] for i in range(taken)]
        every = [*spaced, [t for p in spaced for t in p][:LONG]]
        sampling = [
            SamplingParams(
                temperature=float(i >= len(every)), seed=seed + i, max_tokens=max_tokens, logprobs=TOP, ignore_eos=True
            )
            for i in range(count)
        ]
        return cls(tuple(tuple(int(t) for t in every[i % len(every)]) for i in range(count)), tuple(sampling))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Most tokens of a request, what it generates included."""
        return max(len(p) + (s.max_tokens or 0) for p, s in zip(self.prompts, self.sampling, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model and requests to verify it with.

    Attributes:
        config, params, numerics, definition: The model.
        workload: Requests.
        path: The checkpoint, for axes that start other processes; None leaves those out.
    """

    config: ModelConfig
    params: Params
    numerics: Numerics
    workload: Workload
    definition: nnx.GraphDef[V41] | None = None
    path: Path | None = None

    def __post_init__(self):
        limit = self.config.text_config.max_position_embeddings
        faults = [
            f"request {i}: {len(p)} tokens and {s.max_tokens} more exceed max_position_embeddings {limit}"
            for i, (p, s) in enumerate(zip(self.workload.prompts, self.workload.sampling, strict=True))
            if len(p) + (s.max_tokens or 0) > limit
        ]
        if faults:
            raise InputError("requests that cannot be run", faults)

    @property
    def room(self) -> int:
        """Context limit that the requests are run with by default."""
        return self.length(256)

    def length(self, least: int) -> int:
        """The next power of two, from `least` on, that holds every request, or the model's limit."""
        needed = max(least, self.workload.longest)
        return min(self.config.text_config.max_position_embeddings, 1 << (needed - 1).bit_length())

    def generate(
        self,
        which: Sequence[int],
        *,
        batch_size: int,
        steps: int = 8,
        chunk: int = 64,
        max_length: int | None = None,
        n: int = 1,
        mesh: Mesh | None = None,
    ) -> list[tuple[Outcome, ...]]:
        """Requests of the workload, by number, in this order; `n` outcomes of each."""
        llm = LLM.of(
            self.config,
            self.params,
            numerics=self.numerics,
            definition=self.definition,
            mesh=mesh,
            max_length=max_length or self.room,
            batch_size=batch_size,
            steps=steps,
            chunk=chunk,
            progress=False,
        )
        sampling = [dataclasses.replace(self.workload.sampling[i], n=n) for i in which]
        outputs = llm.generate([self.workload.prompts[i] for i in which], sampling)
        return [tuple(Outcome.of(sample) for sample in output.outputs) for output in outputs]

    @functools.cached_property
    def alone(self) -> list[Outcome]:
        """Every request alone: the reference of all axes."""
        return [self.generate([i], batch_size=1)[0][0] for i in range(len(self.workload))]

    def text(self, i: int) -> tuple[int, ...]:
        """Prompt and reference continuation of a request."""
        return self.workload.prompts[i] + self.alone[i].ids


class Comparison(NamedTuple):
    """One request, compared with what it gave alone.

    Attributes:
        request: Number.
        at: The first generated token that differs, or None.
    """

    request: int
    at: int | None


def compared(which: Iterable[int], expected: Iterable[Outcome], found: Iterable[Outcome]) -> list[Comparison]:
    """Comparisons of outcomes, one by one."""
    pairs = zip(which, expected, found, strict=True)
    return [Comparison(i, want.first_difference(got)) for i, want, got in pairs]
