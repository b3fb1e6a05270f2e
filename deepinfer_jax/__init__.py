"""deepinfer_jax: DeepSeek-V4.1-Flash as pure JAX functions, written in Flax."""

from deepinfer_jax.cache import CacheState, fork, init_cache, release, reserve, rollback
from deepinfer_jax.checkpoint import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.model.v41 import Batch, ImageRows, Output, draft, draft_context, forward
from deepinfer_jax.numerics import Numerics

__all__ = [
    "Batch",
    "CacheState",
    "DeepInferError",
    "ImageRows",
    "ModelConfig",
    "Numerics",
    "Output",
    "draft",
    "draft_context",
    "fork",
    "forward",
    "init_cache",
    "load",
    "release",
    "reserve",
    "rollback",
]
