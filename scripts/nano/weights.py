"""Float weights to train: their shapes, their first values, and what the released dtypes make of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.checkpoint.table import tensor_table
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.formats import QuantizedTensor, weight_round_trip
from deepinfer_jax.model.module import Vectors
from deepinfer_jax.model.v41 import V41, Params, abstract_params

# Matrices whose output is added to the residual streams: smaller at first, the more layers there are.
_OUTPUTS = ("wo_b", "w2", "shared_w2", "wkv")


def initial_params(config: ModelConfig, seed: int) -> Params:
    """float32 masters of every trained leaf; without the token map, which is data."""
    described, treedef = jax.tree_util.tree_flatten_with_path(trained(abstract_params(config)), is_leaf=is_quantized)
    layouts = vector_layouts(config)
    leaves = []
    for i, (path, like) in enumerate(described):
        # By numpy: every shape drawn by JAX would be one more program to compile.
        random, names = np.random.default_rng([seed, i]), tuple(k.key for k in path)
        if names in layouts:
            value = _initial_vectors(layouts[names], config, random)
        else:
            shape = (*like.record.shape[:-1], *like.shape) if is_quantized(like) else like.shape
            value = np.float32(_scale(names, shape, config)) * random.standard_normal(shape, np.float32)
        leaves.append(jnp.asarray(value))
    return jax.tree.unflatten(treedef, leaves)


def trained(params: Params) -> Params:
    """The tree without its token map."""
    return {name: leaf for name, leaf in params.items() if name != "token_map"}


def with_token_map(params: Params, token_map: Any) -> Params:
    """The whole tree again."""
    return params | {"token_map": token_map}


@functools.partial(jax.jit, static_argnums=1)
def as_released(params: Params, config: ModelConfig) -> Params:
    """Masters as the files will hold them: through FP8 and FP4, small vectors and plain matrices through bfloat16.

    Gradients pass straight through.
    """
    layouts, kept = vector_layouts(config), _bfloat16_spans(config)

    def one(path: tuple, leaf: jax.Array, like: Any) -> jax.Array:
        names = tuple(k.key for k in path)
        if is_quantized(like):
            return weight_round_trip(leaf, like.fmt)
        if names in layouts:
            return jnp.where(jnp.asarray(kept[names]), _bfloat16(leaf), leaf)
        return leaf if like.dtype == jnp.float32 else _bfloat16(leaf)

    described = trained(abstract_params(config))
    return jax.tree_util.tree_map_with_path(one, params, described)


def vector_layouts(config: ModelConfig) -> dict[tuple, Vectors]:
    """The packed small vectors of the tree by the path of their leaf."""
    found = {}
    for path, node in nnx.iter_graph(V41(config)):
        if isinstance(node, Vectors):
            found[(*path, "data")] = node
    return found


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of the described tree is kept quantised."""
    return isinstance(leaf, QuantizedTensor)


def _bfloat16_spans(config: ModelConfig) -> dict[tuple, np.ndarray]:
    """For every packed vector leaf, which elements the files hold in bfloat16."""
    sizes = {path: sum(math.prod(shape) for *_, shape in v.layout) for path, v in vector_layouts(config).items()}
    kept = {path: np.zeros(size, bool) for path, size in sizes.items()}
    for spec in tensor_table(config):
        if spec.path in kept and spec.dtype == "BF16":
            kept[spec.path][spec.offset : spec.offset + math.prod(spec.shape)] = True
    return kept


@jax.custom_jvp
def _bfloat16(x: jax.Array) -> jax.Array:
    # A conversion and its reverse may be dropped as excess precision; a barrier keeps the rounding.
    return jax.lax.optimization_barrier(x.astype(jnp.bfloat16)).astype(x.dtype)


@_bfloat16.defjvp
def _bfloat16_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _bfloat16(*primals), tangents[0]


def _scale(names: tuple, shape: tuple[int, ...], config: ModelConfig) -> float:
    """Standard deviation of a matrix at the start."""
    name = names[-1]
    if names in (("embed",), ("mtp", "markov_embed")):
        return 0.5
    if names in (("head",), ("mtp", "markov_head")):
        return 0.02
    if name == "fn":
        return 0.02
    if "embed" in names:  # of an Engram table: e4m3 rows with scales, small at first
        return 0.1
    layers = config.text_config.num_hidden_layers
    return shape[-1] ** -0.5 * ((2 * layers) ** -0.5 if name in _OUTPUTS else 1.0)


def _initial_vectors(vectors: Vectors, config: ModelConfig, random: np.random.Generator) -> np.ndarray:
    streams = config.text_config.hc_mult
    parts = []
    for name, _, shape in vectors.layout:
        if name.startswith("hc_") and name.endswith("_base"):
            # Streams start alike; noise in how they are read and written lets them part.
            pre = np.log(1 / (streams - 1)) + 0.5 * random.standard_normal(streams)
            post = 0.5 * random.standard_normal(streams)
            comb = 4 * np.eye(streams) + 0.3 * random.standard_normal((streams, streams))
            value = np.concatenate([pre, post, comb.reshape(-1)])
        elif name.startswith("hc_"):
            value = np.full(shape, 0.5)
        elif name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", "proj.weight")):
            value = np.zeros(shape)
        else:
            value = np.ones(shape)
        parts.append(np.reshape(value, -1))
    return np.concatenate(parts).astype(np.float32)
