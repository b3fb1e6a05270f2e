"""Linears whose FP8 or FP4 weights stay packed in memory: custom calls that decode as they multiply.

The reference decodes a whole weight before a product (`ops/linear.py`); that defines the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.formats import GROUP, QuantizedTensor
from deepinfer_jax.kernels import Backend
from deepinfer_jax.ops.custom_call import check, custom_call

_FORMATS = {"fp8_block": 0, "fp4": 1}


def packed_linear(x: jax.Array, w: jax.Array | QuantizedTensor, backend: Backend) -> jax.Array:
    """[..., in] x one packed [out, in] -> float32[..., out]. Arguments as for `grouped_packed_linear`."""
    x_RK = x.reshape(-1, x.shape[-1])
    rows = jnp.full(1, x_RK.shape[0], jnp.int32)
    one = jnp.zeros(1, jnp.int32)
    (out,) = grouped_packed_linear(x_RK[None], w, one, rows, backend)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def grouped_packed_linear(
    x_GRK: jax.Array,
    w: jax.Array | QuantizedTensor,
    matrix_G: jax.Array,
    used_G: jax.Array,
    backend: Backend,
    *,
    first_G: jax.Array | None = None,
    n: int | None = None,
) -> jax.Array:
    """Each group of rows times its own matrix: float32[G, R, n].

    The order of a sum depends on the number of columns alone, so a row's bits do not depend on other rows.

    Args:
        x_GRK: Values; products are those of float32.
        w: Matrices [out, in], with at most one leading axis.
        matrix_G: int32: which matrix; negative gives 0.
        used_G: int32: rows of the group that count, the first ones; the others give 0.
        first_G: int32 first row of the matrix, a multiple of 32; by default 0.
        n: Rows of the matrix that are used; by default all.

    Raises:
        NotImplementedError: The weight is not packed, or its columns are no multiple of 32.
    """
    packed = isinstance(w, QuantizedTensor)
    columns = x_GRK.shape[-1]
    check(
        "linear",
        weight=None
        if packed and w.fmt in _FORMATS
        else "found an expanded weight, expected a packed one (expand='none')",
        columns=None if columns % GROUP == 0 else f"found {columns}, expected a multiple of {GROUP}",
    )
    assert isinstance(w, QuantizedTensor)
    groups, rows, _ = x_GRK.shape
    record = w.record.reshape(-1, w.record.shape[-1])
    first = jnp.zeros(groups, jnp.int32) if first_G is None else first_G
    result = jax.ShapeDtypeStruct((groups, rows, w.shape[0] if n is None else n), jnp.float32)
    (out,) = custom_call(
        "linear",
        backend,
        [result],
        x_GRK.astype(jnp.float32),
        record,
        matrix_G.astype(jnp.int32),
        used_G.astype(jnp.int32),
        first,
        n_of_matrix=w.shape[0],
        format=_FORMATS[w.fmt],
    )
    return out
