"""Checking a checkpoint against golden outputs of another implementation.

A `golden.npz` holds `ids` and, per numerics tag, `logits`, `feats`, `draft_ids`, `draft_logits`, `confidence`; and
`vl.*` for one image. Any subset will do.
"""

from __future__ import annotations

import dataclasses
import functools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from deepinfer_jax.cache import CacheState, init_cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.images import Patches
from deepinfer_jax.model.v41 import Batch, ImageRows, Output, Params, draft, draft_context, forward
from deepinfer_jax.numerics import NAMED, Numerics
from deepinfer_jax.parallel.mesh import Layout, make_mesh, param_shardings, param_specs
from deepinfer_jax.prompt import expand_images, image_rows

TOLERANCE = 1e-4
_MEDIAN = 1e-5
_SHARE = 0.9
_LOOSE_ARGMAX = 0.6


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array against its golden; a position is a row of the last axis.

    Attributes:
        tag, what: Which golden.
        largest, median: Over positions, of the largest absolute difference in each.
        agreement: Share of positions with equal argmax (equal ids for drafts), or None.
        first: (sequence, position) of the first difference beyond the tolerance, or None.
        passed: The verdict.
        rule: The rule behind the verdict.
    """

    tag: str
    what: str
    largest: float
    median: float
    agreement: float | None
    first: tuple[int, ...] | None
    passed: bool
    rule: str


def read_golden(path: str | Path) -> dict[str, np.ndarray]:
    """Arrays of a `golden.npz`, or of the one in a directory. Raises InputError."""
    path = Path(path)
    path = path / "golden.npz" if path.is_dir() else path
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            golden = dict(data)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path}: not a readable npz file: {error}") from None
    if "ids" not in golden or golden["ids"].ndim != 2:
        raise InputError(f"{path}: expected an array `ids` of shape (batch, length), found {sorted(golden)[:8]}")
    return golden


def compare(
    params: Params,
    config: ModelConfig,
    golden: dict[str, np.ndarray],
    *,
    tags: tuple[str, ...] | None = None,
    chunk: int | None = None,
    tolerance: float = TOLERANCE,
    strict: bool = False,
    mesh: Mesh | None = None,
) -> Iterator[Comparison]:
    """Run every golden that is there and compare.

    In `fp32` every position must lie within the tolerance. With round trips a value at the edge of a bin may fall to
    the other side and move its position and those that read it: there the median must be at most 1e-5 and 90 % of the
    positions within the tolerance (or all, with `strict`). bfloat16 is compared by argmax: at least 60 %.

    Args:
        tags: Numerics to run; by default those found.
        chunk: Cut sequences into calls of this many tokens.
        mesh: Devices to run on, one by default.
    """
    mesh = make_mesh() if mesh is None else mesh
    params = jax.device_put(params, param_shardings(params, mesh))
    found = tuple(t for t in NAMED if f"{t}.logits" in golden)
    for tag in found if tags is None else tags:
        if tag not in found:
            raise InputError(f"golden.npz has no {tag}.logits; it has {', '.join(found) or 'no tag'}")
        yield from _compare_tag(params, config, golden, tag, chunk, tolerance, strict, mesh)
    if "vl.logits" in golden and config.vision_config is not None and (tags is None or "fp32_kv" in tags):
        yield from _compare_image(params, config, golden, chunk, tolerance, strict, mesh)


def run_sequences(
    params: Params,
    config: ModelConfig,
    ids: np.ndarray,
    numerics: Numerics,
    *,
    chunk: int | None = None,
    images: ImageRows | None = None,
    layout: Layout | None = None,
) -> tuple[Output, CacheState, Batch]:
    """Logits and features of whole sequences [B, S], in one call or in chunks, and the drafter fed with them."""
    batch_size, length = ids.shape
    layout = Layout.of(make_mesh(), batch_size) if layout is None else layout
    local = batch_size // layout.shards
    cache = jax.jit(layout.spmd(lambda: init_cache(config, numerics, local, length), (), layout.rows))()
    # Slots are numbered on each device.
    slots = jnp.arange(batch_size, dtype=jnp.int32) % local
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    whole = Batch(jnp.asarray(ids, jnp.int32), positions, slots, images)
    logits, features = [], []
    for start in range(0, length, chunk or length):
        part = slice(start, start + (chunk or length))
        shown = None if images is None else ImageRows(images.table, images.index[:, part])
        batch = Batch(whole.tokens[:, part], positions[:, part], slots, shown)
        out, cache = _advance(params, config, batch, cache, numerics, layout)
        logits.append(out.logits)
        features.append(out.features)
    joined = jnp.concatenate(features, axis=1) if config.draft_stages else None
    return Output(jnp.concatenate(logits, axis=1), joined), cache, whole


def _fill(rows: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Rows [B, ...] and as many copies of the last one as the mesh needs to have the same number everywhere."""
    extra = -len(rows) % mesh.shape["data"]
    return np.concatenate([rows, np.repeat(rows[-1:], extra, axis=0)])


