"""Writing safetensors files: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from deepinfer_jax.checkpoint.safetensors import (
    INDEX_FILE,
    MAX_AXES,
    MAX_HEADER,
    NAMES,
    SHARD_NAME,
    SINGLE_FILE,
    is_text,
)
from deepinfer_jax.errors import CheckpointError, InputError

_MAX_SHARDS = 99_999
"""The format's file names count with five digits."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when its turn comes, so that a checkpoint larger than memory can be written.

    Attributes:
        dtype: numpy dtype of the elements.
        shape: Sizes.
        make: Returns the array, of exactly this dtype and shape; called once per write.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Tensors = Mapping[str, np.ndarray | LazyTensor]
"""What is written: arrays, or promises of arrays."""


def write_file(path: str | os.PathLike[str], tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write one file: to a temporary one beside it first, which then takes the name. On an error nothing changes.

    Args:
        path: The file; one that exists is replaced.
        tensors: By name. One at a time is made and held.
        metadata: Strings for `__metadata__`.

    Raises:
        CheckpointError: With all faults: a dtype that the format does not have, names or metadata that are no text,
            a header over the format's limit; or a lazy tensor that turns out otherwise than declared.
        OSError: The file cannot be written.
    """
    path = Path(path)
    faults = _faults(tensors, metadata)
    if faults:
        raise CheckpointError(f"{path} cannot be written", faults)
    # Large items first: with a header padded to 8 bytes, every tensor is then aligned to its items.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header = _header(order, tensors, metadata)
    if len(header) > MAX_HEADER:
        raise CheckpointError(f"{path} cannot be written: header of {len(header)} bytes, at most {MAX_HEADER} allowed")
    with _replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            file.write(np.ascontiguousarray(_made(name, tensors[name])).reshape(-1).view(np.uint8).data)


def write_checkpoint_files(
    directory: str | os.PathLike[str],
    tensors: Tensors,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` (one tensor at least) with an index.

    All files are written in full under a hidden directory first, so that a lazy tensor may read the checkpoint that
    is being replaced, and an error leaves that one as it was. Then the old index and files go, the new files take
    their places, and the new index comes last: whatever moment a crash picks, the numbered files that are left are
    one of the two checkpoints in full, or too few to be opened. Until then both take up disk space. Files of other
    names are left alone; an index or `model.safetensors` keeps readers from them.

    Args:
        directory: Made if it is missing.
        tensors: By name, in the order in which they fill the shards.
        max_shard_bytes: Payload bytes of a shard at most, >= 1.
        metadata: For every file.

    Returns:
        The files with tensors.

    Raises:
        CheckpointError: As `write_file`, or two names that differ only in a leading `model.`.
        InputError: `max_shard_bytes` is not positive, or makes more files than can be numbered.
        OSError: A file cannot be written.
    """
    directory = Path(directory)
    faults = _faults(tensors, metadata) + [
        f"{name}: {name.removeprefix('model.')} is there too, and readers drop the prefix"
        for name in tensors
        if isinstance(name, str) and name.startswith("model.") and name.removeprefix("model.") in tensors
    ]
    if faults:
        raise CheckpointError(f"{directory}: the checkpoint cannot be written", faults)
    if max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes: {max_shard_bytes}, expected at least 1")
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) > _MAX_SHARDS:
        raise InputError(f"max_shard_bytes: {max_shard_bytes} makes {len(shards)} files, at most {_MAX_SHARDS}")
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as staging:
        for file, shard in zip(names, shards, strict=True):
            write_file(Path(staging, file), {name: tensors[name] for name in shard}, metadata)
        _remove_checkpoint(directory)
        for file in names:
            os.replace(Path(staging, file), directory / file)
        _sync_directory(directory)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        with _replacing(directory / INDEX_FILE) as file:
            file.write(json.dumps(index, indent=1).encode())
    return tuple(directory / file for file in names)


def _faults(tensors: Tensors, metadata: Mapping[str, str] | None) -> list[str]:
    """What the format cannot hold."""
    faults = []
    for name, t in tensors.items():
        if not is_text(name) or name == "__metadata__":
            faults.append(f"{name!a}: not a name that a tensor can have")
        if t.dtype not in NAMES:  # a byte order other than little-endian is another dtype too
            faults.append(f"{name!a}: dtype {t.dtype!r} is not in the format")
        if len(t.shape) > MAX_AXES or any(size < 0 for size in t.shape):
            faults.append(f"{name!a}: shape {tuple(t.shape)}, expected at most {MAX_AXES} sizes")
    for key, value in (metadata or {}).items():
        if not is_text(key) or not is_text(value):
            faults.append(f"metadata {key!a}: expected strings, found {value!a}")
    return faults


def _header(order: Sequence[str], tensors: Tensors, metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        t = tensors[name]
        sizes = [int(size) for size in t.shape]
        header[name] = {"dtype": NAMES[t.dtype], "shape": sizes, "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8)


def _made(name: str, tensor: np.ndarray | LazyTensor) -> np.ndarray:
    if not isinstance(tensor, LazyTensor):
        return np.asarray(tensor)  # numpy scalars, and arrays of JAX on the host, have a dtype and a shape too
    array = np.asarray(tensor.make())
    if array.dtype != tensor.dtype or array.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name}: made {array.dtype} {list(array.shape)}, declared {tensor.dtype} {list(tensor.shape)}"
        )
    return array


def _shards(tensors: Tensors, limit: int) -> list[list[str]]:
    """Names per file; without tensors, one file without names."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _remove_checkpoint(directory: Path) -> None:
    """Remove what an earlier `write_checkpoint_files` left. The index goes first: without it, a part is no whole."""
    (directory / INDEX_FILE).unlink(missing_ok=True)
    stem = SINGLE_FILE.removesuffix(".safetensors")
    for name in sorted(os.listdir(directory)):
        match = SHARD_NAME.fullmatch(name)
        if name == SINGLE_FILE or (match and match[1] == stem):
            (directory / name).unlink()
    _sync_directory(directory)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block ends well, and leaves nothing when it does not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make renames and removals so far survive a crash in the order in which they were done."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
