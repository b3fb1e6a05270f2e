"""Matrix products: plain ones, and those with FP8 or FP4 weights.

Weights are stored [out, in] and contracted over their last axis with float32 accumulators.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.formats import QuantizedTensor, fp8_round_trip, weight
from deepinfer_jax.kernels import Backend
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.invariant import fence, in_row_tiles
from deepinfer_jax.ops.packed_linear import grouped_packed_linear, packed_linear


def contract(x: jax.Array, w: jax.Array, invariant: bool = False) -> jax.Array:
    """[..., in] x [out, in] -> float32[..., out]. Both sides in one dtype."""

    def product(x: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            w,
            (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
            # float32 operands must not go through TF32 or bfloat16 passes on an accelerator.
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    if not invariant:
        return product(x)
    w = fence(w)
    return in_row_tiles(product, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def linear(x: jax.Array, w: jax.Array | QuantizedTensor, out_dtype: Any = None, invariant: bool = False) -> jax.Array:
    """Plain linear in the dtype of its input: [..., in] x [out, in] -> [..., out].

    `out_dtype` float32 keeps the accumulators, which is what the release computes in float32 from bfloat16
    inputs (router, ratio > 1 compressor, head): the products are exact there.
    """
    out = contract(x, weight(w, x.dtype), invariant).astype(x.dtype if out_dtype is None else out_dtype)
    return fence(out) if invariant else out


def quantized_linear(x: jax.Array, w: jax.Array | QuantizedTensor, numerics: Numerics) -> jax.Array:
    """Linear with FP8 or FP4 weights, quantised or already expanded: [..., in] -> [..., out] in x's dtype.

    With `linear_round_trip` the input first goes through FP8 in groups of 32 channels.
    """
    if numerics.linear_round_trip:
        x = fp8_round_trip(x)
    if numerics.kernels.linear != "reference":
        return packed_linear(x, w, numerics.kernels.linear).astype(x.dtype)
    return linear(x, w, invariant=numerics.batch_invariant)


def grouped_output_linear(x: jax.Array, w: jax.Array | QuantizedTensor, groups: int, numerics: Numerics) -> jax.Array:
    """Block-diagonal linear of the attention output (`wo_a`): one matrix per group of heads.

    Args:
        x: [..., groups * in].
        w: [groups * out, in]. FP8, used as bfloat16 without quantising the input.

    Returns:
        [..., groups * out] in x's dtype.
    """
    if numerics.kernels.linear != "reference":
        return _packed_output_linear(x, w, groups, numerics.kernels.linear)
    w_GRD = weight(w, x.dtype).reshape(groups, -1, x.shape[-1] // groups)

    def product(x_TD: jax.Array) -> jax.Array:
        out_GTR = lax.dot_general(
            jnp.moveaxis(x_TD.reshape(-1, groups, x.shape[-1] // groups), 1, 0),
            w_GRD,
            (((2,), (2,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        return jnp.moveaxis(out_GTR, 0, 1).reshape(x_TD.shape[0], -1)

    x_TD = x.reshape(-1, x.shape[-1])
    if not numerics.batch_invariant:
        return product(x_TD).reshape(*x.shape[:-1], -1).astype(x.dtype)
    w_GRD = fence(w_GRD)
    return fence(in_row_tiles(product, x_TD).reshape(*x.shape[:-1], -1).astype(x.dtype))


def _packed_output_linear(x: jax.Array, w: jax.Array | QuantizedTensor, groups: int, backend: Backend) -> jax.Array:
    """The same by a custom call: a group uses the rows of the one matrix that are its own."""
    x_GTD = jnp.moveaxis(x.reshape(-1, groups, x.shape[-1] // groups), 1, 0)
    rows = (w.shape[0] if isinstance(w, QuantizedTensor) else w.shape[-2]) // groups
    used = jnp.full(groups, x_GTD.shape[1], jnp.int32)
    first = rows * jnp.arange(groups, dtype=jnp.int32)
    out_GTR = grouped_packed_linear(x_GTD, w, jnp.zeros_like(used), used, backend, first_G=first, n=rows)
    return jnp.moveaxis(out_GTR, 0, 1).reshape(*x.shape[:-1], -1).astype(x.dtype)
