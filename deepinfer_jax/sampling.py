"""From logits to tokens, on the device.

A draw is a function of (seed, sample, position) and the row's logits alone: never of the batch, the slot, the step
or the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.ops.invariant import alone, sum_channels


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "top_k", "min_p", "seed", "sample", "stop", "min_position"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplerRows:
    """Sampling parameters of B rows.

    Attributes:
        temperature, top_p, min_p: float32[B]; top_k: int32[B]. As in `SamplingParams`.
        seed: uint32[B, 2] high and low word; sample: uint32[B] number of the sample.
        stop: uint32[B, ceil(V / 32)] ids that end the row, one bit each.
        min_position: int32[B] positions below it cannot hold one of them.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array
    sample: jax.Array
    stop: jax.Array
    min_position: jax.Array


class Logprobs(NamedTuple):
    """Natural log-probabilities under the model's own distribution.

    Attributes:
        chosen: float32[B].
        top: float32[B, K] of the K most probable tokens, descending; top_ids: int32[B, K].
    """

    chosen: jax.Array
    top: jax.Array
    top_ids: jax.Array


Sampler = Callable[[jax.Array, SamplerRows, jax.Array], jax.Array]
"""(logits float32[B, V], rows, positions int32[B] of the new tokens) -> token ids int32[B]."""


def sample(logits: jax.Array, rows: SamplerRows, positions: jax.Array) -> jax.Array:
    """The standard `Sampler`: temperature, min_p, top_k, top_p, then an exact draw by the Gumbel maximum."""
    logits = block_stops(logits, rows, positions)
    greedy = jnp.argmax(logits, axis=-1)

    def draw() -> jax.Array:
        # The maximum goes first, so that no temperature, however small, overflows.
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = scaled / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
        kept = filtered(scaled, rows)
        noise = gumbel(jax.vmap(request_key)(rows.seed, rows.sample, positions), logits.shape[-1])
        return jnp.where(rows.temperature > 0, jnp.argmax(kept + noise, axis=-1), greedy)

    return lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy).astype(jnp.int32)


def block_stops(logits: jax.Array, rows: SamplerRows, positions: jax.Array) -> jax.Array:
    """Logits with -inf for the stop ids of rows that may not end yet."""
    early = positions < rows.min_position

    def blocked() -> jax.Array:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        stops = (rows.stop[:, ids // 32] >> (ids % 32)[None, :]) & 1
        return jnp.where((stops > 0) & early[:, None], -jnp.inf, logits)

    return lax.cond(jnp.any(early), blocked, lambda: logits)


def is_stop(tokens: jax.Array, rows: SamplerRows) -> jax.Array:
    """bool[B]: whether the token of each row ends it."""
    word = jnp.take_along_axis(rows.stop, (tokens // 32)[:, None], axis=1)[:, 0]
    return ((word >> (tokens % 32).astype(jnp.uint32)) & 1) > 0


def filtered(scaled: jax.Array, rows: SamplerRows) -> jax.Array:
    """Scaled logits (maximum 0) with -inf for the tokens that min_p, top_k and top_p leave out.

    Among equal logits the lower ids are kept.
    """
    kept = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)

    def by_rank() -> jax.Array:
        order = jnp.argsort(-kept, axis=-1, stable=True)
        # What is kept must not depend on the batch: sums and exponentials as in `ops/invariant.py`, in every mode.
        p = alone(jnp.exp, jnp.take_along_axis(kept, order, axis=-1))
        rank = jnp.arange(kept.shape[-1])[None, :]
        k = jnp.where(rows.top_k > 0, rows.top_k, kept.shape[-1])[:, None]
        # top_p looks at the distribution that top_k left.
        p = jnp.where(rank < k, p, 0)
        p = p / sum_channels(p)[:, None]
        before = jnp.cumsum(p, axis=-1) - p
        keep = (rank < k) & ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None] | (rank == 0))
        keep = jnp.zeros(kept.shape, bool).at[jnp.arange(kept.shape[0])[:, None], order].set(keep)
        return jnp.where(keep, kept, -jnp.inf)

    ranked = (rows.top_k > 0) | (rows.top_p < 1)
    # Sorting a vocabulary is the dearest step of a draw, so a batch that does not need it skips it.
    return lax.cond(jnp.any(ranked), lambda: jnp.where(ranked[:, None], by_rank(), kept), lambda: kept)


def logprobs(logits: jax.Array, tokens: jax.Array, count: int, invariant: bool = False) -> Logprobs:
    """Log-probabilities of the chosen tokens int32[B] and of the `count` most probable ones (ties: lower ids)."""
    if invariant:
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        log_p = below - alone(jnp.log, sum_channels(alone(jnp.exp, below)))[:, None]
    else:
        log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, top_ids = lax.top_k(log_p, min(count, logits.shape[-1]))
    return Logprobs(chosen, top, top_ids.astype(jnp.int32))


def request_key(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
    """The key of one draw: uint32[2] seed words, number of the sample, position of the new token."""
    # The bare words of a 64-bit seed are a threefry key; `jax.random.key` takes 64 bits only in a global mode.
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample), position)


def gumbel(keys: jax.Array, width: int) -> jax.Array:
    """float32[B, width] of standard Gumbel noise, a row for each key: what `jax.random.gumbel` gives in mode `high`,
    with logarithms whose last bits do not depend on B.

    A uniform u has 24 bits, and 23 more below one half, where the largest values come from.
    """
    high, low = jnp.moveaxis(jax.vmap(lambda key: jax.random.uniform(key, (2, width)))(keys), 1, 0)
    u = jnp.where(high >= 0.5, high, high + (2**-23 * low + 2**-47))
    return -alone(jnp.log, -alone(jnp.log1p, -u))


def seed_words(seed: int) -> np.ndarray:
    """uint32[2] of a 64-bit seed: `jax.random.key(seed)` for seeds below 2^32."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def stop_bits(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32[ceil(V / 32)] with the bits of `ids` set."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in ids:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits
