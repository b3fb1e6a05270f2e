"""Rows of a cache: a pool of vectors, packed or plain, read and written by flat index."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.formats import RowFormat, decode_rows, encode_rows, fp4_round_trip, fp8_round_trip, row_bytes


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How one vector of `width` channels is kept: rounded to `fmt` (None: not at all), as packed bytes or as the
    `dtype` values that they stand for."""

    width: int
    fmt: RowFormat | None
    dtype: Any
    packed: bool = True

    @property
    def stored(self) -> tuple[int, Any]:
        """(elements, dtype) of one stored row."""
        if self.fmt is None or not self.packed:
            return self.width, self.dtype
        return row_bytes(self.fmt, self.width), jnp.uint8

    def encode(self, x: jax.Array) -> jax.Array:
        """[..., width] values -> stored rows."""
        if self.fmt is None or not self.packed:
            return self.round_trip(x).astype(self.dtype)
        return encode_rows(x, self.fmt)

    def decode(self, rows: jax.Array) -> jax.Array:
        """Stored rows -> [..., width] values in `dtype`."""
        if self.fmt is None or not self.packed:
            return rows
        return decode_rows(rows, self.fmt, self.width, self.dtype)

    def round_trip(self, x: jax.Array) -> jax.Array:
        """What x becomes by being stored and read."""
        if self.fmt is None:
            return x
        return fp8_round_trip(x) if self.fmt == "fp8" else fp4_round_trip(x, self.fmt.removeprefix("fp4_"))  # type: ignore[arg-type]


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """A pool of stored rows: data[N, ...] with its layout."""

    data: jax.Array
    layout: RowLayout

    @classmethod
    def flat(cls, pool: jax.Array, layout: RowLayout) -> Rows:
        """View [..., stored] as [N, stored]."""
        return cls(pool.reshape(-1, pool.shape[-1]), layout)

    def take(self, index: jax.Array) -> jax.Array:
        """Values [..., width] of the rows at `index`; -1 reads row 0, for the caller to mask."""
        return self.layout.decode(self.data[jnp.maximum(index, 0)])


def write_rows(pool: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """Scatter stored rows into pool[..., stored] at flat row indices; -1 writes nothing.

    Args:
        pool: [..., stored].
        index: int32[...]; distinct where not negative.
        rows: [..., stored], leading axes of `index`.
    """
    flat = pool.reshape(-1, pool.shape[-1])
    if not flat.shape[0]:
        return pool
    index = jnp.where(index < 0, flat.shape[0], index).reshape(-1)
    rows = rows.reshape(-1, pool.shape[-1])
    if index.shape[0] == 1:
        # XLA turns a scatter of one row into a read and an update of the pool, and copies the whole pool for it.
        index = jnp.concatenate([index, jnp.full_like(index, flat.shape[0])])
        rows = jnp.concatenate([rows, rows])
    return flat.at[index].set(rows, mode="drop").reshape(pool.shape)
