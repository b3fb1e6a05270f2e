"""A transformer block with single-pass hyper-connections."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.attention import Attention, attention_vectors
from deepinfer_jax.model.engram import Engram, engram_vectors
from deepinfer_jax.model.module import Vectors, param
from deepinfer_jax.model.moe import MoE, moe_vectors
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.hyper_connection import Mixes, collapse, expand, mixes
from deepinfer_jax.ops.norm_rope import rms_norm

SITES = ("attn", "ffn")


class Block(nnx.Module):
    """Attention and MoE on C residual streams. Each sublayer collapses the streams with the weights that the
    sublayer before it computed; the first one's come in as `pre`.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        mix = t.hc_mult * (t.hc_mult + 2)
        self.config, self.plan = config, plan
        self.attn = Attention(config, plan)
        self.ffn = MoE(config, plan)
        self.engram = Engram(config, plan) if plan.engram is not None else None
        self.hc_fn = param((len(SITES), mix, t.hc_mult * t.hidden_size), jax.numpy.float32)
        shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (t.hidden_size,), "ffn_norm.weight": (t.hidden_size,)}
        for site in SITES:
            shapes |= {f"hc_{site}_base": (mix,), f"hc_{site}_scale": (3,)}
        shapes |= attention_vectors(config, plan) | moe_vectors(config, plan) | engram_vectors(config, plan)
        self.vectors = Vectors(shapes)

    def __call__(
        self,
        h_BSCD: jax.Array,
        pre_BSC: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        valid_BS: jax.Array,
        image_BS: jax.Array,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array]:
        """New streams and the collapse weights for the next block.

        Args:
            attend: The attention sublayer, [B, S, D] -> [B, S, D].
        """
        eps = self.config.text_config.rms_norm_eps
        with jax.named_scope("attn"):
            site = self.mixes(h_BSCD, "attn")
            y = attend(rms_norm(collapse(h_BSCD, pre_BSC), self.vectors["attn_norm.weight"], eps))
            h_BSCD = expand(y, h_BSCD, site)
        pre_BSC = site.pre
        with jax.named_scope("ffn"):
            site = self.mixes(h_BSCD, "ffn")
            x = rms_norm(collapse(h_BSCD, pre_BSC), self.vectors["ffn_norm.weight"], eps)
            y = self.ffn(x, self.vectors, valid_BS, image_BS, numerics)
            h_BSCD = expand(y, h_BSCD, site)
        return h_BSCD, site.pre

    def mixes(self, h_BSCD: jax.Array, site: str) -> Mixes:
        """The hyper-connection mixes of a sublayer."""
        t = self.config.text_config
        return mixes(
            h_BSCD,
            self.hc_fn[...][SITES.index(site)],
            self.vectors[f"hc_{site}_base"],
            self.vectors[f"hc_{site}_scale"],
            norm_eps=t.rms_norm_eps,
            eps=t.hc_eps,
            iterations=t.hc_sinkhorn_iters,
        )
