"""`acceptance` and `calibrate`: what the drafter's tokens are worth, and making its confidence true."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from deepinfer_jax.cli import common
from deepinfer_jax.cli.common import bad_input, console, error_console
from deepinfer_jax.cli.generate import Format, read_prompts
from deepinfer_jax.errors import DeepInferError, InputError

if TYPE_CHECKING:
    from deepinfer_jax.calibration import Calibration, Outcomes
    from deepinfer_jax.engine.llm import LLM
    from deepinfer_jax.speculative import SpeculativeResult

_FEW = 1000
"""Held-back rounds below which a calibration error is mostly noise."""

Prompts = Annotated[Path, typer.Argument(help="A file of prompts; - is stdin.", show_default=False)]
PromptFormat = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="As for generate: text, lines or jsonl (prompt or token_ids). Default jsonl for *.jsonl, else lines.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.", rich_help_panel="Sampling")]
Chunk = Annotated[int, typer.Option(help="Tokens of each row in a prefill call.", rich_help_panel="Model and devices")]


def acceptance(
    path: common.Checkpoint,
    prompts: Prompts,
    file_format: PromptFormat = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of target and drafts (repeatable); default 0 and 1.")
    ] = None,
    max_tokens: MaxTokens = 128,
    seed: common.Seed = 0,
    numerics: common.NumericsName = "released",
    batch_size: common.BatchSize = 8,
    data: common.Data = 1,
    expert: common.Expert = 1,
    chunk: Chunk = 64,
    compile_cache: common.CompileCache = None,
) -> None:
    """Measure how many drafted tokens are accepted.

    Prompts are continued by drafting and verifying. Prints the mean tokens of a round (one forward of the model), and
    what became of each position of the block. Exits with 2 on bad input, and with 130 after Ctrl-C.
    """
    from deepinfer_jax.calibration import Outcomes
    from deepinfer_jax.speculative import accepted_length

    with _errors():
        degrees = temperature or [0.0, 1.0]
        read = _read(path, prompts, file_format, max_tokens, seed, degrees)
        llm, ids = _open(
            path,
            read,
            compile_cache=compile_cache,
            data=data,
            expert=expert,
            numerics=numerics,
            batch_size=batch_size,
            chunk=chunk,
            seed=seed,
        )
        for degree in degrees:
            results = _run(llm, ids, degree, max_tokens)
            console.print(
                f"temperature {degree:g}: {accepted_length(results):.2f} tokens per round, "
                f"{sum(r.rounds for r in results):,} rounds of {len(results):,} prompts",
                highlight=False,
            )
            console.print(_positions(Outcomes.join(r.outcomes for r in results)))


def calibrate(
    path: common.Checkpoint,
    prompts: Prompts,
    file_format: PromptFormat = None,
    temperature: common.Temperature = 1.0,
    max_tokens: MaxTokens = 128,
    held_back: Annotated[
        float, typer.Option(help="Share of the prompts that is not fitted on: errors are those of its rounds.")
    ] = 0.5,
    analytic: Annotated[
        bool, typer.Option("--analytic", help="Fit to acceptance probabilities, not to what happened: less noise.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Default confidence.json beside the checkpoint.", show_default=False)
    ] = None,
    diagram: Annotated[
        Path | None, typer.Option(help="Default confidence.png beside the checkpoint.", show_default=False)
    ] = None,
    no_diagram: Annotated[bool, typer.Option("--no-diagram", help="Draw none; matplotlib is not needed then.")] = False,
    seed: common.Seed = 0,
    numerics: common.NumericsName = "released",
    batch_size: common.BatchSize = 8,
    data: common.Data = 1,
    expert: common.Expert = 1,
    chunk: Chunk = 64,
    compile_cache: common.CompileCache = None,
) -> None:
    """Calibrate the drafter's confidence head.

    Prompts are continued by drafting and verifying. On one part of them a temperature and an offset are fitted for
    each position of the block; the other part measures them. Exits with 2 on bad input, and with 130 after Ctrl-C.
    """
    from deepinfer_jax.calibration import CONFIDENCE_FILE, Outcomes, draw_reliability, figure_class, split
    from deepinfer_jax.calibration import calibrate as fitted

    folder = path if path.is_dir() else path.parent
    output = output or folder / CONFIDENCE_FILE
    picture = None if no_diagram else diagram or folder / Path(CONFIDENCE_FILE).with_suffix(".png")
    with _errors():
        # What can be wrong without the model is found before it is read.
        read = _read(path, prompts, file_format, max_tokens, seed, [temperature])
        parts = split(len(read), held_back, seed)
        if picture is not None:
            figure_class()
            if not picture.parent.is_dir():
                raise InputError(f"{picture}: No such file or directory")
        with common.whole_file(output) as stream:
            llm, ids = _open(
                path,
                read,
                compile_cache=compile_cache,
                data=data,
                expert=expert,
                numerics=numerics,
                batch_size=batch_size,
                chunk=chunk,
                seed=seed,
            )
            results = _run(llm, ids, temperature, max_tokens)
            fit, rest = (Outcomes.join(results[i].outcomes for i in part) for part in parts)
            labels = "analytic" if analytic else "sampled"
            made = fitted(fit, rest, labels=labels, sampling_temperature=temperature)
            stream.write(json.dumps(made.to_dict(), indent=2) + "\n")
        if picture is not None:
            draw_reliability(picture, rest, made.scaling, labels)
    _print_calibration(made, rest, [len(part) for part in parts])
    for file in (output, picture):
        if file is not None:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)


def _read(
    path: Path, file: Path, file_format: Format | None, max_tokens: int, seed: int, temperatures: Sequence[float]
) -> list[Any]:
    """The prompts. Raises InputError or ConfigError for what is wrong with them or with the configuration."""
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.sampling_params import SamplingParams
    from deepinfer_jax.speculative import check_drafter

    sampling, *_ = [SamplingParams(temperature=t, max_tokens=max_tokens, seed=seed) for t in temperatures]
    if file_format is None and file.suffix != ".jsonl":
        file_format = Format.lines
    prompts, each = read_prompts(None, file, file_format, sampling)
    own = [i for i, params in enumerate(each) if params != sampling]
    if own:
        raise InputError(f"{file}: prompt {own[0]} has sampling parameters, expected prompt or token_ids alone")
    if not prompts:
        raise InputError(f"{file}: found no prompts, expected at least one")
    check_drafter(ModelConfig.from_file(path))
    return prompts


def _open(path: Path, prompts: list[Any], **options: Any) -> tuple[LLM, list[Any]]:
    """The model, and the prompts as token ids; what is neither text nor ids is named by `speculate`."""
    llm = common.open_llm(path, progress=sys.stderr.isatty(), **options)
    if llm.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise InputError("prompts: found text, but the checkpoint has no tokenizer.json; expected token_ids")
    ids, faults = [], []
    for i, prompt in enumerate(prompts):
        try:
            ids.append(llm.tokenizer.encode(prompt) if isinstance(prompt, str) and llm.tokenizer else prompt)
        except InputError as error:
            faults.append(f"prompt {i}: {error.message}")
    if faults:
        raise InputError("prompts that cannot be run", faults)
    return llm, ids


def _run(llm: LLM, ids: list[Any], temperature: float, max_tokens: int) -> list[SpeculativeResult]:
    from deepinfer_jax.speculative import speculate

    return speculate(
        llm.params,
        llm.config,
        ids,
        numerics=llm.numerics,
        temperature=temperature,
        seed=llm.seed,
        max_tokens=max_tokens,
        batch_size=llm.sizes.slots,
        chunk=llm.sizes.chunk,
        mesh=llm.mesh,
        progress=llm.progress,
    )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Exit codes for what a command raises."""
    try:
        yield
    except DeepInferError as error:
        raise bad_input(error) from None
    except KeyboardInterrupt:
        error_console.print("interrupted")
        raise typer.Exit(common.EXIT_INTERRUPTED) from None


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", vertical="bottom")
    return table


