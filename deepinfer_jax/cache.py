"""CacheState: everything a sequence has left behind, and its pure transitions.

A slot holds one sequence. Window KV, compressor rows and Engram history are rings per slot, with slack so that
the last `ROLLBACK` tokens can be given up by changing a length. Compressed KV and index keys are paged: a page
covers `page_tokens` tokens of every KV source, so one block table serves all of them.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CacheError
from deepinfer_jax.formats import RowFormat
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.rows import RowLayout

ROLLBACK = 8
"""Tokens that a slot can give up."""

_PAGE_TOKENS = 64


@partial(
    jax.tree_util.register_dataclass, data_fields=["window", "compressed", "index_keys", "pending"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer owns.

    Attributes:
        window: [slots, ring, stored row]: window KV of position p at p mod ring.
        compressed: [pages, page_tokens / ratio, stored row] or None.
        index_keys: [pages, page_tokens / ratio, stored row] or None.
        pending: float32[slots, ring, 2, head_dim]: compressor values and gates of the latest tokens, which
            the next group may need; None for ratio 1 and for layers without compressor.
    """

    window: jax.Array
    compressed: jax.Array | None = None
    index_keys: jax.Array | None = None
    pending: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths", "written", "block_table", "page_refs", "layers", "draft", "engram"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class CacheState:
    """A value: transitions return a new one.

    Attributes:
        lengths: int32[slots] tokens held.
        written: int32[slots] highest length since the slot was emptied; bounds a rollback.
        block_table: int32[slots, blocks]: page of each `page_tokens` tokens, -1 none.
        page_refs: int32[pages]: slots that hold a page; 0 is free.
        layers: One LayerCache per main layer.
        draft: Window ring of each DSpark stage.
        engram: int32[slots, ring] compressed ids of the latest tokens, -1 for image positions; or None.
    """

    lengths: jax.Array
    written: jax.Array
    block_table: jax.Array
    page_refs: jax.Array
    layers: tuple[LayerCache, ...]
    draft: tuple[jax.Array, ...]
    engram: jax.Array | None

    @property
    def num_slots(self) -> int:
        """Sequences that fit."""
        return self.lengths.shape[0]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """How the three kinds of rows are stored under given numerics."""

    window: RowLayout
    compressed: RowLayout
    index_key: RowLayout

    @classmethod
    def of(cls, config: ModelConfig, numerics: Numerics) -> Layouts:
        """Rounded as released when KV goes through its round trip, and packed if `packed_cache`; else plain values."""
        t, rounded = config.text_config, numerics.kv_round_trip

        def layout(width: int, fmt: RowFormat) -> RowLayout:
            return RowLayout(width, fmt if rounded else None, numerics.dtype, numerics.packed_cache)

        return cls(layout(t.head_dim, "fp8"), layout(t.head_dim, "fp4_e4m3"), layout(t.index_head_dim, "fp4_e8m0"))


