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

_ABSENT = {("linear", "cuda")}
"""Kernels that nobody wrote yet."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend of each op that has more than one.

    Attributes:
        finish_rows: RMSNorm, rotation, quantisation and write of cache rows.
        gate: Scores of the router, choice and weights of the experts. The product before it is not part of it.
        swiglu: SwiGLU with its limit, times the routing weight, through FP8.
        linear: Linears with FP8 or FP4 weights, the experts' among them. There is no `cuda` backend.
    """

    finish_rows: Backend = "reference"
    gate: Backend = "reference"
    swiglu: Backend = "reference"
    linear: Backend = "reference"

    @classmethod
    def named(cls, name: str) -> Kernels:
        """`reference`, `cpu` or `cuda` for every op that has it; the others stay with the reference.

        Raises:
            InputError: Another name.
        """
        if name not in get_args(Backend):
            raise InputError(f"kernels: found {name!r}, expected one of {', '.join(get_args(Backend))}")
        ops = [field.name for field in dataclasses.fields(cls) if (field.name, name) not in _ABSENT]
        choice: dict[str, Any] = dict.fromkeys(ops, name)
        return cls(**choice)

    def __str__(self) -> str:
        """A table, an op a line."""
        rows = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {backend}" for name, backend in rows)
