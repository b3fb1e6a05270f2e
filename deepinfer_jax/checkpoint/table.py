"""The tensor table: every tensor of a checkpoint, derived from the configuration.

The only place that knows the names of the files. Each entry says where its values go in the weight tree, so the
reader, the writer, `inspect` and the memory estimate are all walks over this table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.formats import QuantizedTensor, WeightFormat, weight_bytes
from deepinfer_jax.layer_plan import LayerPlan
from deepinfer_jax.model.block import Block
from deepinfer_jax.model.hyper_connection import SITES
from deepinfer_jax.model.moe import expert_counts
from deepinfer_jax.model.v41 import IMAGE_DELIMITERS, V41
from deepinfer_jax.parallel.mesh import is_split

TRANSFORM_VERSION = 2
"""Raise when the same files would give another weight tree: saved trees of older versions are then made anew."""

ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the files and its place in the weight tree.

    Attributes:
        name, dtype, shape: As in the file (safetensors' names of dtypes).
        scale: Name of the tensor with its scales, or None.
        component: What `inspect` counts it under.
        path: Leaf of the weight tree.
        lead: Range on the leaf's leading axis (an expert, a table's rows, a stacked layer), or None.
        offset: First element within what follows the leading axis, flattened.
        transform: `copy`: same values and dtype. `bytes`: raw bytes into a quantised record. `float32`: cast.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: str | None
    component: str
    path: Path
    lead: tuple[int, int] | None
    offset: int
    transform: Literal["copy", "bytes", "float32"]

    @property
    def nbytes(self) -> int:
        """Payload bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def width(self) -> int:
        """Elements of the leaf that one step of the leading axis takes."""
        count = math.prod(self.shape)
        return count if self.lead is None else count // (self.lead[1] - self.lead[0])


