"""DeepSeek-V4.1-Flash: the whole forward pass.

`V41` is the model as a Flax module. Everything public is a pure function of plain pytrees: `forward`,
`draft_context`, `draft`, `encode_image`. A definition (`define`) is the module without its weights, static and
hashable; the weights are a tree of arrays (`abstract_params` gives its shapes).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.cache import CacheState
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.block import Block
from deepinfer_jax.model.dspark import Draft, DSpark, to_streams
from deepinfer_jax.model.engram import lookback_rows
from deepinfer_jax.model.module import Vectors, param
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Batch, ImageRows, Step
from deepinfer_jax.model.vision import Vision
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.exchange import LOCAL, Exchange
from deepinfer_jax.ops.hyper_connection import collapse, stream_mean
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.norm_rope import rms_norm

Params = dict[str, Any]
"""The weights: a nested dict of arrays and QuantizedTensors."""

Logits = Literal["all", "last", "none"]
"""Positions whose logits are computed."""

IMAGE_DELIMITERS = ("image_start", "image_end", "image_newline")


@partial(jax.tree_util.register_dataclass, data_fields=["logits", "features", "taps"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Output:
    """Result of `forward`.

    Attributes:
        logits: float32[B, S, V], or [B, V] of each row's last token, or None.
        features: [B, S, layers * D] of some layers, for the drafter, or None without one.
        taps: The intermediates that were asked for, by name.
    """

    logits: jax.Array | None
    features: jax.Array | None
    taps: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


class V41(nnx.Module):
    """The model: embedding, layers, head, drafter, vision."""

    def __init__(self, config: ModelConfig):
        t = config.text_config
        self.config = config
        self.embed = param((t.vocab_size, t.hidden_size))
        self.layers = nnx.List([Block(config, plan) for plan in config.layers])
        self.head = param((t.vocab_size, t.hidden_size))
        shapes = {"norm.weight": (t.hidden_size,)}
        if config.image_token_id is not None:
            shapes |= dict.fromkeys(IMAGE_DELIMITERS, (t.hidden_size,))
        self.vectors = Vectors(shapes)
        # Compressed id of each token, from tokenizer.json.
        self.token_map = param((config.token_map_size,), jnp.int32) if config.token_map_size else None
        self.mtp = DSpark(config) if config.draft_stages else None
        self.vision = Vision(config) if config.vision_config else None

    def __call__(
        self, batch: Batch, cache: CacheState, run: Run, logits: Logits, context: int | None
    ) -> tuple[Output, CacheState]:
        step = Step(self.config, batch, cache, context)
        x = self.embed_tokens(batch, run.numerics)
        run.tap("embed", x)
        h, pre = to_streams(x, self.config.text_config.hc_mult)
        history, rows = cache.engram, []
        if self.token_map is not None:
            rows, history = lookback_rows(self.config, self.token_map[...], batch.tokens, step, cache)
        caches, features, selection = list(cache.layers), [], None
        for block in self.layers:
            plan, inside = block.plan, run.at(f"layers.{block.plan.index}")
            with jax.named_scope(f"layer_{plan.index}"):
                if block.engram is not None and plan.engram is not None:
                    h = block.engram(h, rows[plan.engram], block.vectors, ~step.image_mask, inside)
                if plan.dspark_tap is not None:
                    features.append(stream_mean(h, run.numerics.batch_invariant))
                source = None if plan.kv_source is None else caches[plan.kv_source]
                held = {}

                def attend(x: jax.Array, block=block, run=inside, source=source, selection=selection, held=held):
                    i = block.plan.index
                    y, held["cache"], held["selection"] = block.attn(
                        x, block.vectors, step, caches[i], source, selection, run.at("attn")
                    )
                    return y

                h, pre = block(h, pre, attend, step.valid, step.image_mask, inside)
                caches[plan.index], selection = held["cache"], held["selection"]
        end = jnp.where(step.count > 0, step.end, 0)
        cache = dataclasses.replace(
            cache,
            lengths=cache.lengths.at[step.written_slots].set(end, mode="drop"),
            written=cache.written.at[step.written_slots].max(end, mode="drop"),
            layers=tuple(caches),
            engram=history,
        )
        y = collapse(h, pre, run.numerics.batch_invariant)
        run.tap("hidden", y)
        joined = jnp.concatenate(features, axis=-1) if features else None
        return Output(self.logits(y, step, logits, run.numerics.batch_invariant), joined, run.tapped()), cache

    def embed_tokens(self, batch: Batch, numerics: Numerics) -> jax.Array:
        """[B, S, D] token embeddings, or the rows of images where they stand."""
        x = self.embed[...][batch.tokens].astype(numerics.dtype)
        if batch.images is None:
            return x
        rows = batch.images.table[jnp.maximum(batch.images.index, 0)].astype(numerics.dtype)
        return jnp.where((batch.images.index >= 0)[..., None], rows, x)

    def logits(self, y_BSD: jax.Array, step: Step, which: Logits, invariant: bool) -> jax.Array | None:
        """Final norm and head, in float32."""
        if which == "none":
            return None
        if which == "last":
            last = jnp.maximum(step.count - 1, 0)
            y_BSD = jnp.take_along_axis(y_BSD, last[:, None, None], axis=1)
        y_BSD = rms_norm(y_BSD, self.vectors["norm.weight"], self.config.text_config.rms_norm_eps, invariant)
        out = linear(y_BSD, self.head[...], jnp.float32, invariant)
        return out[:, 0] if which == "last" else out


# ------------------------------------------------------------------------------------ pure functions


Change = Callable[[V41], None]
"""A fork: replaces parts of a model before it is split."""


@functools.lru_cache(maxsize=32)
def define(config: ModelConfig, change: Change | None = None) -> nnx.GraphDef[V41]:
    """The module without weights: static and hashable.

    Args:
        change: Replaces parts (`model.layers[3].ffn.gate = MyRouter(...)`) before the split.
    """
    return nnx.split(_built(config, change))[0]


def abstract_params(config: ModelConfig, change: Change | None = None) -> Params:
    """The weight tree as `jax.ShapeDtypeStruct`s, quantised as in the checkpoint. Nothing is allocated."""
    return nnx.to_pure_dict(nnx.split(_built(config, change))[1])


def _built(config: ModelConfig, change: Change | None) -> V41:
    model = V41(config)
    if change is not None:
        change(model)
    return model


def _model(params: Params, config: ModelConfig, definition: nnx.GraphDef[V41] | None) -> V41:
    return nnx.merge(define(config) if definition is None else definition, params)


def forward(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    cache: CacheState,
    *,
    numerics: Numerics = Numerics(),  # noqa: B008 - frozen
    logits: Logits = "all",
    taps: tuple[str, ...] = (),
    context: int | None = None,
    exchange: Exchange = LOCAL,
    definition: nnx.GraphDef[V41] | None = None,
) -> tuple[Output, CacheState]:
    """Run the tokens of a batch through the model.

    Prefill, continuation and decode are the same function: any way of cutting a sequence into calls gives the
    same values.

    Args:
        params: Weights, quantised or expanded (`checkpoint.reader.expand_params`).
        batch: Tokens with their positions and slots.
        cache: What the slots hold. Pages for the new length must be reserved.
        numerics: Which roundings apply; the cache must have been made with the same.
        logits: For which positions to compute them.
        taps: Intermediates to return, by name or `fnmatch` pattern: `layers.*.ffn.experts`.
        context: Most tokens that a sequence of the batch has after the call, when that is known to be less than what
            the cache has room for: compressed entries beyond are not scored.
        exchange: Inside a `shard_map`, which mesh axes split rows and experts; arrays are this device's share.
        definition: A changed model (`define(config, change)`); by default V4.1 of `config`.

    Returns:
        Output and the new cache.

    Raises:
        InputError: A tap that matches nothing.
    """
    return _model(params, config, definition)(batch, cache, Run(numerics, exchange, taps), logits, context)


def draft_context(
    params: Params,
    config: ModelConfig,
    features: jax.Array,
    batch: Batch,
    cache: CacheState,
    *,
    numerics: Numerics = Numerics(),  # noqa: B008
    definition: nnx.GraphDef[V41] | None = None,
) -> CacheState:
    """Feed the drafter the features that `forward` returned for the same batch."""
    model = _model(params, config, definition)
    assert model.mtp is not None
    step = Step(config, batch, cache)
    return dataclasses.replace(cache, draft=model.mtp.context(features, step, cache.draft, numerics))


def draft(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    cache: CacheState,
    *,
    choose: Callable[[jax.Array, int], jax.Array] | None = None,
    numerics: Numerics = Numerics(),  # noqa: B008
    exchange: Exchange = LOCAL,
    definition: nnx.GraphDef[V41] | None = None,
) -> Draft:
    """Draft a block of `dspark_block_size` tokens after an accepted one.

    Args:
        tokens: int32[B] accepted tokens; positions: int32[B] where they stand. `draft_context` must have seen
            every earlier position. slots: int32[B].
        choose: (logits[B, V], k) -> ids[B]; greedy by default.
    """
    model = _model(params, config, definition)
    assert model.mtp is not None
    greedy = choose or (lambda logits, _: jnp.argmax(logits, axis=-1))
    run = Run(numerics, exchange)
    return model.mtp.draft(tokens, positions, slots, cache.draft, model.embed[...], model.head[...], greedy, run)


def encode_image(
    params: Params,
    config: ModelConfig,
    patches: jax.Array,
    coords: jax.Array,
    valid: jax.Array,
    *,
    numerics: Numerics = Numerics(),  # noqa: B008
    definition: nnx.GraphDef[V41] | None = None,
) -> jax.Array:
    """Features [cells, D] of one image; arguments as `images.cell_major` gives them, padded cells allowed."""
    model = _model(params, config, definition)
    assert model.vision is not None
    return model.vision(patches, coords, valid, numerics.dtype)


def image_table(params: Params, config: ModelConfig, features: jax.Array, numerics: Numerics) -> jax.Array:
    """[3 + cells, D]: image_start, image_end, image_newline, then the features: the rows of `ImageRows.table`."""
    model = _model(params, config, None)
    delimiters = jnp.stack([model.vectors[name] for name in IMAGE_DELIMITERS])
    return jnp.concatenate([delimiters.astype(numerics.dtype), features.astype(numerics.dtype)])


__all__ = [
    "V41",
    "Batch",
    "Change",
    "Draft",
    "ImageRows",
    "Output",
    "Params",
    "abstract_params",
    "define",
    "draft",
    "draft_context",
    "encode_image",
    "forward",
    "image_table",
]
