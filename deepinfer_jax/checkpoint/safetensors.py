"""The safetensors format: headers, index, byte ranges. Nothing here knows a model.

A file is an 8-byte little-endian header length, a JSON object (name -> dtype, shape, data_offsets), and the data.
The `safetensors` package is not used: its numpy side cannot represent F8_E8M0.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
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
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
}
"""numpy dtype of each dtype name of the format."""

NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The reverse: the format's name of each numpy dtype."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER = 100 << 20
"""Bytes of a header at most; the format's own limit."""
MAX_AXES = 64
"""Axes of a tensor at most; numpy's limit."""

SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
"""Stem, number (from 1) and count of one file of a set."""

_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_THREADS = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        name: As in the file; from `open_checkpoint`, without a leading `model.`.
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
    """The tensors of one file or of all shards.

    Attributes:
        tensors: By name, without a leading `model.`.
        files: Every file that was read, in order of name.
        metadata: `__metadata__` of all files; where they disagree, the last file's.
    """

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
        path: A `.safetensors` file; or a directory. There the index decides if it exists, then
            `model.safetensors`, then all `.safetensors` files together, of which numbered sets must be complete.
            A leading `model.` of tensor names is dropped.

    Raises:
        CheckpointError: With every fault of every file and of the index.
    """
    path = Path(path)
    faults: list[str] = []
    index: _Index | None = None
    if path.is_file():
        files = [path]
    elif not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or directory")
    elif os.path.lexists(path / INDEX_FILE):
        index = _read_index(path / INDEX_FILE, faults)
        files = [path / name for name in sorted(set(index.weight_map.values()))]
        if not files:  # no use as an index; the files may have faults of their own
            index, files = None, _files_without_index(path, faults)
    else:
        files = _files_without_index(path, faults)
    tensors, metadata = _read_all(files, faults)
    if index is not None:
        faults += _index_faults(index, path, tensors)
    merged = _merge(tensors.values(), faults)
    if faults:
        raise CheckpointError(f"{path} is not a readable checkpoint", faults)
    return Checkpoint(merged, tuple(files), metadata)


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors (under their names in the file) and metadata of one file.

    Raises:
        CheckpointError: With every fault of the file: nothing else, whatever its bytes are.
    """
    path = Path(path)
    raw, size = _header_bytes(path)
    faults: list[str] = []
    header = _parse(raw, "header: ", faults)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    if header is not None:
        metadata = _metadata(header.pop("__metadata__", {}), faults)
        spans: list[tuple[int, int, str]] = []
        data_start = 8 + len(raw)
        for name, entry in header.items():
            span = _span(name, entry, faults)
            if span is not None:
                spans.append((*span, name))
                begin, end = span
                # With a fault in its entry the tensor is never returned; its span still takes part in the layout.
                dtype, shape = entry["dtype"], entry["shape"]
                if not faults:
                    tensors[name] = StoredTensor(name, dtype, tuple(shape), path, data_start + begin, end - begin)
        faults += _layout_faults(spans, size - data_start, complete=len(spans) == len(header))
    if faults:
        raise CheckpointError(f"{path.name} has a faulty header", [f"{path.name}: {fault}" for fault in faults])
    return tensors, metadata


def read_into(tensor: StoredTensor, start: int, out: np.ndarray) -> None:
    """Fill `out` with the tensor's bytes from `start` on, without going through a mapping of the file.

    Args:
        tensor: What to read.
        start: First byte, counted from the tensor's own first one.
        out: Contiguous uint8 array of any shape; its size is the number of bytes.

    Raises:
        CheckpointError: A range outside the tensor, or a file that cannot be read or has become shorter.
        ValueError: `out` is not contiguous, so that filling it would fill a copy.
    """
    if start < 0 or start + out.nbytes > tensor.nbytes:
        raise CheckpointError(f"{tensor.name}: bytes {start}..{start + out.nbytes} of {tensor.nbytes} asked for")
    if out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected a contiguous uint8 array, found {out.dtype} with strides {out.strides}")
    target = memoryview(out.reshape(-1))
    try:
        descriptor = os.open(tensor.file, os.O_RDONLY)
        try:
            done = 0
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], tensor.offset + start + done)
                if count == 0:
                    raise CheckpointError(f"{tensor.name}: {tensor.file.name} has become shorter than its header says")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error.strerror or error}") from None


