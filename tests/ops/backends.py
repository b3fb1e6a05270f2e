"""Which backends of an op a test can run here."""

import pytest

from deepinfer_jax.ops.custom_call import unavailable


def custom_backends(op):
    """Parameters for every backend but the reference; those that are not there are skipped, and say why."""
    found = []
    for backend in ("cpu", "cuda"):
        why = unavailable(backend, op)
        found.append(pytest.param(backend, marks=pytest.mark.skipif(why is not None, reason=f"{backend}: {why}")))
    return found
