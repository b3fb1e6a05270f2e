"""The rules of `Numerics.batch_invariant`: what every op does so that a row's bits do not depend on other rows.

XLA compiles another program for every shape, and its choices move last bits. Four things of a program reach a row:

1. **The shape of a product.** Products run over tiles of few fixed numbers of rows (`in_row_tiles`), whatever their
   number is; the last tile is filled with zeros. That the tile sizes give equal bits is a property of the library;
   `tests/ops/test_invariant.py` and `deepinfer-jax verify` check it for every shape of weight.
2. **The order of a sum.** A sum over channels is a product with ones, in the same tiles (`sum_channels`); a sum over a
   handful of elements is written as additions in their order (`sum_few`).
3. **Approximations.** `exp` and its like have other last bits in a vector than alone, and the shape of an array and
   the rest of a kernel decide which form is used. So they get kernels of their own, over whole vectors (`alone`). The
   vector form of `rsqrt` is an approximation that its scalar form is not; `inverse_sqrt` is made of rounded operations.
4. **Fusion.** Where a product feeds a sum inside one kernel, it may or may not be rounded in between; a rounding to
   bfloat16 may be dropped, and a quotient of quotients turned into another one. A barrier (`fence`) parts such pairs,
   and ends every op.

Everything else is comparison, selection, movement, or one correctly rounded operation per element.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

ROW_TILES = (8, 32, 64, 256)
"""Rows of a product at once. Of such sizes that is taken which `tile_size` says."""

QUERY_TILES = (8, 16)
"""Queries that attend at once."""

INDEX_TILES = (1, 8)
"""Queries of a sequence that the indexer scores at once, and sequences at once."""

LANES = 64
"""A multiple of the elements that any CPU's vector loop takes in a turn."""


def fence(x: jax.Array) -> jax.Array:
    """x, rounded and written out before anything uses it."""
    return lax.optimization_barrier(x)


def tile_size(count: int, sizes: tuple[int, ...]) -> int:
    """The largest of the sizes that is not more than `count`, at least the first."""
    return max((size for size in sizes if size <= count), default=sizes[0])


def in_row_tiles(f: Callable[[jax.Array], jax.Array], x: jax.Array, tile: int | None = None) -> jax.Array:
    """f over the leading axis of x, `tile` rows at a time, each tile on its own, the last one filled with zeros.

    Args:
        f: [tile, ...] -> [tile, ...], each row for itself.
        x: [T, ...].
        tile: By default one of ROW_TILES.
    """
    rows = x.shape[0]
    tile = tile_size(rows, ROW_TILES) if tile is None else tile
    count = -(-rows // tile)
    x = fence(x)
    if count * tile != rows:
        x = fence(jnp.pad(x, [(0, count * tile - rows)] + [(0, 0)] * (x.ndim - 1)))
    if count == 1:
        return fence(f(x))[:rows]
    out = lax.map(lambda part: fence(f(fence(part))), x.reshape(count, tile, *x.shape[1:]))
    return fence(out).reshape(count * tile, *out.shape[2:])[:rows]


def sum_channels(x: jax.Array) -> jax.Array:
    """float32[..., K] -> float32[...]: the sum over the last axis, as a product with ones."""
    ones = jnp.ones((8, x.shape[-1]), jnp.float32)

    def product(rows: jax.Array) -> jax.Array:
        return lax.dot_general(rows, ones, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

    return in_row_tiles(product, x.reshape(-1, x.shape[-1]))[:, 0].reshape(x.shape[:-1])


def alone(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """f(x), elementwise, in a kernel that does nothing else, over a list of whole vectors."""
    flat = x.reshape(-1)
    flat = fence(jnp.pad(flat, (0, -flat.shape[0] % LANES)))
    return fence(f(flat))[: x.size].reshape(x.shape)


def inverse_sqrt(x: jax.Array) -> jax.Array:
    """1 / sqrt(x), each rounded once."""
    return 1 / fence(jnp.sqrt(x))


def sum_few(x: jax.Array, axis: int) -> jax.Array:
    """The sum over a short axis, from its first element to its last."""
    parts = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