def read_bytes(tensor: StoredTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Bytes `start` to `stop` (default: the end) of a tensor, uint8 [stop - start]. Raises as `read_into`."""
    stop = tensor.nbytes if stop is None else stop
    if not 0 <= start <= stop <= tensor.nbytes:
        raise CheckpointError(f"{tensor.name}: bytes {start}..{stop} of {tensor.nbytes} asked for")
    out = np.empty(stop - start, np.uint8)
    read_into(tensor, start, out)
    return out


def view(tensor: StoredTensor) -> np.ndarray:
    """A read-only memory-mapped view of the whole tensor, of its own dtype and shape.

    Raises:
        CheckpointError: The file cannot be read, or has become shorter than its header said.
    """
    if tensor.nbytes == 0:
        return np.zeros(tensor.shape, tensor.numpy_dtype)
    try:
        raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.name}: {tensor.file} cannot be mapped: {error}") from None
    return raw.view(tensor.numpy_dtype).reshape(tensor.shape)


def is_text(value: Any) -> bool:
    """Whether this is a string that can be encoded: JSON escapes can spell half of a surrogate pair."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


# ------------------------------------------------------------------------------------------- one file


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON part of a file, and the file's size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path.name}: not a regular file")
        size = status.st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path.name}: {size} bytes, expected at least the 8 of the header length")
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER:
                raise CheckpointError(f"{path.name}: header of {length} bytes, at most {MAX_HEADER} are allowed")
            if length > size - 8:
                raise CheckpointError(f"{path.name}: header of {length} bytes, but only {size - 8} follow its length")
            raw = file.read(length)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{_label(str(path))}: cannot be read: {reason or error}") from None
    if len(raw) != length:
        raise CheckpointError(f"{path.name}: header ends after {len(raw)} of {length} bytes")
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path.name}: header: not a JSON object: begins with {raw[:1]!r}, expected b'{{'")
    return raw, size


