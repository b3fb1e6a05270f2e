"""The safetensors format: headers, index, byte ranges. Nothing here knows a model.

A file is an 8-byte little-endian header length, a JSON object (name -> dtype, shape, data_offsets), and the data.
The `safetensors` package is not used: its numpy side cannot represent F8_E8M0.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError

DTYPES: Mapping[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BOOL": np.dtype(np.bool_),
} | {f"{kind}{bits}": np.dtype(f"{name}{bits}") for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}  # fmt: skip
"""numpy dtype of each dtype name of the format."""

NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER = 100 << 20
"""Bytes of a header at most; the format's own limit."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        name: As in the file, without a leading `model.`.
        dtype: A key of `DTYPES`.
        shape: Sizes.
        file: The file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        """dtype of its elements."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one file or of all shards."""

    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    metadata: Mapping[str, str]

    @property
    def total_bytes(self) -> int:
        """Payload bytes."""
        return sum(t.nbytes for t in self.tensors.values())


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check the headers of a checkpoint; no tensor is read.

    Args:
        path: A `.safetensors` file; or a directory with an index, with `model.safetensors`, or with shards.
            A leading `model.` of tensor names is dropped.

    Raises:
        CheckpointError: With every fault of every file and of the index.
    """
    path = Path(path)
    faults: list[str] = []
    weight_map: dict[str, str] | None = None
    total_size: Any = None
    if path.is_file():
        files = [path]
    elif not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or directory")
    elif (path / INDEX_FILE).is_file():
        weight_map, total_size = _read_index(path / INDEX_FILE, faults)
        files = [path / name for name in sorted(set(weight_map.values()))]
    else:
        files = _files_without_index(path, faults)
    tensors, metadata = _read_all(files, faults)
    if weight_map is not None:
        faults += _index_faults(weight_map, total_size, files, tensors)
    merged = _merge(tensors, faults)
    if faults:
        raise CheckpointError(f"{path} is not a readable checkpoint", faults)
    return Checkpoint(merged, tuple(files), metadata)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors (under their names in the file) and metadata of one file.

    Raises:
        CheckpointError: With every fault of the file: nothing else, whatever its bytes are.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8:
                raise CheckpointError(f"{path.name}: {size} bytes, expected at least the 8 of the header length")
            if length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path.name}: header of {length} bytes, but the file has {size - 8} after its length "
                    f"and {MAX_HEADER} are allowed"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) != length:
        raise CheckpointError(f"{path.name}: header ends after {len(raw)} of {length} bytes")
    header = _parse(raw, f"{path.name}: header")
    faults: list[str] = []
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        faults.append("__metadata__: expected an object of strings")
        metadata = {}
    tensors = {}
    for name, entry in header.items():
        tensor = _entry(name, entry, path, 8 + length, faults)
        if tensor is not None:
            tensors[name] = tensor
    if not faults:
        faults += _layout_faults(tensors, 8 + length, size)
    if faults:
        raise CheckpointError(f"{path.name} has a faulty header", [f"{path.name}: {fault}" for fault in faults])
    return tensors, metadata


def read_into(tensor: StoredTensor, start: int, out: np.ndarray) -> None:
    """Fill the contiguous uint8 array `out` with the tensor's bytes from `start` on. Raises CheckpointError."""
    if start < 0 or start + out.nbytes > tensor.nbytes:
        raise CheckpointError(f"{tensor.name}: bytes {start}..{start + out.nbytes} of {tensor.nbytes} asked for")
    view = memoryview(out.reshape(-1)).cast("B")
    try:
        descriptor = os.open(tensor.file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error.strerror}") from None
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], tensor.offset + start + done)
            if count == 0:
                raise CheckpointError(f"{tensor.name}: {tensor.file.name} has become shorter than its header says")
            done += count
    finally:
        os.close(descriptor)


def view(tensor: StoredTensor) -> np.ndarray:
    """A read-only memory-mapped view of the whole tensor."""
    if tensor.nbytes == 0:
        return np.zeros(tensor.shape, tensor.numpy_dtype)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    return raw.view(tensor.numpy_dtype).reshape(tensor.shape)


# ------------------------------------------------------------------------------------------- one file


def _parse(raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
        return dict(pairs)

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{what}: not a JSON object: {reason}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(data).__name__}")
    return data


