"""The lightning indexer's choice: index logits, candidate pool, top-k."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.ops.invariant import INDEX_TILES, fence, in_row_tiles, sum_few, tile_size
from deepinfer_jax.ops.tiles import map_sequences, map_tiles

QUERY_TILE = 16
ENTRY_TILE = 256
"""Entries that are scored at once where bits must not depend on their number."""

LOGITS_BYTES = 64 << 20
"""Bytes of index logits held at once."""


class Selection(NamedTuple):
    """Entries of a sequence, by entry number.

    Attributes:
        entries: int32[B, S, K] ascending; -1 where fewer are visible.
        blocks: int32[B, S, C] candidate blocks, -1 unused; None where no layer has published a pool.
    """

    entries: jax.Array
    blocks: jax.Array | None


def select_entries(
    q_BSHD: jax.Array,
    keys_BND: jax.Array,
    weights_BSH: jax.Array,
    visible_BS: jax.Array,
    *,
    top_k: int,
    block_size: int,
    publish_blocks: int | None = None,
    limit_blocks: jax.Array | None = None,
    invariant: bool = False,
) -> Selection:
    """Score every entry for every query and keep the best.

    score = sum over heads of weight * relu(q . key), each step rounded to q's dtype, the sum in float32.

    Args:
        q_BSHD: Index queries, rotated and round-tripped.
        keys_BND: Index keys of N entries.
        weights_BSH: Head weights, scaled.
        visible_BS: int32 number of entries that a query may see; the others score -inf.
        top_k: Entries to keep. Ties go to the older entry.
        block_size: Entries per candidate block.
        publish_blocks: Also return the best blocks (by their best entry), this many; the block with the newest
            visible entry is always among them.
        limit_blocks: int32[B, S, C] blocks to choose from; entries outside score -inf.
    """
    query_tile = tile_size(q_BSHD.shape[1], INDEX_TILES) if invariant else QUERY_TILE
    publish = None if publish_blocks is None else min(publish_blocks, -(-keys_BND.shape[1] // block_size))

    def one_sequence(args: tuple) -> tuple:
        q, keys, weights, visible, limit = args

        def tile(args: tuple) -> tuple:
            q, weights, visible, limit = args
            score = _index_logits(q, keys, weights, invariant)
            entry = jnp.arange(keys.shape[0], dtype=jnp.int32)
            score = jnp.where(entry[None, :] < visible[:, None], score, -jnp.inf)
            blocks = None if publish is None else _best_blocks(score, visible, block_size, publish)
            if limit is not None:
                score = jnp.where(_in_blocks(limit, keys.shape[0], block_size), score, -jnp.inf)
            best = _best_entries(score, min(top_k, keys.shape[0]))
            if invariant:
                # A list's length decides the order of attention's sums, so it must not follow the context limit.
                best = jnp.pad(best, [(0, 0), (0, top_k - best.shape[1])], constant_values=-1)
            return best, blocks

        return map_tiles(tile, (q, weights, visible, limit), query_tile, filled=invariant)

    # Index logits are the largest temporary of a step: as many sequences at once as a fixed budget holds.
    length, heads = q_BSHD.shape[1:3]
    one = 4 * min(length, QUERY_TILE) * heads * keys_BND.shape[1]
    args = (q_BSHD, keys_BND, weights_BSH, visible_BS, limit_blocks)
    if invariant:
        at_once = tile_size(q_BSHD.shape[0], INDEX_TILES)
        entries, blocks = map_tiles(jax.vmap(one_sequence), args, at_once, filled=True)
    else:
        entries, blocks = map_sequences(one_sequence, args, max(1, LOGITS_BYTES // one))
    return Selection(entries, limit_blocks if publish is None else blocks)


def _index_logits(q_THD: jax.Array, keys_ND: jax.Array, weights_TH: jax.Array, invariant: bool) -> jax.Array:
    if not invariant:
        weighted = jax.nn.relu(_products(q_THD, keys_ND).astype(q_THD.dtype)) * weights_TH[..., None]
        return jnp.sum(weighted, axis=1, dtype=jnp.float32).astype(q_THD.dtype)
    q_THD = fence(q_THD)
    # Entries in tiles too: how many there are follows the context limit.
    dot_NTH = in_row_tiles(lambda keys: jnp.moveaxis(_products(q_THD, keys), 2, 0), keys_ND, ENTRY_TILE)
    dot = fence(jnp.moveaxis(dot_NTH, 0, 2).astype(q_THD.dtype))
    weighted = fence(jax.nn.relu(dot) * weights_TH[..., None])
    return fence(sum_few(weighted.astype(jnp.float32), 1).astype(q_THD.dtype))


def _products(q_THD: jax.Array, keys_ND: jax.Array) -> jax.Array:
    """float32[T, H, N]."""
    precision = lax.Precision.HIGHEST if q_THD.dtype == jnp.float32 else None
    return jnp.einsum("thd,nd->thn", q_THD, keys_ND, precision=precision, preferred_element_type=jnp.float32)


def _best_blocks(score_TN: jax.Array, visible_T: jax.Array, size: int, count: int) -> jax.Array:
    tokens, n = score_TN.shape
    padded = jnp.pad(score_TN, [(0, 0), (0, -n % size)], constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(tokens, -1, size), axis=-1)
    newest = (visible_T - 1) // size
    best = jnp.where(jnp.arange(best.shape[1])[None, :] == newest[:, None], jnp.inf, best)
    value, block = lax.top_k(best, count)
    return jnp.where(value > -jnp.inf, block, -1).astype(jnp.int32)


def _in_blocks(blocks_TC: jax.Array, n: int, size: int) -> jax.Array:
    tokens = blocks_TC.shape[0]
    count = -(-n // size)
    slot = jnp.where(blocks_TC < 0, count, blocks_TC)
    chosen = jnp.zeros((tokens, count + 1), bool).at[jnp.arange(tokens)[:, None], slot].set(True)
    return jnp.repeat(chosen[:, :count], size, axis=1)[:, :n]


def _best_entries(score_TN: jax.Array, k: int) -> jax.Array:
    value, entry = lax.top_k(score_TN, k)
    past_the_end = score_TN.shape[1]
    entry = jnp.sort(jnp.where(value > -jnp.inf, entry, past_the_end), axis=-1)
    return jnp.where(entry < past_the_end, entry, -1).astype(jnp.int32)
