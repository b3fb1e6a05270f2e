"""`generate`: continue a prompt, a file of prompts, or stdin."""

from __future__ import annotations

import contextlib
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli import common
from deepinfer_jax.errors import DeepInferError, InputError

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm import LLM
    from deepinfer_jax.engine.outputs import RequestOutput
    from deepinfer_jax.sampling_params import SamplingParams


class Format(StrEnum):
    """How a file holds prompts."""

    text = "text"
    lines = "lines"
    jsonl = "jsonl"


def generate(
    path: common.Checkpoint,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it and --file, stdin is read.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file of prompts; - is stdin.")] = None,
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="text: the file, without its last line break, is one prompt. lines: one per line. jsonl: one object "
            "per line, with prompt or token_ids, and any sampling parameters. Default jsonl for *.jsonl, else text.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results there, as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON lines.")] = False,
    n: Annotated[int, typer.Option(help="Samples per prompt.")] = 1,
    max_tokens: common.MaxTokens = None,
    min_tokens: common.MinTokens = 0,
    temperature: common.Temperature = 1.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = 0,
    stop: common.Stop = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="An id that ends the text (repeatable).")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence id.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of this many tokens (0: the chosen).")] = None,
    numerics: common.NumericsName = "released",
    batch_invariant: common.BatchInvariant = False,
    kernels: common.KernelsName = "reference",
    max_length: common.MaxLength = None,
    batch_size: common.BatchSize = 8,
    data: common.Data = 1,
    expert: common.Expert = 1,
    steps: common.Steps = 8,
    chunk: common.Chunk = 256,
    compile_cache: common.CompileCache = None,
) -> None:
    """Continue prompts.

    One prompt is printed as it is generated; several are printed in their order, or as JSON lines. Exits with 2 on bad
    input, and with 130 after Ctrl-C, when what was finished has been written.
    """
    from deepinfer_jax.sampling_params import SamplingParams

    try:
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        prompts, each = read_prompts(prompt, file, file_format, sampling)
        llm = common.open_llm(
            path,
            compile_cache=compile_cache,
            data=data,
            expert=expert,
            numerics=numerics,
            batch_invariant=batch_invariant,
            kernels=kernels,
            max_length=max_length,
            batch_size=batch_size,
            steps=steps,
            chunk=chunk,
            seed=seed,
            progress=sys.stderr.isatty(),
        )
        if len(prompts) == 1 and each[0].n == 1 and output is None and not as_json:
            _stream(llm, prompts[0], each[0])
        else:
            _batch(llm, prompts, each, output, as_json)
    except DeepInferError as error:
        raise common.bad_input(error) from None


def read_prompts(
    prompt: str | None, file: Path | None, file_format: Format | None, sampling: SamplingParams
) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts (text or ids) and their sampling parameters. Raises InputError with every bad line."""
    if prompt is not None and file is not None:
        raise InputError("found a prompt and --file, expected one of them")
    if prompt is not None:
        return [prompt], [sampling]
    if file is None:
        if common.at_terminal():
            raise InputError("no prompt: give one as an argument, with --file, or on stdin")
        file = Path("-")
    text = common.read_text(file)
    if file_format is None:
        file_format = Format.jsonl if file.suffix == ".jsonl" else Format.text
    if file_format is Format.text:
        return [text.removesuffix("\n").removesuffix("\r")], [sampling]
    if file_format is Format.lines:
        prompts: list[Any] = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
        return prompts, [sampling] * len(prompts)
    return _json_lines(text, file, sampling)


def _json_lines(text: str, file: Path, sampling: SamplingParams) -> tuple[list[Any], list[SamplingParams]]:
    from deepinfer_jax.sampling_params import SamplingParams

    prompts, each, faults = [], [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or ("prompt" in row) == ("token_ids" in row):
                raise InputError("expected an object with either prompt or token_ids")
            prompts.append(row.pop("prompt") if "prompt" in row else row.pop("token_ids"))
            each.append(SamplingParams.from_dict({**sampling.to_dict(), **row}))
        except (ValueError, InputError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        raise InputError(f"{file}: not prompts", faults)
    return prompts, each


def _stream(llm: LLM, prompt: Any, sampling: SamplingParams) -> None:
    try:
        for piece in llm.stream(prompt, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        common.error_console.print("interrupted")
        raise typer.Exit(common.EXIT_INTERRUPTED) from None
    sys.stdout.write("\n")


def _batch(llm: LLM, prompts: list[Any], each: list[SamplingParams], output: Path | None, as_json: bool) -> None:
    from deepinfer_jax.engine.outputs import Interrupted

    interrupted = None
    with contextlib.nullcontext(sys.stdout) if output is None else common.whole_file(output) as stream:
        try:
            results = llm.generate(prompts, each)
        except Interrupted as stopped:
            interrupted, results = stopped, stopped.finished
        if as_json or output is not None:
            stream.writelines(json.dumps(result.to_dict(), ensure_ascii=False) + "\n" for result in results)
        else:
            _print(results)
    if interrupted is not None:
        common.error_console.print(str(interrupted), highlight=False)
        raise typer.Exit(common.EXIT_INTERRUPTED)


def _print(results: list[RequestOutput]) -> None:
    for result in results:
        for one in result.outputs:
            name = f"prompt {result.index}" + (f", sample {one.index}" if len(result.outputs) > 1 else "")
            common.console.rule(f"{name} ({len(one.token_ids)} tokens, {one.finish_reason})", align="left")
            text = one.text if one.text is not None else " ".join(map(str, one.token_ids))
            common.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