def _entry(name: str, entry: Any, path: Path, data_start: int, faults: list[str]) -> StoredTensor | None:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        faults.append(f"{name}: expected an object with {sorted(_ENTRY_KEYS)}, found {str(found)[:80]}")
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = isinstance(dtype, str) and dtype in DTYPES
    if not known:
        faults.append(f"{name}: dtype {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}")
    if not _sizes(shape):
        faults.append(f"{name}: shape {str(shape)[:60]}, expected a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        faults.append(f"{name}: data_offsets {str(offsets)[:60]}, expected [begin, end] with begin <= end")
    elif known and _sizes(shape):
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != expected:
            faults.append(f"{name}: {offsets[1] - offsets[0]} bytes, expected {expected} for {dtype} {shape}")
        return StoredTensor(name, dtype, tuple(shape), path, data_start + offsets[0], offsets[1] - offsets[0])
    return None


def _sizes(value: Any) -> bool:
    # bool is an int in Python, and a number like 1e3 arrives as a float: neither is a size. Beyond 2^63 it is noise.
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _layout_faults(tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> list[str]:
    faults, end = [], data_start
    for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if t.offset < end and t.nbytes:
            faults.append(f"{t.name}: begins at byte {t.offset - data_start}, inside the tensor before it")
        elif t.offset > end:
            faults.append(f"{t.name}: begins at byte {t.offset - data_start}, {t.offset - end} after the last one's end")
        end = max(end, t.offset + t.nbytes)
    if end > size:
        faults.append(f"the file is truncated: {size} bytes, expected {end}")
    elif end < size:
        faults.append(f"{size - end} bytes follow the last tensor")
    return faults


# ------------------------------------------------------------------------------------------ all files


def _read_all(files: list[Path], faults: list[str]) -> tuple[list[dict[str, StoredTensor]], dict[str, str]]:
    """Tensors per file; a file with faults gives none."""

    def read(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]] | CheckpointError:
        try:
            return read_header(file)
        except CheckpointError as error:
            return error

    tensors, metadata = [], {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for result in pool.map(read, files):
            if isinstance(result, CheckpointError):
                faults += result.faults or [result.message]
                tensors.append({})
            else:
                tensors.append(result[0])
                metadata |= result[1]
    return tensors, metadata


def _merge(per_file: list[dict[str, StoredTensor]], faults: list[str]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for tensors in per_file:
        for name, tensor in tensors.items():
            bare = name.removeprefix("model.")
            if bare in merged:
                other = merged[bare].file.name
                faults.append(f"{name}: stands in {other} and again in {tensor.file.name}")
            merged[bare] = StoredTensor(bare, tensor.dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
    return merged


def _read_index(path: Path, faults: list[str]) -> tuple[dict[str, str], Any]:
    data = _parse(path.read_bytes(), path.name)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object `weight_map` of tensor names to files")
    good = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            faults.append(f"{path.name}: {name} lies in {str(file)[:60]!r}, expected a .safetensors file beside the index")
        else:
            good[name] = file
    metadata = data.get("metadata", {})
    return good, metadata.get("total_size") if isinstance(metadata, dict) else None


def _index_faults(
    weight_map: dict[str, str], total_size: Any, files: list[Path], per_file: list[dict[str, StoredTensor]]
) -> list[str]:
    """Where the index and the headers disagree. Files that could not be read are reported already."""
    held = {file.name: tensors for file, tensors in zip(files, per_file, strict=True)}
    faults = []
    for name, file in weight_map.items():
        if held[file] and name not in held[file]:
            faults.append(f"{INDEX_FILE}: says that {name} lies in {file}, which does not have it")
    for file, tensors in held.items():
        for name in tensors:
            if weight_map.get(name) != file:
                faults.append(f"{INDEX_FILE}: does not say that {name} lies in {file}")
    total = sum(t.nbytes for tensors in per_file for t in tensors.values())
    if total_size is not None and all(per_file) and total_size != total:
        faults.append(f"{INDEX_FILE}: total_size {str(total_size)[:40]}, but the files hold {total} bytes")
    return faults


def _files_without_index(path: Path, faults: list[str]) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: there is no .safetensors file in it")
    sets = {(m[1], int(m[3])) for file in files if (m := _SHARD.fullmatch(file.name))}
    for stem, count in sorted(sets):
        missing = [i for i in range(1, count + 1) if not (path / f"{stem}-{i:05}-of-{count:05}.safetensors").is_file()]
        faults += [f"{stem}-{i:05}-of-{count:05}.safetensors: missing" for i in missing]
    return files
