"""`chat`: one answer, or a conversation at the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli import common
from deepinfer_jax.errors import DeepInferError, InputError

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm import LLM, ChatOutput
    from deepinfer_jax.sampling_params import SamplingParams


def chat(
    path: common.Checkpoint,
    message: Annotated[str | None, typer.Argument(help="The question; without it and --file, a conversation.")] = None,
    file: Annotated[Path | None, typer.Option(help="Messages as a JSON list of objects with role and content.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    tools: Annotated[Path | None, typer.Option(help="Tools as a JSON list, in OpenAI's form.")] = None,
    tool_choice: Annotated[str, typer.Option(help="auto, none, or required (with --no-thinking).")] = "auto",
    thinking: Annotated[bool, typer.Option(help="Whether the model thinks before it answers.")] = True,
    reasoning_effort: Annotated[
        str | None, typer.Option("--effort", help="minimal, low, medium, high, xhigh or max.")
    ] = None,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Print the answer only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reply as JSON.")] = False,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = 1.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = 0,
    numerics: common.NumericsName = "released",
    batch_invariant: common.BatchInvariant = False,
    kernels: common.KernelsName = "reference",
    max_length: common.MaxLength = None,
    data: common.Data = 1,
    expert: common.Expert = 1,
    steps: common.Steps = 8,
    chunk: common.Chunk = 256,
    compile_cache: common.CompileCache = None,
) -> None:
    """Answer a message, or talk: without a message a conversation is held at the terminal, until Ctrl-D.

    Stdin that is not a terminal is read as the message. Exits with 2 on bad input and 130 after Ctrl-C.
    """
    from deepinfer_jax.sampling_params import SamplingParams

    try:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
        )
        messages = _messages(message, file, system)
        settings: dict[str, Any] = {
            "tools": None if tools is None else common.read_json(tools),
            "tool_choice": tool_choice,
            "thinking": thinking,
            "reasoning_effort": reasoning_effort,
        }
        llm = common.open_llm(
            path,
            compile_cache=compile_cache,
            data=data,
            expert=expert,
            numerics=numerics,
            batch_invariant=batch_invariant,
            kernels=kernels,
            max_length=max_length,
            batch_size=data,
            steps=steps,
            chunk=chunk,
            progress=sys.stderr.isatty(),
        )
        if messages is None:
            _converse(llm, system, settings, sampling, hide_thinking)
            return
        output = _answer(llm, messages, settings, sampling, None if as_json else hide_thinking)
        if as_json:
            sys.stdout.write(json.dumps(output.to_dict(), ensure_ascii=False) + "\n")
    except DeepInferError as error:
        raise common.bad_input(error) from None
    except KeyboardInterrupt:
        common.error_console.print("interrupted")
        raise typer.Exit(common.EXIT_INTERRUPTED) from None


def _messages(message: str | None, file: Path | None, system: str | None) -> list[Any] | None:
    """The conversation to answer; None to hold one at the terminal."""
    if message is not None and file is not None:
        raise InputError("found a message and --file, expected one of them")
    if file is not None:
        messages = common.read_json(file)
        if not isinstance(messages, list):
            raise InputError(f"{file}: found {type(messages).__name__}, expected a list of messages")
        return messages if system is None else [_system(system), *messages]
    if message is None:
        if common.at_terminal():
            return None
        message = common.read_text(Path("-"))
    return [*([] if system is None else [_system(system)]), {"role": "user", "content": message}]


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _answer(
    llm: LLM, messages: list[Any], settings: dict[str, Any], sampling: SamplingParams, hide: bool | None
) -> ChatOutput:
    """One reply, printed as it comes unless `hide` is None."""
    from deepinfer_jax.engine.llm import ChatOutput

    output, last = None, None
    styles = {"reasoning": "dim", "content": "", "tool": "cyan"}
    for piece in llm.chat_stream(llm.chat_encoder.prepare(messages, **settings), sampling):
        if isinstance(piece, ChatOutput):
            output = piece
        elif hide is not None and not (hide and piece[0] == "reasoning"):
            # Colours are lost in a file or a pipe, so that a blank line parts reasoning, answer and tool calls.
            text = piece[1] if last in (None, piece[0]) else "\n\n" + piece[1]
            last = piece[0]
            common.console.print(
                text, style=styles[last], end="", markup=False, highlight=False, emoji=False, soft_wrap=True
            )
    assert output is not None
    if hide is not None:
        common.console.print()
        for call in output.replies[0].tool_calls:
            if call.fault:
                common.error_console.print(f"tool call {call.name}: {call.fault}", markup=False)
        if output.request.outputs[0].finish_reason == "length":
            common.error_console.print("(cut off at the length limit)")
    return output


def _converse(llm: LLM, system: str | None, settings: dict[str, Any], sampling: SamplingParams, hide: bool) -> None:
    """Turns until Ctrl-D. Ctrl-C ends a reply; the question and the partial reply are forgotten then."""
    history: list[Any] = [] if system is None else [_system(system)]
    while True:
        try:
            text = common.console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            common.console.print()
            return
        if not text.strip():
            continue
        question = {"role": "user", "content": text}
        try:
            reply = _answer(llm, [*history, question], settings, sampling, hide).replies[0]
        except KeyboardInterrupt:
            common.console.print("\n(interrupted; this turn is forgotten)")
            continue
        except InputError as error:
            # A conversation that has grown too long, for instance: it can go on with another question.
            common.error_console.print(f"[red]error[/red] {error}", highlight=False)
            continue
        answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning is not None:
            answer["reasoning_content"] = reply.reasoning
        history += [question, answer]
