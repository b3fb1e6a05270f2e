"""From files to device arrays: checked first, then read in pieces, each straight to where it belongs."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich import progress as rich_progress

from deepinfer_jax.checkpoint.safetensors import Checkpoint, StoredTensor, open_checkpoint, read_into
from deepinfer_jax.checkpoint.table import Path, TensorSpec, leaf_shapes, tensor_table
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.text.token_map import load_token_map

PIECE_BYTES = 64 << 20
"""Largest piece of a leaf that is on the host at once."""

THREADS = 4

Expand = Literal["none", "bfloat16", "float32"]


def checkpoint_faults(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Missing, unknown, mis-shaped and mis-typed tensors: what the files hold against the tensor table."""
    expected = {spec.name: spec for spec in tensor_table(config)}
    faults = [f"{name}: missing" for name in expected if name not in checkpoint.tensors]
    for name, stored in checkpoint.tensors.items():
        spec = expected.get(name)
        if spec is None:
            faults.append(f"{name}: unknown tensor ({stored.dtype} {list(stored.shape)} in {stored.file.name})")
        elif (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
            faults.append(
                f"{name}: found {stored.dtype} {list(stored.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
    return faults


def load_params(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    shardings: Any = None,
    expand: Expand = "none",
    progress: bool = True,
    piece_bytes: int = PIECE_BYTES,
    threads: int = THREADS,
) -> Params:
    """Read a checkpoint into a weight tree on devices.

    Everything is checked before the first byte of a tensor is read. On the host at most 2 * `threads` + 2 pieces of
    `piece_bytes` exist at a time (blocks, and a temporary of each), beside the result where the device is the host.

    Args:
        path: A `.safetensors` file, or a directory with one, or with shards and their index; with Engram also
            its `tokenizer.json`.
        config: What the files must hold.
        shardings: A `jax.sharding.Sharding` for all leaves, or a tree like the weight tree; it may split
            leading axes. Default: one device.
        expand: Decode FP8 and FP4 matrices to this dtype as they arrive. Exact. Engram tables stay quantised,
            since only single rows of them are read.
        progress: Show a progress bar.
        piece_bytes, threads: The bound on host memory, and the readers that fill it.

    Raises:
        CheckpointError: With all faults of the files.
        TokenizerError: Engram's token map cannot be made from `tokenizer.json`.
    """
    checkpoint = open_checkpoint(path)
    faults = checkpoint_faults(checkpoint, config)
    if faults:
        raise CheckpointError(f"{path} is not a checkpoint of this configuration", faults)
    token_map = _token_map(FilePath(path), config)
    leaves = leaf_shapes(config)
    placements: dict[Path, list[TensorSpec]] = collections.defaultdict(list)
    for spec in tensor_table(config):
        placements[spec.path].append(spec)
    jobs = [_Leaf(p, leaves[p], placements[p], sharding_at(shardings, p)) for p in placements]
    tasks = [(job, piece) for job in jobs for piece in job.pieces(piece_bytes)]
    flat: dict[Path, Any] = {}
    with _progress(progress) as bar, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        task_id = bar.add_task("weights", total=sum(piece.elements * job.itemsize for job, piece in tasks))
        blocks = _ahead(pool, [partial(job.read, checkpoint, piece) for job, piece in tasks], threads)
        for (job, piece), block in zip(tasks, blocks, strict=True):
            job.place(piece, block)
            if piece.last:
                flat[job.path] = _expanded(job.finish(), expand)
            bar.advance(task_id, block.nbytes)
    if token_map is not None:
        flat["token_map",] = jax.device_put(token_map, sharding_at(shardings, ("token_map",)))
    return _nested(flat)


def expand_params(params: Params, dtype: Any) -> Params:
    """Decode every quantised matrix to `dtype` (float32 or bfloat16), and cast the plain matrices. Exact.

    Engram tables stay quantised; float32 leaves stay float32.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedTensor):
            return _expanded(leaf, jnp.dtype(dtype).name)  # type: ignore[arg-type]
        return leaf.astype(dtype) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, QuantizedTensor))


def default_expand(config: ModelConfig, numerics: Numerics) -> Expand:
    """The compute dtype on a CPU with room for it (three times the expanded weights), else `none`.

    A CPU has no FP8 or FP4 arithmetic: expanding at every use costs more time than reading wider weights. Custom calls
    decode as they multiply, and need weights as they are.
    """
    if jax.default_backend() != "cpu" or numerics.kernels.linear != "reference":
        return "none"
    compute = numerics.compute
    wide = 4 if compute == "float32" else 2
    size = sum(
        wide * math.prod(leaf.record.shape[:-1]) * math.prod(leaf.shape) if isinstance(leaf, QuantizedTensor) else 0
        for leaf in leaf_shapes(config).values()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ("float32" if compute == "float32" else "bfloat16") if 3 * size < memory else "none"


# ------------------------------------------------------------------------------------- one leaf


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A rectangle of a leaf seen as [leading axis, rest], for some devices that all hold it."""

    lead: tuple[int, int]
    inner: tuple[int, int]
    devices: tuple[Any, ...]
    shard: int
    last: bool

    @property
    def elements(self) -> int:
        return (self.lead[1] - self.lead[0]) * (self.inner[1] - self.inner[0])


class _Leaf:
    """One array of the result: its tensors, its pieces, and the buffers they are collected in."""

    def __init__(self, path: Path, spec: Any, tensors: list[TensorSpec], sharding: jax.sharding.Sharding):
        self.path, self.spec, self.tensors, self.sharding = path, spec, tensors, sharding
        array = spec.record if isinstance(spec, QuantizedTensor) else spec
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)
        self.itemsize = self.dtype.itemsize
        self.has_lead = tensors[0].lead is not None
        self.buffers: dict[int, list[jax.Array]] = {}

    def pieces(self, piece_bytes: int) -> list[_Piece]:
        """Cut every distinct shard along axis 0 into pieces of at most `piece_bytes` (one row at least)."""
        shards: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
        try:
            indices = self.sharding.addressable_devices_indices_map(self.shape)
        except ValueError as error:
            name = ".".join(map(str, self.path))
            raise CheckpointError(f"{name} of shape {list(self.shape)} cannot be split by {self.sharding}") from error
        for device, index in indices.items():
            assert index is not None
            if any(s.indices(n)[:2] != (0, n) for s, n in zip(index[1:], self.shape[1:], strict=True)):
                raise CheckpointError(f"{self.path}: a sharding may split only the leading axis, found {index}")
            shards[index[0].indices(self.shape[0])[:2]].append(device)
        row = math.prod(self.shape[1:])
        step = max(1, piece_bytes // (row * self.itemsize))
        out = []
        for shard, ((start, stop), devices) in enumerate(shards.items()):
            for a in range(start, stop, step):
                b = min(a + step, stop)
                lead, inner = ((a, b), (0, row)) if self.has_lead else ((0, 1), (a * row, b * row))
                out.append(_Piece(lead, inner, tuple(devices), shard, b == stop and shard == len(shards) - 1))
        return out

    def read(self, checkpoint: Checkpoint, piece: _Piece) -> np.ndarray:
        """The values of a piece, [leading, inner]."""
        (l0, l1), (i0, i1) = piece.lead, piece.inner
        block = np.zeros((l1 - l0, i1 - i0), self.dtype)
        for spec in self.tensors:
            s0, s1 = spec.lead or (0, 1)
            a, b = max(l0, s0), min(l1, s1)
            c, d = max(i0, spec.offset), min(i1, spec.offset + spec.width)
            if a < b and c < d:
                part = block[a - l0 : b - l0, c - i0 : d - i0]
                stored = checkpoint.tensors[spec.name]
                _read_part(stored, spec, (a - s0, b - s0), (c - spec.offset, d - spec.offset), part)
        return block

    def place(self, piece: _Piece, block: np.ndarray) -> None:
        """Put a block on its devices; shards of several pieces are collected in a device buffer."""
        row = (block.size // math.prod(self.shape[1:]), *self.shape[1:])
        parts = [jax.device_put(block.reshape(row), device) for device in piece.devices]
        start = piece.lead[0] if self.has_lead else piece.inner[0] // math.prod(self.shape[1:])
        shard_shape = self.sharding.shard_shape(self.shape)
        if row[0] == shard_shape[0]:
            self.buffers[piece.shard] = parts
            return
        if piece.shard not in self.buffers:
            self.buffers[piece.shard] = [
                jax.device_put(jnp.zeros(shard_shape, self.dtype), device) for device in piece.devices
            ]
            self.starts = {**getattr(self, "starts", {}), piece.shard: start}
        offset = start - self.starts[piece.shard]
        self.buffers[piece.shard] = [
            _write_piece(buffer, part, offset) for buffer, part in zip(self.buffers[piece.shard], parts, strict=True)
        ]

    def finish(self) -> Any:
        """The leaf as one (sharded) array."""
        arrays = list(itertools.chain.from_iterable(self.buffers.values()))
        self.buffers = {}
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)
        if isinstance(self.spec, QuantizedTensor):
            return QuantizedTensor(array, self.spec.fmt, self.spec.shape)
        return array


@partial(jax.jit, donate_argnums=0)
def _write_piece(buffer: jax.Array, part: jax.Array, offset: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(buffer, part, offset, axis=0)


def _read_part(
    stored: StoredTensor, spec: TensorSpec, lead: tuple[int, int], inner: tuple[int, int], out: np.ndarray
) -> None:
    """Elements [lead, inner] of a tensor seen as [leading, width], into `out`."""
    item = stored.nbytes // math.prod(spec.shape)
    if inner == (0, spec.width) or lead[1] - lead[0] == 1:
        # One run of bytes.
        count = (lead[1] - lead[0]) * (inner[1] - inner[0])
        raw = np.empty(count * item, np.uint8)
        read_into(stored, (lead[0] * spec.width + inner[0]) * item, raw)
        raw = raw.reshape(lead[1] - lead[0], -1)
    else:
        raw = np.empty((lead[1] - lead[0], (inner[1] - inner[0]) * item), np.uint8)
        for i in range(raw.shape[0]):
            read_into(stored, ((lead[0] + i) * spec.width + inner[0]) * item, raw[i])
    out[...] = raw if spec.transform == "bytes" else raw.view(stored.numpy_dtype)


# -------------------------------------------------------------------------------------- the rest


@partial(jax.jit, static_argnums=1)
def _decode(leaf: QuantizedTensor, dtype: str) -> jax.Array:
    return leaf.decode(dtype)


def _expanded(leaf: Any, expand: Expand) -> Any:
    if expand == "none" or not isinstance(leaf, QuantizedTensor) or leaf.fmt == "fp8_row":
        if expand != "none" and not isinstance(leaf, QuantizedTensor) and leaf.dtype == jnp.bfloat16:
            return leaf.astype(expand)
        return leaf
    return _decode(leaf, expand)


def _ahead(pool: concurrent.futures.Executor, jobs: Sequence[Any], depth: int) -> Iterator[np.ndarray]:
    """Results in order, with at most `depth` unfinished or unclaimed ones."""
    pending: collections.deque = collections.deque()
    for job in jobs:
        pending.append(pool.submit(job))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def sharding_at(shardings: Any, path: Path) -> jax.sharding.Sharding:
    """The sharding of a leaf: out of one for all, out of a tree, or one device."""
    if shardings is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    node = shardings
    for key in path:
        if isinstance(node, jax.sharding.Sharding):
            return node
        node = node[key]
    return node.record if isinstance(node, QuantizedTensor) else node


def _nested(flat: dict[Path, Any]) -> Params:
    root: dict = {}
    for path, leaf in flat.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def _token_map(path: FilePath, config: ModelConfig) -> np.ndarray | None:
    if not config.token_map_size:
        return None
    t = config.text_config
    return load_token_map(
        path if path.is_dir() else path.parent,
        vocab_size=t.vocab_size,
        compressed_vocab_size=t.engram_compressed_vocab_size,
    )


def _progress(show: bool) -> rich_progress.Progress:
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        disable=not show,
        transient=True,
    )
