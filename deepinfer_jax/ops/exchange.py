"""The exchange between the devices of a mesh: the one place where rows leave their device.

Rows (tokens) are split over some mesh axes, experts and Engram tables over others. Every row goes to every device
of its axes, each device adds what its own experts or table rows give and zeros elsewhere, and the sum comes back to
the row's device. Of the summands of an element only one is not zero, so the sum is exact, and no result depends on
the number of devices or on the order of arrival.

This is the reference backend: gather, work locally, reduce. Others replace `Exchange` and nothing else.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which mesh axes split what. Static; only meaningful inside a `shard_map` over a mesh with these axes.

    Attributes:
        rows: Axes that split the rows of a batch; along the other axes rows are repeated.
        experts: Axes that split the leading axis of expert weights and Engram tables.
    """

    rows: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def gather(self, x: jax.Array) -> jax.Array:
        """[T, ...] rows of this device -> [T * devices, ...] the rows of all."""
        return lax.all_gather(x, self.rows, axis=0, tiled=True) if self.rows else x

    def reduce(self, x: jax.Array) -> jax.Array:
        """[T * devices, ...] contributions to the rows of all devices -> [T, ...] the sums of this device's rows."""
        repeated = tuple(axis for axis in self.experts if axis not in self.rows)
        if repeated:
            x = lax.psum(x, repeated)
        return lax.psum_scatter(x, self.rows, scatter_dimension=0, tiled=True) if self.rows else x

    def first(self, count: int, total: int) -> jax.Array | int:
        """Number of the first of the `count` experts (or table rows) out of `total` that this device holds."""
        return lax.axis_index(self.experts) * count if self.is_split(count, total) else 0

    def is_split(self, count: int, total: int) -> bool:
        """Whether a device that holds `count` of `total` has to exchange rows."""
        return bool(self.experts) and count != total

    def lookup(self, table: jax.Array, index: jax.Array, total: int) -> jax.Array:
        """Rows of a table whose leading axis may be split.

        Args:
            table: [N, W], this device's part of [total, W].
            index: int32[T, K] rows of the whole table.

        Returns:
            [T, K, W].
        """
        count = table.shape[0]
        if not self.is_split(count, total):
            return table[index]
        local = self.gather(index) - self.first(count, total)
        ours = (local >= 0) & (local < count)
        picked = table[jnp.where(ours, local, 0)]
        return self.reduce(jnp.where(ours[..., None], picked, jnp.zeros_like(picked)))


LOCAL = Exchange()
"""One device: nothing is exchanged."""
