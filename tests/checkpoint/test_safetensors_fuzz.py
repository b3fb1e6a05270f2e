"""Fuzzing the file format: whatever the bytes are, either a CheckpointError or a reading that is wholly consistent."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors as official
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_jax.checkpoint import safetensors as reader
from deepinfer_jax.checkpoint.safetensors import (
    DTYPES,
    INDEX_FILE,
    Checkpoint,
    open_checkpoint,
    read_bytes,
    read_header,
    view,
)
from deepinfer_jax.checkpoint.safetensors_writer import write_checkpoint_files, write_file
from deepinfer_jax.errors import CheckpointError

FUZZ = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

BASE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(6, dtype=np.int32),
    "model.c": np.ones(5, "i1"),
}
BASE |= {"e": np.ones((0, 3), np.int8), "s": np.array(4, DTYPES["F8_E8M0"]), "w": np.ones(2, DTYPES["BF16"])}

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, -1, 0.0, 1.5, math.nan, math.inf, -math.inf])
    | st.sampled_from([*DTYPES, "F4", "a", "b", "", "\ud800", "\0", "../x"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def file_bytes(header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def check_accepted(data: bytes, file: Path) -> bool:
    """Read `data` as a file: False if it is refused; if not, it must be what an independent reader sees, and whole."""
    file.write_bytes(data)
    try:
        tensors, metadata = read_header(file)
    except CheckpointError as error:
        assert str(error).encode()
        return False
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items())
    theirs = dict(official.deserialize(data))  # raises where the official reader refuses
    assert theirs.keys() == tensors.keys()
    covered = 8 + int.from_bytes(data[:8], "little")
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        assert t.offset == covered, "neither overlap nor hole"
        covered += t.nbytes
        assert t.nbytes == math.prod(t.shape) * DTYPES[t.dtype].itemsize and min(t.shape, default=0) >= 0
        assert (theirs[name]["dtype"], tuple(theirs[name]["shape"])) == (t.dtype, t.shape)
        assert bytes(theirs[name]["data"]) == read_bytes(t).tobytes() == view(t).tobytes()
    assert covered == len(data), "every byte belongs to a tensor"
    return True


@pytest.fixture
def base(tmp_path: Path) -> bytes:
    write_file(tmp_path / "base.safetensors", BASE, {"format": "pt"})
    return (tmp_path / "base.safetensors").read_bytes()


BYTE_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "insert", "delete", "cut", "append", "length"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def edit_bytes(data: bytes, edits: list[tuple[str, float, int]]) -> bytes:
    out = bytearray(data)
    for kind, where, value in edits:
        at = int(where * len(out))
        if kind == "flip" and out:
            out[at] ^= 1 << value % 8
        elif kind == "set" and out:
            out[at] = b'0123456789-[]{},:" .etrn'[value % 24] if value < 240 else value
        elif kind == "insert":
            out.insert(at, value)
        elif kind == "delete":
            del out[at : at + 1 + value % 16]
        elif kind == "cut":
            del out[at:]
        elif kind == "append":
            out += bytes(value % 9)
        elif kind == "length" and len(out) >= 8:
            length = int.from_bytes(out[:8], "little") + (value - 128 if value % 2 else 1 << value % 64)
            out[:8] = (length % 2**64).to_bytes(8, "little")
    return bytes(out)


def test_no_mutation_of_the_bytes_crashes_or_slips_through(base: bytes, tmp_path: Path):
    outcomes: collections.Counter[bool] = collections.Counter()

    @settings(FUZZ, max_examples=2000)
    @given(BYTE_EDITS)
    def fuzz(edits: list[tuple[str, float, int]]) -> None:
        outcomes[check_accepted(edit_bytes(base, edits), tmp_path / "a.safetensors")] += 1

    fuzz()
    assert outcomes[False] > 100 and outcomes[True] > 10


def test_no_random_file_crashes(tmp_path: Path):
    @settings(FUZZ, max_examples=500)
    @given(st.binary(max_size=200), st.booleans())
    def fuzz(data: bytes, framed: bool) -> None:
        check_accepted(file_bytes(data) if framed else data, tmp_path / "a.safetensors")

    fuzz()


@st.composite
def edited_header(draw: st.DrawFn, header: dict[str, Any]) -> tuple[bytes, int]:
    """A header after some edits of its JSON, and how many bytes of data more than it described there should be."""
    out: dict[str, Any] = json.loads(json.dumps(header))
    extra = 0
    for kind in draw(st.lists(st.sampled_from(sorted(HEADER_EDITS)), min_size=1, max_size=3)):
        entries = [n for n, e in out.items() if n != "__metadata__" and isinstance(e, dict)]
        if entries:
            one, other = draw(st.sampled_from(entries)), draw(st.sampled_from(entries))
            extra += HEADER_EDITS[kind](draw, out, one, other) or 0
    text = json.dumps(out)
    if draw(st.integers(0, 9)) == 0:  # a duplicate key, which no dict can hold
        text = text.replace('"w"', '"b"').replace('"shape"', '"dtype"', draw(st.integers(0, 1)))
    return text.encode() + b" " * draw(st.integers(0, 2)), extra


def _swap(key: str) -> Callable[..., None]:
    def edit(_: Any, out: dict[str, Any], one: str, other: str) -> None:
        if key in out[one] and key in out[other]:
            out[one][key], out[other][key] = out[other][key], out[one][key]

    return edit


def _rename(draw: Any, out: dict[str, Any], one: str, other: str) -> None:
    out[draw(st.sampled_from([other, "model.a", "__metadata__", "z", "", "\ud800"]))] = out.pop(one)


def _junk(draw: Any, out: dict[str, Any], one: str, _: str) -> None:
    key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "x", None]))
    if key is None:
        out[one] = draw(JUNK)
    else:
        out[one][key] = draw(JUNK)


def _drop(draw: Any, out: dict[str, Any], one: str, _: str) -> None:
    if draw(st.booleans()):
        del out[one]
    else:
        out[one].pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)


def _dtype(draw: Any, out: dict[str, Any], one: str, _: str) -> None:
    out[one]["dtype"] = draw(st.sampled_from([*DTYPES, "F4", "F8_E5M2", "f32", "C64"]))


def _shape(draw: Any, out: dict[str, Any], one: str, _: str) -> None:
    shape = out[one].get("shape")
    if isinstance(shape, list):
        shapes = [[*shape, 1], [1, *shape], shape[::-1], shape[1:], [*shape, 0], [*shape, 2**62, 4], [-1, *shape]]
        out[one]["shape"] = draw(st.sampled_from(shapes))


def _offsets(draw: Any, out: dict[str, Any], one: str, _: str) -> int:
    offsets = out[one].get("data_offsets")
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(v) is int for v in offsets):
        a, b = draw(st.integers(-8, 8)), draw(st.integers(-8, 8))
        out[one]["data_offsets"] = draw(st.sampled_from([offsets[::-1], [offsets[0] + a, offsets[1] + b]]))
    return draw(st.integers(-8, 8))


def _add(draw: Any, out: dict[str, Any], _: str, __: str) -> int:
    size = draw(st.integers(0, 9))
    ends = [e["data_offsets"][1] for e in out.values() if isinstance(e, dict) and _pair(e.get("data_offsets"))]
    end = max(ends, default=0)
    out["new"] = entry("U8", (size,), end, end + size)
    return size


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value)


def _metadata(draw: Any, out: dict[str, Any], _: str, __: str) -> None:
    out["__metadata__"] = draw(JUNK | st.dictionaries(st.text(max_size=3), st.text(max_size=3)))


HEADER_EDITS: dict[str, Callable[..., int | None]] = {
    "swap offsets": _swap("data_offsets"),
    "swap dtypes": _swap("dtype"),
    "swap shapes": _swap("shape"),
    "rename": _rename,
    "junk": _junk,
    "drop": _drop,
    "dtype": _dtype,
    "shape": _shape,
    "offsets": _offsets,
    "add": _add,
    "metadata": _metadata,
}


def test_no_mutation_of_the_header_crashes_or_slips_through(base: bytes, tmp_path: Path):
    length = int.from_bytes(base[:8], "little")
    header, data = json.loads(base[8 : 8 + length]), base[8 + length :]
    outcomes: collections.Counter[bool] = collections.Counter()

    @settings(FUZZ, max_examples=2000)
    @given(edited_header(header), st.booleans())
    def fuzz(edited: tuple[bytes, int], resize: bool) -> None:
        raw, extra = edited
        resized = (data + bytes(64))[: max(0, len(data) + extra)] if resize else data
        outcomes[check_accepted(file_bytes(raw, resized), tmp_path / "a.safetensors")] += 1

    fuzz()
    assert outcomes[False] > 100 and outcomes[True] > 100


def test_the_fuzz_check_notices_a_reader_that_skips_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hole = file_bytes({"a": entry(begin=4, end=8)}, b"12345678")
    assert not check_accepted(hole, tmp_path / "a.safetensors")
    monkeypatch.setattr(reader, "_layout_faults", lambda *_, **__: [])
    with pytest.raises((AssertionError, official.SafetensorError)):
        check_accepted(hole, tmp_path / "a.safetensors")


@st.composite
def edited_index(draw: st.DrawFn, index: dict[str, Any]) -> Any:
    out: Any = json.loads(json.dumps(index))
    names = [*out["weight_map"], "new", "model.a", "a", "\ud800", "__metadata__"]
    files = [*sorted(set(out["weight_map"].values())), "gone.safetensors", "../x.safetensors", "adapter.safetensors"]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["map", "map junk", "drop", "total", "metadata", "weight_map", "all", "extra"]))
        if not isinstance(out, dict):
            return out
        weight_map = out.get("weight_map")
        if kind in ("map", "map junk", "drop") and isinstance(weight_map, dict):
            name = draw(st.sampled_from(names))
            if kind == "drop":
                weight_map.pop(name, None)
            else:
                weight_map[name] = draw(JUNK if kind == "map junk" else st.sampled_from(files))
        elif kind == "total":
            out["metadata"] = {"total_size": draw(JUNK | st.integers(60, 75))}
        elif kind in ("metadata", "weight_map", "extra"):
            out[kind] = draw(JUNK)
        elif kind == "all":
            out = draw(JUNK)
    return out


def whole(checkpoint: Checkpoint, directory: Path, index: Any, total: int) -> None:
    """An accepted index says exactly what the files hold."""
    named = {name.removeprefix("model."): file for name, file in index["weight_map"].items()}
    assert {name: t.file.name for name, t in checkpoint.tensors.items()} == named
    held = {n.removeprefix("model."): t.offset for f in checkpoint.files for n, t in read_header(f)[0].items()}
    assert {name: t.offset for name, t in checkpoint.tensors.items()} == held
    assert all(file.parent == directory for file in checkpoint.files)
    stated = index.get("metadata", {}).get("total_size", total)
    assert type(stated) is int and stated == checkpoint.total_bytes == total


def test_no_mutation_of_the_index_crashes_or_slips_through(tmp_path: Path):
    files = write_checkpoint_files(tmp_path, BASE, 25)
    assert len(files) == 3
    write_file(tmp_path / "adapter.safetensors", {"mine": np.ones(1)})
    text = (tmp_path / INDEX_FILE).read_bytes()
    total = sum(a.nbytes for a in BASE.values())
    outcomes: collections.Counter[bool] = collections.Counter()

    def check(data: bytes) -> None:
        (tmp_path / INDEX_FILE).write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
        except CheckpointError as error:
            assert str(error).encode()
            outcomes[False] += 1
        else:
            whole(checkpoint, tmp_path, json.loads(data), total)
            outcomes[True] += 1

    @settings(FUZZ, max_examples=450)
    @given(edited_index(json.loads(text)).map(lambda index: json.dumps(index).encode()))
    def fuzz_values(data: bytes) -> None:
        check(data)

    @settings(FUZZ, max_examples=350)
    @given(BYTE_EDITS.map(lambda edits: edit_bytes(text, edits)))
    def fuzz_bytes(data: bytes) -> None:
        check(data)

    fuzz_values()
    fuzz_bytes()
    assert outcomes[False] > 100 and outcomes[True] > 10
