"""The two training steps: of the layers, and of the drafter on frozen layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.numerics import Numerics
from scripts.nano.forward import drafts, next_token_loss, trunk
from scripts.nano.optimizer import balanced, moved, optimizer
from scripts.nano.weights import as_released, with_token_map

BIAS_RATE = 1e-3
"""How far a router bias moves per step."""

DRAFT_SHARE = 0.75
"""Weight of a drafted position in divergence and doubt, over the one before it."""

State = dict[str, Any]
Metrics = dict[str, jax.Array]


class Trainer(NamedTuple):
    """One kind of training.

    Attributes:
        first: Whole float tree -> state.
        step: (state, learning rate, weight decay, two inputs) -> (state, metrics); the state is donated.
        merged: (state, whole float tree) -> the tree with what was trained.
    """

    first: Callable[[Params], State]
    step: Callable[..., tuple[State, Metrics]]
    merged: Callable[[State, Params], Params]


def trunk_trainer(config: ModelConfig, token_map: jax.Array, numerics: Numerics) -> Trainer:
    """Trains all but the drafter on the next token; inputs are tokens int32[B, S] and their weights float32[B, S]."""
    rule = optimizer()

    def loss_of(layers: Params, mtp: Params, tokens: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
        params = with_token_map(as_released(layers | {"mtp": mtp}, config), token_map)
        out = trunk(params, config, tokens, numerics)
        nats = next_token_loss(out.logits, tokens)
        loss = jnp.sum(nats * weight[:, 1:]) / jnp.sum(weight[:, 1:])
        index = sum(v for name, v in out.taps.items() if name.endswith("index_loss"))
        load = {name: v for name, v in out.taps.items() if name.endswith("load")}
        return loss + index, (loss, index, load)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: State, rate: jax.Array, decay: jax.Array, tokens: jax.Array, weight: jax.Array
    ) -> tuple[State, Metrics]:
        layers, mtp = state["layers"], state["mtp"]
        grad, (loss, index, load) = jax.grad(loss_of, has_aux=True)(layers, mtp, tokens, weight)
        update, memory = rule.update(grad, state["memory"], layers)
        layers = balanced(moved(layers, update, rate, decay), config, load, jnp.float32(BIAS_RATE))
        least = jnp.stack([jnp.min(v) * v.shape[0] for v in load.values()]).min()
        metrics = {"loss": loss, "index loss": index, "gradient": _norm(grad), "least load": least}
        return {"layers": layers, "mtp": mtp, "memory": memory}, metrics

    def first(params: Params) -> State:
        layers = {name: leaf for name, leaf in params.items() if name != "mtp"}
        return {"layers": layers, "mtp": params["mtp"], "memory": jax.jit(rule.init)(layers)}

    return Trainer(first, step, lambda state, _: state["layers"] | {"mtp": state["mtp"]})


def draft_trainer(config: ModelConfig, token_map: jax.Array, numerics: Numerics, anchors: int) -> Trainer:
    """Trains the drafter (`mtp`); the layers are frozen, rounded as released. Inputs are tokens and a random key.

    Judged token by token a draft is accepted after accepted ones with probability 1 - TV(layers, draft), so the tokens
    that a block is expected to give up are known (fewer, when it is judged as a whole), and are the loss; beside it
    KL(layers || draft), from which positions learn that are seldom reached, and the cross entropy of the confidence
    with the probability of acceptance.

    Args:
        anchors: Drafted blocks per sequence.
    """
    rule, n = optimizer(), config.text_config.dspark_block_size
    share = DRAFT_SHARE ** jnp.arange(n, dtype=jnp.float32)
    share = share / share.sum()

    def loss_of(mtp: Params, layers: Params, tokens: jax.Array, at: jax.Array) -> tuple[jax.Array, Any]:
        drafter = as_released(layers | {"mtp": mtp}, config)["mtp"]
        params = with_token_map(layers | {"mtp": drafter}, token_map)
        out = jax.lax.stop_gradient(trunk(params, config, tokens, numerics))
        logits, confidence, load = drafts(params, config, tokens, out.features, at, numerics)
        target = drafted_positions(out.logits, at, n)
        log_p, log_q = jax.nn.log_softmax(target), jax.nn.log_softmax(logits)
        p = jnp.exp(log_p)
        divergence = jnp.sum(p * (log_p - log_q), axis=-1)
        accepted = 1 - 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
        doubt = optax.sigmoid_binary_cross_entropy(confidence, jax.lax.stop_gradient(accepted))
        length = jnp.cumprod(accepted, axis=-1).sum(-1).mean()
        loss = n - length + jnp.sum((divergence + doubt).mean(0) * share)
        return loss, ({"loss": divergence.mean(), "confidence loss": doubt.mean(), "expected length": 1 + length}, load)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: State, rate: jax.Array, decay: jax.Array, tokens: jax.Array, key: jax.Array
    ) -> tuple[State, Metrics]:
        at = jax.random.randint(key, (tokens.shape[0], anchors), 0, tokens.shape[1] - n)
        grad, (metrics, load) = jax.grad(loss_of, has_aux=True)(state["mtp"], state["layers"], tokens, at)
        update, memory = rule.update(grad, state["memory"], state["mtp"])
        mtp = moved(state["mtp"], update, rate, decay)
        mtp = balanced({"mtp": mtp}, config, load, jnp.float32(BIAS_RATE))["mtp"]
        return {"layers": state["layers"], "mtp": mtp, "memory": memory}, metrics

    def first(params: Params) -> State:
        # Copies: the state's buffers are donated step by step, and the masters are needed afterwards.
        rounded, mtp = jax.tree.map(jnp.copy, (as_released(params, config), params["mtp"]))
        layers = {name: leaf for name, leaf in rounded.items() if name != "mtp"}
        return {"layers": layers, "mtp": mtp, "memory": jax.jit(rule.init)(mtp)}

    return Trainer(first, step, lambda state, params: params | {"mtp": state["mtp"]})


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def drafted_positions(logits_BSV: jax.Array, anchors_BA: jax.Array, n: int) -> jax.Array:
    """[B * A, n, V]: the logits of the positions that the drafts after each anchor stand for."""
    rows = jnp.repeat(jnp.arange(logits_BSV.shape[0]), anchors_BA.shape[1])
    return logits_BSV[rows[:, None], anchors_BA.reshape(-1, 1) + jnp.arange(n)[None]]
