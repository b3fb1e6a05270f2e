"""Custom calls: the handlers of `ffi/`, registered with XLA once, called with arguments checked at trace time.

Without the compiled module (no C++ compiler at installation, or no nvcc) everything else of the package works;
`unavailable` says what is missing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.kernels import Backend

_MODULE = "deepinfer_jax._custom_calls"
_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}


@functools.cache
def _module() -> Any:
    """The compiled module, its handlers registered; or the ImportError that says why there is none."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return error
    for op, platform, handler in module.targets():
        jax.ffi.register_ffi_target(_target(op), handler, platform=platform)
    return module


def _target(op: str) -> str:
    return f"deepinfer.{op}"


@functools.cache
def _built() -> frozenset[tuple[str, str]]:
    module = _module()
    return frozenset() if isinstance(module, ImportError) else frozenset((op, p) for op, p, _ in module.targets())


def cuda_build() -> dict[str, Any]:
    """What the module's CUDA part was compiled for, and which devices it finds; empty without one."""
    module = _module()
    return {} if isinstance(module, ImportError) else module.cuda()


def unavailable(backend: str, op: str | None = None) -> str | None:
    """Why a backend cannot be used here (for one op), or None where it can."""
    if backend == "reference":
        return None
    module = _module()
    if isinstance(module, ImportError):
        return f"the compiled module is missing ({module}); installing with a C++ compiler builds it"
    ops = {name for name, platform in _built() if platform == _PLATFORM[backend]}
    if backend == "cuda" and not ops:
        return "the compiled module has no CUDA kernels; installing where nvcc is found builds them"
    if op is not None and op not in ops:
        return f"{op} has no {backend} kernel"
    return _unfit_devices() if backend == "cuda" else None


def _unfit_devices() -> str | None:
    """Why this process's devices cannot run the CUDA kernels."""
    architectures = cuda_build()["architectures"]
    gpus = [d for d in jax.devices() if d.platform in ("gpu", "cuda")]
    if not gpus:
        return f"JAX has no GPU here, its devices are {jax.devices()[0].platform}"
    for device in gpus:
        capability = str(getattr(device, "compute_capability", "unknown"))
        if capability.replace(".", "") not in {a.rstrip("af") for a in architectures.split()}:
            return f"{device.device_kind} has compute capability {capability}, kernels are built for {architectures}"
    return None


def custom_call(
    op: str,
    backend: Backend,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """Call the handler of an op.

    Args:
        results: Shapes and dtypes of all results, workspaces included.
        aliases: Operand number -> number of the result that takes its buffer.
        attributes: Static scalars; integers become int32, floats float32.

    Raises:
        NotImplementedError: The backend cannot run here, and why.
    """
    why = unavailable(backend, op)
    if why is not None:
        raise NotImplementedError(f"{op}: backend {backend!r} cannot be used: {why}")
    scalars = {k: np.float32(v) if isinstance(v, float) else np.int32(v) for k, v in attributes.items()}
    call = jax.ffi.ffi_call(_target(op), tuple(results), input_output_aliases=dict(aliases or {}))
    return tuple(call(*operands, **scalars))


def like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Descriptions of results that look like these arrays."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def check(op: str, **faults: str | None) -> None:
    """Raise what is wrong with a call, all of it.

    Raises:
        NotImplementedError: Some fault is not None.
    """
    found = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    if found:
        raise NotImplementedError(f"{op}: " + "; ".join(found))