def _parse(raw: bytes, prefix: str, faults: list[str]) -> dict[str, Any] | None:
    """The JSON object in `raw`, or None. A key that occurs twice, or is no text, is a fault; faults get a `prefix`."""
    key_faults: list[str] = []

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            key_faults.extend(f"{prefix}the key {_label(key)} occurs twice" for key, n in counts.items() if n > 1)
        key_faults.extend(f"{prefix}the key {_label(key)} is not Unicode text" for key in unique if not is_text(key))
        return unique

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def integer(digits: str) -> int:
        # Other readers of the format take no sign at all; Python would make -0 a size.
        return -1 if digits == "-0" else int(digits)

    try:
        data = json.loads(
            raw.decode("utf-8"), object_pairs_hook=pairs_to_dict, parse_constant=refuse, parse_int=integer
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        faults.append(f"{prefix}not a JSON object: {reason}")
        return None
    faults += key_faults
    if not isinstance(data, dict):
        faults.append(f"{prefix}not a JSON object: found {_shown(data)}")
        return None
    return data


def _metadata(value: Any, faults: list[str]) -> dict[str, str]:
    if not isinstance(value, dict) or any(not is_text(v) for v in value.values()):
        faults.append(f"__metadata__: expected an object of strings, found {_shown(value)}")
        return {}
    return value


def _span(name: str, entry: Any, faults: list[str]) -> tuple[int, int] | None:
    """[begin, end) of an entry in the data, or None where that cannot be known; adds the entry's faults."""
    label = _label(name)
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        found = sorted(entry) if isinstance(entry, dict) else entry
        faults.append(f"{label}: expected an object with {sorted(_ENTRY_KEYS)}, found {_shown(found)}")
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = isinstance(dtype, str) and dtype in DTYPES
    if not known:
        faults.append(f"{label}: dtype {_shown(dtype)}, expected one of {', '.join(DTYPES)}")
    count = _element_count(shape)
    if count is None:
        faults.append(
            f"{label}: shape {_shown(shape)}, expected at most {MAX_AXES} sizes, and fewer than 2^60 elements"
        )
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        faults.append(f"{label}: data_offsets {_shown(offsets)}, expected [begin, end] with begin <= end")
        return None
    begin, end = offsets
    if known and count is not None and end - begin != count * DTYPES[dtype].itemsize:
        expected = count * DTYPES[dtype].itemsize
        faults.append(f"{label}: {end - begin} bytes, expected {expected} for {dtype} {_shown(shape)}")
    return begin, end


def _sizes(value: Any) -> bool:
    # bool is an int in Python, and a number like 1e3 arrives as a float: neither is a size. Beyond 2^63 it is noise.
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _element_count(shape: Any) -> int | None:
    """Elements of a shape, or None for what is no shape, or none that numpy can hold even without elements."""
    if not _sizes(shape) or len(shape) > MAX_AXES:
        return None
    product = 1
    for size in shape:
        product *= max(size, 1)  # numpy refuses [2^62, 2^62, 0] too: it looks at the other axes
    if product >= 2**60:  # times 8 bytes stays within a signed 64-bit count
        return None
    return 0 if 0 in shape else product


def _layout_faults(spans: list[tuple[int, int, str]], size: int, complete: bool) -> list[str]:
    """Overlaps, holes and a wrong end. Without all spans (`complete`), a hole may belong to a faulty entry."""
    faults, reached, last = [], 0, ""
    for begin, end, name in sorted(spans):
        if begin < reached:
            faults.append(f"{_label(name)}: begins at data byte {begin}, but {last} before it ends at {reached}")
        elif begin > reached and complete:
            faults.append(f"{_label(name)}: begins at data byte {begin}, {begin - reached} after the last tensor's end")
        if end >= reached:
            reached, last = end, _label(name)
    if reached > size:
        faults.append(f"the file is truncated: {size} bytes of data, expected {reached}")
    elif reached < size and complete:
        faults.append(f"{size - reached} bytes follow the last tensor")
    return faults


def _label(name: str) -> str:
    """A name from a file as it can be printed: short, on one line, no terminal codes."""
    short = name if len(name) <= 200 else name[:200] + "..."
    return short if short and short.isprintable() else ascii(short)


def _shown(value: Any) -> str:
    """The beginning of a value from a file."""
    try:
        return ascii(value)[:80]
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


# ------------------------------------------------------------------------------------------ all files


@dataclass(frozen=True)
class _Index:
    """What could be understood of an index; `total_size` is None where it states none."""

    weight_map: dict[str, str]
    total_size: int | None


def _read_all(files: Sequence[Path], faults: list[str]) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, str]]:
    """Tensors by file name, without the files that have faults, and the metadata."""

    def read(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]] | CheckpointError:
        try:
            return read_header(file)
        except CheckpointError as error:
            return error

    tensors: dict[str, dict[str, StoredTensor]] = {}
    metadata: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for file, result in zip(files, pool.map(read, files), strict=True):
            if isinstance(result, CheckpointError):
                faults += result.faults or [result.message]
            else:
                tensors[file.name] = result[0]
                metadata |= result[1]
    return tensors, metadata


