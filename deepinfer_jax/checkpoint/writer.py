"""From a weight tree back to a checkpoint directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.safetensors import DTYPES
from deepinfer_jax.checkpoint.safetensors_writer import LazyTensor, write_checkpoint_files
from deepinfer_jax.checkpoint.table import TensorSpec, leaf_shapes, tensor_table
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.formats import QuantizedTensor, quantize_weight
from deepinfer_jax.model.v41 import Params, abstract_params
from deepinfer_jax.text.token_map import TOKENIZER_FILE

SHARD_BYTES = 4 << 30


def save_checkpoint(
    directory: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> tuple[Path, ...]:
    """Write `config.json` and the tensors under the released names and dtypes.

    Args:
        params: A quantised tree (`quantize_params` makes one from float matrices).
        tokenizer: A `tokenizer.json` to copy along.
        max_shard_bytes: Size of a file at most.

    Returns:
        The files with tensors.

    Raises:
        CheckpointError: Leaves that are missing, mis-shaped or not quantised, or small vectors that the file's
            bfloat16 cannot hold exactly.
    """
    leaves = _leaves(params, config)
    tensors = {spec.name: _lazy(spec, leaves[spec.path]) for spec in tensor_table(config)}
    directory = Path(directory)
    files = write_checkpoint_files(directory, tensors, max_shard_bytes, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / TOKENIZER_FILE)
    return files


def quantize_params(params: Params, config: ModelConfig) -> Params:
    """Quantise every float matrix whose place in the tree is a quantised one; round to nearest even."""

    def one(leaf: Any, like: Any) -> Any:
        if isinstance(like, QuantizedTensor) and not isinstance(leaf, QuantizedTensor):
            return quantize_weight(leaf, like.fmt)
        return leaf

    described = _tree_like(params, config)
    return jax.tree.map(one, params, described, is_leaf=lambda x: isinstance(x, QuantizedTensor))


def _tree_like(params: Params, config: ModelConfig) -> Params:
    described = abstract_params(config)
    if jax.tree.structure(params, is_leaf=_is_quantized) != jax.tree.structure(described, is_leaf=_is_quantized):
        raise CheckpointError("the weight tree has other leaves than its configuration describes")
    return described


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedTensor)


def _leaves(params: Params, config: ModelConfig) -> dict:
    found = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_quantized)[0]
    }
    faults = []
    like: Any
    for path, like in leaf_shapes(config).items():
        name = ".".join(map(str, path))
        if path not in found:
            faults.append(f"{name}: missing")
            continue
        leaf = found[path]
        if _is_quantized(like):
            if not _is_quantized(leaf):
                faults.append(f"{name}: not quantised; see quantize_params")
            elif leaf.record.shape != like.record.shape or leaf.fmt != like.fmt:
                faults.append(f"{name}: {leaf.fmt} {leaf.record.shape}, expected {like.fmt} {like.record.shape}")
        elif leaf.shape != like.shape:
            faults.append(f"{name}: shape {leaf.shape}, expected {like.shape}")
    faults += [f"{'.'.join(map(str, path))}: unknown leaf" for path in found.keys() - leaf_shapes(config).keys()]
    if faults:
        raise CheckpointError("the weight tree cannot be written", faults)
    return found


def _lazy(spec: TensorSpec, leaf: Any) -> LazyTensor:
    dtype = DTYPES[spec.dtype]

    def make() -> np.ndarray:
        array = leaf.record if _is_quantized(leaf) else leaf
        lead = spec.lead or (0, 1)
        if spec.lead is None:
            part = jnp.reshape(array, (-1,))[spec.offset : spec.offset + spec.width]
        else:
            part = jnp.reshape(array[lead[0] : lead[1]], (lead[1] - lead[0], -1))
            part = part[:, spec.offset : spec.offset + spec.width]
        values = np.ascontiguousarray(jax.device_get(part))
        if spec.transform == "bytes":
            return values.reshape(-1).view(dtype).reshape(spec.shape)
        exact = values.astype(dtype)
        if not np.array_equal(exact.astype(np.float32), values.astype(np.float32), equal_nan=True):
            raise CheckpointError(f"{spec.name}: values that {spec.dtype} cannot hold exactly; round them first")
        return exact.reshape(spec.shape)

    return LazyTensor(dtype, spec.shape, make)
