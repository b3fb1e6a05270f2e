"""Saving a cache to a file and resuming it in another process, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import jax
import numpy as np

from deepinfer_jax.cache import CacheState, abstract_cache, page_tokens
from deepinfer_jax.checkpoint.safetensors import open_checkpoint, view
from deepinfer_jax.checkpoint.safetensors_writer import write_file
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CacheError, CheckpointError
from deepinfer_jax.numerics import Numerics

_VERSION = "1"


def save_cache(path: str | os.PathLike[str], cache: CacheState, config: ModelConfig, numerics: Numerics) -> None:
    """Write a cache as a safetensors file; an existing file is replaced only once the new one is whole."""
    arrays = {name: np.asarray(jax.device_get(leaf)) for name, leaf in _named(cache).items()}
    write_file(path, arrays, {"deepinfer_jax_cache": _VERSION, "model": _fingerprint(config, numerics)})


def load_cache(path: str | os.PathLike[str], config: ModelConfig, numerics: Numerics) -> CacheState:
    """Read a cache that `save_cache` wrote.

    Raises:
        CacheError: The file is no cache, is damaged, or was made with another configuration or numerics.
    """
    try:
        stored = open_checkpoint(path)
    except CheckpointError as error:
        raise CacheError(f"{path} is not a saved cache: {error.message}", error.faults) from None
    if stored.metadata.get("deepinfer_jax_cache") != _VERSION:
        found = stored.metadata.get("deepinfer_jax_cache", "none")
        raise CacheError(f"{path}: cache version {found}, expected {_VERSION}")
    if stored.metadata.get("model") != _fingerprint(config, numerics):
        raise CacheError(f"{path}: the cache was made with another configuration or other numerics ({numerics})")
    sizes = {name: stored.tensors[name].shape for name in ("block_table", "page_refs") if name in stored.tensors}
    if len(sizes) != 2 or len(sizes["block_table"]) != 2 or len(sizes["page_refs"]) != 1:
        raise CacheError(f"{path}: the block table or the page counts are missing or mis-shaped")
    slots, blocks = sizes["block_table"]
    room = min(blocks * page_tokens(config), config.text_config.max_position_embeddings)
    like = abstract_cache(config, numerics, slots, room, sizes["page_refs"][0])
    expected = _named(like)
    faults = [f"{name}: missing" for name in expected.keys() - stored.tensors.keys()]
    faults += [f"{name}: unknown" for name in stored.tensors.keys() - expected.keys()]
    for name in expected.keys() & stored.tensors.keys():
        found, want = stored.tensors[name], expected[name]
        if found.shape != want.shape or found.numpy_dtype != want.dtype:
            faults.append(f"{name}: {found.dtype} {list(found.shape)}, expected {want.dtype} {list(want.shape)}")
    if faults:
        raise CacheError(f"{path} does not fit this model", sorted(faults))
    leaves = [jax.numpy.asarray(np.array(view(stored.tensors[name]))) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(cache: CacheState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]
    }


def _fingerprint(config: ModelConfig, numerics: Numerics) -> str:
    text = json.dumps(config.to_dict(), sort_keys=True) + repr(numerics)
    return hashlib.sha256(text.encode()).hexdigest()
