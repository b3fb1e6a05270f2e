"""Addresses of the Engram tables: primes, offsets and multipliers, on the host.

An Engram layer looks up one table row per n-gram size and head. The row is a multiply-xor hash of the last n
compressed token ids, modulo a prime that no other column of the model uses, plus the offset of that column.
The rule is `EngramHash` of DeepSeek's `inference/engram.py`. Everything here is exact integer arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEAD = -1
"""Compressed id of a position that takes no part in n-grams, such as a position of an image."""

_LAYER_SEED = 10007


@functools.lru_cache(maxsize=16)
def primes(
    layer_ids: tuple[int, ...], max_ngram_size: int, n_heads: int, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Rows of every column of every Engram table.

    The rule gives each n-gram size of each layer the `n_heads` smallest primes from `vocab_size` on that are not
    in use yet, which is one ascending run of primes over sizes and layers.

    Args:
        layer_ids: The Engram layers, in order.
        max_ngram_size: The longest n-gram. Sizes 2 to `max_ngram_size` are hashed.
        n_heads: Columns per n-gram size.
        vocab_size: `engram_vocab_size`, where the search for primes starts.

    Returns:
        Per layer, `(max_ngram_size - 1) * n_heads` primes: the heads of 2-grams, then those of 3-grams, and so on.
    """
    columns = (max_ngram_size - 1) * n_heads
    run = _primes_from(vocab_size)
    return tuple(tuple(itertools.islice(run, columns)) for _ in layer_ids)


def offsets(primes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """First table row of every column: per layer the running sum of `primes`, starting at 0."""
    return tuple(tuple(itertools.accumulate(row[:-1], initial=0))[: len(row)] for row in primes)


@functools.lru_cache(maxsize=16)
def multipliers(
    layer_ids: tuple[int, ...], max_ngram_size: int, compressed_vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Odd hash multipliers of each Engram layer, one per lookback 0 to `max_ngram_size - 1`.

    They are drawn from numpy's default generator, seeded by the layer number, below the bound that keeps the
    product with a compressed id inside int64.

    Args:
        layer_ids: The Engram layers, in order.
        max_ngram_size: The longest n-gram.
        compressed_vocab_size: Number of compressed token ids.
    """
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab_size // 2)
    return tuple(_draw(layer, max_ngram_size, bound) for layer in layer_ids)


def addresses(
    compressed_ids: ArrayLike,
    primes: tuple[tuple[int, ...], ...],
    multipliers: tuple[tuple[int, ...], ...],
    pad_id: int,
    n_heads: int,
) -> NDArray[np.int64]:
    """Table rows of whole sequences that start at position 0: the plain definition, for tests.

    A lookback that leaves the sequence or meets a dead position reads `pad_id`, and so do all longer ones.

    Args:
        compressed_ids: (..., S) compressed token ids; `DEAD` (-1) marks positions without a token.
        primes: As returned by `primes`.
        multipliers: As returned by `multipliers`.
        pad_id: Compressed id of the padding token.
        n_heads: Columns per n-gram size.

    Returns:
        (..., S, layers, columns) rows of the layer's table. Rows of dead positions are valid rows without meaning.
    """
    ids = np.asarray(compressed_ids, np.int64)
    length = ids.shape[-1]
    sizes, start = np.asarray(primes, np.int64), np.asarray(offsets(primes), np.int64)
    factors = np.asarray(multipliers, np.int64)

    cut = np.zeros(ids.shape, bool)
    mixed = np.zeros((*ids.shape, len(factors)), np.int64)
    columns = []
    for back in range(factors.shape[1]):
        token = np.full(ids.shape, DEAD, np.int64)
        token[..., back:] = ids[..., : max(length - back, 0)]
        cut |= token == DEAD
        mixed ^= np.where(cut, pad_id, token)[..., None] * factors[:, back]
        if back:
            columns.append(mixed[..., None] % sizes[:, (back - 1) * n_heads : back * n_heads])
    return np.concatenate(columns, axis=-1) + start


def _draw(layer: int, count: int, bound: int) -> tuple[int, ...]:
    values = np.random.default_rng(_LAYER_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(value) * 2 + 1 for value in values)


def _primes_from(low: int) -> Iterator[int]:
    """The primes from `low` on, by a sieve over windows wide enough for a few dozen of them."""
    low = max(low, 2)
    while True:
        high = low + 4096
        window = np.ones(high - low, bool)
        for p in _small_primes(math.isqrt(high)):
            # Starting at the square keeps p itself, which matters when the window begins below it.
            first = max(p * p, -(-low // p) * p)
            window[first - low :: p] = False
        yield from (low + int(i) for i in np.flatnonzero(window))
        low = high


@functools.lru_cache(maxsize=4)
def _small_primes(high: int) -> tuple[int, ...]:
    """All primes up to and including `high`."""
    flags = np.ones(high + 1, bool)
    flags[:2] = False
    for p in range(2, math.isqrt(high) + 1):
        if flags[p]:
            flags[p * p :: p] = False
    return tuple(int(p) for p in np.flatnonzero(flags))
