"""DSpark: a drafter that proposes a block of tokens in one pass and corrects it by a Markov head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.cache import Layouts
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.block import Block
from deepinfer_jax.model.module import Vectors, param, quantized
from deepinfer_jax.model.run import Run
from deepinfer_jax.model.step import Step
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.hyper_connection import collapse
from deepinfer_jax.ops.invariant import sum_channels
from deepinfer_jax.ops.linear import linear, quantized_linear
from deepinfer_jax.ops.norm_rope import rms_norm, rope_table
from deepinfer_jax.ops.sparse_attention import dense_attention


class Draft(NamedTuple):
    """A drafted block.

    Attributes:
        tokens: int32[B, 1 + n]: the accepted token, then the n drafted ones.
        logits: float32[B, n, V]: row k is the distribution of drafted token k.
        confidence: float32[B, n]: logit that drafted token k is accepted if those before it were.
    """

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array


class DSpark(nnx.Module):
    """The draft stages (`mtp.*` in the checkpoint) and their heads."""

    def __init__(self, config: ModelConfig):
        t = config.text_config
        self.config = config
        self.main_proj = quantized("fp8_block", t.hidden_size, t.hidden_size * len(t.dspark_target_layer_ids))
        self.stages = nnx.List([Block(config, plan) for plan in config.draft_stages])
        self.markov_embed = param((t.vocab_size, t.dspark_markov_rank))
        self.markov_head = param((t.vocab_size, t.dspark_markov_rank))
        self.vectors = Vectors(
            {
                "main_norm.weight": (t.hidden_size,),
                "norm.weight": (t.hidden_size,),
                "confidence_head.proj.weight": (t.hidden_size + t.dspark_markov_rank,),
            }
        )

    def context(
        self, features_BSF: jax.Array, step: Step, rings: tuple[jax.Array, ...], numerics: Numerics
    ) -> tuple[jax.Array, ...]:
        """Write the stages' window KV for the positions of the step, from the target's features."""
        layouts = Layouts.of(self.config, numerics)
        m = quantized_linear(features_BSF, self.main_proj[...], numerics)
        eps = self.config.text_config.rms_norm_eps
        m = rms_norm(m, self.vectors["main_norm.weight"], eps, numerics.batch_invariant)
        out = []
        for stage, ring in zip(self.stages, rings, strict=True):
            kv, index = stage.attn.window_kv(m, numerics), step.ring_index(ring.shape[1])
            out.append(stage.attn.window_rows(kv, stage.vectors, step.rope("plain"), layouts, numerics, index, ring)[1])
        return tuple(out)

    def draft(
        self,
        tokens_B: jax.Array,
        positions_B: jax.Array,
        slots_B: jax.Array,
        rings: tuple[jax.Array, ...],
        embed_VD: jax.Array,
        head_VD: jax.Array,
        choose: Callable[[jax.Array, int], jax.Array],
        run: Run,
    ) -> Draft:
        """One block after the accepted token at `positions_B`; features of all earlier positions are in `rings`.

        Args:
            choose: (logits[B, V], k) -> token ids [B] of draft step k.
        """
        t, numerics = self.config.text_config, run.numerics
        n = t.dspark_block_size
        noise = jnp.full((tokens_B.shape[0], n - 1), t.dspark_noise_token_id, tokens_B.dtype)
        h = embed_VD[jnp.concatenate([tokens_B[:, None], noise], axis=1)].astype(numerics.dtype)
        h, pre = to_streams(h, t.hc_mult)
        positions = positions_B[:, None] + jnp.arange(n, dtype=jnp.int32)[None, :]
        table = rope_table(positions, t, "plain")
        everywhere = jnp.ones(positions.shape, bool)
        for m, (stage, ring) in enumerate(zip(self.stages, rings, strict=True)):
            with jax.named_scope(f"mtp_{m}"):
                h, pre = stage(
                    h,
                    pre,
                    lambda x, stage=stage, ring=ring: self._attend(
                        stage, x, table, ring, positions_B, slots_B, numerics
                    ),
                    everywhere,
                    ~everywhere,
                    run.at(f"mtp.{m}"),
                )
        invariant = numerics.batch_invariant
        y = collapse(h, pre, invariant)
        normed = rms_norm(y, self.vectors["norm.weight"], t.rms_norm_eps, invariant)
        return self._markov(tokens_B, y, linear(normed, head_VD, jnp.float32, invariant), choose, invariant)

    def _attend(
        self,
        stage: Block,
        x_BND: jax.Array,
        table: tuple[jax.Array, jax.Array],
        ring: jax.Array,
        positions_B: jax.Array,
        slots_B: jax.Array,
        numerics: Numerics,
    ) -> jax.Array:
        """All queries of the block see the window before it and the whole block: no mask inside."""
        window = self.config.text_config.sliding_window
        layouts = Layouts.of(self.config, numerics)
        _, q, kv = stage.attn.project(x_BND, stage.vectors, table, numerics)
        position = positions_B[:, None] - window + jnp.arange(window)[None, :]
        # The block's own rows are attended to, not kept.
        nowhere = jnp.full(kv.shape[:2], -1, jnp.int32)
        new, _ = stage.attn.window_rows(kv, stage.vectors, table, layouts, numerics, nowhere, ring[:0])
        old = ring[slots_B[:, None], position % ring.shape[1]]
        rows = layouts.window.decode(jnp.concatenate([old, new], axis=1))
        valid = jnp.concatenate([position >= 0, jnp.ones(kv.shape[:2], bool)], axis=1)
        valid = jnp.broadcast_to(valid[:, None, :], (*kv.shape[:2], rows.shape[1]))
        out = dense_attention(q, rows, valid, stage.vectors["attn.attn_sink"], numerics.batch_invariant)
        return stage.attn.output(out, table, numerics)

    def _markov(
        self,
        tokens_B: jax.Array,
        y_BND: jax.Array,
        base_BNV: jax.Array,
        choose: Callable[[jax.Array, int], jax.Array],
        invariant: bool,
    ) -> Draft:
        """Tokens one after the other: each adds a low-rank term to the logits of the next."""
        tokens, logits, confidence = [tokens_B], [], []
        proj = self.vectors["confidence_head.proj.weight"]
        for k in range(y_BND.shape[1]):
            e = self.markov_embed[...][tokens[-1]].astype(y_BND.dtype)
            logits.append(base_BNV[:, k] + linear(e, self.markov_head[...], jnp.float32, invariant))
            # The stream before the norm, as the release has it.
            joined = jnp.concatenate([y_BND[:, k], e], axis=-1).astype(jnp.float32)
            terms = joined * proj[None]
            confidence.append(sum_channels(terms) if invariant else jnp.sum(terms, axis=-1))
            tokens.append(choose(logits[-1], k).astype(tokens_B.dtype))
        return Draft(jnp.stack(tokens, 1), jnp.stack(logits, 1), jnp.stack(confidence, 1))


def to_streams(x_BSD: jax.Array, streams: int) -> tuple[jax.Array, jax.Array]:
    """Embeddings copied into every stream, and collapse weights that pick the first one."""
    h = jnp.broadcast_to(x_BSD[:, :, None], (*x_BSD.shape[:2], streams, x_BSD.shape[-1]))
    pre = jnp.zeros((*x_BSD.shape[:2], streams), jnp.float32).at[..., 0].set(1)
    return h, pre
