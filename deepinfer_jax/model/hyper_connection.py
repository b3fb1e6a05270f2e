"""Single-pass hyper-connections: the residual streams around the sublayers of a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.module import Vectors, param
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.hyper_connection import Mixes, collapse, expand, mixes

SITES = ("attn", "ffn")


def hyper_connection_vectors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Small vectors of the hyper-connections of a block."""
    mix = config.text_config.hc_mult * (config.text_config.hc_mult + 2)
    shapes: dict[str, tuple[int, ...]] = {}
    for site in SITES:
        shapes |= {f"hc_{site}_base": (mix,), f"hc_{site}_scale": (3,)}
    return shapes


class HyperConnection(nnx.Module):
    """How sublayers read from and write to the streams. A fork replaces this module to connect them differently."""

    def __init__(self, config: ModelConfig):
        t = config.text_config
        self.config = config
        # One leaf for both sites: attn, then ffn.
        self.fn = param((len(SITES), t.hc_mult * (t.hc_mult + 2), t.hc_mult * t.hidden_size), jnp.float32)

    def mixes(self, h_BSCD: jax.Array, vectors: Vectors, site: str, numerics: Numerics) -> Mixes:
        """The mixes of a sublayer, computed from the streams before it."""
        t = self.config.text_config
        return mixes(
            h_BSCD,
            self.fn[...][SITES.index(site)],
            vectors[f"hc_{site}_base"],
            vectors[f"hc_{site}_scale"],
            norm_eps=t.rms_norm_eps,
            eps=t.hc_eps,
            iterations=t.hc_sinkhorn_iters,
            invariant=numerics.batch_invariant,
        )

    def collapse(self, h_BSCD: jax.Array, pre_BSC: jax.Array, numerics: Numerics) -> jax.Array:
        """Streams to the input of a sublayer: [B, S, D]."""
        return collapse(h_BSCD, pre_BSC, numerics.batch_invariant)

    def expand(self, y_BSD: jax.Array, h_BSCD: jax.Array, site: Mixes, numerics: Numerics) -> jax.Array:
        """Output of a sublayer and the streams before it to the streams after it."""
        return expand(y_BSD, h_BSCD, site, numerics.batch_invariant)