def _merge(per_file: Iterable[dict[str, StoredTensor]], faults: list[str]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for tensors in per_file:
        for name, tensor in tensors.items():
            bare = name.removeprefix("model.")
            if bare in merged:
                other = merged[bare].file.name
                faults.append(f"{_label(name)}: stands in {other} and again in {tensor.file.name}")
            merged[bare] = tensor if bare == name else dataclasses.replace(tensor, name=bare)
    return merged


def _read_index(path: Path, faults: list[str]) -> _Index:
    own: list[str] = []
    try:
        data = _parse(path.read_bytes(), "", own)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    weight_map: Any = {} if data is None else data.get("weight_map")
    if data is not None and (not isinstance(weight_map, dict) or not weight_map):
        own.append(f"weight_map: expected an object of tensor names to files, found {_shown(weight_map)}")
        weight_map = {}
    good = {}
    for name, file in weight_map.items():
        if _is_file_name(file):
            good[name] = file
        else:
            own.append(f"{_label(name)} lies in {_shown(file)}, expected a .safetensors file beside the index")
    metadata: Any = {} if data is None else data.get("metadata", {})
    total_size = None
    if not isinstance(metadata, dict):
        own.append(f"metadata: expected an object, found {_shown(metadata)}")
    elif "total_size" in metadata:
        total_size = metadata["total_size"]
        if type(total_size) is not int:
            own.append(f"total_size: expected an integer, found {_shown(total_size)}")
            total_size = None
    faults += [f"{path.name}: {fault}" for fault in own]
    return _Index(good, total_size)


def _is_file_name(value: Any) -> bool:
    return (
        is_text(value)
        and value.endswith(".safetensors")
        and len(value.encode()) <= 255
        and value.isprintable()
        and not any(c in value for c in "/\\")
    )


def _index_faults(index: _Index, directory: Path, held: Mapping[str, dict[str, StoredTensor]]) -> list[str]:
    """Where the index and the headers disagree. Files that could not be read are reported already."""
    faults = []
    for name, file in index.weight_map.items():
        if file in held and name not in held[file]:
            faults.append(f"says that {_label(name)} lies in {file}, which does not have it")
    for file, tensors in held.items():
        for name in tensors:
            if index.weight_map.get(name) != file:
                faults.append(f"does not say that {_label(name)} lies in {file}")
    named = set(index.weight_map.values())
    sets = {(m[1], m[3]) for file in named if (m := SHARD_NAME.fullmatch(file))}
    for stray in sorted(set(_file_names(directory)) - named):
        # Other files may lie there for other programs; one of the same set holds tensors of this checkpoint.
        if (m := SHARD_NAME.fullmatch(stray)) and (m[1], m[3]) in sets:
            faults.append(f"does not name {_label(stray)}, which belongs to the same set of files")
    total = sum(t.nbytes for tensors in held.values() for t in tensors.values())
    if index.total_size is not None and held.keys() == named and index.total_size != total:
        faults.append(f"total_size {_shown(index.total_size)}, but the files hold {total} bytes")
    return [f"{INDEX_FILE}: {fault}" for fault in faults]


def _file_names(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be listed: {error.strerror or error}") from None


def _files_without_index(path: Path, faults: list[str]) -> list[Path]:
    names = _file_names(path)
    if not names:
        faults.append(f"{path}: there is no .safetensors file in it")
    if SINGLE_FILE in names:
        stem = SINGLE_FILE.removesuffix(".safetensors")
        if any((m := SHARD_NAME.fullmatch(name)) and m[1] == stem for name in names):
            faults.append(f"{SINGLE_FILE} and numbered files of the same name, but no index that says which are meant")
        return [path / SINGLE_FILE]
    sets: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for name in names:
        if m := SHARD_NAME.fullmatch(name):
            sets[m[1], int(m[3])].add(int(m[2]))
    for (stem, count), found in sorted(sets.items()):
        wanted = set(range(1, count + 1))
        faults += [f"{stem}-{i:05}-of-{count:05}.safetensors: missing" for i in sorted(wanted - found)]
        faults += [f"{stem}-{i:05}-of-{count:05}.safetensors: number out of range" for i in sorted(found - wanted)]
    return [path / name for name in names]
