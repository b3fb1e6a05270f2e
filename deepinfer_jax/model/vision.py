"""The vision tower and the aligner: patches of one image to token features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.model.module import Vectors, param
from deepinfer_jax.ops.linear import contract
from deepinfer_jax.ops.norm_rope import rms_norm
from deepinfer_jax.ops.tiles import map_tiles

NORM_EPS = 1e-6
QUERY_TILE = 256
"""Patches whose attention scores are held at once."""


class Vision(nnx.Module):
    """Pre-norm ViT with 2-D RoPE and full attention; its blocks are stacked, since every image runs all of them."""

    def __init__(self, config: ModelConfig):
        v = config.vision_config
        assert v is not None
        d, width, depth = config.text_config.hidden_size, v.hidden_size, v.num_hidden_layers
        self.vision = v
        self.patch_embed = param((width, 3 * v.patch_size**2))
        self.wqkv = param((depth, 3 * width, width))
        self.wo = param((depth, width, width))
        self.w1 = param((depth, 2 * v.intermediate_size, width))
        self.w2 = param((depth, width, v.intermediate_size))
        self.blocks = Vectors(
            {
                "norm1.weight": (width,),
                "norm2.weight": (width,),
                "attn.wqkv.bias": (3 * width,),
                "attn.wo.bias": (width,),
            },
            (depth,),
        )
        self.aligner_w1 = param((d, width * v.downsample_ratio**2))
        self.aligner_w2 = param((d, d))
        self.vectors = Vectors(
            {
                "vision.patch_embed.proj.bias": (width,),
                "vision.norm.weight": (width,),
                "aligner.w1.bias": (d,),
                "aligner.w2.bias": (d,),
            }
        )

    def __call__(self, patches_NP: jax.Array, coords_N2: jax.Array, valid_N: jax.Array, dtype: Any) -> jax.Array:
        """Encode one image.

        Args:
            patches_NP: [cells * r * r, 3 * P * P], the r x r patches of a cell one after the other
                (`images.cell_major`); N may be padded with invalid cells.
            coords_N2: int32 (row, column) of each patch.
            valid_N: False for patches outside the image.

        Returns:
            [cells, D] features.
        """
        table = _rope_2d(coords_N2, self.vision)
        x = _dense(patches_NP.astype(dtype), self.patch_embed[...], self.vectors["vision.patch_embed.proj.bias"])

        def block(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            wqkv, wo, w1, w2, row = weights
            y = rms_norm(x, self.blocks.read(row, "norm1.weight"), NORM_EPS)
            y = self._attend(_dense(y, wqkv, self.blocks.read(row, "attn.wqkv.bias")), table, valid_N)
            x = x + _dense(y, wo, self.blocks.read(row, "attn.wo.bias"))
            gate, up = jnp.split(_dense(rms_norm(x, self.blocks.read(row, "norm2.weight"), NORM_EPS), w1), 2, axis=-1)
            return x + _dense(jax.nn.silu(gate) * up, w2), None

        stack = (self.wqkv[...], self.wo[...], self.w1[...], self.w2[...], self.blocks.data[...])
        x = rms_norm(lax.scan(block, x, stack)[0], self.vectors["vision.norm.weight"], NORM_EPS)
        return self._align(jnp.where(valid_N[:, None], x, 0))

    def _attend(self, qkv: jax.Array, table: tuple[jax.Array, jax.Array], valid_N: jax.Array) -> jax.Array:
        n, heads = qkv.shape[0], self.vision.num_attention_heads
        q, k, v = (x.reshape(n, heads, -1) for x in jnp.split(qkv, 3, axis=-1))
        q, k = _rotate(q, table), _rotate(k, table)
        precision = lax.Precision.HIGHEST if qkv.dtype == jnp.float32 else None

        def tile(q: jax.Array) -> jax.Array:
            score = jnp.einsum("qhd,khd->qhk", q, k, precision=precision, preferred_element_type=jnp.float32)
            score = jnp.where(valid_N[None, None], score * np.float32(q.shape[-1] ** -0.5), -jnp.inf)
            p = jax.nn.softmax(score, axis=-1).astype(q.dtype)
            return jnp.einsum("qhk,khd->qhd", p, v, precision=precision, preferred_element_type=jnp.float32)

        return map_tiles(tile, q, QUERY_TILE).reshape(n, -1).astype(qkv.dtype)

    def _align(self, x_NW: jax.Array) -> jax.Array:
        r = self.vision.downsample_ratio
        # Channel-major within a cell: feature = channel * r^2 + patch.
        cells = jnp.moveaxis(x_NW.reshape(-1, r * r, x_NW.shape[-1]), 1, 2).reshape(x_NW.shape[0] // (r * r), -1)
        y = jax.nn.gelu(_dense(cells, self.aligner_w1[...], self.vectors["aligner.w1.bias"]), approximate=False)
        return _dense(y, self.aligner_w2[...], self.vectors["aligner.w2.bias"])


def _dense(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    y = contract(x, w.astype(x.dtype))
    return (y if bias is None else y + bias[None]).astype(x.dtype)


def _rope_2d(coords_N2: jax.Array, v: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) float32[N, head_dim / 2]: the row turns the first half of the frequencies, the column the rest."""
    half = v.hidden_size // v.num_attention_heads // 2
    exponent = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    f = np.float32(1) / np.power(np.float64(v.rope_theta), exponent.astype(np.float64)).astype(np.float32)
    angle = (coords_N2.astype(jnp.float32)[:, :, None] * jnp.asarray(f)[None, None]).reshape(coords_N2.shape[0], -1)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_NHD: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Half-split rotation in float32."""
    cos, sin = table[0][:, None], table[1][:, None]
    a, b = jnp.split(x_NHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_NHD.dtype)
