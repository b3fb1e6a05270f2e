"""`verify`: whether requests give the same bits whatever else runs, on somebody's checkpoint, prompts and machine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli import common
from deepinfer_jax.cli.common import EXIT_DIFFERS, EXIT_INTERRUPTED, bad_input, console, error_console
from deepinfer_jax.cli.generate import Format, read_prompts
from deepinfer_jax.errors import DeepInferError, InputError

if TYPE_CHECKING:
    from deepinfer_jax.verify.report import CaseResult, Report
    from deepinfer_jax.verify.subject import Subject

DEVICES = 4
"""Virtual devices on a CPU, for the axis of devices."""

_ROW = "{:<20} {:<32} {:>8} {:>7}  {}"


def verify(
    path: common.Checkpoint,
    prompts: Annotated[Path, typer.Argument(help="A file of prompts; - is stdin.", show_default=False)],
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="As for generate: text, lines or jsonl (prompt or token_ids). Default jsonl for *.jsonl, else lines.",
        ),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option(help="Whether the mode is on; off shows what differs without it.")
    ] = True,
    long: Annotated[
        bool, typer.Option("--long", help="Every case of every axis: more than 2,000 comparisons.")
    ] = False,
    axis: Annotated[list[str] | None, typer.Option(help="An axis to run (repeatable); default: all.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests made of the prompts, greedy and sampled; default 12, or 33.", min=2)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.", min=2)] = 12,
    seed: common.Seed = 0,
    numerics: common.NumericsName = "released",
    kernels: common.KernelsName = "reference",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there, as JSON.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page with a picture of where a difference arose.")
    ] = None,
    compile_cache: common.CompileCache = None,
) -> None:
    """Verify that requests do not depend on what else runs.

    Every request is run alone, and then in every way that an axis names: other batches, chunks, processes, ... Ids and
    bits of log-probabilities are compared. Exits with 0 when all are equal, with 1 when something differs (and says
    in which layer and operation it began), with 2 on bad input, and with 130 after Ctrl-C.
    """
    from deepinfer_jax.verify.report import page
    from deepinfer_jax.verify.run import verify as run

    try:
        count = requests or (33 if long else 12)
        subject = _subject(path, prompts, file_format, numerics, batch_invariant, kernels, count,
                           max_tokens, seed, compile_cache)  # fmt: skip
        console.print(_ROW.format("axis", "case", "compared", "differ", "from token"), style="bold", soft_wrap=True)
        report = run(subject, axes=axis, short=not long, progress=_print_case)
        _print_end(report)
        for file, text in (
            (json_file, lambda: json.dumps(report.to_dict(), indent=1) + "\n"),
            (html_file, lambda: page(report, f"{path}: {report.summary()}")),
        ):
            if file is not None:
                with common.whole_file(file) as stream:
                    stream.write(text())
                console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    except DeepInferError as error:
        raise bad_input(error) from None
    except KeyboardInterrupt:
        error_console.print("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(0 if report.holds else EXIT_DIFFERS)


def _subject(
    path: Path,
    file: Path,
    file_format: Format | None,
    numerics: str,
    batch_invariant: bool,
    kernels: str,
    count: int,
    max_tokens: int,
    seed: int,
    compile_cache: Path | None,
) -> Subject:
    """Checkpoint and requests. Raises DeepInferErrors."""
    from deepinfer_jax.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens)
    if file_format is None and file.suffix != ".jsonl":
        file_format = Format.lines
    # What is wrong with the prompts is found before the weights are read.
    prompts, each = read_prompts(None, file, file_format, sampling)
    own = [i for i, params in enumerate(each) if params != sampling]
    if own:
        raise InputError(f"{file}: prompt {own[0]} has sampling parameters, expected prompt or token_ids alone")
    # Where JAX runs already, it keeps the devices that it has.
    with contextlib.suppress(RuntimeError):
        common.prepare_devices(DEVICES)
    common.keep_compiled(compile_cache)
    mode = common.numerics_of(numerics, batch_invariant, kernels)
    from deepinfer_jax.checkpoint import load
    from deepinfer_jax.verify.subject import Subject, Workload

    config, params = load(path, numerics=mode)
    workload = Workload.of(_ids(path, config, prompts), count=count, max_tokens=max_tokens, seed=seed)
    return Subject(config, params, mode, workload, path=path)


def _ids(path: Path, config: Any, prompts: list[Any]) -> list[Any]:
    """Prompts as token ids. Raises InputError or TokenizerError."""
    from deepinfer_jax.engine.requests import check_requests
    from deepinfer_jax.sampling_params import SamplingParams
    from deepinfer_jax.text.tokenizer import TextTokenizer

    ids, faults = list(prompts), {}
    if any(isinstance(prompt, str) for prompt in prompts):
        folder = path if path.is_dir() else path.parent
        tokenizer = TextTokenizer.from_directory(folder, bos_token_id=config.bos_token_id)
        for i, prompt in enumerate(prompts):
            try:
                ids[i] = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            except InputError as error:
                ids[i], faults[i] = (), error.message
    limit = config.text_config.max_position_embeddings
    each = [SamplingParams(max_tokens=1)] * len(ids)
    return [r.ids.tolist() for r in check_requests(ids, each, config, limit, known_faults=faults)]


def _print_case(result: CaseResult) -> None:
    first = min((c.at for c in result.comparisons if c.at is not None), default="")
    cells = _ROW.format(result.axis, result.name, len(result.comparisons), result.differing, first)
    console.print(cells, style="red" if result.differing else None, highlight=False, soft_wrap=True)


def _print_end(report: Report) -> None:
    if report.left_out:
        console.print(f"did not apply: {', '.join(report.left_out)}", highlight=False)
    console.print(report.summary(), style="green" if report.holds else "red", highlight=False)
    origin = report.origin()
    if origin:
        console.print(origin, highlight=False, soft_wrap=True)
    console.print(f"numerics version {report.numerics_version}", highlight=False)
