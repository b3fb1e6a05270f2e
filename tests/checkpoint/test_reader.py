"""Reading, writing and saving weight trees; and checkpoints that are broken in every way we know."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from deepinfer_jax.checkpoint import load
from deepinfer_jax.checkpoint.reader import expand_params, load_params
from deepinfer_jax.checkpoint.safetensors import open_checkpoint, view
from deepinfer_jax.checkpoint.safetensors_writer import write_file
from deepinfer_jax.checkpoint.saved_tree import load_converted, restore_tree, save_tree
from deepinfer_jax.checkpoint.table import is_split
from deepinfer_jax.checkpoint.writer import quantize_params, save_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, DeepInferError, TokenizerError
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.model.v41 import abstract_params


@pytest.fixture(scope="module")
def tiny(data_dir):
    config = ModelConfig.from_file(data_dir / "v41_tiny")
    return config, load_params(data_dir / "v41_tiny", config, progress=False)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def tensors_of(path) -> dict[str, np.ndarray]:
    return {name: np.array(view(tensor)) for name, tensor in open_checkpoint(path).tensors.items()}


def decoded(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """An independent decoder: FP4 if the weight is int8, else FP8 with a scale per 32 x 32 (or per row)."""
    if weight.dtype == np.int8:
        nibble = np.stack([weight.view(np.uint8) & 15, weight.view(np.uint8) >> 4], -1).reshape(len(weight), -1)
        value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)[nibble]
    else:
        value = weight.astype(np.float32)
    r, c = np.indices(value.shape)
    rows = r if len(scale) == len(weight) else r // 32
    return value * scale.astype(np.float32)[rows, c // 32]


def test_values_arrive_where_the_model_looks_for_them(data_dir, tiny):
    config, params = tiny
    t = tensors_of(data_dir / "v41_tiny")
    full = expand_params(params, jnp.float32)
    layer, attn = full["layers"][1], full["layers"][1]["attn"]
    name = "layers.1.attn."
    want = np.concatenate([decoded(t[f"{name}{w}.weight"], t[f"{name}{w}.scale"]) for w in ("wq_a", "wkv")])
    np.testing.assert_array_equal(attn["wqkv_a"], want)
    want = np.concatenate([t[f"{name}compressor.{w}.weight"].astype(np.float32) for w in ("wkv", "wgate")])
    np.testing.assert_array_equal(attn["compressor"]["w"], want)
    for e in (0, 7):
        name = f"layers.1.ffn.experts.{e}."
        want = np.concatenate([decoded(t[f"{name}{w}.weight"], t[f"{name}{w}.scale"]) for w in ("w1", "w3")])
        np.testing.assert_array_equal(layer["ffn"]["w13"][e], want)
        np.testing.assert_array_equal(layer["ffn"]["w2"][e], decoded(t[f"{name}w2.weight"], t[f"{name}w2.scale"]))
    table = params["layers"][0]["engram"]["embed"]
    assert isinstance(table, QuantizedTensor), "tables stay quantised: only single rows are read"
    want = decoded(t["layers.0.engram.embed.weight"], t["layers.0.engram.embed.scale"])
    np.testing.assert_array_equal(table.decode(jnp.float32)[:660, 0], want)
    np.testing.assert_array_equal(full["vision"]["wo"][1], t["vision.blocks.1.attn.wo.weight"].astype(np.float32))
    np.testing.assert_array_equal(params["token_map"], np.arange(128) // 2)
    assert config.text_config.engram_num_embeddings[0] == 660


def test_expanding_at_load_equals_expanding_later(data_dir, tiny):
    config, params = tiny
    for name in ("bfloat16", "float32"):
        at_load = load_params(data_dir / "v41_tiny", config, expand=name, progress=False)
        assert_same(at_load, expand_params(params, jnp.dtype(name)))


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_pieces_of_any_size_give_the_same_tree(data_dir, tiny, piece_bytes):
    config, params = tiny
    if piece_bytes == 1:
        # One row at a time is thousands of pieces: the smaller fixture will do.
        config = ModelConfig.from_file(data_dir / "v41_tiny_noengram")
        params = load_params(data_dir / "v41_tiny_noengram", config, progress=False)
        config_path = data_dir / "v41_tiny_noengram"
        piece_bytes = 300
    else:
        config_path = data_dir / "v41_tiny"
    assert_same(load_params(config_path, config, piece_bytes=piece_bytes, threads=2, progress=False), params)


def test_leaves_are_read_straight_into_their_shards(data_dir, tiny):
    config, params = tiny
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    split, whole = NamedSharding(mesh, PartitionSpec("expert")), NamedSharding(mesh, PartitionSpec())

    def place(path, _):
        return split if is_split(tuple(k.key for k in path if hasattr(k, "key"))) else whole

    shardings = jax.tree_util.tree_map_with_path(place, abstract_params(config))
    for piece_bytes in (500, 1 << 20):
        got = load_params(data_dir / "v41_tiny", config, shardings=shardings, piece_bytes=piece_bytes, progress=False)
        assert_same(got, params)
        experts = got["layers"][0]["ffn"]["w13"].record
        assert {s.data.shape for s in experts.addressable_shards} == {(2, experts.shape[1])}
        assert got["head"].sharding == whole
    everywhere = NamedSharding(mesh, PartitionSpec(("data", "expert")))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wqkv_a of shape \[6150\] cannot be split"):
        load_params(data_dir / "v41_tiny", config, shardings=everywhere, progress=False)


def test_a_written_checkpoint_is_the_one_that_was_read(data_dir, tiny, tmp_path):
    config, params = tiny
    files = save_checkpoint(
        tmp_path / "copy", params, config, tokenizer=data_dir / "v41_tiny/tokenizer.json", max_shard_bytes=300_000
    )
    assert len(files) > 3
    want, got = tensors_of(data_dir / "v41_tiny"), tensors_of(tmp_path / "copy")
    assert want.keys() == got.keys()
    assert all(want[name].tobytes() == got[name].tobytes() for name in want)
    again, tree = load(tmp_path / "copy", expand="none", progress=False)
    assert again == config
    assert_same(tree, params)


def test_float_weights_are_quantised_for_writing_and_refused_otherwise(tiny, tmp_path):
    config, params = tiny
    floats = expand_params(params, jnp.float32)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_b: not quantised; see quantize_params"):
        save_checkpoint(tmp_path, floats, config)
    quantised = quantize_params(floats, config)
    assert_same(expand_params(quantised, jnp.float32), floats)
    params = dict(params, vectors={"data": params["vectors"]["data"] + 1e-7})
    with pytest.raises(CheckpointError, match="cannot hold exactly"):
        save_checkpoint(tmp_path / "inexact", params, config)
    assert not list((tmp_path / "inexact").glob("*.safetensors"))


def test_a_saved_tree_comes_back_with_its_shardings(data_dir, tiny, tmp_path):
    config, params = tiny
    first = load_converted(data_dir / "v41_tiny", config, tmp_path, progress=False)
    second = load_converted(data_dir / "v41_tiny", config, tmp_path, progress=False)
    assert_same(first, params)
    assert_same(second, params)
    assert len(list(tmp_path.iterdir())) == 1
    expanded = load_converted(data_dir / "v41_tiny", config, tmp_path, expand="float32", progress=False)
    assert_same(expanded, expand_params(params, jnp.float32))
    assert len(list(tmp_path.iterdir())) == 2
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("expert"))
    like = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)}
    save_tree(tmp_path / "w", {"w": jnp.arange(32.0).reshape(8, 4)})
    assert restore_tree(tmp_path / "w", like)["w"].sharding == split
    with pytest.raises(CheckpointError, match=r"w: float32 \[8, 4\], expected float32 \[4, 8\]"):
        restore_tree(tmp_path / "w", {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=split)})
    with pytest.raises(CheckpointError, match="there is no saved tree"):
        restore_tree(tmp_path / "none", like)
    with pytest.raises(CheckpointError, match="exists already"):
        save_tree(tmp_path / "w", params)


# ---------------------------------------------------------------------------- broken checkpoints


@pytest.fixture
def copy(data_dir, tmp_path):
    """A checkpoint directory to break."""
    return shutil.copytree(data_dir / "v41_tiny_noengram", tmp_path / "broken", ignore=lambda *_: ["golden.npz"])


def rewrite(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    write_file(folder / "model.safetensors", tensors)


def shard(folder) -> dict:
    """Make the directory two shards with an index; returns the index."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for i, part in enumerate((names[:300], names[300:]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        write_file(folder / file, {name: tensors[name] for name in part})
        index["weight_map"] |= dict.fromkeys(part, file)
    return index


