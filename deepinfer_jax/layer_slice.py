"""A few layers of a model at real width, as a model of their own: for benchmarks of what does not fit whole."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.config import ModelConfig, engram_primes
from deepinfer_jax.errors import ConfigError


def slice_layers(config: ModelConfig, first: int, last: int) -> ModelConfig:
    """The configuration of layers `first` to `last` (inclusive), renumbered from 0.

    The plan is made consistent: the first layer that reads a KV source outside the slice becomes a full layer
    itself, and where a candidate pool would be read from outside, that layer publishes it. Drafter and vision
    are left out. Engram tables are hashed anew, since their primes depend on the layers before.

    Raises:
        ConfigError: The range is not within the model.
    """
    t = config.text_config
    if not 0 <= first <= last < t.num_hidden_layers:
        raise ConfigError(f"layers {first}..{last}: expected a range within 0..{t.num_hidden_layers - 1}")
    plans = config.layers[first : last + 1]
    kv_sources, index_sources = set(), set()
    candidate_source: int | None = None
    standing_in: dict[int, int] = {}
    for plan in plans:
        if plan.kv_source is None:
            continue
        outside = plan.kv_source < first
        source = standing_in.setdefault(plan.kv_source, plan.index) if outside else plan.kv_source
        kv_sources.add(source)
        if plan.owns_indexer or plan.index == source:
            index_sources.add(plan.index)
        if plan.candidates == "publishes":
            candidate_source = plan.index
    limited = [plan for plan in plans if plan.candidates == "limited" and plan.index not in kv_sources]
    if limited and candidate_source is None:
        assert limited[0].kv_source is not None
        candidate_source = standing_in[limited[0].kv_source]
    engram = tuple(plan.index for plan in plans if plan.engram is not None)
    text = dataclasses.replace(
        t,
        num_hidden_layers=len(plans),
        compress_ratios=tuple(plan.ratio for plan in plans),
        kv_source_layer_ids=tuple(i - first for i in sorted(kv_sources)),
        index_source_layer_ids=tuple(i - first for i in sorted(index_sources)),
        candidate_source_layer_id=None if candidate_source is None else candidate_source - first,
        engram_layer_ids=tuple(i - first for i in engram),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )
    text = dataclasses.replace(text, engram_num_embeddings=tuple(sum(p) for p in engram_primes(text)))
    return dataclasses.replace(config, text_config=text, vision_config=None, image_token_id=None)
