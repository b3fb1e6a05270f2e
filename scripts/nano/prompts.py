"""Held-out prompts, to measure drafts with and to calibrate on.

python -m scripts.nano.prompts tests/data/nano_heldout.jsonl --data build/nano
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from scripts.nano.streams import BOS, MIXTURE

LENGTH = 48
"""Tokens of a prompt that is a piece of text."""


def prompts_of(folder: Path, name: str, count: int) -> list[list[int]]:
    """Token ids of evenly spaced prompts of a source: beginnings of documents, for chat up to the first reply."""
    tokens = np.load(folder / f"{name}.npy")
    mask = folder / f"{name}_mask.npy"
    learned = np.load(mask) if mask.is_file() else None
    starts = np.flatnonzero(tokens == BOS)
    if learned is None and len(starts) < count:
        # Few and long documents: pieces from anywhere in them.
        starts = np.linspace(0, len(tokens) - LENGTH, count, endpoint=False).astype(int)
    starts = starts[np.linspace(0, len(starts), count, endpoint=False).astype(int)]
    if learned is None:
        return [_piece(tokens[s : s + LENGTH]) for s in starts]
    return [tokens[s : s + int(np.argmax(learned[s:] > 0))].tolist() for s in starts]


def _piece(tokens: np.ndarray) -> list[int]:
    """The token that begins a text, then tokens of one document."""
    body = tokens[int(tokens[0] == BOS) :]
    ends = np.flatnonzero(body == BOS)
    return [BOS, *body[: ends[0] if len(ends) else None].tolist()]


def main(
    path: Annotated[Path, typer.Argument(help="The JSON lines file to write.")],
    data: Annotated[Path, typer.Option(help="What `prepare` wrote.")] = Path("build/nano"),
    count: Annotated[int, typer.Option(help="Prompts of each source.")] = 20,
) -> None:
    """Write `count` prompts of every source, in turns."""
    each = {name: prompts_of(data / "heldout", name, count) for name in MIXTURE}
    lines = [{"token_ids": each[name][i]} for i in range(count) for name in each]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} prompts of {len(each)} sources")


if __name__ == "__main__":
    typer.run(main)
