"""Attention of one query over two lists of rows: its window and its selected compressed entries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.ops.invariant import QUERY_TILES, alone, fence, tile_size
from deepinfer_jax.ops.rows import Rows
from deepinfer_jax.ops.tiles import map_tiles

QUERY_TILE = 16
"""Queries whose rows are gathered at once: bounds the gathered copy to 16 x (W + K) vectors."""


def sparse_attention(
    q_THD: jax.Array,
    window: Rows,
    window_index_TW: jax.Array,
    compressed: Rows | None,
    compressed_index_TK: jax.Array | None,
    sink_H: jax.Array,
    invariant: bool = False,
) -> jax.Array:
    """One softmax over both lists plus a sink; key and value are the same vector for all heads.

    Args:
        q_THD: Queries, rotated. Scores are scaled by D^-0.5.
        window: Window KV rows; window_index_TW chooses among them, -1 is masked.
        compressed: Compressed KV rows with their index_TK, or None.
        sink_H: float32 logit per head that only adds to the denominator.

    Returns:
        [T, H, D] in q's dtype; 0 for a query without any valid row. Scores, softmax and sums are float32;
        probabilities are rounded to q's dtype before they multiply the values.
    """

    def tile(args: tuple[jax.Array, ...]) -> jax.Array:
        q, window_index, *rest = args
        rows, index = window.take(window_index), window_index
        if compressed is not None:
            rows = jnp.concatenate([rows, compressed.take(rest[0])], axis=1)
            index = jnp.concatenate([index, rest[0]], axis=1)
        return _attend(q, rows, index >= 0, sink_H, invariant)

    lists = (q_THD, window_index_TW) if compressed is None else (q_THD, window_index_TW, compressed_index_TK)
    size = tile_size(q_THD.shape[0], QUERY_TILES) if invariant else QUERY_TILE
    return map_tiles(tile, lists, size, filled=invariant)


def dense_attention(
    q_BTHD: jax.Array, kv_BND: jax.Array, valid_BTN: jax.Array, sink_H: jax.Array, invariant: bool = False
) -> jax.Array:
    """The same with one list of N rows for all T queries of a sequence: what a DSpark block attends to."""

    def sequence(args: tuple[jax.Array, ...]) -> jax.Array:
        q, kv, valid = args
        return _attend(q, jnp.broadcast_to(kv, (q.shape[0], *kv.shape)), valid, sink_H, invariant)

    args = (q_BTHD, kv_BND, valid_BTN)
    if invariant:
        # One by one: the blocks of several sequences in one product would make its shape depend on their number.
        return lax.map(sequence, args)
    return jax.vmap(sequence)(args)


def _attend(
    q_THD: jax.Array, rows_TND: jax.Array, valid_TN: jax.Array, sink_H: jax.Array, invariant: bool
) -> jax.Array:
    keep = fence if invariant else lambda x: x
    q_THD, rows_TND = keep(q_THD), keep(rows_TND)
    precision = lax.Precision.HIGHEST if q_THD.dtype == jnp.float32 else None
    scale = np.float32(q_THD.shape[-1] ** -0.5)
    score = jnp.einsum("thd,tnd->thn", q_THD, rows_TND, precision=precision, preferred_element_type=jnp.float32)
    score = jnp.where(valid_TN[:, None, :], keep(keep(score) * scale), -jnp.inf)
    # -1e30 rather than -inf: a query without valid rows must give 0, not NaN.
    # It cancels out, so it needs no gradient.
    top = lax.stop_gradient(jnp.maximum(jnp.max(score, axis=-1, keepdims=True), -1e30))
    exp = functools.partial(alone, jnp.exp) if invariant else jnp.exp
    p = exp(score - top)
    denominator = keep(jnp.sum(p, axis=-1)) + exp(sink_H[None, :] - top[..., 0])
    out = jnp.einsum(
        "thn,tnd->thd", p.astype(q_THD.dtype), rows_TND, precision=precision, preferred_element_type=jnp.float32
    )
    return keep((keep(out) / denominator[..., None]).astype(q_THD.dtype))
