"""Writing safetensors files: whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.safetensors import INDEX_FILE, NAMES, SINGLE_FILE
from deepinfer_jax.errors import CheckpointError


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when its turn comes, so that a checkpoint larger than memory can be written."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Tensors = Mapping[str, np.ndarray | LazyTensor]


def write_file(path: str | os.PathLike[str], tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write one file: to a temporary one first, which then takes the name.

    Raises:
        CheckpointError: A dtype that the format does not have, metadata that is no string, or a lazy tensor that
            turns out otherwise than declared.
    """
    path = Path(path)
    faults = [f"{n}: dtype {t.dtype} is not in the format" for n, t in tensors.items() if np.dtype(t.dtype) not in NAMES]
    faults += [f"metadata {k!r}: expected a string" for k, v in (metadata or {}).items() if not isinstance(v, str)]
    if faults:
        raise CheckpointError(f"{path} cannot be written", faults)
    # Large items first: with a header padded to 8 bytes, every tensor is then aligned to its items.
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        t = tensors[name]
        header[name] = {
            "dtype": NAMES[np.dtype(t.dtype)],
            "shape": list(t.shape),
            "data_offsets": [end, end + t.nbytes],
        }
        end += t.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with _replacing(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            file.write(np.ascontiguousarray(_made(name, tensors[name])).reshape(-1).view(np.uint8).data)


def write_checkpoint_files(
    directory: str | os.PathLike[str],
    tensors: Tensors,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` (one tensor at least) with an index.

    The index comes last, so that an interrupted write is not taken for a whole checkpoint. Files of an earlier
    checkpoint that would be read along with the new ones are removed first.

    Returns:
        The files with tensors.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [directory / INDEX_FILE, *directory.glob("*.safetensors")]:
        stale.unlink(missing_ok=True)
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        write_file(directory / SINGLE_FILE, tensors, metadata)
        return (directory / SINGLE_FILE,)
    weight_map, files = {}, []
    for i, names in enumerate(shards, 1):
        file = directory / f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_file(file, {name: tensors[name] for name in names}, metadata)
        weight_map |= dict.fromkeys(names, file.name)
        files.append(file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with _replacing(directory / INDEX_FILE) as file:
        file.write(json.dumps(index, indent=1).encode())
    return tuple(files)


def _made(name: str, tensor: np.ndarray | LazyTensor) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    array = np.asarray(tensor.make())
    if array.dtype != tensor.dtype or array.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name}: made {array.dtype} {list(array.shape)}, declared {tensor.dtype} {list(tensor.shape)}"
        )
    return array


def _shards(tensors: Tensors, limit: int) -> Iterable[list[str]]:
    names, size = [], 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


class _replacing:  # noqa: N801 - used like a function
    """A binary file that replaces `path` when the block ends well, and leaves nothing when it does not."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        descriptor, self.temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        self.file = os.fdopen(descriptor, "wb")
        return self.file

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
                os.chmod(self.temporary, 0o644)
        finally:
            self.file.close()
            if kind is None:
                os.replace(self.temporary, self.path)
            else:
                os.unlink(self.temporary)