def faults_of(folder) -> str:
    with pytest.raises(DeepInferError) as error:
        load(folder, expand="none", progress=False)
    return "\n".join([error.value.message, *error.value.faults])


def test_missing_unknown_misshaped_and_mistyped_tensors_are_reported_together(copy):
    def change(t):
        del t["layers.2.attn.wkv.scale"], t["norm.weight"]
        t["layers.9.attn.wkv.weight"] = t["layers.2.attn.wkv.weight"]
        t["head.weight"] = t["head.weight"][:100]
        t["embed.weight"] = t["embed.weight"].astype(np.float32)

    rewrite(copy, change)
    text = faults_of(copy)
    assert "layers.2.attn.wkv.scale: missing" in text
    assert "norm.weight: missing" in text
    assert "layers.9.attn.wkv.weight: unknown tensor (F8_E4M3 [64, 64] in model.safetensors)" in text
    assert "head.weight: found BF16 [100, 64], expected BF16 [128, 64]" in text
    assert "embed.weight: found F32 [128, 64], expected BF16 [128, 64]" in text


def test_a_truncated_file_is_named(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated" in faults_of(copy)


def test_a_header_larger_than_the_file_is_named(copy):
    file = copy / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    assert "header" in faults_of(copy)
    assert str(1 << 40) in faults_of(copy).replace(",", "")


def test_an_empty_file_and_a_directory_without_files_are_named(copy):
    (copy / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in faults_of(copy)
    (copy / "model.safetensors").unlink()
    assert "safetensors" in faults_of(copy)


def test_an_index_that_names_a_tensor_its_file_lacks(copy):
    index = shard(copy)
    index["weight_map"]["norm.weight"] = "model-00001-of-00002.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "norm.weight" in faults_of(copy)


def test_an_index_that_names_a_missing_file(copy):
    index = shard(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in faults_of(copy)


def test_an_index_with_a_wrong_total(copy):
    index = shard(copy)
    index["metadata"]["total_size"] += 1
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "total_size" in faults_of(copy)


def test_an_index_that_points_outside_the_directory(copy):
    index = shard(copy)
    index["weight_map"]["norm.weight"] = "../elsewhere.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "../elsewhere.safetensors" in faults_of(copy)


def test_an_index_that_is_no_json(copy):
    shard(copy)
    (copy / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json" in faults_of(copy)


def test_shards_without_an_index_must_be_complete(copy):
    shard(copy)
    config, params = load(copy, expand="none", progress=False)
    assert params.keys() == abstract_params(config).keys()
    (copy / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors" in faults_of(copy)


def test_a_tensor_that_stands_twice_is_named(copy):
    rewrite(copy, lambda t: t.update({"model.norm.weight": t["norm.weight"]}))
    assert "norm.weight" in faults_of(copy)


def test_names_with_a_leading_model_are_accepted(copy, data_dir):
    tensors = tensors_of(copy)
    write_file(copy / "model.safetensors", {f"model.{name}": tensor for name, tensor in tensors.items()})
    _, got = load(copy, expand="none", progress=False)
    _, want = load(data_dir / "v41_tiny_noengram", expand="none", progress=False)
    assert_same(got, want)


def test_the_checkpoint_of_another_configuration_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["n_routed_experts"] = 9
    (copy / "config.json").write_text(json.dumps(config))
    text = faults_of(copy)
    assert "layers.0.ffn.experts.8.w1.weight: missing" in text
    assert "layers.0.ffn.gate.weight: found BF16 [8, 64], expected BF16 [9, 64]" in text


def test_a_missing_file_is_named(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_params(tmp_path / "nowhere", tiny[0], progress=False)


def test_a_wrong_or_missing_tokenizer_is_named(data_dir, tmp_path):
    folder = shutil.copytree(data_dir / "v41_tiny", tmp_path / "x")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] = {f"token{i}": i for i in range(128)}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match=r"128 .*64"):
        load(folder, progress=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load(folder, progress=False)
