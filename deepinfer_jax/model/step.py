"""Batch: the input of a forward call. Step: what every layer needs to know about its tokens, worked out once."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from deepinfer_jax.cache import ROLLBACK, CacheState, page_tokens, pages_per_slot, window_ring
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.ops.norm_rope import rope_table


@partial(jax.tree_util.register_dataclass, data_fields=["table", "index"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ImageRows:
    """Embeddings that replace those of tokens.

    Attributes:
        table: [M, D] rows: delimiters and features of the images of a batch.
        index: int32[B, S] row of each position; -1 where the token's own embedding stands.
    """

    table: jax.Array
    index: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "positions", "slots", "images"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of one call: decode has S = 1, verification a few, prefill a chunk.

    Attributes:
        tokens: int32[B, S].
        positions: int32[B, S]. In each row consecutive, from the slot's length on, then -1 for padding.
        slots: int32[B], distinct. A row of padding alone may name any slot.
        images: Embeddings of image spans, or None.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    images: ImageRows | None = None


class Step:
    """Positions, index lists and tables shared by all layers of one call. Exists at trace time only.

    Args:
        context: Most tokens that a sequence of the batch has after the call; the pages beyond are not looked at.

    Attributes:
        positions: int32[B, S]; valid: bool[B, S]; slots: int32[B].
        start: int32[B] first position; end: int32[B] length after the call.
        in_place: Whether new window rows are written before they are read. The ring has room for that up to
            ROLLBACK + 1 tokens; longer chunks attend to the old ring and the chunk side by side.
        window_index: int32[B * S, W] rows of each query's window, oldest first, -1 masked.
        image_mask: bool[B, S].
    """

    def __init__(self, config: ModelConfig, batch: Batch, cache: CacheState, context: int | None = None):
        self.config = config
        self.positions, self.slots = batch.positions, batch.slots
        self.valid = batch.positions >= 0
        self.count = jnp.sum(self.valid, axis=1, dtype=jnp.int32)
        self.start = jnp.maximum(batch.positions[:, 0], 0)
        self.end = self.start + self.count
        self.num_slots = cache.num_slots
        blocks = cache.block_table.shape[1] if context is None else pages_per_slot(config, context)
        self.block_table = cache.block_table[self.slots, :blocks]
        self.image_mask = jnp.zeros_like(self.valid) if batch.images is None else batch.images.index >= 0
        self.in_place = batch.tokens.shape[1] <= ROLLBACK + 1
        self.window_index = self._window_index()
        self._rope: dict = {}

    @property
    def written_slots(self) -> jax.Array:
        """int32[B] slots to update; one past the last (dropped by scatters) for rows of padding."""
        return jnp.where(self.count > 0, self.slots, self.num_slots)

    def rope(self, kind: Literal["plain", "yarn"], back: int = 0) -> tuple[jax.Array, jax.Array]:
        """(cos, sin) of the positions, or of those `back` earlier."""
        if (kind, back) not in self._rope:
            self._rope[kind, back] = rope_table(self.positions - back, self.config.text_config, kind)
        return self._rope[kind, back]

    def ring_index(self, ring: int) -> jax.Array:
        """int32[B, S] flat row in [slots, ring] where each token goes; -1 for padding and for tokens that a
        later one of the same chunk overwrites (a scatter has no order)."""
        keep = self.valid & (self.positions >= (self.end - ring)[:, None])
        return jnp.where(keep, self.slots[:, None] * ring + self.positions % ring, -1)

    def before(self, ring: jax.Array, count: int) -> jax.Array:
        """[B, count, ...]: the ring's rows of the `count` positions before the first token (any, if none)."""
        position = self.start[:, None] - count + jnp.arange(count)[None, :]
        return ring[self.slots[:, None], position % ring.shape[1]]

    def visible(self, ratio: int) -> jax.Array:
        """int32[B, S] compressed entries that each query may see."""
        return jnp.where(self.valid, (self.positions + 1) // ratio, 0)

    def pool_index(self, entries: jax.Array, ratio: int) -> jax.Array:
        """Flat pool rows of the entries int32[B, ...] of each sequence; -1 stays, unreserved pages give -1."""
        per_page = page_tokens(self.config) // ratio
        entry = jnp.maximum(entries, 0).reshape(entries.shape[0], -1)
        blocks = self.block_table.shape[1]
        page = jnp.take_along_axis(self.block_table, jnp.minimum(entry // per_page, blocks - 1), axis=1)
        row = jnp.where(page < 0, -1, page * per_page + entry % per_page).reshape(entries.shape)
        return jnp.where(entries < 0, -1, row)

    def gather_pool(self, pool: jax.Array) -> jax.Array:
        """[B, N, stored]: a pool's rows in the order of each sequence's entries."""
        rows = pool[jnp.maximum(self.block_table, 0)]
        return rows.reshape(rows.shape[0], -1, rows.shape[-1])

    def _window_index(self) -> jax.Array:
        window, ring = self.config.text_config.sliding_window, window_ring(self.config)
        length = self.positions.shape[1]
        back = jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
        position = self.positions[..., None] - back[None, None, :]
        if self.in_place:
            index = self.slots[:, None, None] * ring + position % ring
        else:
            # Each sequence has its old ring and then the chunk.
            row = jnp.where(
                position >= self.start[:, None, None], ring + position - self.start[:, None, None], position % ring
            )
            index = jnp.arange(self.slots.shape[0])[:, None, None] * (ring + length) + row
        seen = self.valid[..., None] & (position >= 0)
        return jnp.where(seen, index, -1).reshape(-1, window)