@functools.lru_cache(maxsize=8)
def tensor_table(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor that a checkpoint of `config` holds, in the order of the model."""
    model = V41(config)
    t = config.text_config
    build = _Builder()
    build.plain("embed.weight", "BF16", (t.vocab_size, t.hidden_size), ("embed",), "embedding")
    if config.image_token_id is not None:
        # Delimiters of image spans: part of the text checkpoint, with or without the tower.
        for name in IMAGE_DELIMITERS:
            build.vector(name, "BF16", ("vectors",), model.vectors, name, "embedding")
    for plan, block in zip(config.layers, model.layers, strict=True):
        _block(build, config, plan, block, f"layers.{plan.index}.", ("layers", plan.index))
    build.vector("norm.weight", "BF16", ("vectors",), model.vectors, "norm.weight", "head")
    build.plain("head.weight", "BF16", (t.vocab_size, t.hidden_size), ("head",), "head")
    if model.mtp is not None:
        _draft(build, config, model)
    if model.vision is not None:
        _vision(build, config, model)
    return tuple(build.specs)


def leaf_shapes(config: ModelConfig) -> dict[Path, jax.ShapeDtypeStruct | QuantizedTensor]:
    """The leaves of the weight tree by path, quantised weights as one."""
    flat = jax.tree_util.tree_flatten_with_path(
        nnx.to_pure_dict(nnx.split(V41(config))[1]), is_leaf=lambda x: isinstance(x, QuantizedTensor)
    )[0]
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


class _Builder:
    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []

    def plain(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        path: Path,
        component: str,
        *,
        lead: tuple[int, int] | None = None,
        offset: int = 0,
    ) -> None:
        self.specs.append(TensorSpec(name, dtype, shape, None, component, path, lead, offset, "copy"))

    def vector(
        self,
        name: str,
        dtype: str,
        path: Path,
        vectors: object,
        key: str,
        component: str,
        *,
        shape: tuple[int, ...] | None = None,
        lead: tuple[int, int] | None = None,
    ) -> None:
        """A small vector in the packed float32 leaf of its layer."""
        start, found = next((s, shp) for k, s, shp in vectors.layout if k == key)  # type: ignore[attr-defined]
        transform = "copy" if dtype == "F32" else "float32"
        path = (*path, "data")
        self.specs.append(TensorSpec(name, dtype, shape or found, None, component, path, lead, start, transform))

    def quantized(
        self,
        name: str,
        fmt: WeightFormat,
        shape: tuple[int, int],
        path: Path,
        component: str,
        *,
        lead: tuple[int, int] | None = None,
        first_row: int = 0,
        of_rows: int | None = None,
    ) -> None:
        """`name.weight` and `name.scale`: rows `first_row` on of a record with `of_rows` rows."""
        (rows, cols), whole = shape, (of_rows or shape[0], shape[1])
        scales = weight_bytes(fmt, (rows, cols))[1]
        before, scales_before = weight_bytes(fmt, (first_row, cols))
        stored = (rows, cols // 2) if fmt == "fp4" else (rows, cols)
        scale_cols = -(-cols // 32)
        weight = TensorSpec(
            f"{name}.weight", "I8" if fmt == "fp4" else "F8_E4M3", stored, f"{name}.scale", component, path, lead,
            before, "bytes",
        )  # fmt: skip
        scale = TensorSpec(
            f"{name}.scale", "F8_E8M0", (scales // scale_cols, scale_cols), None, component, path, lead,
            weight_bytes(fmt, whole)[0] + scales_before, "bytes",
        )  # fmt: skip
        self.specs += [weight, scale]


def _block(build: _Builder, config: ModelConfig, plan: LayerPlan, block: Block, prefix: str, path: Path) -> None:
    t = config.text_config
    group = "draft" if plan.draft else "layers"
    _attention(build, config, plan, block, prefix, path, f"{group}: attention")
    _moe(build, config, plan, block, prefix, path, group)
    for norm in ("attn_norm.weight", "ffn_norm.weight"):
        build.vector(prefix + norm, "BF16", (*path, "vectors"), block.vectors, norm, f"{group}: norms, mixes")
    mix, width = t.hc_mult * (t.hc_mult + 2), t.hc_mult * t.hidden_size
    for i, site in enumerate(SITES):
        part = f"{group}: norms, mixes"
        build.plain(f"{prefix}hc_{site}_fn", "F32", (mix, width), (*path, "hc", "fn"), part, offset=i * mix * width)
        for name in (f"hc_{site}_base", f"hc_{site}_scale"):
            build.vector(prefix + name, "F32", (*path, "vectors"), block.vectors, name, part)
    if plan.engram is not None:
        rows, columns = t.engram_num_embeddings[plan.engram], t.engram_columns * t.engram_head_dim
        name, part = f"{prefix}engram.embed", "engram: tables"
        lead, scales = (0, rows), t.engram_head_dim // 32
        where = (*path, "engram", "embed")
        build.specs += [
            TensorSpec(f"{name}.weight", "F8_E4M3", (rows, t.engram_head_dim), f"{name}.scale", part, where, lead, 0,
                       "bytes"),
            TensorSpec(f"{name}.scale", "F8_E8M0", (rows, scales), None, part, where, lead, t.engram_head_dim, "bytes"),
        ]  # fmt: skip
        shape = (t.hidden_size * (t.hc_mult + 1), columns)
        build.quantized(f"{prefix}engram.wkv", "fp8_block", shape, (*path, "engram", "wkv"), "engram: projections")
        for name in ("engram.q_weight", "engram.k_weight"):
            build.vector(prefix + name, "BF16", (*path, "vectors"), block.vectors, name, "engram: projections")


def _attention(
    build: _Builder, config: ModelConfig, plan: LayerPlan, block: Block, prefix: str, path: Path, part: str
) -> None:
    t = config.text_config
    prefix, at, d = f"{prefix}attn.", (*path, "attn"), t.hidden_size
    heads = t.num_attention_heads * t.head_dim
    fused = t.q_lora_rank + t.head_dim
    build.quantized(f"{prefix}wq_a", "fp8_block", (t.q_lora_rank, d), (*at, "wqkv_a"), part, of_rows=fused)
    build.quantized(f"{prefix}wq_b", "fp8_block", (heads, t.q_lora_rank), (*at, "wq_b"), part)
    build.quantized(
        f"{prefix}wkv", "fp8_block", (t.head_dim, d), (*at, "wqkv_a"), part, first_row=t.q_lora_rank, of_rows=fused
    )
    rank = t.o_groups * t.o_lora_rank
    build.quantized(f"{prefix}wo_a", "fp8_block", (rank, heads // t.o_groups), (*at, "wo_a"), part)
    build.quantized(f"{prefix}wo_b", "fp8_block", (d, rank), (*at, "wo_b"), part)
    vectors = {"q_norm.weight": "BF16", "kv_norm.weight": "BF16", "attn_sink": "F32"}
    if plan.owns_kv:
        vectors |= {"compressor.norm.weight": "BF16", "indexer.k_norm.weight": "BF16"}
        shape, w = (t.head_dim, d), (*at, "compressor", "w")
        build.plain(f"{prefix}compressor.wkv.weight", "BF16", shape, w, part)
        if plan.ratio > 1:
            build.plain(f"{prefix}compressor.wgate.weight", "BF16", shape, w, part, offset=math.prod(shape))
        build.plain(f"{prefix}indexer.wk.weight", "BF16", (t.index_head_dim, t.head_dim), (*at, "indexer", "wk"), part)
    if plan.owns_indexer:
        shape = (t.index_n_heads * t.index_head_dim, t.q_lora_rank)
        build.quantized(f"{prefix}indexer.wq_b", "fp8_block", shape, (*at, "indexer", "wq_b"), part)
        where = (*at, "indexer", "weights_proj")
        build.plain(f"{prefix}indexer.weights_proj.weight", "BF16", (t.index_n_heads, d), where, part)
    for name, dtype in vectors.items():
        build.vector(prefix + name, dtype, (*path, "vectors"), block.vectors, f"attn.{name}", part)


def _moe(
    build: _Builder, config: ModelConfig, plan: LayerPlan, block: Block, prefix: str, path: Path, group: str
) -> None:
    t = config.text_config
    experts = expert_counts(config, plan)[0]
    prefix, at, d, i = f"{prefix}ffn.", (*path, "ffn"), t.hidden_size, t.moe_intermediate_size
    build.plain(f"{prefix}gate.weight", "BF16", (experts, d), (*at, "gate", "weight"), f"{group}: router")
    for name in ("gate.bias", "gate.bias_vl"):
        build.vector(prefix + name, "F32", (*path, "vectors"), block.vectors, f"ffn.{name}", f"{group}: router")
    # w1 and w3 share a record, w1's rows first.
    for e in [*range(experts), None]:
        name = f"{prefix}shared_experts" if e is None else f"{prefix}experts.{e}"
        part = f"{group}: {'shared' if e is None else 'routed'} experts"
        w13, w2 = ("shared_w13", "shared_w2") if e is None else ("w13", "w2")
        fmt: WeightFormat = "fp8_block" if e is None else "fp4"
        lead = None if e is None else (e, e + 1)
        build.quantized(f"{name}.w1", fmt, (i, d), (*at, w13), part, lead=lead, of_rows=2 * i)
        build.quantized(f"{name}.w2", fmt, (d, i), (*at, w2), part, lead=lead)
        build.quantized(f"{name}.w3", fmt, (i, d), (*at, w13), part, lead=lead, first_row=i, of_rows=2 * i)


def _draft(build: _Builder, config: ModelConfig, model: V41) -> None:
    t, mtp = config.text_config, model.mtp
    assert mtp is not None
    for m, (plan, stage) in enumerate(zip(config.draft_stages, mtp.stages, strict=True)):
        _block(build, config, plan, stage, f"mtp.{m}.", ("mtp", "stages", m))
    last, part, at = f"mtp.{len(mtp.stages) - 1}.", "draft: heads", ("mtp", "vectors")
    d = t.hidden_size
    shape = (d, d * len(t.dspark_target_layer_ids))
    build.quantized("mtp.0.main_proj", "fp8_block", shape, ("mtp", "main_proj"), part)
    build.vector("mtp.0.main_norm.weight", "BF16", at, mtp.vectors, "main_norm.weight", part)
    build.vector(f"{last}norm.weight", "BF16", at, mtp.vectors, "norm.weight", part)
    markov = (t.vocab_size, t.dspark_markov_rank)
    build.plain(f"{last}markov_head.embed.weight", "BF16", markov, ("mtp", "markov_embed"), part)
    build.plain(f"{last}markov_head.head.weight", "BF16", markov, ("mtp", "markov_head"), part)
    name = "confidence_head.proj.weight"
    build.vector(last + name, "BF16", at, mtp.vectors, name, part, shape=(1, d + t.dspark_markov_rank))


def _vision(build: _Builder, config: ModelConfig, model: V41) -> None:
    v, tower, part = config.vision_config, model.vision, "vision"
    assert v is not None and tower is not None
    d, w, at = config.text_config.hidden_size, v.hidden_size, ("vision",)
    build.plain("vision.patch_embed.proj.weight", "BF16", (w, 3 * v.patch_size**2), (*at, "patch_embed"), part)
    matrices = {
        "attn.wqkv.weight": ("wqkv", (3 * w, w)),
        "attn.wo.weight": ("wo", (w, w)),
        "mlp.w1.weight": ("w1", (2 * v.intermediate_size, w)),
        "mlp.w2.weight": ("w2", (w, v.intermediate_size)),
    }
    for b in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{b}."
        for name, (leaf, shape) in matrices.items():
            build.plain(prefix + name, "BF16", shape, (*at, leaf), part, lead=(b, b + 1))
        for name, _, _ in tower.blocks.layout:
            build.vector(prefix + name, "BF16", (*at, "blocks"), tower.blocks, name, part, lead=(b, b + 1))
    for name, _, _ in tower.vectors.layout:
        build.vector(name, "BF16", (*at, "vectors"), tower.vectors, name, part)
    build.plain("aligner.w1.weight", "BF16", (d, w * v.downsample_ratio**2), (*at, "aligner_w1"), part)
    build.plain("aligner.w2.weight", "BF16", (d, d), (*at, "aligner_w2"), part)


def memory_per_device(config: ModelConfig, devices: int) -> dict[str, int]:
    """Bytes of weights on each of `devices` devices: experts and Engram tables are split, the rest is copied."""
    total = {"split over devices": 0, "copied to each": 0}
    for path, leaf in leaf_shapes(config).items():
        array = leaf.record if isinstance(leaf, QuantizedTensor) else leaf
        size = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        if is_split(path):
            total["split over devices"] += -(-size // devices)
        else:
            total["copied to each"] += size
    return total
