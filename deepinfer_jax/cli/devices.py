"""`devices`: what is there to compute on, which custom calls were built, and why one cannot be used."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from deepinfer_jax.cli.common import console


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Print JAX's devices, what the custom calls were compiled for, and which kernel can be used for each op."""
    facts = found()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for device in facts["devices"]:
        console.print(f"{device['platform']}:{device['id']}  {device['kind']}", highlight=False)
    cuda = facts["cuda"]
    if cuda:
        built = f"{cuda['architectures']}, CUDA {cuda['compiled_with']}, driver {cuda['driver'] or 'none'}"
        console.print(f"CUDA kernels for {built} {cuda['error']}", highlight=False, soft_wrap=True)
    table = Table("op", "backend", "can be used")
    for row in facts["kernels"]:
        table.add_row(row["op"], row["backend"], "yes" if row["why_not"] is None else f"no: {row['why_not']}")
    console.print(table)


def found() -> dict[str, Any]:
    """Devices, the CUDA part of the compiled module, and per op and backend why it cannot be used (None: it can)."""
    import jax

    from deepinfer_jax.kernels import Backend, Kernels
    from deepinfer_jax.ops.custom_call import cuda_build, unavailable

    kernels = [
        {"op": field.name, "backend": backend, "why_not": unavailable(backend, field.name)}
        for field in dataclasses.fields(Kernels)
        for backend in get_args(Backend)
    ]
    here = [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]
    return {"devices": here, "cuda": cuda_build(), "kernels": kernels}
