"""The mixture-of-experts sublayer: router, routed FP4 experts, one shared FP8 expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.module import Vectors, param, quantized
from deepinfer_jax.model.run import Run
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.moe import Routing, gate, mlp, routed_experts


def expert_counts(config: ModelConfig, plan: LayerPlan) -> tuple[int, int]:
    """(experts, experts per token) of a layer or draft stage."""
    t = config.text_config
    if plan.draft:
        return t.dspark_n_routed_experts, t.dspark_num_experts_per_tok
    return t.n_routed_experts, t.num_experts_per_tok


def moe_vectors(config: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Small vectors of the MoE part of a layer."""
    experts = expert_counts(config, plan)[0]
    return {"ffn.gate.bias": (experts,), "ffn.gate.bias_vl": (experts,)}


class Router(nnx.Module):
    """Chooses experts. A fork replaces this module to route differently."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        self.config, self.plan = config, plan
        self.weight = param((expert_counts(config, plan)[0], config.text_config.hidden_size))

    def __call__(self, x_TD: jax.Array, vectors: Vectors, image_T: jax.Array, numerics: Numerics) -> Routing:
        bias = jnp.where(image_T[:, None], vectors["ffn.gate.bias_vl"][None], vectors["ffn.gate.bias"][None])
        top_k = expert_counts(self.config, self.plan)[1]
        scale = self.config.text_config.routed_scaling_factor
        return gate(
            x_TD,
            self.weight[...],
            bias,
            top_k=top_k,
            scale=scale,
            invariant=numerics.batch_invariant,
            backend=numerics.kernels.gate,
        )


class MoE(nnx.Module):
    """Router, experts and their sum."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        experts = expert_counts(config, plan)[0]
        self.config, self.num_experts = config, experts
        self.gate = Router(config, plan)
        # w1 (gate) and w3 (up) read the same input: one matrix, w1's rows first.
        self.w13 = quantized("fp4", 2 * t.moe_intermediate_size, t.hidden_size, (experts,))
        self.w2 = quantized("fp4", t.hidden_size, t.moe_intermediate_size, (experts,))
        self.shared_w13 = quantized("fp8_block", 2 * t.moe_intermediate_size, t.hidden_size)
        self.shared_w2 = quantized("fp8_block", t.hidden_size, t.moe_intermediate_size)

    def __call__(
        self, x_BSD: jax.Array, vectors: Vectors, valid_BS: jax.Array, image_BS: jax.Array, run: Run
    ) -> jax.Array:
        limit = self.config.text_config.swiglu_limit
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        with jax.named_scope("router"):
            routing = self.gate(x_TD, vectors, image_BS.reshape(-1), run.numerics)
        run.tap("experts", routing.experts.reshape(*x_BSD.shape[:2], -1))
        run.tap("weights", routing.weights.reshape(*x_BSD.shape[:2], -1))
        with jax.named_scope("routed_experts"):
            w13, w2 = self.w13[...], self.w2[...]
            y = routed_experts(
                x_TD, routing, valid_BS.reshape(-1), w13, w2, self.num_experts, limit, run.numerics, run.exchange
            )
        with jax.named_scope("shared_expert"):
            shared = mlp(x_TD, self.shared_w13[...], self.shared_w2[...], limit, run.numerics)
        run.tap("routed", y.reshape(x_BSD.shape))
        run.tap("shared", shared.reshape(x_BSD.shape))
        return (y + shared.astype(jnp.float32)).astype(x_BSD.dtype).reshape(x_BSD.shape)
