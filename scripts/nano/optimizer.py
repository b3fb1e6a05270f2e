"""Muon for matrices, Adam for the rest, and the router biases that balance the load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from scripts.nano.weights import vector_layouts

MAX_SKIPPED = 10
"""Steps in a row without a finite gradient. After them a run takes what comes, and ends at the next line of its log."""

_ADAM = ("embed", "head", "markov_embed", "markov_head", "weight", "fn", "data")


def optimizer() -> optax.GradientTransformation:
    """Clipped gradients, then Muon and Adam at a learning rate of 1 and without weight decay.

    A gradient that is not finite moves nothing (but decay): one batch in ten thousand must not end a run.

    `moved` brings both in, as arguments of the step: one compiled program serves runs of every length and setting.
    """
    rule = muon(
        1.0,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_dimensions,  # type: ignore[arg-type]
        adam_b1=0.9,
        adam_b2=0.98,
    )
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), rule), MAX_SKIPPED)


def moved(params: Params, update: Any, rate: jax.Array, decay: jax.Array) -> Params:
    """New weights: `rate` times the update, and matrices of Muon smaller by rate * decay."""

    def one(p: jax.Array, u: jax.Array, numbers: MuonDimensionNumbers | None) -> jax.Array:
        return p + rate * (u if numbers is None else u - decay * p)

    return jax.tree.map(one, params, update, _dimensions(params))


def learning_rate(i: int, steps: int, peak: float) -> float:
    """Of step i: a warm-up, a plateau, and a linear decay over the last 60 %."""
    warm = min(150, steps // 10 + 1)
    return peak * min((i + 1) / warm, 1, max((steps - i) / (0.6 * steps), 0.02))


def _dimensions(params: Params) -> Any:
    """Matrices [..., out, in] by Muon; embeddings, heads, routers, mixes, small vectors and tables by Adam."""

    def one(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        names = [k.key for k in path]
        if names[-1] in _ADAM or leaf.ndim < 2:
            return None
        return MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(one, params)


def balanced(params: Params, config: ModelConfig, load: dict[str, jax.Array], rate: jax.Array) -> Params:
    """Router biases moved by `rate` towards experts with less than their share.

    Args:
        params: A tree with some of the vector leaves of the model.
        load: Share of each expert, by the name of its tap (`layers.3.ffn.load`, `mtp.0.ffn.load`).
    """
    layouts = vector_layouts(config)

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        names = tuple(k.key for k in path)
        where = [n for n in names if n != "stages"][:2]
        tap = f"{where[0]}.{where[1]}.ffn.load" if len(where) == 2 else ""
        if names not in layouts or tap not in load:
            return leaf
        share = load[tap]
        move = rate * jnp.sign(jnp.mean(share) - share)
        spans = layouts[names].spans()
        for name in ("ffn.gate.bias", "ffn.gate.bias_vl"):
            start, stop = spans[name]
            leaf = leaf.at[start:stop].add(move)
        return leaf

    return jax.tree_util.tree_map_with_path(one, params)
