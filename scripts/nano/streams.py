"""Batches out of token streams: which source, and where in it, decided by the number of the step alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

BOS = 0

MIXTURE = {
    "bible": 0.08, "austen": 0.09, "devil": 0.01, "jargon": 0.03, "wordnet": 0.22, "python": 0.17, "chat": 0.40,
}  # fmt: skip
"""Share of the sequences of a batch."""

OWN = "own"
"""The source that the layers write for the drafter (`own_text.py`)."""

DRAFT_MIXTURE = {
    "bible": 0.05, "austen": 0.06, "devil": 0.01, "jargon": 0.03, "wordnet": 0.07, "python": 0.06, "chat": 0.12,
    OWN: 0.60,
}  # fmt: skip
"""The same for the drafter: more even, since small sources do no harm where the layers say what is right."""

PROMPT_WEIGHT = 0.1
"""Weight of chat tokens that the model is given rather than asked to write."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """One source: documents one after the other, each between its first and its last special token.

    Attributes:
        tokens: uint16[N].
        weight: float32[N] of each token in the loss.
        starts: Where documents begin.
    """

    tokens: np.ndarray
    weight: np.ndarray
    starts: np.ndarray

    @classmethod
    def read(cls, folder: Path, name: str) -> Stream:
        """Tokens `<name>.npy`, and `<name>_mask.npy` where replies are marked."""
        tokens, mask = np.load(folder / f"{name}.npy"), folder / f"{name}_mask.npy"
        weight = np.ones(tokens.shape, np.float32)
        if mask.is_file():
            weight = np.where(np.load(mask) > 0, np.float32(1), np.float32(PROMPT_WEIGHT))
        return cls(tokens, weight, np.flatnonzero(tokens == BOS))


def read_streams(data: Path, split: str, mixture: Mapping[str, float] = MIXTURE) -> dict[str, Stream]:
    """The streams of `train` or `heldout` by source."""
    return {name: Stream.read(data / split, name) for name in mixture}


def sample(
    streams: dict[str, Stream], seed: int, step: int, batch: int, length: int, mixture: Mapping[str, float] = MIXTURE
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32[batch, length] and their weights float32[batch, length] of one step.

    Half of the sequences begin where a document does, as prompts do; the others anywhere.
    """
    random = np.random.default_rng([seed, step])
    names = random.choice(list(mixture), size=batch, p=np.array(list(mixture.values())) / sum(mixture.values()))
    tokens, weight = np.zeros((batch, length), np.int32), np.zeros((batch, length), np.float32)
    for row, name in enumerate(names):
        stream = streams[name]
        last = len(stream.tokens) - length
        start = int(random.integers(0, last + 1))
        if random.random() < 0.5:
            start = int(stream.starts[np.searchsorted(stream.starts, start, side="right") - 1])
        tokens[row] = stream.tokens[start : start + length]
        weight[row] = stream.weight[start : start + length]
    return tokens, weight


def windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole stream in overlapping windows int32[n, length], and bool[n, length] of the tokens that each scores.

    Every token but the first is scored once, with at least half a window of context where the stream has it.
    """
    half = length // 2
    count = max(1, -(-(len(tokens) - half) // half))
    padded = np.zeros((count + 1) * half, np.int32)
    padded[: len(tokens)] = tokens
    rows = np.stack([padded[i * half : i * half + length] for i in range(count)])
    scored = np.zeros(rows.shape, bool)
    scored[:, half:] = True
    scored[0, 1:] = True
    position = np.arange(count)[:, None] * half + np.arange(length)[None]
    return rows, scored & (position < len(tokens))
