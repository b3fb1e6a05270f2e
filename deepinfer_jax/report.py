"""Tables for the terminal: what a checkpoint holds, and how a comparison went."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from deepinfer_jax.cache import Layouts
from deepinfer_jax.checkpoint.reader import checkpoint_faults
from deepinfer_jax.checkpoint.safetensors import open_checkpoint
from deepinfer_jax.checkpoint.table import memory_per_device, tensor_table
from deepinfer_jax.compare import Comparison
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.v41 import abstract_params
from deepinfer_jax.numerics import Numerics


def inspect(path: Path, devices: int, console: Console) -> list[str]:
    """Print everything that is known without loading; returns the faults of the files.

    Raises:
        ConfigError: There is no usable configuration.
    """
    config = ModelConfig.from_file(path.parent if path.suffix == ".safetensors" else path)
    console.print(_plan_table(config))
    console.print(_component_table(config))
    specs = tensor_table(config)
    total = sum(spec.nbytes for spec in specs)
    leaves = len(jax.tree.leaves(abstract_params(config)))
    memory = memory_per_device(config, devices)
    console.print(f"{len(specs):,} tensors, {total:,} bytes; {leaves} leaves in the weight tree", highlight=False)
    console.print(
        f"weights on each of {devices} device(s): {_size(sum(memory.values()))} "
        f"(split {_size(memory['split over devices'])}, copied {_size(memory['copied to each'])})",
        highlight=False,
    )
    console.print(
        f"cache: {cache_bytes_per_token(config):g} bytes per token, "
        f"{_size(cache_bytes_per_slot(config))} per sequence beside them",
        highlight=False,
    )
    if path.suffix == ".json":
        return []
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return list(error.faults) or [error.message]
    console.print(
        f"files: {len(checkpoint.files)} with {len(checkpoint.tensors):,} tensors, {checkpoint.total_bytes:,} bytes",
        highlight=False,
    )
    return checkpoint_faults(checkpoint, config)


def cache_bytes_per_token(config: ModelConfig) -> float:
    """Bytes of compressed KV and index keys per token, as released (packed)."""
    layouts = Layouts.of(config, Numerics.named("released"))
    row = layouts.compressed.stored[0] + layouts.index_key.stored[0]
    return sum(row / plan.ratio for plan in config.kv_sources)


def cache_bytes_per_slot(config: ModelConfig) -> int:
    """Bytes of rings and states of one sequence, as released (packed)."""
    from deepinfer_jax.cache import abstract_cache

    cache = abstract_cache(config, Numerics.named("released"), 1, 1, 1)
    rings = [(c.window, c.pending) for c in cache.layers]
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves((rings, cache.draft, cache.engram))
    )


def comparison(results: Iterable[Comparison], console: Console) -> bool:
    """Print a comparison row by row as it runs, then the rules behind the verdicts; True when everything passed."""
    row = "{:<9} {:<15} {:>9} {:>9} {:>7} {:<15} {}"
    console.print(
        row.format("numerics", "output", "largest", "median", "equal", "beyond from", "verdict"), style="bold"
    )
    done: list[Comparison] = []
    for r in results:
        place = "" if r.first is None else f"row {r.first[0]} pos {r.first[1]}"
        agree = "" if r.agreement is None else f"{r.agreement:.1%}"
        cells = row.format(
            r.tag, r.what, f"{r.largest:.2e}", f"{r.median:.2e}", agree, place, "ok" if r.passed else "DIFFERS"
        )
        console.print(cells, style=None if r.passed else "red", highlight=False)
        done.append(r)
    if not done:
        console.print("the golden file has nothing that this model can be compared with")
    rules: dict[str, list[str]] = {}
    for r in done:
        rules.setdefault(r.rule, []).append(r.tag)
    for rule, tags in rules.items():
        console.print(f"{', '.join(dict.fromkeys(tags))}: {rule}", highlight=False)
    return bool(done) and all(r.passed for r in done)


def _plan_table(config: ModelConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="layers")
    table.add_column("layers")
    table.add_column("plan")
    runs: list[list] = []
    for plan in (*config.layers, *config.draft_stages):
        text = plan.describe()
        if runs and runs[-1][2] == text:
            runs[-1][1] = plan.index
        else:
            runs.append([plan.index, plan.index, text])
    for first, last, text in runs:
        table.add_row(str(first) if first == last else f"{first}-{last}", text)
    return table


def _component_table(config: ModelConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="tensors")
    for column in ("component", "tensors", "bytes", "share"):
        table.add_column(column, justify="left" if column == "component" else "right")
    count: collections.Counter = collections.Counter()
    size: collections.Counter = collections.Counter()
    for spec in tensor_table(config):
        count[spec.component] += 1
        size[spec.component] += spec.nbytes
    for component in size:
        share = size[component] / size.total()
        table.add_row(component, f"{count[component]:,}", f"{size[component]:,}", f"{share:.1%}")
    return table


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
