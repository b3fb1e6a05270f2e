"""`inspect` and `compare`: what is in a checkpoint, and whether it computes what another implementation computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_jax.cli import common
from deepinfer_jax.cli.common import EXIT_DIFFERS, bad_input, console
from deepinfer_jax.errors import DeepInferError


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory or file, or a config.json.")],
    devices: Annotated[int, typer.Option(help="Devices for the memory estimate.", min=1)] = 1,
    all_faults: Annotated[bool, typer.Option("--all-faults", help="Print every fault, not the first 50.")] = False,
) -> None:
    """Print the plan of the layers, tensors and bytes, memory, and what is wrong, without loading a tensor.

    Exits with 0 when the files are a checkpoint of their configuration, with 1 when they are not, and with 2 when
    there is nothing to inspect.
    """
    from deepinfer_jax import report

    try:
        faults = report.inspect(path, devices, console)
    except DeepInferError as error:
        raise bad_input(error) from None
    if faults:
        shown = faults if all_faults else faults[:50]
        for fault in shown:
            console.print(f"[red]fault[/red] {fault}", highlight=False, soft_wrap=True)
        if len(shown) < len(faults):
            console.print(f"... and {len(faults) - len(shown)} more (--all-faults)")
        raise typer.Exit(EXIT_DIFFERS)


def compare(
    directory: Annotated[Path, typer.Argument(help="A checkpoint directory with golden.npz.")],
    golden: Annotated[Path | None, typer.Option(help="Another golden.npz.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Numerics to run (repeatable); default: all found.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Run the sequences in chunks of this many tokens.", min=1)] = None,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a position.")] = 1e-4,
    strict: Annotated[bool, typer.Option("--strict", help="Every position must agree, round trips or not.")] = False,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Keep weights quantised and decode them where they are used.")
    ] = False,
    data: common.Data = 1,
    expert: common.Expert = 1,
) -> None:
    """Check a checkpoint against golden outputs of another implementation.

    Exits with 0 when everything agrees, 1 when something does not, 2 on bad input.
    """
    common.prepare_devices(data * expert)
    from deepinfer_jax import checkpoint, report
    from deepinfer_jax.compare import compare as run
    from deepinfer_jax.compare import read_golden
    from deepinfer_jax.numerics import Numerics
    from deepinfer_jax.parallel.mesh import make_mesh

    try:
        mesh = make_mesh(data, expert)
        arrays = read_golden(golden or directory)
        for name in tag or ():
            Numerics.named(name)
        # float32 holds every released weight exactly and serves all tags.
        config, params = checkpoint.load(
            directory, numerics=Numerics.named("fp32"), expand="none" if quantized else "float32"
        )
        results = run(
            params,
            config,
            arrays,
            tags=tuple(tag) if tag else None,
            chunk=chunk,
            tolerance=tolerance,
            strict=strict,
            mesh=mesh,
        )
        passed = report.comparison(results, console)
    except DeepInferError as error:
        raise bad_input(error) from None
    raise typer.Exit(0 if passed else EXIT_DIFFERS)
