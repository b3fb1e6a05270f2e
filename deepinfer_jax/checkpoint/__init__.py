"""Checkpoints: the tensor table, reading, writing, and saved weight trees."""

from __future__ import annotations

import os

from deepinfer_jax.checkpoint.reader import Expand, default_expand, load_params
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.numerics import Numerics


def load(
    path: str | os.PathLike[str],
    *,
    numerics: Numerics = Numerics(),  # noqa: B008 - frozen
    expand: Expand | None = None,
    shardings: object = None,
    progress: bool = True,
) -> tuple[ModelConfig, Params]:
    """Read a checkpoint directory.

    Args:
        path: A directory with `config.json`, the tensors, and with Engram `tokenizer.json`.
        numerics: What the weights will be used with; decides the dtype of expanded weights.
        expand: `none` keeps matrices quantised, `bfloat16` or `float32` decodes them (exactly). By default they
            are expanded on a CPU with enough memory, where that is faster, and kept elsewhere.
        shardings, progress: As in `load_params`.

    Returns:
        The configuration and the weight tree.
    """
    config = ModelConfig.from_file(path)
    chosen = default_expand(config, numerics) if expand is None else expand
    return config, load_params(path, config, shardings=shardings, expand=chosen, progress=progress)


__all__ = ["load", "load_params"]
