"""The numerics version: a short name for everything that decides the bits of a result, beside weights and request.

Two results with the same numerics version, made with `Numerics.batch_invariant`, can be compared bit by bit. Another
version does not mean other bits; it means that nobody promises the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops import invariant, select_entries, sparse_attention

_FEATURES = ("avx", "fma", "f16c", "amx", "sse4", "asimd", "sve", "bf16", "i8mm")


def numerics_facts(numerics: Numerics, *, forked: bool = False) -> dict[str, Any]:
    """What enters the version, as plain values for JSON.

    Args:
        forked: Whether the model's definition was changed. Which change it was, the version does not know.
    """
    device = jax.devices()[0]
    return {
        "numerics": dataclasses.asdict(numerics),
        "tiles": {
            "rows": invariant.ROW_TILES,
            "queries": [invariant.QUERY_TILES, sparse_attention.QUERY_TILE, select_entries.QUERY_TILE],
            "index": [invariant.INDEX_TILES, select_entries.ENTRY_TILE],
            "lanes": invariant.LANES,
        },
        "forked": forked,
        "deepinfer_jax": _package(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device": device.device_kind if device.platform != "cpu" else _cpu(),
    }


def numerics_version(numerics: Numerics, *, forked: bool = False) -> str:
    """Twelve hexadecimal digits of `numerics_facts`."""
    text = json.dumps(numerics_facts(numerics, forked=forked), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _package() -> str:
    try:
        return importlib.metadata.version("deepinfer_jax")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    """Architecture and the instruction sets that arithmetic may use: compiled code differs between them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    flags = next(
        (line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    used = sorted(flag for flag in flags if flag.startswith(_FEATURES))
    return " ".join([platform.machine(), *used])
