"""What the commands share: consoles, exit codes, and the options of a model that generates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from deepinfer_jax.errors import DeepInferError, InputError

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm import LLM
    from deepinfer_jax.numerics import Numerics

EXIT_DIFFERS = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

console = Console()
error_console = Console(stderr=True)

_MODEL, _SAMPLING = "Model and devices", "Sampling"

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint directory.", show_default=False)]
NumericsName = Annotated[
    str, typer.Option(help="released, fp32, fp32_kv, fp32_all, bf16_kv or bf16_all.", rich_help_panel=_MODEL)
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant", help="The bits of a result do not depend on what else runs (CPU).", rich_help_panel=_MODEL
    ),
]
KernelsName = Annotated[
    str,
    typer.Option(
        "--kernels",
        help="reference (JAX alone), cpu or cuda: custom calls (see `deepinfer-jax devices`).",
        rich_help_panel=_MODEL,
    ),
]
MaxLength = Annotated[
    int | None, typer.Option(help="Most tokens of a sequence, prompt included; default 4096.", rich_help_panel=_MODEL)
]
BatchSize = Annotated[int, typer.Option(help="Sequences generated at once.", rich_help_panel=_MODEL)]
Data = Annotated[int, typer.Option(help="Mesh axis that splits sequences.", min=1, rich_help_panel=_MODEL)]
Expert = Annotated[
    int, typer.Option(help="Second mesh axis; experts are split over data x expert.", min=1, rich_help_panel=_MODEL)
]
Steps = Annotated[int, typer.Option(help="Tokens decoded per dispatch.", rich_help_panel=_MODEL)]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill call.", rich_help_panel=_MODEL)]
CompileCache = Annotated[
    Path | None,
    typer.Option(help="Folder for compiled programs; default ~/.cache/deepinfer-jax.", rich_help_panel=_MODEL),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate; default: up to --max-length.", rich_help_panel=_SAMPLING)
]
MinTokens = Annotated[int, typer.Option(help="No stop before this many tokens.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this sum.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 is off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Least share of the top probability; 0 is off.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int, typer.Option(help="Of the draws; prompt i takes seed + i.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="A string that ends the text (repeatable).", rich_help_panel=_SAMPLING)
]


def prepare_devices(devices: int) -> None:
    """Ask for virtual devices on a CPU. JAX must not have been used yet."""
    import jax

    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)


def keep_compiled(compile_cache: Path | None) -> None:
    """Keep compiled programs for the next start."""
    import jax

    # A folder that JAX was told about otherwise stays.
    if compile_cache is not None or jax.config.jax_compilation_cache_dir is None:
        folder = compile_cache or Path.home() / ".cache" / "deepinfer-jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def open_llm(
    path: Path,
    *,
    compile_cache: Path | None,
    data: int,
    expert: int,
    numerics: str,
    batch_invariant: bool = False,
    kernels: str = "reference",
    **options: Any,
) -> LLM:
    """An LLM for a command. Raises DeepInferErrors."""
    prepare_devices(data * expert)
    keep_compiled(compile_cache)
    from deepinfer_jax.engine.llm import LLM

    mode = numerics_of(numerics, batch_invariant, kernels)
    return LLM(path, data=data, expert=expert, numerics=mode, **options)


def numerics_of(name: str, batch_invariant: bool, kernels: str) -> Numerics:
    """Numerics for a command. Raises InputError, also when the kernels cannot be used here."""
    from deepinfer_jax.kernels import Kernels
    from deepinfer_jax.numerics import Numerics
    from deepinfer_jax.ops.custom_call import unavailable

    chosen = Kernels.named(kernels)
    why = unavailable(kernels)
    if why is not None:
        raise InputError(f"--kernels {kernels}: {why}")
    return dataclasses.replace(Numerics.named(name), batch_invariant=batch_invariant, kernels=chosen)


def bad_input(error: DeepInferError) -> typer.Exit:
    """Print an error; the exit code that goes with it."""
    error_console.print(f"[red]error[/red] {error}", highlight=False, soft_wrap=True)
    return typer.Exit(EXIT_BAD_INPUT)


def at_terminal() -> bool:
    """Whether somebody can type."""
    return sys.stdin.isatty()


def read_text(file: Path) -> str:
    """A UTF-8 file, or stdin for `-`. Raises InputError."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: byte {error.start} is not UTF-8") from None


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[TextIO]:
    """A file to write, which exists when the block has ended well and not before. That it can be written is known
    when the block begins. Raises InputError."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            yield stream
        os.replace(part, file)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def read_json(file: Path) -> Any:
    """A JSON file. Raises InputError."""
    try:
        return json.loads(read_text(file))
    except ValueError as error:
        raise InputError(f"{file}: not JSON: {error}") from None
