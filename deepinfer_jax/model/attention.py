"""CSA2 attention: a sliding window, and compressed entries that an indexer selects."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.cache import ROLLBACK, LayerCache, Layouts
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.module import Vectors, param, quantized
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Step
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.finish_rows import finish_rows
from deepinfer_jax.ops.invariant import alone, fence, sum_few
from deepinfer_jax.ops.linear import grouped_output_linear, linear, quantized_linear
from deepinfer_jax.ops.norm_rope import rms_norm, rope
from deepinfer_jax.ops.rows import Rows, write_rows
from deepinfer_jax.ops.select_entries import Selection, select_entries
from deepinfer_jax.ops.sparse_attention import sparse_attention


def attention_vectors(config: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Small vectors of the attention part of a layer."""
    t = config.text_config
    shapes: dict[str, tuple[int, ...]] = {
        "attn.q_norm.weight": (t.q_lora_rank,),
        "attn.kv_norm.weight": (t.head_dim,),
        "attn.attn_sink": (t.num_attention_heads,),
    }
    if plan.owns_kv:
        shapes |= {"attn.compressor.norm.weight": (t.head_dim,), "attn.indexer.k_norm.weight": (t.index_head_dim,)}
    return shapes


class Attention(nnx.Module):
    """The attention sublayer. Draft stages use its parts with other rows (`dspark.py`)."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        heads = t.num_attention_heads * t.head_dim
        self.config, self.plan = config, plan
        # wq_a and wkv read the same input: one matrix, wq_a's rows first.
        self.wqkv_a = quantized("fp8_block", t.q_lora_rank + t.head_dim, t.hidden_size)
        self.wq_b = quantized("fp8_block", heads, t.q_lora_rank)
        self.wo_a = quantized("fp8_block", t.o_groups * t.o_lora_rank, heads // t.o_groups)
        self.wo_b = quantized("fp8_block", t.hidden_size, t.o_groups * t.o_lora_rank)
        self.compressor = Compressor(config, plan) if plan.owns_kv else None
        self.indexer = Indexer(config, plan) if plan.owns_indexer else None

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
        """Attend and update what the layer owns.

        Args:
            source: Cache of the layer's KV source; ignored where that is the layer itself.
            selection: What the last indexer chose.

        Returns:
            Output [B, S, D], the layer's new cache, and the selection that later layers read.
        """
        numerics = run.numerics
        layouts, ratio = Layouts.of(self.config, numerics), self.plan.ratio
        table = step.rope(self.plan.rope)
        qr, q_BSHK, kv_BSK = self.project(x_BSD, vectors, table, numerics)
        run.tap("qr", qr)
        run.tap("q", q_BSHK)
        window, cache = self.window(kv_BSK, vectors, step, cache, run)
        compressed = index = None
        if ratio:
            if self.compressor is not None:
                assert self.indexer is not None
                latent = self.compressor(x_BSD, vectors, step, cache, numerics)
                run.tap("latent", latent.values)
                keys = self.indexer.keys(latent.values, vectors, numerics)
                cache = self.compressor.store(latent, keys, step, layouts)
                source = cache
            assert source is not None and source.compressed is not None and source.index_keys is not None
            if self.indexer is not None:
                keys = layouts.index_key.decode(step.gather_pool(source.index_keys))
                selection = self.indexer(x_BSD, qr, keys, step, selection, layouts, run)
            assert selection is not None
            run.tap("entries", selection.entries)
            compressed = Rows.flat(source.compressed, layouts.compressed)
            index = step.pool_index(selection.entries, ratio)
            index = index.reshape(-1, index.shape[-1])
        b, s, h, k = q_BSHK.shape
        with jax.named_scope("sparse_attention"):
            out = sparse_attention(
                q_BSHK.reshape(b * s, h, k),
                window,
                step.window_index,
                compressed,
                index,
                vectors["attn.attn_sink"],
                numerics.batch_invariant,
            )
        run.tap("heads", out.reshape(b, s, h, k))
        return self.output(out.reshape(b, s, h, k), table, numerics), cache, selection

    def project(
        self, x_BSD: jax.Array, vectors: Vectors, table: tuple[jax.Array, jax.Array], numerics: Numerics
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Low-rank query [B, S, R], rotated queries [B, S, H, K] and window KV [B, S, K] before its norm."""
        t = self.config.text_config
        qr, kv = jnp.split(quantized_linear(x_BSD, self.wqkv_a[...], numerics), [t.q_lora_rank], axis=-1)
        qr = rms_norm(qr, vectors["attn.q_norm.weight"], t.rms_norm_eps, numerics.batch_invariant)
        q = quantized_linear(qr, self.wq_b[...], numerics)
        q_BSHK = rope(q.reshape(*q.shape[:-1], t.num_attention_heads, t.head_dim), table)
        return qr, q_BSHK, kv

    def window(
        self, kv_BSK: jax.Array, vectors: Vectors, step: Step, cache: LayerCache, run: Run
    ) -> tuple[Rows, LayerCache]:
        """The rows that `step.window_index` points into, and the cache with the new rows in its ring."""
        layouts, table = Layouts.of(self.config, run.numerics), step.rope(self.plan.rope)
        index = step.ring_index(cache.window.shape[1])
        rows, ring = self.window_rows(kv_BSK, vectors, table, layouts, run.numerics, index, cache.window)
        run.tap("kv", layouts.window.decode(rows))
        pool = ring if step.in_place else jnp.concatenate([cache.window[step.slots], rows], axis=1)
        return Rows.flat(pool, layouts.window), dataclasses.replace(cache, window=ring)

    def window_rows(
        self,
        kv_BSK: jax.Array,
        vectors: Vectors,
        table: tuple[jax.Array, jax.Array],
        layouts: Layouts,
        numerics: Numerics,
        index_BS: jax.Array,
        ring: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Window KV as the cache stores it, [B, S, stored], and the ring with it written."""
        return finish_rows(
            kv_BSK,
            vectors["attn.kv_norm.weight"],
            table,
            layouts.window,
            self.config.text_config.rms_norm_eps,
            index_BS,
            ring,
            invariant=numerics.batch_invariant,
            backend=numerics.kernels.finish_rows,
        )

    def window_kv(self, x_BSD: jax.Array, numerics: Numerics) -> jax.Array:
        """Window KV [B, S, K] before its norm: what a draft stage keeps of the target's features."""
        return quantized_linear(x_BSD, self.wqkv_a[...], numerics)[..., self.config.text_config.q_lora_rank :]

    def output(self, out_BSHK: jax.Array, table: tuple[jax.Array, jax.Array], numerics: Numerics) -> jax.Array:
        """Heads, rotated back, to the residual width: [B, S, D]."""
        out = rope(out_BSHK, table, inverse=True)
        groups = self.config.text_config.o_groups
        out = out.reshape(*out.shape[:2], -1)
        out = grouped_output_linear(out, self.wo_a[...], groups, numerics)
        return quantized_linear(out, self.wo_b[...], numerics)


@dataclasses.dataclass(frozen=True)
class Latents:
    """One latent per token: the group that ends there, meaningful where it is complete.

    Attributes:
        values: [B, S, K], not rotated.
        entries: int32[B, S] entry number, -1 where no group ends.
        cache: The layer's cache with the compressor's own rows updated.
    """

    values: jax.Array
    entries: jax.Array
    cache: LayerCache


class Compressor(nnx.Module):
    """Pools `ratio` tokens into one latent by a softmax per channel; for ratio 1 a plain projection."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        self.config, self.plan = config, plan
        # wkv, then wgate (ratio > 1).
        self.w = param(((2 if plan.ratio > 1 else 1) * t.head_dim, t.hidden_size))

    def __call__(
        self, x_BSD: jax.Array, vectors: Vectors, step: Step, cache: LayerCache, numerics: Numerics
    ) -> Latents:
        t, ratio, invariant = self.config.text_config, self.plan.ratio, numerics.batch_invariant
        if ratio == 1:
            pooled = linear(x_BSD, self.w[...], invariant=invariant)
        else:
            # float32: the release upcasts this projection.
            rows = linear(x_BSD, self.w[...], jnp.float32, invariant).reshape(*x_BSD.shape[:2], 2, t.head_dim)
            assert cache.pending is not None
            flat = cache.pending.reshape(*cache.pending.shape[:2], -1)
            index = step.ring_index(flat.shape[1])
            pending = write_rows(flat, index, rows.reshape(*rows.shape[:2], -1)).reshape(cache.pending.shape)
            # The ring holds a short call's rows beside those before it, so it can be read after the write, which then
            # needs no copy of it.
            short = x_BSD.shape[1] <= ROLLBACK
            before = step.before(pending if short else cache.pending, ratio - 1)
            run = jnp.concatenate([before, rows], axis=1)
            group = jnp.stack([run[:, i : i + x_BSD.shape[1]] for i in range(ratio)], axis=2)
            pooled = pool(group[..., 0, :], group[..., 1, :], invariant).astype(x_BSD.dtype)
            cache = dataclasses.replace(cache, pending=pending)
        values = rms_norm(pooled, vectors["attn.compressor.norm.weight"], t.rms_norm_eps, invariant)
        complete = step.valid & ((step.positions + 1) % ratio == 0)
        return Latents(values, jnp.where(complete, step.positions // ratio, -1), cache)

    def store(self, latent: Latents, keys_BSK: jax.Array, step: Step, layouts: Layouts) -> LayerCache:
        """Rotate, quantise and write compressed KV and index keys of the groups that are complete."""
        ratio, cache = self.plan.ratio, latent.cache
        assert cache.compressed is not None and cache.index_keys is not None
        table = step.rope("yarn", ratio - 1)
        index = step.pool_index(latent.entries, ratio)
        kv = layouts.compressed.encode(rope(latent.values, table))
        keys = layouts.index_key.encode(rope(keys_BSK, table))
        return dataclasses.replace(
            cache,
            compressed=write_rows(cache.compressed, index, kv),
            index_keys=write_rows(cache.index_keys, index, keys),
        )


def pool(values: jax.Array, gates: jax.Array, invariant: bool) -> jax.Array:
    """Softmax-weighted sum over axis 2 (the tokens of a group), float32."""
    if not invariant:
        return jnp.sum(values * jax.nn.softmax(gates, axis=2), axis=2)
    e = alone(jnp.exp, gates - jnp.max(gates, axis=2, keepdims=True))
    return sum_few(fence(values * (e / sum_few(e, 2)[:, :, None])), 2)


class Indexer(nnx.Module):
    """Chooses which compressed entries each query attends to."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        t = config.text_config
        self.config, self.plan = config, plan
        self.wq_b = quantized("fp8_block", t.index_n_heads * t.index_head_dim, t.q_lora_rank)
        self.weights_proj = param((t.index_n_heads, t.hidden_size))
        self.wk = param((t.index_head_dim, t.head_dim)) if plan.owns_kv else None

    def keys(self, latent_BSK: jax.Array, vectors: Vectors, numerics: Numerics) -> jax.Array:
        """Index keys [B, S, index_head_dim] of un-rotated latents, not rotated yet."""
        assert self.wk is not None
        eps = self.config.text_config.rms_norm_eps
        invariant = numerics.batch_invariant
        keys = linear(latent_BSK, self.wk[...], invariant=invariant)
        return rms_norm(keys, vectors["attn.indexer.k_norm.weight"], eps, invariant)

    def queries(
        self, x_BSD: jax.Array, qr_BSR: jax.Array, step: Step, numerics: Numerics
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated index queries [B, S, H, index_head_dim] and scaled head weights [B, S, H]."""
        t = self.config.text_config
        q = quantized_linear(qr_BSR, self.wq_b[...], numerics)
        q = rope(q.reshape(*q.shape[:-1], t.index_n_heads, t.index_head_dim), step.rope("yarn"))
        # The scale is applied in float32: a bfloat16 constant would round it first.
        scale = np.float32(t.index_head_dim**-0.5 * t.index_n_heads**-0.5)
        weights = linear(x_BSD, self.weights_proj[...], invariant=numerics.batch_invariant)
        return q, (weights.astype(jnp.float32) * scale).astype(x_BSD.dtype)

    def __call__(
        self,
        x_BSD: jax.Array,
        qr_BSR: jax.Array,
        keys_BNK: jax.Array,
        step: Step,
        selection: Selection | None,
        layouts: Layouts,
        run: Run,
    ) -> Selection:
        t, plan = self.config.text_config, self.plan
        q, weights = self.queries(x_BSD, qr_BSR, step, run.numerics)
        run.tap("index_q", q)
        run.tap("index_weights", weights)
        limited = plan.candidates == "limited"
        assert not limited or selection is not None
        with jax.named_scope("select_entries"):
            return select_entries(
                layouts.index_key.round_trip(q),
                keys_BNK,
                weights,
                step.visible(plan.ratio),
                top_k=t.index_topk,
                block_size=t.candidate_block_size,
                publish_blocks=t.candidate_topk_blocks if plan.candidates == "publishes" else None,
                limit_blocks=selection.blocks if limited and selection is not None else None,
                invariant=run.numerics.batch_invariant,
            )
