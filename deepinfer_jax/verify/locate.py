"""Where a difference arises: the same text computed in two ways, all intermediates kept, compared in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.cache import CacheState, init_cache
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Batch
from deepinfer_jax.model.v41 import Params, define
from deepinfer_jax.verify.subject import Subject

LENGTH = 96
"""Tokens of a text that are looked at."""

OPS = {
    "embed": "embedding",
    "engram.rows": "Engram addresses (ops/engram.py)",
    "engram.out": "Engram linear and gate (ops/linear.py, ops/engram.py)",
    "attn.pre": "hyper-connection mixes (ops/hyper_connection.py)",
    "attn.post": "hyper-connection mixes (ops/hyper_connection.py)",
    "attn.comb": "hyper-connection mixes, Sinkhorn (ops/hyper_connection.py)",
    "attn.in": "collapse and norm (ops/hyper_connection.py, ops/norm_rope.py)",
    "attn.qr": "query and KV down-projection, norm (ops/linear.py, ops/norm_rope.py)",
    "attn.q": "query up-projection, rotary embedding (ops/linear.py, ops/norm_rope.py)",
    "attn.kv": "KV norm, rotary embedding (ops/norm_rope.py)",
    "attn.latent": "compressor (model/attention.py)",
    "attn.index_q": "index queries (ops/linear.py, ops/norm_rope.py)",
    "attn.index_weights": "weights of index heads (ops/linear.py)",
    "attn.entries": "index logits and top-k (ops/select_entries.py)",
    "attn.heads": "sparse attention (ops/sparse_attention.py)",
    "attn.out": "output projections (ops/linear.py)",
    "attn.streams": "expansion into streams (ops/hyper_connection.py)",
    "ffn.pre": "hyper-connection mixes (ops/hyper_connection.py)",
    "ffn.post": "hyper-connection mixes (ops/hyper_connection.py)",
    "ffn.comb": "hyper-connection mixes, Sinkhorn (ops/hyper_connection.py)",
    "ffn.in": "collapse and norm (ops/hyper_connection.py, ops/norm_rope.py)",
    "ffn.experts": "gate, choice of experts (ops/moe.py)",
    "ffn.weights": "gate, weights of experts (ops/moe.py)",
    "ffn.routed": "routed experts and their sum (ops/moe.py)",
    "ffn.shared": "shared expert (ops/moe.py)",
    "ffn.out": "sum of the experts (model/moe.py)",
    "streams": "expansion into streams (ops/hyper_connection.py)",
    "hidden": "collapse (ops/hyper_connection.py)",
    "logits": "final norm and head (ops/norm_rope.py, ops/linear.py)",
}
"""What computes an intermediate, by the end of its name."""


class Way(NamedTuple):
    """How a text is computed.

    Attributes:
        batch: Rows; the others run the text turned, so that they differ.
        chunk: Tokens of a call; 0 for all at once.
        room: Context limit, as a multiple of what the subject needs.
    """

    batch: int = 1
    chunk: int = 0
    room: int = 1

    def __str__(self) -> str:
        calls = "at once" if not self.chunk else "token by token" if self.chunk == 1 else f"in chunks of {self.chunk}"
        rows = "alone" if self.batch == 1 else f"in a batch of {self.batch}"
        return f"{rows}, {calls}" + ("" if self.room == 1 else f", with {self.room} times the room")


class Difference(NamedTuple):
    """How two ways differ in one intermediate.

    Attributes:
        name: Of the intermediate.
        share: Of the positions that differ.
        first: The first of them, or None.
        largest: Largest absolute difference.
    """

    name: str
    share: float
    first: int | None
    largest: float

    @property
    def layer(self) -> int | None:
        """Number of the layer, or None outside of them."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def op(self) -> str:
        """What computes it."""
        end = ".".join(self.name.split(".")[2:]) if self.layer is not None else self.name
        return OPS.get(end, end)


class Finding(NamedTuple):
    """The result of a search.

    Attributes:
        ways: The two ways.
        request: Number of the request whose text was computed.
        differences: Of every intermediate, in the order of computation.
    """

    ways: tuple[Way, Way]
    request: int
    differences: tuple[Difference, ...]

    @property
    def origin(self) -> Difference | None:
        """The first intermediate that differs: all that it was computed from is equal."""
        return next((d for d in self.differences if d.first is not None), None)


def search(subject: Subject, request: int, pairs: Sequence[tuple[Way, Way]]) -> Finding | None:
    """The first pair of ways whose intermediates differ for a request's text, or None.

    Keeping intermediates is another program too, so a difference may vanish under the eye; then there is none to
    find here.
    """
    known: dict[Way, dict[str, np.ndarray]] = {}
    for pair in pairs:
        for way in pair:
            if way not in known:
                known[way] = trace(subject, request, way)
        a, b = (known[way] for way in pair)
        found = Finding(pair, request, tuple(_difference(name, a[name], b[name]) for name in a))
        if found.origin is not None:
            return found
    return None


def trace(subject: Subject, request: int, way: Way) -> dict[str, np.ndarray]:
    """Every intermediate [positions, ...] of a request's text (its first `LENGTH` tokens), in order."""
    text = np.array(subject.text(request)[:LENGTH], np.int32)
    room = min(subject.room * way.room, subject.config.text_config.max_position_embeddings)
    cache = init_cache(subject.config, subject.numerics, way.batch, room)
    definition = define(subject.config) if subject.definition is None else subject.definition
    names: list[str] = []

    @jax.jit
    def run(params: Params, batch: Batch, cache: CacheState) -> tuple[list[jax.Array], CacheState]:
        kept = Run(subject.numerics, taps=("*",))
        out, cache = nnx.merge(definition, params)(batch, cache, kept, "all", None)
        assert out.logits is not None
        names[:] = [*kept.found, "logits"]
        return [*(value[0] for value in kept.found.values()), out.logits[0]], cache

    rows = np.stack([np.roll(text, i) for i in range(way.batch)])
    parts = []
    for start in range(0, len(text), way.chunk or len(text)):
        part = rows[:, start : start + (way.chunk or len(text))]
        positions = np.broadcast_to(np.arange(start, start + part.shape[1], dtype=np.int32), part.shape)
        batch = Batch(jnp.asarray(part), jnp.asarray(positions), jnp.arange(way.batch, dtype=jnp.int32))
        values, cache = run(subject.params, batch, cache)
        parts.append(jax.device_get(values))
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(names)}


def _difference(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    # Lists of entries may have other lengths with other context limits; what is missing is no entry.
    if a.shape != b.shape:
        width = max(a.shape[-1], b.shape[-1])
        a, b = (np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])], constant_values=-1) for x in (a, b))
    same = np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)
    differ = ~same.reshape(len(a), -1).all(axis=1)
    gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    largest = float(np.nanmax(gap)) if gap.size else 0.0
    return Difference(name, float(differ.mean()), int(np.argmax(differ)) if differ.any() else None, largest)
