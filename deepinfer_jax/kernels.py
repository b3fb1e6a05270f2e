"""Kernels: which backend computes each op.

A static, hashable value inside `Numerics`, since another backend may give other last bits. Nothing falls back: a
backend that cannot serve a call is an error (`NotImplementedError`) at trace time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from deepinfer_jax.errors import InputError

Backend = Literal["reference", "cpu", "cuda"]
"""`reference` is the jnp code that defines the op, on every platform; the others are custom calls
(`ops/custom_call.py`)."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend of each op that has more than one.

    Attributes:
        finish_rows: RMSNorm, rotation, quantisation and write of cache rows.
        compress_rows: Pooling of a group of tokens by a softmax per channel, and its norm.
        rotate: Rotary embedding of queries, and back of attention's outputs.
        top_entries: The best entries and candidate blocks out of index scores, as rows of the pool.
        hyper_connection: Mixes, collapse with its norm, and expansion of the streams.
        gate: Scores of the router, choice and weights of the experts.
        swiglu: SwiGLU with its limit, times the routing weight, quantised.
        expert_rows: Rows to the order of their experts, and their sum in the order of expert ids.
        engram: Gather of table rows, and the gate.
        linear: Linears with FP8 or FP4 weights, the experts' among them.
        sample: Choice of the next token.
    """

    finish_rows: Backend = "reference"
    compress_rows: Backend = "reference"
    rotate: Backend = "reference"
    top_entries: Backend = "reference"
    hyper_connection: Backend = "reference"
    gate: Backend = "reference"
    swiglu: Backend = "reference"
    expert_rows: Backend = "reference"
    engram: Backend = "reference"
    linear: Backend = "reference"
    sample: Backend = "reference"

    @classmethod
    def named(cls, name: str) -> Kernels:
        """One backend for every op: `reference`, `cpu` or `cuda`.

        Raises:
            InputError: Another name.
        """
        if name not in get_args(Backend):
            raise InputError(f"kernels: found {name!r}, expected one of {', '.join(get_args(Backend))}")
        choice: dict[str, Any] = {field.name: name for field in dataclasses.fields(cls)}
        return cls(**choice)

    def __str__(self) -> str:
        """A table, an op a line."""
        rows = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {backend}" for name, backend in rows)
