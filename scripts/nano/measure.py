"""Held-out bits per byte of a released-format checkpoint by the engine itself, beside the byte 5-gram's.

python -m scripts.nano.measure checkpoints/nano --data build/nano
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

import deepinfer_jax as dj
from deepinfer_jax.model.v41 import Params
from scripts.nano.config import SEQUENCE
from scripts.nano.evaluate import PROSE
from scripts.nano.forward import next_token_loss
from scripts.nano.ngram import SEPARATOR, NGram
from scripts.nano.streams import BOS, windows

BATCH = 4


def bits_of(params: Params, config: dj.ModelConfig, numerics: dj.Numerics, tokens: np.ndarray) -> float:
    """Bits of all tokens of a stream but the first of each document, in overlapping windows."""
    rows, scored = windows(tokens, SEQUENCE)
    scored &= rows != BOS
    cache = dj.init_cache(config, numerics, num_slots=BATCH, max_length=SEQUENCE)
    positions = jnp.broadcast_to(jnp.arange(SEQUENCE, dtype=jnp.int32), (BATCH, SEQUENCE))

    @jax.jit
    def losses(part: jax.Array) -> jax.Array:
        batch = dj.Batch(part, positions, slots=jnp.arange(BATCH, dtype=jnp.int32))
        out, _ = dj.forward(params, config, batch, cache, numerics=numerics)
        assert out.logits is not None
        return next_token_loss(out.logits, part)

    total = 0.0
    for i in range(0, len(rows), BATCH):
        part = np.zeros((BATCH, SEQUENCE), np.int32)
        part[: len(rows[i : i + BATCH])] = rows[i : i + BATCH]
        keep = scored[i : i + BATCH]
        total += float((np.asarray(losses(jnp.asarray(part)))[: len(keep)] * keep[:, 1:]).sum())
    return total / math.log(2)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.")] = Path("checkpoints/nano"),
    data: Annotated[Path, typer.Option(help="What `prepare` wrote.")] = Path("build/nano"),
    sources: Annotated[str, typer.Option(help="Comma-separated sources.")] = ",".join((*PROSE, "python")),
    tag: Annotated[str, typer.Option(help="Numerics.")] = "released",
    limit: Annotated[int | None, typer.Option(help="Tokens of each source at most, for a quick look.")] = None,
) -> None:
    """Print bits per byte by source, and of the prose together."""
    numerics = dj.Numerics.named(tag)
    config, params = dj.load(checkpoint, numerics=numerics, expand="bfloat16" if tag == "released" else "float32")
    facts = json.loads((data / "sources.json").read_text(encoding="utf-8"))["sources"]
    floor = NGram(SEPARATOR.join((data / "train" / f"{name}.txt").read_bytes() for name in facts))
    prose = {"bits": 0.0, "floor": 0.0, "bytes": 0.0}
    print("source     bytes  model  5-gram")
    for name in sources.split(","):
        tokens = np.load(data / "heldout" / f"{name}.npy")
        share = 1.0 if limit is None else min(1.0, limit / len(tokens))
        size = facts[name]["heldout"]["bytes"] * share
        bits = bits_of(params, config, numerics, tokens[:limit])
        text = (data / "heldout" / f"{name}.txt").read_bytes()
        least = floor.bits_per_byte(text)
        print(f"{name:8} {size:7.0f}  {bits / size:.3f}  {least:.3f}", flush=True)
        if name in PROSE:
            prose = {
                "bits": prose["bits"] + bits,
                "floor": prose["floor"] + least * size,
                "bytes": prose["bytes"] + size,
            }
    if prose["bytes"]:
        print(f"{'prose':8} {prose['bytes']:7.0f}  {prose['bits'] / prose['bytes']:.3f}  "
              f"{prose['floor'] / prose['bytes']:.3f}")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
