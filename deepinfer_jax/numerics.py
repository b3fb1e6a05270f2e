"""Numerics: which roundings of the released arithmetic are applied.

What `spec` calls float32 (router, hyper-connection mixes, ratio > 1 pooling, softmax, head) is float32 in every
mode; the switches name the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from deepinfer_jax.errors import InputError
from deepinfer_jax.kernels import Kernels


@dataclass(frozen=True)
class Numerics:
    """A static description of the arithmetic.

    Attributes:
        compute: Dtype of activations between operations.
        kv_round_trip: Window KV goes through FP8, compressed KV and index queries and keys through FP4,
            as the released model does. Off, the caches hold `compute` values.
        linear_round_trip: Inputs of FP8 and FP4 linears go through FP8 in groups of 32.
        packed_cache: Round-tripped rows are held as packed bytes. Off, they are held as the `compute` values that the
            bytes stand for: the same numbers, more memory, and a gradient.
        batch_invariant: The bits of a row do not depend on other rows, padding, chunks or the number of steps per
            call (`ops/invariant.py`).
        kernels: Which backend computes each op.
    """

    compute: Literal["float32", "bfloat16"] = "bfloat16"
    kv_round_trip: bool = True
    linear_round_trip: bool = True
    packed_cache: bool = True
    batch_invariant: bool = False
    kernels: Kernels = Kernels()

    @property
    def dtype(self) -> Any:
        """`compute` as a JAX dtype."""
        return jnp.float32 if self.compute == "float32" else jnp.bfloat16

    @classmethod
    def named(cls, tag: str) -> Numerics:
        """The modes of the golden files: `fp32`, `fp32_kv`, `fp32_all`, `bf16_kv`, `bf16_all` (= `released`)."""
        if tag not in NAMED:
            raise InputError(f"numerics: found {tag!r}, expected one of {', '.join(NAMED)}")
        return NAMED[tag]


NAMED = {
    "fp32": Numerics("float32", False, False),
    "fp32_kv": Numerics("float32", True, False),
    "fp32_all": Numerics("float32", True, True),
    "bf16_kv": Numerics("bfloat16", True, False),
    "bf16_all": Numerics("bfloat16", True, True),
    "released": Numerics("bfloat16", True, True),
}
