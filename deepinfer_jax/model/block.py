"""A transformer block with single-pass hyper-connections."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.attention import Attention, attention_vectors
from deepinfer_jax.model.engram import Engram, engram_vectors
from deepinfer_jax.model.hyper_connection import HyperConnection, hyper_connection_vectors
from deepinfer_jax.model.module import Vectors
from deepinfer_jax.model.moe import MoE, moe_vectors
from deepinfer_jax.model.run import Run
from deepinfer_jax.ops.hyper_connection import Mixes
from deepinfer_jax.ops.norm_rope import rms_norm


class Block(nnx.Module):
    """Attention and MoE on C residual streams. Each sublayer collapses the streams with the weights that the
    sublayer before it computed; the first one's come in as `pre`.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        self.config, self.plan = config, plan
        self.attn = Attention(config, plan)
        self.ffn = MoE(config, plan)
        self.engram = Engram(config, plan) if plan.engram is not None else None
        self.hc = HyperConnection(config)
        shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (t.hidden_size,), "ffn_norm.weight": (t.hidden_size,)}
        shapes |= hyper_connection_vectors(config) | attention_vectors(config, plan)
        shapes |= moe_vectors(config, plan) | engram_vectors(config, plan)
        self.vectors = Vectors(shapes)

    def __call__(
        self,
        h_BSCD: jax.Array,
        pre_BSC: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        valid_BS: jax.Array,
        image_BS: jax.Array,
        run: Run,
    ) -> tuple[jax.Array, jax.Array]:
        """New streams and the collapse weights for the next block.

        Args:
            attend: The attention sublayer, [B, S, D] -> [B, S, D].
        """
        eps, numerics = self.config.text_config.rms_norm_eps, run.numerics
        norm = functools.partial(rms_norm, eps=eps, invariant=numerics.batch_invariant)
        with jax.named_scope("attn"):
            site = self.hc.mixes(h_BSCD, self.vectors, "attn", numerics)
            x = norm(self.hc.collapse(h_BSCD, pre_BSC, numerics), self.vectors["attn_norm.weight"])
            _tap_site(run, "attn", site, x)
            y = attend(x)
            run.tap("attn.out", y)
            h_BSCD = self.hc.expand(y, h_BSCD, site, numerics)
            run.tap("attn.streams", h_BSCD)
        pre_BSC = site.pre
        with jax.named_scope("ffn"):
            site = self.hc.mixes(h_BSCD, self.vectors, "ffn", numerics)
            x = norm(self.hc.collapse(h_BSCD, pre_BSC, numerics), self.vectors["ffn_norm.weight"])
            _tap_site(run, "ffn", site, x)
            y = self.ffn(x, self.vectors, valid_BS, image_BS, run.at("ffn"))
            run.tap("ffn.out", y)
            h_BSCD = self.hc.expand(y, h_BSCD, site, numerics)
        run.tap("streams", h_BSCD)
        return h_BSCD, site.pre


def _tap_site(run: Run, name: str, site: Mixes, x_BSD: jax.Array) -> None:
    for part, value in site._asdict().items():
        run.tap(f"{name}.{part}", value)
    run.tap(f"{name}.in", x_BSD)
