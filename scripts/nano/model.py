"""The model as it is trained: V4.1's own modules, with two of them computing densely over whole sequences.

`forward` serves sequences of any length out of paged caches, gathers what each query attends to, and runs experts
over tiles of rows. A training step has whole sequences from position 0, and wants few large matrix products. The
values are the same up to the order of sums; `tests/scripts/test_nano_model.py` compares them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.cache import LayerCache, Layouts
from deepinfer_jax.formats import fp8_round_trip
from deepinfer_jax.model.attention import Attention
from deepinfer_jax.model.module import Vectors
from deepinfer_jax.model.moe import MoE
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Step
from deepinfer_jax.model.v41 import V41
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.moe import mlp, swiglu
from deepinfer_jax.ops.norm_rope import rms_norm, rope
from deepinfer_jax.ops.select_entries import Selection

TRAINED = Numerics("bfloat16", packed_cache=False)
"""The released arithmetic, with caches that hold the rounded values themselves: gradients pass."""

FLOAT = Numerics("bfloat16", kv_round_trip=False, linear_round_trip=False)
"""The same without the roundings to FP8 and FP4."""


def trainable(model: V41) -> None:
    """Replace attention and experts of a model by their dense forms; an argument of `define`."""
    for block in model.layers:
        block.attn = DenseAttention(model.config, block.plan)
        block.ffn = DenseMoE(model.config, block.plan)
    if model.mtp is not None:
        for stage in model.mtp.stages:
            stage.ffn = DenseMoE(model.config, stage.plan)


class DenseMoE(MoE):
    """Every expert sees every token; the routing weights of those not chosen are 0."""

    def __call__(
        self, x_BSD: jax.Array, vectors: Vectors, valid_BS: jax.Array, image_BS: jax.Array, run: Run
    ) -> jax.Array:
        t, e = self.config.text_config, self.num_experts
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.gate(x_TD, vectors, image_BS.reshape(-1), run.numerics)
        one_hot = jax.nn.one_hot(routing.experts, e, dtype=jnp.float32)
        run.tap("load", one_hot.mean((0, 1)))
        weight_TE = jnp.einsum("tke,tk->te", one_hot, routing.weights)
        rounded = fp8_round_trip if run.numerics.linear_round_trip else lambda x: x
        w13, w2 = self.w13[...], self.w2[...]
        gate_up = linear(rounded(x_TD), w13.reshape(-1, t.hidden_size)).reshape(x_TD.shape[0], e, -1)
        y = (swiglu(gate_up, t.swiglu_limit) * weight_TE[..., None]).astype(x_TD.dtype)
        y = linear(rounded(y).reshape(x_TD.shape[0], -1), w2.transpose(1, 0, 2).reshape(t.hidden_size, -1), jnp.float32)
        shared = mlp(x_TD, self.shared_w13[...], self.shared_w2[...], t.swiglu_limit, run.numerics)
        return (y + shared.astype(jnp.float32)).astype(x_BSD.dtype).reshape(x_BSD.shape)


class DenseAttention(Attention):
    """Attention of whole sequences from position 0 on, by masks.

    What a source would write to its cache stands in the cache's place: the rounded values of the whole batch.
    The indexer learns from a loss of its own, offered as the tap `index_loss`: its scores, as a distribution over the
    visible entries, should be the attention's own distribution over them (summed over heads, without gradient).
    """

    def __call__(
        self,
        x_BSD: jax.Array,
        vectors: Vectors,
        step: Step,
        cache: LayerCache,
        source: LayerCache | None,
        selection: Selection | None,
        run: Run,
    ) -> tuple[jax.Array, LayerCache, Selection | None]:
        numerics, window = run.numerics, self.config.text_config.sliding_window
        layouts, table = Layouts.of(self.config, numerics), step.rope(self.plan.rope)
        qr, q_BSHK, kv_BSK = self.project(x_BSD, vectors, table, numerics)
        kv_BSK = rms_norm(kv_BSK, vectors["attn.kv_norm.weight"], self.config.text_config.rms_norm_eps)
        kv_BSK = layouts.window.round_trip(rope(kv_BSK, table))
        if not self.plan.ratio:
            out = attend(q_BSHK, kv_BSK, None, None, vectors["attn.attn_sink"], window)
            return self.output(out, table, numerics), cache, selection
        if self.compressor is not None:
            cache = source = self._compressed(x_BSD, vectors, step, layouts, numerics)
        assert source is not None and source.compressed is not None and source.index_keys is not None
        entries_BNK = source.compressed
        visible = _visible(x_BSD.shape[1], entries_BNK.shape[1], self.plan.ratio)
        if self.indexer is not None:
            # The indexer learns from its own loss alone.
            x, qr = lax.stop_gradient(x_BSD), lax.stop_gradient(qr)
            selection = self.indexer(x, qr, lax.stop_gradient(source.index_keys), step, selection, layouts, run)
            score = self._index_scores(x, qr, source.index_keys, step, layouts, numerics)
            teacher = _entry_attention(q_BSHK, entries_BNK, visible)
            run.tap("index_loss", _index_loss(score, teacher, visible))
        assert selection is not None
        chosen = _mask(selection.entries, entries_BNK.shape[1])
        out = attend(q_BSHK, kv_BSK, entries_BNK, chosen, vectors["attn.attn_sink"], window)
        return self.output(out, table, numerics), cache, selection

    def _compressed(
        self, x_BSD: jax.Array, vectors: Vectors, step: Step, layouts: Layouts, numerics: Numerics
    ) -> LayerCache:
        """Rounded entries and index keys [B, N, K] of the complete groups."""
        assert self.compressor is not None and self.indexer is not None
        ratio = self.plan.ratio
        batch, length, head_dim = *x_BSD.shape[:2], self.config.text_config.head_dim
        empty = jnp.zeros((batch, ratio - 1 + 8, 2, head_dim), jnp.float32) if ratio > 1 else None
        latent = self.compressor(x_BSD, vectors, step, LayerCache(jnp.zeros(0), pending=empty), numerics)
        # The index keys must not pull the latents, which attention needs.
        keys = self.indexer.keys(lax.stop_gradient(latent.values), vectors, numerics)
        cos, sin = step.rope("yarn", ratio - 1)
        ends = slice(ratio - 1, length, ratio)
        table = (cos[:, ends], sin[:, ends])
        return LayerCache(
            jnp.zeros(0),
            layouts.compressed.round_trip(rope(latent.values[:, ends], table)),
            layouts.index_key.round_trip(rope(keys[:, ends], table)),
        )

    def _index_scores(
        self, x: jax.Array, qr: jax.Array, keys: jax.Array, step: Step, layouts: Layouts, numerics: Numerics
    ) -> jax.Array:
        """float32[B, S, N]: what the indexer ranks entries by, with a gradient."""
        assert self.indexer is not None
        q, weights = self.indexer.queries(x, qr, step, numerics)
        q = layouts.index_key.round_trip(q)
        dot = jnp.einsum("bshk,bnk->bshn", q, keys, preferred_element_type=jnp.float32)
        return jnp.einsum("bshn,bsh->bsn", jax.nn.relu(dot), weights.astype(jnp.float32))


def attend(
    q_BSHK: jax.Array,
    kv_BSK: jax.Array,
    entries_BNK: jax.Array | None,
    chosen_BSN: jax.Array | None,
    sink_H: jax.Array,
    window: int,
) -> jax.Array:
    """`sparse_attention` of whole sequences: a causal window, computed in blocks of its size, and masked entries."""
    b, s, h, k = q_BSHK.shape
    pad = -s % window
    blocks = (s + pad) // window
    q = jnp.pad(q_BSHK, [(0, 0), (0, pad), (0, 0), (0, 0)]).reshape(b, blocks, window, h, k)
    own = jnp.pad(kv_BSK, [(0, 0), (0, pad), (0, 0)]).reshape(b, blocks, window, k)
    near = jnp.concatenate([jnp.pad(own, [(0, 0), (1, 0), (0, 0), (0, 0)])[:, :-1], own], axis=2)
    back = np.arange(window)[:, None] + window - np.arange(2 * window)[None, :]
    seen = np.broadcast_to((back >= 0) & (back < window), (blocks, window, 2 * window)).copy()
    seen[0, :, :window] = False
    score = jnp.einsum("bnqhk,bnjk->bnhqj", q, near, preferred_element_type=jnp.float32)
    score = jnp.where(seen[None, :, None], score * np.float32(k**-0.5), -jnp.inf)
    if entries_BNK is not None and chosen_BSN is not None:
        far = jnp.einsum("bnqhk,bek->bnhqe", q, entries_BNK, preferred_element_type=jnp.float32)
        chosen = jnp.pad(chosen_BSN, [(0, 0), (0, pad), (0, 0)]).reshape(b, blocks, 1, window, -1)
        score = jnp.concatenate([score, jnp.where(chosen, far * np.float32(k**-0.5), -jnp.inf)], axis=-1)
    top = lax.stop_gradient(jnp.maximum(jnp.max(score, axis=-1, keepdims=True), -1e30))
    p = jnp.exp(score - top)
    total = jnp.sum(p, axis=-1) + jnp.exp(sink_H[None, None, :, None] - top[..., 0])
    p = p.astype(q.dtype)
    out = jnp.einsum("bnhqj,bnjk->bnqhk", p[..., : 2 * window], near, preferred_element_type=jnp.float32)
    if entries_BNK is not None:
        out += jnp.einsum("bnhqe,bek->bnqhk", p[..., 2 * window :], entries_BNK, preferred_element_type=jnp.float32)
    out = out / jnp.moveaxis(total, 2, 3)[..., None]
    return out.astype(q.dtype).reshape(b, s + pad, h, k)[:, :s]


def _visible(length: int, entries: int, ratio: int) -> np.ndarray:
    """bool[1, S, N]: which entries are complete when each position is computed."""
    return (np.arange(entries)[None, :] < (np.arange(length)[:, None] + 1) // ratio)[None]


def _mask(entries_BSK: jax.Array, count: int) -> jax.Array:
    """bool[B, S, N] of a list of entries; -1 stands for none."""
    b, s, _ = entries_BSK.shape
    slot = jnp.where(entries_BSK < 0, count, entries_BSK)
    chosen = jnp.zeros((b, s, count + 1), bool)
    return chosen.at[jnp.arange(b)[:, None, None], jnp.arange(s)[None, :, None], slot].set(True)[..., :count]


def _entry_attention(q_BSHK: jax.Array, entries_BNK: jax.Array, visible: np.ndarray) -> jax.Array:
    """float32[B, S, N]: attention over all visible entries, the mean of the heads; 0 where none is visible."""
    q, entries = lax.stop_gradient(q_BSHK), lax.stop_gradient(entries_BNK)
    score = jnp.einsum("bshk,bnk->bshn", q, entries, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    score = jnp.where(visible[:, :, None], score, -1e30)
    return jnp.where(visible, jax.nn.softmax(score, axis=-1).mean(2), 0)


def _index_loss(score_BSN: jax.Array, teacher_BSN: jax.Array, visible: np.ndarray) -> jax.Array:
    """Mean over positions of KL(attention || softmax of the index scores), in nats."""
    log_p = jax.nn.log_softmax(jnp.where(visible, score_BSN, -1e30), axis=-1)
    gap = jnp.log(jnp.maximum(teacher_BSN, 1e-30)) - log_p
    return jnp.sum(jnp.where(teacher_BSN > 0, teacher_BSN * gap, 0), axis=-1).mean()
