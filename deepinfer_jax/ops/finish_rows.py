"""Finishing rows for a cache: RMSNorm, rotation, quantisation, and the write into a ring or a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels import Backend
from deepinfer_jax.ops.custom_call import check, custom_call, like
from deepinfer_jax.ops.norm_rope import rms_norm, rope
from deepinfer_jax.ops.rows import RowLayout, write_rows

_FORMATS = {"fp8": 0, "fp4_e4m3": 1, "fp4_e8m0": 2}
_WIDTHS = (32, 64, 128, 512)


def finish_rows(
    x: jax.Array,
    weight: jax.Array,
    table: tuple[jax.Array, jax.Array],
    layout: RowLayout,
    eps: float,
    index: jax.Array,
    pool: jax.Array,
    *,
    invariant: bool = False,
    backend: Backend = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Rows as a cache stores them, and the pool with them written.

    Values are rounded to x's dtype after the norm and after the rotation, as in the release.

    Args:
        x: [..., width].
        weight: float32[width] of the norm.
        table: (cos, sin) float32[..., r / 2]; the last r channels are rotated.
        layout: How the pool stores a row.
        index: int32[...] flat row of the pool, -1 for none; distinct otherwise.
        pool: [..., stored].
        backend: Custom calls keep packed rows only. They sum the norm in another order than the reference, so a row may
            differ where a rounding stood on the edge: in less than one code of a thousand, and by one step.

    Returns:
        Rows [..., stored] and the new pool.
    """
    if backend == "reference":
        rows = layout.encode(rope(rms_norm(x, weight, eps, invariant), table))
        return rows, write_rows(pool, index, rows)
    width = x.shape[-1]
    check(
        "finish_rows",
        layout=None if layout.fmt is not None and layout.packed else "rows are not packed; use the reference",
        width=None if width in _WIDTHS else f"found {width}, expected one of {_WIDTHS}",
        dtype=None if x.dtype in (jnp.float32, jnp.bfloat16) else f"found {x.dtype}, expected float32 or bfloat16",
    )
    assert layout.fmt is not None
    flat, into, stored = x.reshape(-1, width), pool.reshape(-1, layout.stored[0]), layout.stored[0]
    rows, written = custom_call(
        "finish_rows",
        backend,
        [jax.ShapeDtypeStruct((flat.shape[0], stored), jnp.uint8), *like(into)],
        flat,
        weight,
        *(t.reshape(flat.shape[0], -1) for t in table),
        index.reshape(-1),
        into,
        aliases={5: 1},
        eps=float(eps),
        format=_FORMATS[layout.fmt],
    )
    return rows.reshape(*x.shape[:-1], stored), written.reshape(pool.shape)
