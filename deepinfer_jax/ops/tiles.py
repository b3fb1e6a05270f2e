"""Running a function over fixed tiles of a leading axis, so that its memory does not grow with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map_tiles(f: Callable[[Any], Any], xs: Any, tile: int, filled: bool = False) -> Any:
    """f over the leading axis of the tree xs, `tile` elements at a time; the last tile is padded with zeros.

    f maps a tree of [tile, ...] arrays to a tree of [tile, ...] arrays (any size up to `tile` when the axis is
    shorter than one tile), each element on its own. `filled` makes every tile whole, also a single one.
    """
    n = jax.tree.leaves(xs)[0].shape[0]
    if n == tile or (n < tile and not filled):
        return f(xs)
    count = -(-n // tile)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, count * tile - n)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(count, tile, *x.shape[1:])

    if count == 1:
        return jax.tree.map(lambda y: y[:n], f(jax.tree.map(lambda x: split(x)[0], xs)))
    out = lax.map(f, jax.tree.map(split, xs))
    return jax.tree.map(lambda y: y.reshape(count * tile, *y.shape[2:])[:n], out)


def map_sequences(f: Callable[[Any], Any], xs: Any, at_once: int) -> Any:
    """f over the leading axis of the tree xs, vectorised over at most `at_once` elements."""
    if jax.tree.leaves(xs)[0].shape[0] <= at_once:
        return jax.vmap(f)(xs)
    return lax.map(f, xs, batch_size=at_once)