def _positions(outcomes: Outcomes) -> Table:
    from deepinfer_jax.calibration import by_position

    table = _table("position", "verified", "accepted", "expected", "confidence")
    for k, row in enumerate(by_position(outcomes), 1):
        table.add_row(str(k), f"{row.verified:,}", *map(_share, (row.acceptance, row.analytic, row.confidence)))
    return table


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _print_calibration(made: Calibration, held_back: Outcomes, prompts: list[int]) -> None:
    from deepinfer_jax.calibration import LIMITS, by_position

    table = _table("position", "rounds", "confidence", "accepted", "temperature", "offset", "ECE\nbefore", "ECE\nafter")
    scaling = (made.temperatures, made.offsets)
    rows = zip(by_position(held_back), made.counts, *scaling, made.ece_before, made.ece_after, strict=True)
    for k, (row, count, temperature, offset, before, after) in enumerate(rows, 1):
        table.add_row(
            str(k),
            f"{count:,}",
            _share(row.confidence),
            _share(row.acceptance),
            f"{temperature:.3f}",
            f"{offset:+.3f}",
            f"{before:.2%}",
            f"{after:.2%}",
        )
    table.add_section()
    table.add_row("mean", "", "", "", "", "", f"{made.overall_before:.2%}", f"{made.overall_after:.2%}")
    console.print(
        f"fitted on {made.fitted:,} rounds of {prompts[0]:,} prompts, measured on {len(held_back.accepted):,} rounds "
        f"of {prompts[1]:,} others",
        highlight=False,
    )
    console.print(table)
    if len(held_back.accepted) < _FEW:
        error_console.print(f"fewer than {_FEW:,} rounds: these errors are mostly noise", highlight=False)
    if any(t in LIMITS for t in made.temperatures):
        low, high = LIMITS
        error_console.print(
            f"a temperature is at an end of the search, {low:g} to {high:g}: the head says little there"
        )
