"""deepinfer_jax: DeepSeek-V4.1-Flash as pure JAX functions, written in Flax."""

from deepinfer_jax.cache import CacheState, fork, init_cache, release, reserve, rollback
from deepinfer_jax.checkpoint import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.batch import generate
from deepinfer_jax.engine.llm import LLM, ChatOutput
from deepinfer_jax.engine.outputs import Completion, Interrupted, RequestOutput
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.model.v41 import V41, Batch, ImageRows, Output, define, draft, draft_context, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.mesh import make_mesh, param_shardings
from deepinfer_jax.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "V41",
    "Batch",
    "CacheState",
    "ChatOutput",
    "Completion",
    "DeepInferError",
    "ImageRows",
    "Interrupted",
    "ModelConfig",
    "Numerics",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "define",
    "draft",
    "draft_context",
    "fork",
    "forward",
    "generate",
    "init_cache",
    "load",
    "make_mesh",
    "param_shardings",
    "release",
    "reserve",
    "rollback",
]
