"""Saving a loaded weight tree with Orbax, so that the next start skips the conversion.

A saved tree belongs to one source (its files, their sizes and times), one version of the transform and one
expansion; anything else gets a folder of its own.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from deepinfer_jax.checkpoint.reader import Expand, expand_params, load_params, sharding_at
from deepinfer_jax.checkpoint.safetensors import open_checkpoint
from deepinfer_jax.checkpoint.table import TRANSFORM_VERSION
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.model.v41 import Params, abstract_params


def save_tree(directory: str | os.PathLike[str], params: Params) -> None:
    """Write a weight tree with Orbax. The directory must not exist yet; an interrupted write leaves none."""
    target = Path(directory).absolute()
    if target.exists():
        raise CheckpointError(f"{target}: exists already")
    with ocp.StandardCheckpointer() as writer:
        writer.save(target, _plain(params))


def restore_tree(directory: str | os.PathLike[str], like: Params) -> Params:
    """Read a weight tree that `save_tree` wrote.

    Args:
        like: Abstract tree: `jax.ShapeDtypeStruct` leaves, with the `sharding` that each leaf shall have.

    Raises:
        CheckpointError: There is no saved tree, or its leaves differ from `like`.
    """
    source = Path(directory).absolute()
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no saved tree")
    with ocp.StandardCheckpointer() as reader:
        try:
            found = dict(_flat(reader.metadata(source).item_metadata.tree))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{source}: not a saved tree: {str(error)[:200]}") from None
        want = dict(_flat(_plain(like)))
        faults = [f"{name}: missing" for name in want.keys() - found.keys()]
        faults += [f"{name}: unknown" for name in found.keys() - want.keys()]
        for name in want.keys() & found.keys():
            if (tuple(found[name].shape), found[name].dtype) != (want[name].shape, want[name].dtype):
                faults.append(
                    f"{name}: {found[name].dtype} {list(found[name].shape)}, expected "
                    f"{want[name].dtype} {list(want[name].shape)}"
                )
        if faults:
            raise CheckpointError(f"{source} holds another weight tree", sorted(faults))
        return _shaped(reader.restore(source, _plain(like)), like)


def load_converted(
    path: str | os.PathLike[str],
    config: ModelConfig,
    cache_directory: str | os.PathLike[str],
    *,
    shardings: Any = None,
    expand: Expand = "none",
    progress: bool = True,
) -> Params:
    """`load_params`, remembering the result under `cache_directory` for the next time."""
    saved = Path(cache_directory) / source_key(path, config, expand)
    if saved.is_dir():
        return restore_tree(saved, _abstract(path, config, shardings, expand))
    params = load_params(path, config, shardings=shardings, expand=expand, progress=progress)
    saved.parent.mkdir(parents=True, exist_ok=True)
    save_tree(saved, params)
    return params


def source_key(path: str | os.PathLike[str], config: ModelConfig, expand: Expand) -> str:
    """Name of the saved tree of a source: a hash of its files (names, sizes, times, headers), the configuration,
    the tokenizer, the transform version and the expansion."""
    digest = hashlib.sha256(f"{TRANSFORM_VERSION} {expand} {config}".encode())
    checkpoint = open_checkpoint(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    for file in (*checkpoint.files, folder / "tokenizer.json"):
        if file.exists():
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.offset}".encode())
    return f"v{TRANSFORM_VERSION}-{expand}-{digest.hexdigest()[:20]}"


def _abstract(path: Any, config: ModelConfig, shardings: Any, expand: Expand) -> Params:
    tree = abstract_params(config)
    if expand != "none":
        tree = jax.eval_shape(lambda p: expand_params(p, expand), tree)

    def with_sharding(keys: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        place = sharding_at(shardings, tuple(k.key for k in keys if hasattr(k, "key")))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(with_sharding, tree)


def _plain(tree: Params) -> dict:
    """The tree as nested dicts with string keys and arrays, which is what Orbax stores."""
    if isinstance(tree, QuantizedTensor):
        return tree.record
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items()}
    return tree


def _shaped(plain: Any, like: Any) -> Any:
    if isinstance(like, QuantizedTensor):
        return QuantizedTensor(plain, like.fmt, like.shape)
    if isinstance(like, dict):
        return {key: _shaped(plain[str(key)], value) for key, value in like.items()}
    return plain


def _flat(tree: Any, prefix: str = "") -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
