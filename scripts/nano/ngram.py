"""A byte model to compare with: 5-grams with interpolated Kneser-Ney smoothing (Chen and Goodman 1999, section 3).

`python -m scripts.nano.ngram [--data build/nano]` prints the bits per byte of the held-out texts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ORDER = 5
# Stands between documents and before the first one; the place of the model's end-of-text token.
SEPARATOR = b"\f"

Keys = NDArray[np.uint64]
_BYTE = np.uint64(8)


@dataclass(frozen=True)
class _Level:
    """The n-grams of one length, and their contexts.

    Attributes:
        keys: (n,) sorted n-grams; the last byte is the lowest.
        counts: (n,) how often each was seen; below the longest length, after how many different bytes.
        contexts: (m,) sorted n-grams without their last byte.
        totals: (m,) sum of the counts that follow a context.
        kinds: (m,) number of different bytes that follow a context.
        discount: What is taken from each count for the shorter context.
    """

    keys: Keys
    counts: NDArray[np.int64]
    contexts: Keys
    totals: NDArray[np.int64]
    kinds: NDArray[np.int64]
    discount: float


class NGram:
    """Probabilities of the next byte after the four bytes before it.

    Args:
        train: Bytes to count.
        order: Bytes of an n-gram, 1 to 8.
    """

    def __init__(self, train: bytes, order: int = ORDER):
        self._order = order
        keys, counts = _unique(grams(train, order))
        levels = [_level(keys, counts)]
        for length in range(order - 1, 0, -1):
            mask = np.uint64((1 << 8 * length) - 1)
            keys, counts = _unique(keys & mask)
            levels.append(_level(keys, counts))
        self._levels = levels[::-1]

    def probability(self, wanted: Keys) -> NDArray[np.float64]:
        """Of each n-gram of the full order, the probability of its last byte after the others.

        Args:
            wanted: (n,) as of `grams`.
        """
        result = np.full(wanted.shape, 1 / 256)
        for length, level in enumerate(self._levels, 1):
            key = wanted & np.uint64((1 << 8 * length) - 1)
            counts = _look_up(level.keys, level.counts, key)
            totals = _look_up(level.contexts, level.totals, key >> _BYTE)
            kinds = _look_up(level.contexts, level.kinds, key >> _BYTE)
            seen = totals > 0
            own = np.maximum(counts - level.discount, 0)
            rest = level.discount * kinds
            # A context that was never seen says nothing: the shorter one decides.
            result = np.where(seen, (own + rest * result) / np.maximum(totals, 1), result)
        return result

    def bits_per_byte(self, test: bytes) -> float:
        """Mean of -log2 of the probabilities of all bytes of a text."""
        return float(-np.log2(self.probability(grams(test, self._order))).mean())


def bits_per_byte(train: bytes, test: bytes) -> float:
    """Bits per byte of `test` under the 5-grams of `train`."""
    return NGram(train).bits_per_byte(test)


def grams(text: bytes, order: int) -> Keys:
    """The n-gram that ends at each byte, as one number; separators stand before the text."""
    values = np.frombuffer(SEPARATOR * (order - 1) + text, np.uint8)
    keys = np.zeros(len(text), np.uint64)
    for at in range(order):
        keys = (keys << _BYTE) | values[at : at + len(text)].astype(np.uint64)
    return keys


def _level(keys: Keys, counts: NDArray[np.int64]) -> _Level:
    contexts = keys >> _BYTE
    starts = np.flatnonzero(np.concatenate([[True], contexts[1:] != contexts[:-1]]))
    kinds = np.diff(np.append(starts, len(keys)))
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = once / (once + 2 * twice) if once else 0.5
    return _Level(keys, counts, contexts[starts], np.add.reduceat(counts, starts), kinds, discount)


def _unique(keys: Keys) -> tuple[Keys, NDArray[np.int64]]:
    found, counts = np.unique(keys, return_counts=True)
    return found, counts


def _look_up(keys: Keys, values: NDArray[np.int64], wanted: Keys) -> NDArray[np.int64]:
    """Values by key; 0 for keys that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def main() -> None:
    """Train on all prose and print each source's held-out bits per byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/nano"), help="folder that prepare.py wrote")
    data = parser.parse_args().data
    names = [file.stem for file in sorted((data / "heldout").glob("*.txt"))]
    print("training ...", flush=True)
    model = NGram(SEPARATOR.join((data / "train" / f"{name}.txt").read_bytes() for name in names))
    print("source     bytes  bits per byte")
    for name in names:
        text = (data / "heldout" / f"{name}.txt").read_bytes()
        print(f"{name:8} {len(text):7}  {model.bits_per_byte(text):.4f}", flush=True)


if __name__ == "__main__":
    main()
