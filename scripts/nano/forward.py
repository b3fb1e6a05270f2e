"""Logits, features and losses of whole sequences, through the dense form of the model."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.cache import CacheState, init_cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Batch, Step
from deepinfer_jax.model.v41 import V41, Params, define
from deepinfer_jax.numerics import Numerics
from scripts.nano.model import trainable


class Trunk(NamedTuple):
    """What the layers give for whole sequences.

    Attributes:
        logits: float32[B, S, V].
        features: [B, S, F] for the drafter.
        taps: `layers.*.ffn.load` float32[E] and `layers.*.attn.index_loss`.
    """

    logits: jax.Array
    features: jax.Array
    taps: dict[str, jax.Array]


@functools.lru_cache(maxsize=8)
def definition(config: ModelConfig) -> nnx.GraphDef[V41]:
    """The dense form of a configuration."""
    return define(config, trainable)


def trunk(params: Params, config: ModelConfig, tokens_BS: jax.Array, numerics: Numerics) -> Trunk:
    """All positions of sequences that start at position 0."""
    model = nnx.merge(definition(config), params)
    batch, cache = whole(config, tokens_BS, numerics)
    out, _ = model(batch, cache, Run(numerics, taps=("*.load", "*.index_loss")), "all", None)
    assert out.logits is not None and out.features is not None
    return Trunk(out.logits, out.features, out.taps)


def drafts(
    params: Params,
    config: ModelConfig,
    tokens_BS: jax.Array,
    features_BSF: jax.Array,
    anchors_BA: jax.Array,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Drafts after each anchor, told the true tokens as they go (teacher forcing).

    Returns:
        Logits float32[B * A, n, V], confidence logits float32[B * A, n] and the taps of the stages.
    """
    model = nnx.merge(definition(config), params)
    assert model.mtp is not None
    (b, s), n = tokens_BS.shape, config.text_config.dspark_block_size
    batch, cache = whole(config, tokens_BS, numerics)
    width, dtype = cache.draft[0].shape[-1], cache.draft[0].dtype
    # Rings as long as the sequences: every anchor finds the window before it.
    rings = tuple(jnp.zeros((b, s, width), dtype) for _ in cache.draft)
    rings = model.mtp.context(features_BSF, Step(config, batch, cache), rings, numerics)
    at = anchors_BA.reshape(-1)
    rows = jnp.repeat(jnp.arange(b), anchors_BA.shape[1])
    true = tokens_BS[rows[:, None], at[:, None] + jnp.arange(n + 1)[None]]
    run = Run(numerics, taps=("*.load",))
    draft = model.mtp.draft(
        true[:, 0], at, rows, rings, model.embed[...], model.head[...], lambda _, k: true[:, k + 1], run
    )
    return draft.logits, draft.confidence, run.tapped()


def whole(config: ModelConfig, tokens_BS: jax.Array, numerics: Numerics) -> tuple[Batch, CacheState]:
    """Sequences from position 0 on, and the empty cache that the interface asks for (nothing is kept in it)."""
    b, s = tokens_BS.shape
    positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    return Batch(tokens_BS, positions, jnp.arange(b, dtype=jnp.int32)), init_cache(config, numerics, b, s)


def next_token_loss(logits_BSV: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Nats of each token after the first, float32[B, S - 1]."""
    log_p = jax.nn.log_softmax(logits_BSV[:, :-1], axis=-1)
    return -jnp.take_along_axis(log_p, tokens_BS[:, 1:, None], axis=-1)[..., 0]


def count(params: Any) -> int:
    """Numbers in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
