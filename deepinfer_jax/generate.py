"""Generation as pure functions of a state: take a request in, prefill a chunk, decode k steps.

`State` holds every slot's cache, the logits of its next token, and how to draw from them. Each transition below is
written for one device's share. `Programs` compiles them over a mesh, with the state donated; the host only decides
which request goes where (`engine/schedule.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from deepinfer_jax.cache import CacheState, fork, init_cache, release, reserve
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.step import Batch, ImageRows
from deepinfer_jax.model.v41 import V41, Params, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.mesh import Layout, param_specs
from deepinfer_jax.sampling import Logprobs, Sampler, SamplerRows, is_stop, logprobs, sample


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "logits", "active", "end", "sampler"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """What B slots are doing.

    Attributes:
        cache: Caches; `lengths` are the positions of the next tokens.
        logits: float32[B, V] of the next token of each slot.
        active: bool[B] whether the slot is generating.
        end: int32[B] length, new tokens included, at which a slot stops.
        sampler: How the next tokens are drawn.
    """

    cache: CacheState
    logits: jax.Array
    active: jax.Array
    end: jax.Array
    sampler: SamplerRows


class Tokens(NamedTuple):
    """What a decode call generated.

    Attributes:
        ids: int32[steps, B]; -1 where a slot was not generating.
        logprobs: Of the ids, with leading axis `steps`; or None.
    """

    ids: jax.Array
    logprobs: Logprobs | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the programs are made for. Static.

    Attributes:
        config, numerics: Of the model.
        layout: Devices.
        definition: A changed model, or None.
        sampler: From logits to tokens.
    """

    config: ModelConfig
    numerics: Numerics
    layout: Layout
    definition: nnx.GraphDef[V41] | None = None
    sampler: Sampler = sample


# --------------------------------------------------------------------- transitions, for one device's share