def page_tokens(config: ModelConfig) -> int:
    """Tokens of a page: 64, or the next multiple that every compression ratio divides."""
    ratios = math.lcm(*(p.ratio for p in config.kv_sources)) if config.kv_sources else 1
    return -(-_PAGE_TOKENS // ratios) * ratios


def window_ring(config: ModelConfig) -> int:
    """Rows of a window ring: the window and the tokens that may be given up."""
    return config.text_config.sliding_window + ROLLBACK


def pages_per_slot(config: ModelConfig, max_length: int) -> int:
    """Pages that a sequence of `max_length` tokens needs."""
    return max(1, -(-max_length // page_tokens(config)))


def abstract_cache(
    config: ModelConfig, numerics: Numerics, num_slots: int, max_length: int, num_pages: int | None = None
) -> CacheState:
    """Shapes and dtypes of a cache, as `jax.ShapeDtypeStruct`s. Arguments as for `init_cache`."""
    if num_slots < 1 or not 1 <= max_length <= config.text_config.max_position_embeddings:
        raise CacheError(
            f"cache of {num_slots} slots of {max_length} tokens: expected at least 1 slot and 1 to "
            f"{config.text_config.max_position_embeddings} tokens (max_position_embeddings)"
        )
    layouts, page = Layouts.of(config, numerics), page_tokens(config)
    blocks = pages_per_slot(config, max_length)
    pages = num_slots * blocks if num_pages is None else num_pages
    # Described leaves stand where arrays will: Any, as for every abstract tree of JAX.
    struct: Any = jax.ShapeDtypeStruct

    def ring(rows: int) -> Any:
        stored, dtype = layouts.window.stored
        return struct((num_slots, rows, stored), dtype)

    def pool(layout: RowLayout, ratio: int) -> Any:
        stored, dtype = layout.stored
        return struct((pages, page // ratio, stored), dtype)

    layers = []
    for plan in config.layers:
        window = ring(window_ring(config))
        if plan.owns_kv:
            pending = (num_slots, plan.ratio - 1 + ROLLBACK, 2, config.text_config.head_dim)
            layers.append(
                LayerCache(
                    window,
                    pool(layouts.compressed, plan.ratio),
                    pool(layouts.index_key, plan.ratio),
                    struct(pending, jnp.float32) if plan.ratio > 1 else None,
                )
            )
        else:
            layers.append(LayerCache(window))
    history = config.text_config.engram_max_ngram_size - 1 + ROLLBACK
    return CacheState(
        lengths=struct((num_slots,), jnp.int32),
        written=struct((num_slots,), jnp.int32),
        block_table=struct((num_slots, blocks), jnp.int32),
        page_refs=struct((pages,), jnp.int32),
        layers=tuple(layers),
        draft=tuple(ring(window_ring(config)) for _ in config.draft_stages),
        engram=struct((num_slots, history), jnp.int32) if config.token_map_size else None,
    )


def init_cache(
    config: ModelConfig, numerics: Numerics, num_slots: int, max_length: int, num_pages: int | None = None
) -> CacheState:
    """An empty cache.

    Args:
        num_slots: Sequences held at once.
        max_length: Most tokens of one sequence.
        num_pages: Size of the page pool. By default every slot gets the pages for `max_length` at once;
            with a number, pages are taken by `reserve`.

    Raises:
        CacheError: Sizes that make no sense.
    """
    abstract = abstract_cache(config, numerics, num_slots, max_length, num_pages)
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)
    cache = dataclasses.replace(cache, block_table=jnp.full_like(cache.block_table, -1))
    if num_pages is None:
        return reserve(cache, config, jnp.full(num_slots, max_length, jnp.int32))[0]
    return cache


def reserve(cache: CacheState, config: ModelConfig, lengths: jax.Array) -> tuple[CacheState, jax.Array]:
    """Give every slot the pages for its length in `lengths` (int32[slots]; it keeps what it has beyond).

    Returns:
        The new cache and a bool scalar: False when the pool has too few free pages or a length exceeds the
        block table. The cache is unchanged then.
    """
    blocks = cache.block_table.shape[1]
    needed = -(-lengths // page_tokens(config))
    want = (jnp.arange(blocks)[None, :] < needed[:, None]) & (cache.block_table < 0)
    free_first = jnp.argsort(cache.page_refs > 0, stable=True).astype(jnp.int32)
    rank = jnp.cumsum(want.reshape(-1)).reshape(want.shape) - 1
    fits = (jnp.sum(want) <= jnp.sum(cache.page_refs == 0)) & jnp.all(needed <= blocks)
    take = want & fits
    page = free_first[jnp.minimum(rank, free_first.shape[0] - 1)]
    refs = cache.page_refs.at[jnp.where(take, page, cache.page_refs.shape[0])].add(1, mode="drop")
    table = jnp.where(take, page, cache.block_table)
    return dataclasses.replace(cache, block_table=table, page_refs=refs), fits


def release(cache: CacheState, slots: jax.Array, *, keep_pages: bool = False) -> CacheState:
    """Empty the slots (int32[n], distinct; `num_slots` names none). With `keep_pages` their own pages stay reserved."""
    lengths = cache.lengths.at[slots].set(0, mode="drop")
    written = cache.written.at[slots].set(0, mode="drop")
    cache = dataclasses.replace(cache, lengths=lengths, written=written)
    if keep_pages:
        return cache
    held = cache.block_table.at[slots].get(mode="fill", fill_value=-1)
    refs = cache.page_refs.at[jnp.where(held < 0, cache.page_refs.shape[0], held)].add(-1, mode="drop")
    table = cache.block_table.at[slots].set(-1, mode="drop")
    return dataclasses.replace(cache, block_table=table, page_refs=refs)


def rollback(cache: CacheState, drop: jax.Array) -> CacheState:
    """Give up the last `drop` tokens of every slot (int32[slots]): only lengths change.

    Raises:
        CacheError: Outside `jit`, when a slot would give up more than it holds, or return to more than
            `ROLLBACK` tokens below the longest it has been. Inside `jit` that is the caller's duty.
    """
    lengths = cache.lengths - drop
    if not isinstance(lengths, Tracer) and not isinstance(cache.written, Tracer):
        bad = np.flatnonzero((np.asarray(drop) < 0) | (lengths < 0) | (lengths < cache.written - ROLLBACK))
        if bad.size:
            raise CacheError(
                "rollback is not possible",
                [
                    f"slot {s}: holds {cache.lengths[s]} tokens (longest was {cache.written[s]}), asked to give up "
                    f"{drop[s]}, at most {max(0, int(cache.lengths[s] - jnp.maximum(0, cache.written[s] - ROLLBACK)))}"
                    for s in bad
                ],
            )
    return dataclasses.replace(cache, lengths=lengths)


def fork(cache: CacheState, config: ModelConfig, source: jax.Array, target: jax.Array) -> tuple[CacheState, jax.Array]:
    """Make slot `target` continue the sequence of slot `source` (int32 scalars; target `num_slots` names none).

    Full pages are shared; a page that the source may still write is copied into a fresh one. The target's own
    pages go back to the pool first.

    Returns:
        The new cache and a bool scalar: False when no page was free. The cache is unchanged then.
    """
    page = page_tokens(config)
    exists = target < cache.num_slots
    held = cache.block_table.at[target].get(mode="fill", fill_value=-1)
    freed = release(cache, target[None])
    # Rolling back may reopen a page that is full now, so only pages below every possible length are shared.
    shared = jnp.maximum(0, cache.written[source] - ROLLBACK) // page
    blocks = jnp.arange(cache.block_table.shape[1])
    row = jnp.where((blocks < shared) & exists, cache.block_table[source], -1)
    refs = freed.page_refs.at[jnp.where(row < 0, freed.page_refs.shape[0], row)].add(1, mode="drop")
    forked = dataclasses.replace(
        freed,
        lengths=freed.lengths.at[target].set(cache.lengths[source], mode="drop"),
        written=freed.written.at[target].set(cache.written[source], mode="drop"),
        block_table=freed.block_table.at[target].set(row, mode="drop"),
        page_refs=refs,
    )
    # The target keeps as much room as it had reserved, so that it can go on like before.
    room = jnp.maximum(cache.written[source], jnp.sum(held >= 0) * page)
    forked, fits = reserve(forked, config, jnp.where(jnp.arange(cache.num_slots) == target, room, 0))
    # Small arrays are chosen whole; pools and rings are written in place, or not at all.
    forked = dataclasses.replace(
        forked,
        lengths=jnp.where(fits, forked.lengths, cache.lengths),
        written=jnp.where(fits, forked.written, cache.written),
        block_table=jnp.where(fits, forked.block_table, cache.block_table),
        page_refs=jnp.where(fits, forked.page_refs, cache.page_refs),
    )
    new = forked.block_table.at[target].get(mode="fill", fill_value=-1)
    copied = jnp.where(fits & (blocks >= shared) & (new >= 0), new, cache.page_refs.shape[0])
    slot = jnp.where(fits, target, cache.num_slots)

    def copy_pages(pool: jax.Array | None) -> jax.Array | None:
        if pool is None:
            return None
        return pool.at[copied].set(pool[jnp.maximum(cache.block_table[source], 0)], mode="drop")

    def copy_slot(ring: jax.Array | None) -> jax.Array | None:
        return None if ring is None else ring.at[slot].set(ring[source], mode="drop")

    layers = tuple(
        LayerCache(copy_slot(c.window), copy_pages(c.compressed), copy_pages(c.index_keys), copy_slot(c.pending))  # type: ignore[arg-type]
        for c in cache.layers
    )
    draft = tuple(copy_slot(ring) for ring in cache.draft)
    return dataclasses.replace(forked, layers=layers, draft=draft, engram=copy_slot(cache.engram)), fits  # type: ignore[arg-type]
