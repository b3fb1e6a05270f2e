"""Engram: a hashed n-gram memory that is added to the streams before two of the layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax import engram_hash
from deepinfer_jax.cache import CacheState
from deepinfer_jax.config import ModelConfig, engram_primes
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.module import Vectors, quantized
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Step
from deepinfer_jax.ops.engram import addresses, engram_gate
from deepinfer_jax.ops.linear import quantized_linear
from deepinfer_jax.ops.rows import write_rows

TABLE_MULTIPLE = 64
"""The tables' rows are padded to a multiple of this, so that any number of devices up to it can share them."""


def engram_vectors(config: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Small vectors of the Engram part of a layer."""
    if plan.engram is None:
        return {}
    shape = (config.text_config.hc_mult, config.text_config.hidden_size)
    return {"engram.q_weight": shape, "engram.k_weight": shape}


class Engram(nnx.Module):
    """Table, projection and gate of one Engram layer."""

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        assert plan.engram is not None
        t = config.text_config
        self.config = config
        self.rows = -(-t.engram_num_embeddings[plan.engram] // TABLE_MULTIPLE) * TABLE_MULTIPLE
        self.embed = quantized("fp8_row", 1, t.engram_head_dim, (self.rows,))
        self.wkv = quantized("fp8_block", t.hidden_size * (t.hc_mult + 1), t.engram_columns * t.engram_head_dim)

    def __call__(
        self, h_BSCD: jax.Array, rows_BSK: jax.Array, vectors: Vectors, open_BS: jax.Array, run: Run
    ) -> jax.Array:
        """Streams plus memory. `rows_BSK` are table rows; the gate is shut where `open_BS` is False."""
        t = self.config.text_config
        run.tap("engram.rows", rows_BSK)
        table = self.embed[...]
        packed = isinstance(table, QuantizedTensor)
        # A plain table (for training) is [rows, 1, width], as its quantised form decodes.
        data = table.record if packed else table[:, 0]
        picked = run.exchange.lookup(data, rows_BSK.reshape(-1, rows_BSK.shape[-1]), self.rows)
        # Rows are bfloat16 after the lookup in every mode; e4m3 times a power of two is exact in it.
        if packed:
            memory = QuantizedTensor(picked, table.fmt, table.shape).decode(h_BSCD.dtype)
        else:
            memory = picked.astype(h_BSCD.dtype)
        kv = quantized_linear(memory.reshape(*rows_BSK.shape[:2], -1), self.wkv[...], run.numerics)
        key, value = jnp.split(kv, [t.hc_mult * t.hidden_size], axis=-1)
        qk = vectors["engram.q_weight"] * vectors["engram.k_weight"]
        out = engram_gate(
            h_BSCD, key.reshape(h_BSCD.shape), value, qk, open_BS, t.rms_norm_eps, run.numerics.batch_invariant
        )
        run.tap("engram.out", out)
        return out


def lookback_rows(
    config: ModelConfig, token_map: jax.Array, tokens_BS: jax.Array, step: Step, cache: CacheState
) -> tuple[list[jax.Array], jax.Array]:
    """Table rows [B, S, columns] per Engram layer, and the updated history of compressed ids."""
    t = config.text_config
    size = t.engram_max_ngram_size
    assert cache.engram is not None
    ids = jnp.where(step.image_mask, -1, token_map[tokens_BS])
    run = jnp.concatenate([step.before(cache.engram, size - 1), ids], axis=1)
    blocked = jnp.zeros_like(step.valid)
    lookback = []
    for k in range(size):
        source = run[:, size - 1 - k : size - 1 - k + ids.shape[1]]
        blocked = blocked | (step.positions < k) | (source < 0)
        lookback.append(jnp.where(blocked, token_map[t.engram_pad_token_id], source))
    layers = t.engram_layer_ids
    rows = addresses(
        jnp.stack(lookback, axis=-1),
        engram_primes(t),
        engram_hash.multipliers(layers, size, t.engram_compressed_vocab_size),
        t.engram_n_heads,
    )
    index = step.ring_index(cache.engram.shape[1])
    return rows, write_rows(cache.engram[..., None], index, ids[..., None])[..., 0]