def init_state(setup: Setup, slots: int, max_length: int) -> State:
    """Empty slots for sequences of at most `max_length` tokens."""
    vocab = setup.config.text_config.vocab_size

    def zeros(dtype: Any, *shape: int) -> jax.Array:
        return jnp.zeros((slots, *shape), dtype)

    real, whole, bits = zeros(jnp.float32), zeros(jnp.int32), zeros(jnp.uint32)
    rows = SamplerRows(
        real, real + 1, whole, real, zeros(jnp.uint32, 2), bits, zeros(jnp.uint32, -(-vocab // 32)), whole
    )
    cache = init_cache(setup.config, setup.numerics, slots, max_length)
    return State(cache, zeros(jnp.float32, vocab), zeros(bool), whole, rows)


def admit(setup: Setup, state: State, mask: jax.Array, end: jax.Array, rows: SamplerRows) -> State:
    """Empty the slots of `mask` (bool[B]) and give them new requests; other rows of `end` and `rows` do not count."""
    # Pages are given back and taken anew, because those that a slot holds may be shared with another. There are
    # pages for every slot at full length, so this always fits.
    cache = release(state.cache, jnp.where(mask, jnp.arange(mask.shape[0]), mask.shape[0]))
    cache, _ = reserve(cache, setup.config, jnp.where(mask, end, 0))

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    sampler = jax.tree.map(chosen, rows, state.sampler)
    return State(cache, state.logits, state.active & ~mask, chosen(end, state.end), sampler)


def prefill(params: Params, setup: Setup, state: State, batch: Batch, *, context: int) -> State:
    """Run a chunk of prompts; the logits of a slot are those of the last token of its row."""
    out, cache = forward(
        params,
        setup.config,
        batch,
        state.cache,
        numerics=setup.numerics,
        logits="last",
        context=context,
        exchange=setup.layout.exchange,
        definition=setup.definition,
    )
    slots = jnp.where(batch.positions[:, 0] >= 0, batch.slots, cache.num_slots)
    logits = state.logits.at[slots].set(out.logits, mode="drop")
    return dataclasses.replace(state, cache=cache, logits=logits)


def copy_slot(setup: Setup, state: State, source: jax.Array, target: jax.Array) -> State:
    """Let slot `target` continue the sequence of slot `source` (int32[1]; target B names none). How the target draws
    was given by `admit`."""
    cache, _ = fork(state.cache, setup.config, source[0], target[0])
    logits = state.logits.at[target].set(state.logits[source], mode="drop")
    return dataclasses.replace(state, cache=cache, logits=logits)


def switch(state: State, on: jax.Array, off: jax.Array) -> State:
    """Start the slots of `on` and stop those of `off` (bool[B])."""
    return dataclasses.replace(state, active=(state.active | on) & ~off)


def decode(
    params: Params, setup: Setup, state: State, *, steps: int, context: int, top_logprobs: int | None
) -> tuple[State, Tokens]:
    """Draw and run up to `steps` tokens of every active slot.

    Args:
        context: Most tokens that a slot has afterwards.
        top_logprobs: How many alternatives to report; None for no log-probabilities at all.
    """
    slots = jnp.arange(state.active.shape[0], dtype=jnp.int32)
    rows = setup.layout.exchange.rows

    def any_active(state: State) -> jax.Array:
        """Whether to go on: the same answer on every device, because they exchange tokens in every step."""
        count = jnp.sum(state.active, dtype=jnp.int32)
        return (lax.psum(count, rows) if rows else count) > 0

    def step(carry: tuple) -> tuple:
        i, _, state, tokens = carry
        position = state.cache.lengths
        drawn = setup.sampler(state.logits, state.sampler, position)
        ids = jnp.where(state.active, drawn, -1)
        shown = (
            None if top_logprobs is None else logprobs(state.logits, ids, top_logprobs, setup.numerics.batch_invariant)
        )
        tokens = jax.tree.map(lambda out, value: out.at[i].set(value), tokens, Tokens(ids, shown))
        ended = is_stop(drawn, state.sampler) & (position >= state.sampler.min_position)
        active = state.active & ~ended & (position + 1 < state.end)
        batch = Batch(jnp.maximum(ids, 0)[:, None], jnp.where(active, position, -1)[:, None], slots)
        state = prefill(params, setup, dataclasses.replace(state, active=active), batch, context=context)
        return i + 1, any_active(state), state, tokens

    tokens = _no_tokens(setup, state, steps, top_logprobs)
    carry = (jnp.int32(0), any_active(state), state, tokens)
    _, _, state, tokens = lax.while_loop(lambda c: (c[0] < steps) & c[1], step, carry)
    return state, tokens


def _no_tokens(setup: Setup, state: State, steps: int, top_logprobs: int | None) -> Tokens:
    slots = state.active.shape[0]
    ids = jnp.full((steps, slots), -1, jnp.int32)
    if top_logprobs is None:
        return Tokens(ids, None)
    shape = (steps, slots, min(top_logprobs, setup.config.text_config.vocab_size))
    chosen = jnp.zeros((steps, slots), jnp.float32)
    return Tokens(ids, Logprobs(chosen, jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)))


# ------------------------------------------------------------------------------------------ over a mesh


class Programs:
    """The transitions, compiled for a setup. Every one takes the state donated and gives a new one."""

    def __init__(self, setup: Setup):
        self.setup = setup
        layout = setup.layout
        rows = layout.rows

        def own(transition: Any, *specs: Any) -> Any:
            """A transition without weights: the state first, then `specs`."""
            return jax.jit(layout.spmd(transition, (rows, *specs), rows), donate_argnums=0)

        self.admit = own(partial(admit, setup), rows, rows, rows)
        self.copy_slot = own(partial(copy_slot, setup), rows, rows)
        self.switch = own(switch, rows, rows)
        self.init = jax.jit(self._init, static_argnums=(0, 1))
        self.prefill = jax.jit(self._prefill, donate_argnums=1, static_argnames="context")
        self.decode = jax.jit(self._decode, donate_argnums=1, static_argnames=("steps", "context", "top_logprobs"))

    def _init(self, slots: int, max_length: int) -> State:
        layout = self.setup.layout
        return layout.spmd(partial(init_state, self.setup, slots // layout.shards, max_length), (), layout.rows)()

    def _prefill(self, params: Params, state: State, batch: Batch, *, context: int) -> State:
        rows = self.setup.layout.rows
        images = None if batch.images is None else ImageRows(P(), rows)  # type: ignore[arg-type]
        specs = (self._specs(params), rows, Batch(rows, rows, rows, images))  # type: ignore[arg-type]

        def share(params: Params, state: State, batch: Batch) -> State:
            return prefill(params, self.setup, state, batch, context=context)

        return self.setup.layout.spmd(share, specs, rows)(params, state, batch)

    def _decode(
        self, params: Params, state: State, *, steps: int, context: int, top_logprobs: int | None
    ) -> tuple[State, Tokens]:
        layout = self.setup.layout

        def share(params: Params, state: State) -> tuple[State, Tokens]:
            return decode(params, self.setup, state, steps=steps, context=context, top_logprobs=top_logprobs)

        by_step = P(None, layout.slot_axes)
        return layout.spmd(share, (self._specs(params), layout.rows), (layout.rows, by_step))(params, state)

    def _specs(self, params: Params) -> Any:
        return param_specs(params, self.setup.layout.mesh.size)


@functools.lru_cache(maxsize=16)
def programs(setup: Setup) -> Programs:
    """The programs of a setup: the same object every time, so that nothing is compiled twice."""
    return Programs(setup)