@functools.partial(jax.jit, static_argnums=(1, 4, 5))
def _advance(params: Params, config: ModelConfig, batch: Batch, cache: CacheState, numerics: Numerics, layout: Layout):
    exchange, rows = layout.exchange, layout.rows

    def share(params: Params, batch: Batch, cache: CacheState):
        out, cache = forward(params, config, batch, cache, numerics=numerics, exchange=exchange)
        if out.features is not None:
            cache = draft_context(params, config, out.features, batch, cache, numerics=numerics)
        return out, cache

    images = None if batch.images is None else ImageRows(P(), rows)  # type: ignore[arg-type]
    specs = (param_specs(params, layout.mesh.size), Batch(rows, rows, rows, images), rows)  # type: ignore[arg-type]
    return layout.spmd(share, specs, rows)(params, batch, cache)


@functools.partial(jax.jit, static_argnums=(1, 6, 7))
def _draft(
    params: Params, config: ModelConfig, tokens, positions, slots, cache: CacheState, numerics: Numerics, layout: Layout
):
    def share(params: Params, tokens, positions, slots, cache: CacheState):
        return draft(params, config, tokens, positions, slots, cache, numerics=numerics, exchange=layout.exchange)

    specs = (param_specs(params, layout.mesh.size), *[layout.rows] * 4)
    return layout.spmd(share, specs, layout.rows)(params, tokens, positions, slots, cache)


def _compare_tag(
    params: Params,
    config: ModelConfig,
    golden: dict,
    tag: str,
    chunk: int | None,
    tolerance: float,
    strict: bool,
    mesh: Mesh,
) -> Iterator[Comparison]:
    numerics, ids = Numerics.named(tag), golden["ids"]
    filled = _fill(ids, mesh)
    layout = Layout.of(mesh, len(filled))
    out, cache, batch = run_sequences(params, config, filled, numerics, chunk=chunk, layout=layout)
    out = jax.tree.map(lambda rows: rows[: len(ids)], out)
    judge = functools.partial(_judge, tag=tag, tolerance=tolerance, strict=strict)
    yield judge(out.logits, golden[f"{tag}.logits"], what="logits", argmax=True)
    moved = np.zeros(len(ids), bool)
    if out.features is not None and f"{tag}.feats" in golden:
        yield judge(out.features, golden[f"{tag}.feats"], what="features", argmax=False)
        window = config.text_config.sliding_window
        moved = (_rows(out.features, golden[f"{tag}.feats"])[:, -window:] > tolerance).any(axis=1)
    if config.draft_stages and f"{tag}.draft_ids" in golden:
        want = golden[f"{tag}.draft_ids"]
        tokens, end = _fill(want[:, 0].astype(np.int32), mesh), np.full(len(filled), ids.shape[1], np.int32)
        drafted = _draft(params, config, tokens, end, batch.slots, cache, numerics, layout)
        drafted = jax.tree.map(lambda rows: rows[: len(ids)], drafted)
        # A draft that reads a moved feature says nothing about the drafter: it is left out, or only reported when
        # there is no other.
        keep = np.ones(len(ids), bool) if tag == "fp32" or strict else ~moved
        only_moved = not keep.any()
        keep |= only_moved
        same = float((np.asarray(drafted.tokens) == want)[keep].mean())
        for what, got in (("draft logits", drafted.logits), ("confidence", drafted.confidence[..., None])):
            gold = golden[f"{tag}.{'draft_logits' if what == 'draft logits' else 'confidence'}"]
            gold = gold if what == "draft logits" else gold[..., None]
            result = judge(np.asarray(got)[keep], gold[keep], what=what, argmax=False)
            if what == "draft logits":
                ids_equal = same == 1.0 or tag.startswith("bf16")
                result = dataclasses.replace(result, agreement=same, passed=result.passed and ids_equal)
            if only_moved:
                result = dataclasses.replace(result, passed=True, rule="reported only")
            yield result


