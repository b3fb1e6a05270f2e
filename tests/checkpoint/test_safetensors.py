"""The file format: what is written is read back, and nothing else than a valid file is accepted."""

from __future__ import annotations

import collections
import json
import math
import os
import stat
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors as official
import safetensors.numpy as official_numpy

from deepinfer_jax.checkpoint.safetensors import (
    DTYPES,
    INDEX_FILE,
    NAMES,
    SINGLE_FILE,
    open_checkpoint,
    read_bytes,
    read_header,
    read_into,
    view,
)
from deepinfer_jax.checkpoint.safetensors_writer import LazyTensor, write_checkpoint_files, write_file
from deepinfer_jax.errors import CheckpointError, InputError


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every bit pattern may occur: NaN payloads and the like must survive. A bool has only two."""
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return (raw % 2 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


def some_of_each_dtype() -> dict[str, np.ndarray]:
    shapes = [(3, 5), (), (0, 4), (7,), (2, 1, 3)]
    return {f"t.{n}.{i}": random_array(d, s, i) for n, d in DTYPES.items() for i, s in enumerate(shapes)}


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def file_bytes(header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


# --------------------------------------------------------------------------------------- round trips


def test_every_dtype_of_the_checkpoint_has_a_name_and_back():
    assert {"F8_E4M3", "F8_E8M0", "I8", "U8", "BF16", "F32"} <= DTYPES.keys()
    assert {NAMES[dtype]: dtype for dtype in DTYPES.values()} == DTYPES


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path):
    tensors = some_of_each_dtype()
    write_file(tmp_path / "a.safetensors", tensors, {"format": "pt", "ü": "\U0001f600"})
    stored, metadata = read_header(tmp_path / "a.safetensors")
    assert metadata == {"format": "pt", "ü": "\U0001f600"}
    assert stored.keys() == tensors.keys()
    for name, array in tensors.items():
        assert_same_bits(view(stored[name]), array)
        assert read_bytes(stored[name]).tobytes() == array.tobytes()


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path):
    write_file(tmp_path / "a.safetensors", some_of_each_dtype(), {"length": "x" * 3})
    stored, _ = read_header(tmp_path / "a.safetensors")
    assert all(t.offset % t.numpy_dtype.itemsize == 0 for t in stored.values())
    assert int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little") % 8 == 0
    assert all(view(t).flags.aligned for t in stored.values())


def test_the_official_package_reads_our_files(tmp_path: Path):
    tensors = some_of_each_dtype()
    write_file(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    raw = dict(official.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert raw.keys() == tensors.keys()
    for name, array in tensors.items():
        assert raw[name]["dtype"] == NAMES[array.dtype] and tuple(raw[name]["shape"]) == array.shape
        assert bytes(raw[name]["data"]) == array.tobytes()
    plain = {n: a for n, a in tensors.items() if NAMES[a.dtype] not in ("F8_E8M0", "F8_E4M3", "BF16")}
    write_file(tmp_path / "b.safetensors", plain)
    loaded = official_numpy.load_file(tmp_path / "b.safetensors")
    for name, array in plain.items():
        assert_same_bits(loaded[name], array)


def test_we_read_the_files_of_the_official_package(tmp_path: Path):
    tensors = {n: a for n, a in some_of_each_dtype().items() if NAMES[a.dtype] not in ("F8_E8M0", "F8_E4M3", "BF16")}
    (tmp_path / "a.safetensors").write_bytes(official_numpy.save(tensors, {"by": "them"}))
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    assert checkpoint.metadata == {"by": "them"}
    assert checkpoint.total_bytes == sum(a.nbytes for a in tensors.values())
    for name, array in tensors.items():
        assert_same_bits(view(checkpoint.tensors[name]), array)


def test_byte_ranges_are_those_of_the_tensor(tmp_path: Path):
    array = np.arange(40, dtype=np.int16)
    write_file(tmp_path / "a.safetensors", {"a": array, "b": np.ones(9, np.int8)})
    tensor = read_header(tmp_path / "a.safetensors")[0]["a"]
    raw = array.tobytes()
    assert read_bytes(tensor, 3, 17).tobytes() == raw[3:17]
    assert read_bytes(tensor, 80, 80).size == 0
    out = np.zeros((2, 5), np.uint8)
    read_into(tensor, 70, out)
    assert out.tobytes() == raw[70:80]
    for start, stop in [(-1, 3), (0, 81), (5, 4), (81, 81)]:
        with pytest.raises(CheckpointError, match=f"a: bytes {start}..{stop} of 80 asked for"):
            read_bytes(tensor, start, stop)
    with pytest.raises(CheckpointError, match=r"a: bytes 71..81 of 80 asked for"):
        read_into(tensor, 71, out)
    with pytest.raises(ValueError, match="contiguous"):  # it would fill a copy
        read_into(tensor, 0, np.zeros((4, 4), np.uint8)[:, ::2])


def test_a_view_is_a_read_only_mapping(tmp_path: Path):
    write_file(tmp_path / "a.safetensors", {"a": np.ones((1 << 20,), np.float64)})
    tensor = read_header(tmp_path / "a.safetensors")[0]["a"]
    tracemalloc.start()
    try:
        array = view(tensor)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 < array.nbytes
    finally:
        tracemalloc.stop()
    assert not array.flags.writeable and not array.flags.owndata


def test_a_file_that_shrinks_after_its_header_was_read_is_reported(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    write_file(file, {"a": np.ones(9, np.float32)})
    tensor = read_header(file)[0]["a"]
    os.truncate(file, tensor.offset + 8)
    with pytest.raises(CheckpointError, match="become shorter than its header says"):
        read_bytes(tensor)
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        view(tensor)
    file.unlink()
    for read in (read_bytes, view):
        with pytest.raises(CheckpointError, match="No such file"):
            read(tensor)


# ------------------------------------------------------------------------------------ faulty headers

DEEP = b'{"a":{"dtype":' + b"[" * 100_000 + b"]" * 100_000 + b',"shape":[1],"data_offsets":[0,4]}}'
FAULTY: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes, expected at least the 8"),
    "seven bytes": (b"1234567", "7 bytes, expected at least the 8"),
    "longer than the file": (file_bytes(b"{}", length=3), "header of 3 bytes, but only 2 follow"),
    "over the limit": (file_bytes(b"{}", length=(100 << 20) + 1), "at most 104857600 are allowed"),
    "absurd length": (b"\xff" * 64, "header of 18446744073709551615 bytes"),
    "no header": (file_bytes(b""), "not a JSON object"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "can't decode byte 0xff"),
    "not JSON": (file_bytes(b"{]"), "not a JSON object"),
    "not an object": (file_bytes(b"[1]"), "begins with b'['"),
    "blank first": (file_bytes(b" {}"), "begins with b' '"),
    "text after it": (file_bytes(b"{} {}"), "Extra data"),
    "nested too deeply": (file_bytes(DEEP, b"1234"), "nested too deeply"),
    "nested deeply": (file_bytes(DEEP.replace(b"[" * 99_500, b"").replace(b"]" * 99_500, b""), b"1234"), "a: dtype"),
    "NaN": (file_bytes(b'{"a":NaN}'), "NaN is not JSON"),
    "number of 5,000 digits": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "not a JSON object"),
    "name twice": (file_bytes(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"1234"), "a occurs twice"),
    "key twice": (
        file_bytes(b'{"a":{"dtype":"I8","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        "dtype occurs twice",
    ),
    "half a surrogate": (file_bytes({"\ud800": entry()}, b"1234"), "the key '\\ud800' is not Unicode text"),
    "entry no object": (file_bytes({"a": [1]}), "a: expected an object with"),
    "key missing": (file_bytes({"a": {"dtype": "F32", "shape": []}}), "found ['dtype', 'shape']"),
    "key too many": (file_bytes({"a": {**entry(), "x": 1}}, b"1234"), "'shape', 'x']"),
    "unknown dtype": (file_bytes({"a": entry("F4")}, b"1234"), "a: dtype 'F4', expected one of F8_E4M3"),
    "dtype no string": (file_bytes({"a": entry(["F32"])}, b"1234"), "a: dtype ['F32']"),
    "shape no list": (file_bytes({"a": entry(shape=4)}, b"1234"), "a: shape 4"),
    "negative size": (file_bytes({"a": entry(shape=(-1,))}, b"1234"), "a: shape [-1]"),
    "two negative sizes": (file_bytes({"a": entry(shape=(-1, -1))}, b"1234"), "a: shape [-1, -1]"),
    "bool size": (file_bytes({"a": entry(shape=(True,))}, b"1234"), "a: shape [True]"),
    "float size": (file_bytes({"a": entry(shape=(1.0,))}, b"1234"), "a: shape [1.0]"),
    "minus zero": (file_bytes(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "a: shape [-1]"),
    "overflow": (file_bytes({"a": entry(shape=(2**62, 4))}, b"1234"), "fewer than 2^60 elements"),
    "overflow by far": (file_bytes({"a": entry(shape=(2**62,) * 60)}, b"1234"), "fewer than 2^60 elements"),
    "overflow but empty": (file_bytes({"a": entry(shape=(2**62, 2**62, 0), end=0)}), "fewer than 2^60 elements"),
    "65 axes": (file_bytes({"a": entry(shape=(1,) * 65)}, b"1234"), "at most 64 sizes"),
    "one offset": (file_bytes({"a": {**entry(), "data_offsets": [0]}}, b"1234"), "a: data_offsets [0]"),
    "bool offset": (file_bytes({"a": entry("I8", (1,), False, True)}, b"1"), "a: data_offsets [False, True]"),
    "backwards": (file_bytes({"a": entry(begin=4, end=0)}, b"1234"), "a: data_offsets [4, 0]"),
    "wrong byte count": (file_bytes({"a": entry(shape=(2,))}, b"1234"), "a: 4 bytes, expected 8 for F32 [2]"),
    "overlap": (
        file_bytes({"a": entry(), "b": entry("I8", (4,), 2, 6)}, b"123456"),
        "b: begins at data byte 2, but a before it ends at 4",
    ),
    "the same bytes twice": (file_bytes({"a": entry(), "b": entry()}, b"1234"), "but a before it ends at 4"),
    "empty tensor inside": (
        file_bytes({"a": entry(), "b": entry(shape=(0,), begin=2, end=2)}, b"1234"),
        "b: begins at data byte 2",
    ),
    "hole": (
        file_bytes({"a": entry(), "b": entry(begin=6, end=10)}, b"1234567890"),
        "b: begins at data byte 6, 2 after",
    ),
    "hole before the first": (file_bytes({"a": entry(begin=1, end=5)}, b"12345"), "a: begins at data byte 1, 1 after"),
    "truncated": (file_bytes({"a": entry()}, b"123"), "the file is truncated: 3 bytes of data, expected 4"),
    "bytes left over": (file_bytes({"a": entry()}, b"12345"), "1 bytes follow the last tensor"),
    "metadata no object": (file_bytes({"__metadata__": "x"}), "__metadata__: expected an object of strings"),
    "metadata no strings": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__: expected an object of strings"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_faulty_header_is_refused_with_its_reason(kind: str, tmp_path: Path):
    data, message = FAULTY[kind]
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "a.safetensors")
    assert message in str(caught.value)
    assert "a.safetensors" in str(caught.value)
    assert len(caught.value.faults) <= 1, "one thing is wrong with it"


def test_no_depth_of_nesting_escapes(tmp_path: Path):
    # Just below the depth that the parser refuses (Python's choice), printing the value would overflow instead.
    for depth in [*range(1, 1400, 100), *range(1400, 1600)]:
        nested = b"[" * depth + b"1" + b"]" * depth
        header = b'{"a":{"dtype":%b,"shape":[1],"data_offsets":[0,4]}}' % nested
        (tmp_path / SINGLE_FILE).write_bytes(file_bytes(header, b"1234"))
        with pytest.raises(CheckpointError, match=r"nested too deeply|a: dtype"):
            read_header(tmp_path / SINGLE_FILE)
        (tmp_path / INDEX_FILE).write_bytes(nested)
        with pytest.raises(CheckpointError, match=r"nested too deeply|found \[|a deeply nested list"):
            open_checkpoint(tmp_path)


def test_the_smallest_valid_files_are_accepted(tmp_path: Path):
    for header, data, count in [({}, b"", 0), ({"": entry()}, b"1234", 1), ({"a": entry(shape=(0,), end=0)}, b"", 1)]:
        (tmp_path / "a.safetensors").write_bytes(file_bytes(header, data))
        assert len(read_header(tmp_path / "a.safetensors")[0]) == count


def test_all_faults_of_a_file_come_in_one_error(tmp_path: Path):
    header = {
        "__metadata__": {"x": None},
        "a": entry("F3"),
        "b": entry(shape=(-1,), begin=4, end=8),
        "c": entry("I8", (4,), 6, 10),
        "d": 5,
    }
    (tmp_path / "f.safetensors").write_bytes(file_bytes(header, b"123456789"))
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "f.safetensors")
    wanted = ["__metadata__", "a: dtype", "b: shape", "d: expected", "c: begins at data byte 6", "truncated: 9 bytes"]
    assert len(caught.value.faults) == len(wanted)
    for part, fault in zip(wanted, caught.value.faults, strict=True):
        assert fault.startswith(f"f.safetensors: {part}") or part in fault


def test_names_cannot_garble_the_message(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(file_bytes({"\x1b[2J\n": 1, "x" * 10_000: 1}))
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "a.safetensors")
    text = str(caught.value)
    assert "'\\x1b[2J\\n'" in text and "\x1b" not in text and len(text) < 1_000


def test_paths_that_are_no_files_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in [("no", "No such file"), ("folder", "not a regular file"), ("pipe", "not a regular file")]:
        with pytest.raises(CheckpointError, match=message):
            read_header(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_checkpoint(tmp_path / "no")
    with pytest.raises(CheckpointError, match="null byte"):
        read_header(tmp_path / "a\0b")


# ------------------------------------------------------------------------- directories and the index


def write_shards(directory: Path, index: Any = None, total_size: Any = None) -> dict[str, np.ndarray]:
    """Two shards whose index may be told what to say."""
    shards = [{"a": np.ones(3, np.float32), "b": np.ones(2, np.int8)}, {"model.c": np.zeros((2, 2), np.int64)}]
    for i, tensors in enumerate(shards, 1):
        write_file(directory / f"model-0000{i}-of-00002.safetensors", tensors, {"format": "pt"})
    names = {n: f"model-0000{i}-of-00002.safetensors" for i, tensors in enumerate(shards, 1) for n in tensors}
    content = {
        "metadata": {"total_size": 46 if total_size is None else total_size},
        "weight_map": names | (index or {}),
    }
    content["weight_map"] = {n: f for n, f in content["weight_map"].items() if f != "remove"}
    (directory / INDEX_FILE).write_text(json.dumps(content))
    return shards[0] | shards[1]


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_one_checkpoint(with_index: bool, tmp_path: Path):
    tensors = write_shards(tmp_path)
    if not with_index:
        (tmp_path / INDEX_FILE).unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == {"a", "b", "c"}, "a leading `model.` is dropped"
    assert checkpoint.total_bytes == 46 and len(checkpoint.files) == 2
    for name, array in tensors.items():
        bare = name.removeprefix("model.")
        assert checkpoint.tensors[bare].name == bare
        assert_same_bits(view(checkpoint.tensors[bare]), array)


def test_a_directory_with_one_file_is_a_checkpoint(tmp_path: Path):
    write_file(tmp_path / SINGLE_FILE, {"a": np.ones(1)})
    write_file(tmp_path / "adapter.safetensors", {"a": np.ones(1)})
    assert open_checkpoint(tmp_path).files == (tmp_path / SINGLE_FILE,)


LIES: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "names a tensor that its file lacks": (
        {"x": "model-00001-of-00002.safetensors"},
        None,
        ["says that x lies in model-00001-of-00002.safetensors, which does not have it"],
    ),
    "names a file that is missing": ({"x": "other.safetensors"}, None, ["other.safetensors: cannot be read: No such"]),
    "does not name a tensor": ({"b": "remove"}, None, ["does not say that b lies in model-00001-of-00002.safetensors"]),
    "does not name a file": ({"model.c": "remove"}, 14, ["does not name model-00002-of-00002.safetensors"]),
    "maps a tensor elsewhere": (
        {"b": "model-00002-of-00002.safetensors"},
        None,
        ["says that b lies in model-00002-of-00002", "does not say that b lies in model-00001-of-00002"],
    ),
    "leaves the directory": ({"x": "../a.safetensors"}, None, ["x lies in '../a.safetensors', expected"]),
    "absolute": ({"x": "/etc/a.safetensors"}, None, ["x lies in '/etc/a.safetensors', expected"]),
    "null byte": ({"x": "a\0.safetensors"}, None, ["x lies in 'a\\x00.safetensors', expected"]),
    "half a surrogate": ({"x": "\ud800.safetensors"}, None, ["x lies in '\\ud800.safetensors', expected"]),
    "very long name": ({"x": "a" * 300 + ".safetensors"}, None, ["x lies in 'aaa"]),
    "other suffix": ({"x": "a.bin"}, None, ["x lies in 'a.bin', expected"]),
    "no string": ({"x": ["a.safetensors"]}, None, ["x lies in ['a.safetensors'], expected"]),
    "wrong total": ({}, 47, ["total_size 47, but the files hold 46 bytes"]),
    "total no integer": ({}, "46", ["total_size: expected an integer, found '46'"]),
    "total true": ({}, True, ["total_size: expected an integer, found True"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(lie: str, tmp_path: Path):
    weight_map, total, messages = LIES[lie]
    write_shards(tmp_path, weight_map, total)
    error = refusal(tmp_path)
    assert len(error.faults) == len(messages)
    for message in messages:
        assert message in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model.safetensors.index.json: not a JSON object"),
        ("[]", "not a JSON object: found []"),
        ("{}", "weight_map: expected an object"),
        ('{"weight_map":{}}', "weight_map: expected an object"),
        ('{"weight_map":["a"]}', "weight_map: expected an object"),
        ('{"weight_map":{"a":"f.safetensors","a":"f.safetensors"}}', "the key a occurs twice"),
        ('{"weight_map":{"a":"f.safetensors"},"metadata":[]}', "metadata: expected an object"),
        ("[" * 100_000, "nested too deeply"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_an_index_that_is_none_is_refused(text: str, message: str, tmp_path: Path):
    write_file(tmp_path / "f.safetensors", {"a": np.ones(1)})
    (tmp_path / INDEX_FILE).write_text(text)
    error = refusal(tmp_path)
    assert message in str(error) and len(error.faults) == 1


def test_all_faults_of_all_files_come_in_one_error(tmp_path: Path):
    write_shards(tmp_path, {"x": "gone.safetensors", "y": 5, "b": "remove"})
    file = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    error = refusal(tmp_path)
    assert len(error.faults) == 4
    for part in ["y lies in 5", "gone.safetensors", "truncated: 31 bytes", "does not say that b lies in"]:
        assert any(part in fault for fault in error.faults)
    (tmp_path / INDEX_FILE).write_text("{")
    assert [p in str(refusal(tmp_path)) for p in ("index.json: not a JSON", "truncated: 31 bytes")] == [True, True]


def test_an_index_that_cannot_be_followed_is_refused(tmp_path: Path):
    (tmp_path / INDEX_FILE).symlink_to("gone")
    write_file(tmp_path / SINGLE_FILE, {"a": np.ones(1)})
    assert "cannot be read" in str(refusal(tmp_path))


def test_without_an_index_a_set_must_be_complete(tmp_path: Path):
    assert "there is no .safetensors file" in str(refusal(tmp_path))
    write_file(tmp_path / "model-00002-of-00003.safetensors", {"a": np.ones(1)})
    write_file(tmp_path / "model-00004-of-00003.safetensors", {"b": np.ones(1)})
    error = refusal(tmp_path)
    assert error.faults == (
        "model-00001-of-00003.safetensors: missing",
        "model-00003-of-00003.safetensors: missing",
        "model-00004-of-00003.safetensors: number out of range",
    )
    write_file(tmp_path / SINGLE_FILE, {"a": np.ones(1)})
    assert "no index that says which are meant" in str(refusal(tmp_path))


def test_names_that_collide_are_refused(tmp_path: Path):
    write_file(tmp_path / "a.safetensors", {"model.x": np.ones(1), "x": np.ones(1)})
    assert "x: stands in a.safetensors and again in a.safetensors" in str(refusal(tmp_path / "a.safetensors"))
    write_file(tmp_path / "a.safetensors", {"x": np.ones(1)})
    write_file(tmp_path / "b.safetensors", {"model.x": np.ones(1)})
    assert "model.x: stands in a.safetensors and again in b.safetensors" in str(refusal(tmp_path))


# ------------------------------------------------------------------------------------------- writing


def test_what_the_format_cannot_hold_is_refused_before_writing(tmp_path: Path):
    bad = {
        "complex": np.ones(1, np.complex64),
        "big": np.ones(1, ">f4"),
        "object": np.array([None]),
        "__metadata__": np.ones(1),
        "\ud800": np.ones(1),
    }
    with pytest.raises(CheckpointError) as caught:
        write_file(tmp_path / "a.safetensors", bad, {"a": 1, 2: "b"})  # type: ignore[dict-item]
    assert len(caught.value.faults) == 7
    for part in ["'complex': dtype", "'big': dtype", "'object': dtype", "'__metadata__': not a name", "'\\ud800'"]:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="x is there too"):
        write_checkpoint_files(tmp_path / "d", {"model.x": np.ones(1), "x": np.ones(1)}, 10)
    with pytest.raises(InputError, match="max_shard_bytes: 0"):
        write_checkpoint_files(tmp_path / "d", {"x": np.ones(1)}, 0)
    assert not (tmp_path / "d").exists()


def lazy(array: np.ndarray, make: Callable[[], np.ndarray]) -> LazyTensor:
    return LazyTensor(array.dtype, array.shape, make)


def test_lazy_tensors_are_made_one_at_a_time(tmp_path: Path):
    array = np.full((1 << 20,), 7, np.float32)
    tensors = {f"t{i}": lazy(array, lambda i=i: np.full((1 << 20,), i, np.float32)) for i in range(8)}
    tracemalloc.start()
    try:
        write_file(tmp_path / "a.safetensors", tensors)
        assert tracemalloc.get_traced_memory()[1] < 3 * array.nbytes
    finally:
        tracemalloc.stop()
    stored = open_checkpoint(tmp_path / "a.safetensors").tensors
    assert all((view(stored[f"t{i}"]) == i).all() for i in range(8))


def fail() -> np.ndarray:
    raise RuntimeError("no array")


@pytest.mark.parametrize("failure", ["other dtype", "other shape", "raises", "disk full"])
def test_a_write_that_fails_leaves_the_old_files(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = np.arange(5, dtype=np.int32)
    write_checkpoint_files(tmp_path, {"old": old}, 1 << 20)
    makers = {"other dtype": lambda: old.astype(np.int64), "other shape": lambda: old[:4], "raises": fail}
    bad = lazy(old, makers.get(failure, lambda: old))
    if failure == "disk full":

        def no_space(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", no_space)
    for write in (
        lambda: write_file(tmp_path / SINGLE_FILE, {"new": old, "x": bad}),
        lambda: write_checkpoint_files(tmp_path, {"new": old, "x": bad}, 1),
    ):
        with pytest.raises((CheckpointError, RuntimeError, OSError), match=r"declared int32|no array|No space"):
            write()
        assert [p.name for p in tmp_path.iterdir()] == [SINGLE_FILE]
        assert_same_bits(view(open_checkpoint(tmp_path).tensors["old"]), old)


def test_files_have_the_usual_permissions(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a.safetensors", {"a": np.ones(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_shards_fill_up_to_the_limit(tmp_path: Path):
    tensors = {f"t{i}": np.full(size, i, np.int8) for i, size in enumerate([4, 4, 3, 20, 1, 9, 0])}
    files = write_checkpoint_files(tmp_path, tensors, 10, {"format": "pt"})
    sizes = [sum(t.nbytes for t in read_header(file)[0].values()) for file in files]
    assert sizes == [8, 3, 20, 10], "a tensor is never split"
    assert files[0].name == "model-00001-of-00004.safetensors"
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 41} and index["weight_map"].keys() == tensors.keys()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files == files and checkpoint.metadata == {"format": "pt"}
    for name, array in tensors.items():
        assert_same_bits(view(checkpoint.tensors[name]), array)


def test_a_checkpoint_may_be_rewritten_from_itself(tmp_path: Path):
    tensors = {f"t{i}": np.full(10, i, np.int8) for i in range(5)}
    write_checkpoint_files(tmp_path, tensors, 20)
    write_file(tmp_path / "adapter.safetensors", {"mine": np.ones(1)})
    for limit, count in [(10, 5), (1000, 1), (30, 2)]:
        stored = open_checkpoint(tmp_path).tensors
        copies = {n: lazy(tensors[n], lambda t=t: read_bytes(t).view(np.int8)) for n, t in stored.items()}
        files = write_checkpoint_files(tmp_path, copies, limit)
        assert len(files) == count and open_checkpoint(tmp_path).files == files
        assert {p.name for p in tmp_path.iterdir()} == {"adapter.safetensors", *(f.name for f in files)} | (
            {INDEX_FILE} if count > 1 else set()
        ), "stale files go, other files stay"
        for name, array in tensors.items():
            assert_same_bits(view(open_checkpoint(tmp_path).tensors[name]), array)


class Crash(BaseException):
    """The machine stops: no clean-up of ours counts."""


@pytest.mark.parametrize("old_limit", [1000, 20])
@pytest.mark.parametrize("new_limit", [1000, 20, 10])
def test_a_crash_never_leaves_a_mixture(
    old_limit: int, new_limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = {f"t{i}": np.full(10, i, np.int8) for i in range(4)}
    new = {f"t{i}": np.full(10, 50 + i, np.int8) for i in range(4)}
    outcomes: collections.Counter[str] = collections.Counter()
    real = {"replace": os.replace, "unlink": os.unlink}
    for crash_at in range(40):
        directory = tmp_path / str(crash_at)
        write_checkpoint_files(directory, old, old_limit)
        calls = iter(range(1000))

        def step(kind: str, calls=calls, crash_at=crash_at) -> Callable[..., None]:
            def call(*args: Any, **kwargs: Any) -> None:
                if next(calls) >= crash_at:
                    raise Crash
                real[kind](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step("replace"))
            patch.setattr(os, "unlink", step("unlink"))
            try:
                write_checkpoint_files(directory, new, new_limit)
            except Crash:
                pass
            else:
                outcomes["done"] += 1
        outcomes[what_it_holds(directory, old, new)] += 1
        if outcomes["done"]:
            break
    assert outcomes["old"] and outcomes["new"] and outcomes["done"]
    if old_limit == 20 or new_limit != 1000:
        assert outcomes["none"]


def what_it_holds(directory: Path, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> str:
    try:
        tensors = open_checkpoint(directory).tensors
    except CheckpointError:
        return "none"
    held = {name: view(t).tobytes() for name, t in tensors.items()}
    for kind, expected in [("old", old), ("new", new)]:
        if held == {name: a.tobytes() for name, a in expected.items()}:
            return kind
    raise AssertionError("a mixture")
