"""What the modules share: declaring weights, and the packed small vectors of a layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.formats import QuantizedTensor, WeightFormat


def param(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> nnx.Param:
    """A weight without data: modules are only ever built abstractly."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))


def quantized(fmt: WeightFormat, rows: int, cols: int, lead: tuple[int, ...] = ()) -> nnx.Param:
    """A quantised weight without data."""
    return nnx.Param(QuantizedTensor.abstract(fmt, (rows, cols), lead))


class Vectors(nnx.Module):
    """Named small vectors in one float32 leaf, which keeps the number of leaves (and so the cost of every
    dispatch) down. bfloat16 values are exact in it.

    Args:
        shapes: Shape of each vector, under its checkpoint name within the layer.
        lead: Leading axes of the leaf, for stacked layers.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], lead: tuple[int, ...] = ()):
        start = 0
        layout = []
        for name, shape in shapes.items():
            layout.append((name, start, shape))
            start += math.prod(shape)
        self.layout = tuple(layout)
        self.data = param((*lead, start), jnp.float32)

    def spans(self) -> dict[str, tuple[int, int]]:
        """(start, stop) of each vector in the leaf."""
        return {name: (start, start + math.prod(shape)) for name, start, shape in self.layout}

    def read(self, data: jax.Array, name: str) -> jax.Array:
        """The vector `name` out of one row of the leaf."""
        for known, start, shape in self.layout:
            if known == name:
                return data[start : start + math.prod(shape)].reshape(shape)
        raise KeyError(name)

    def __getitem__(self, name: str) -> jax.Array:
        return self.read(self.data[...], name)