def _compare_image(
    params: Params, config: ModelConfig, golden: dict, chunk: int | None, tolerance: float, strict: bool, mesh: Mesh
) -> Iterator[Comparison]:
    numerics = Numerics.named("fp32_kv")
    rows, cols, at, span = (int(v) for v in golden["vl.grid"])
    image = Patches(golden["vl.patches"].astype(np.float32), rows, cols)
    ids = golden["vl.ids"][0]
    prompt = expand_images([*ids[: at + 1], *ids[at + span :]], [image], config)
    if not np.array_equal(prompt.ids, ids):
        raise InputError("golden.npz: vl.ids does not hold the span of a grid of vl.grid")
    table = image_rows(params, config, [image], numerics)
    judge = functools.partial(_judge, tag="image", tolerance=tolerance, strict=strict)
    yield judge(table[None, 3:], golden["vl.features"][None], what="vision features", argmax=False)
    images = ImageRows(table, jnp.asarray(_fill(prompt.image_index[None], mesh)))
    filled = _fill(prompt.ids[None], mesh)
    layout = Layout.of(mesh, len(filled))
    out, _, _ = run_sequences(params, config, filled, numerics, chunk=chunk, images=images, layout=layout)
    assert out.logits is not None
    yield judge(out.logits[:1], golden["vl.logits"], what="logits", argmax=True)


def _rows(got: object, want: np.ndarray) -> np.ndarray:
    """Largest absolute difference in each position; a value that is not finite counts as infinite."""
    difference = np.abs(np.asarray(got, np.float32) - want)
    return np.where(np.isfinite(difference), difference, np.inf).max(axis=-1)


def _judge(
    got: object, want: np.ndarray, *, tag: str, what: str, argmax: bool, tolerance: float, strict: bool
) -> Comparison:
    got = np.asarray(got, np.float32)
    if got.shape != want.shape:
        raise InputError(f"golden.npz: {tag} {what} has shape {want.shape}, this model gives {got.shape}")
    rows = _rows(got, want)
    agreement = float((got.argmax(-1) == want.argmax(-1)).mean()) if argmax else None
    beyond = np.argwhere(rows > tolerance)
    if tag.startswith("bf16"):
        rule = f"argmax >= {_LOOSE_ARGMAX:.0%}" if argmax else "reported only"
        passed = agreement is None or agreement >= _LOOSE_ARGMAX
    elif tag == "fp32" or what == "vision features" or strict:
        rule, passed = f"all <= {tolerance:g}", not len(beyond)
    else:
        rule = f"median <= {_MEDIAN:g}, {_SHARE:.0%} <= {tolerance:g}"
        passed = bool(np.median(rows) <= _MEDIAN and (rows <= tolerance).mean() >= _SHARE)
    passed = passed and bool(np.isfinite(rows).all())
    first = tuple(int(i) for i in beyond[0]) if len(beyond) else None
    return Comparison(tag, what, float(rows.max()), float(np.median(rows)), agreement, first, passed, rule)
