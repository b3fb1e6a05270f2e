"""LLM: a checkpoint, ready to generate text and to chat."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import jax
from flax import nnx
from jax.sharding import Mesh

from deepinfer_jax.checkpoint.reader import Expand, default_expand, load_params
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.batch import Progressed, run
from deepinfer_jax.engine.outputs import Interrupted, RequestOutput
from deepinfer_jax.engine.progress import RunProgress
from deepinfer_jax.engine.requests import DEFAULT_LENGTH, SEEDS, check_requests, list_of_prompts, params_of_each
from deepinfer_jax.engine.schedule import Request, warm_up
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.generate import Programs, Setup, programs
from deepinfer_jax.model.v41 import V41, Params, abstract_params
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.mesh import Layout, make_mesh, param_shardings
from deepinfer_jax.sampling import Sampler, sample
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.token_map import TOKENIZER_FILE
from deepinfer_jax.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from deepinfer_jax.text.chat import ChatEncoder, ChatPrompt, ChatReply, Piece

Prompt = str | Sequence[int]
"""Text, or token ids."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: dicts with `role` and `content`, as in OpenAI's chat interface."""


@dataclasses.dataclass(frozen=True)
class ChatOutput:
    """The result of one conversation.

    Attributes:
        index: Its number in the call.
        replies: `n` replies, read into reasoning, content and tool calls.
        request: The ids, texts (special tokens spelled out), finish reasons and log-probabilities behind them.
    """

    index: int
    replies: tuple[ChatReply, ...]
    request: RequestOutput

    @property
    def content(self) -> str:
        """Answer of the first reply."""
        return self.replies[0].content

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


class Options(TypedDict, total=False):
    """Options of an LLM, all with a default.

    Attributes:
        numerics: Which roundings apply, or the name of a `Numerics`; default `released`.
        max_length: Most tokens of a sequence, prompt included; default 4096, or the model's limit if that is less.
        batch_size: Sequences generated at once, default 8; a multiple of the mesh's `data` axis.
        steps: Tokens decoded per dispatch, default 8.
        chunk: Tokens of a prefill call, default 256.
        seed: Prompt i of a call without a seed of its own gets seed + i; default 0.
        definition: A changed model (`define(config, change)`).
        sampler: Another way to draw tokens.
        progress: Show progress bars; default True.
    """

    numerics: Numerics | str
    max_length: int | None
    batch_size: int
    steps: int
    chunk: int
    seed: int
    definition: nnx.GraphDef[V41] | None
    sampler: Sampler
    progress: bool


class LLM:
    """A model with its weights and tokenizer.

    Nothing changes in it between calls, so a call that is interrupted leaves no half state.

    Args:
        path: A checkpoint directory.
        data, expert: The mesh: slots are split over `data`, experts over all data x expert devices.
        expand: As in `load`.
        options: As in `Options`.

    Raises:
        ConfigError, CheckpointError, TokenizerError: What is wrong with the files.
        InputError: What is wrong with the other arguments.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: int = 1,
        expert: int = 1,
        expand: Expand | None = None,
        **options: Unpack[Options],
    ):
        # What can be wrong without reading weights is found first.
        self._set(ModelConfig.from_file(path), make_mesh(data, expert), **options)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.tokenizer = None
        if (folder / TOKENIZER_FILE).exists():
            self.tokenizer = TextTokenizer.from_directory(folder, bos_token_id=self.config.bos_token_id)
        self.params: Params = load_params(
            path,
            self.config,
            shardings=param_shardings(abstract_params(self.config), self.mesh),
            expand=default_expand(self.config, self.numerics) if expand is None else expand,
            progress=self.progress,
        )

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        params: Params,
        tokenizer: TextTokenizer | None = None,
        *,
        mesh: Mesh | None = None,
        **options: Unpack[Options],
    ) -> LLM:
        """An LLM over weights that are there already: trained, changed, or shared with another."""
        self = cls.__new__(cls)
        self._set(config, make_mesh() if mesh is None else mesh, **options)
        self.tokenizer = tokenizer
        self.params = jax.device_put(params, param_shardings(params, self.mesh))
        return self

    def _set(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        numerics: Numerics | str = "released",
        max_length: int | None = None,
        batch_size: int = 8,
        steps: int = 8,
        chunk: int = 256,
        seed: int = 0,
        definition: nnx.GraphDef[V41] | None = None,
        sampler: Sampler = sample,
        progress: bool = True,
    ) -> None:
        self.config, self.mesh = config, mesh
        self.numerics = Numerics.named(numerics) if isinstance(numerics, str) else numerics
        limit = config.text_config.max_position_embeddings
        length = min(DEFAULT_LENGTH, limit) if max_length is None else max_length
        self.sizes = Sizes(batch_size, length, steps, chunk)
        if length > limit:
            raise InputError(f"max_length: found {length}, expected at most max_position_embeddings {limit}")
        Layout.of(mesh, batch_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
            raise InputError(f"seed: found {seed!r}, expected a whole number from 0 to 2^64 - 1")
        self.seed, self.definition, self.sampler, self.progress = seed, definition, sampler, progress

    # ---------------------------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: Texts or lists of token ids; a single one is a list of one.
            sampling: One for all prompts, or one each.
            progress: Show a progress bar; default as in the constructor.

        Returns:
            One result per prompt, in their order.

        Raises:
            InputError: With every fault of every prompt, before anything is run.
            Interrupted: Ctrl-C; `finished` has the results so far.
        """
        requests, texts = self._requests(prompts, sampling)
        outputs: list[RequestOutput] = []
        with RunProgress(len(requests), self.progress if progress is None else progress) as bar:
            try:
                for update, _, output in self._run(requests, texts):
                    bar.advance(bar.tokens, len(update.ids))
                    if output is not None:
                        outputs.append(output)
                        bar.advance(bar.prompts)
            except KeyboardInterrupt:
                raise Interrupted(sorted(outputs, key=lambda o: o.index), len(requests)) from None
        return sorted(outputs, key=lambda output: output.index)

    def generate_iter(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """The same, each result as soon as it is finished, in any order (`index` tells which)."""
        requests, texts = self._requests(prompts, sampling)
        return (output for _, _, output in self._run(requests, texts) if output is not None)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The text of one prompt's continuation, piece by piece."""
        self._tokenizer("stream")
        requests, texts = self._requests([prompt], sampling)
        if requests[0].params.n != 1:
            raise InputError(f"stream: found n {requests[0].params.n}, expected 1")
        for _, one, _ in self._run(requests, texts):
            piece = one.new_text()
            if piece:
                yield piece

    # -------------------------------------------------------------------------------------- chat

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        thinking: bool = True,
        reasoning_effort: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Answer a conversation, or several.

        Sampling parameters are the caller's alone; deepseek-recipe's own defaults are not applied.

        Args:
            messages: One conversation (a list of dicts) or a list of conversations.
            sampling: One for all, or one each.
            tools, tool_choice, thinking, reasoning_effort, response_format: As in `ChatEncoder.prepare`.

        Returns:
            A ChatOutput for one conversation, a list of them for several.

        Raises:
            TokenizerError: The tokenizer lacks special tokens of V4.1 chat.
            InputError, Interrupted: As for `generate`.
        """
        single = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
            raise InputError(f"messages: found {type(messages).__name__}, expected a conversation or a list of them")
        prompts = [
            self.chat_encoder.prepare(
                m,
                tools=tools,
                tool_choice=tool_choice,
                thinking=thinking,
                reasoning_effort=reasoning_effort,
                response_format=response_format,
            )
            for m in conversations
        ]
        each = [_spelled_out(p) for p in params_of_each(sampling, len(prompts))]
        results = self.generate([p.ids for p in prompts], each, progress=progress)
        outputs = [self._chat_output(prompt, output) for prompt, output in zip(prompts, results, strict=True)]
        return outputs[0] if single else outputs

    def chat_stream(self, prompt: ChatPrompt, sampling: SamplingParams | None = None) -> Iterator[Piece | ChatOutput]:
        """The reply to a prompt of `chat_encoder.prepare`: pieces as they come, and at last the ChatOutput."""
        requests, texts = self._requests([prompt.ids], _spelled_out(sampling or SamplingParams()))
        if requests[0].params.n != 1:
            raise InputError(f"chat_stream: found n {requests[0].params.n}, expected 1")
        reader = self.chat_encoder.stream(prompt)
        for _, one, output in self._run(requests, texts):
            yield from reader.push_text(one.new_text())
            if output is not None:
                yield from reader.finish(output.outputs[0].finish_reason == "stop")
                yield self._chat_output(prompt, output)

    @functools.cached_property
    def chat_encoder(self) -> ChatEncoder:
        """Writes conversations as prompts and reads replies. Raises TokenizerError where that cannot be."""
        # Only chat needs deepseek-recipe.
        from deepinfer_jax.text.chat import ChatEncoder

        return ChatEncoder(self._tokenizer("chat"))

    def warm_up(self, logprobs: Sequence[int | None] = (None,)) -> None:
        """Compile every program that calls may need, so that none does later.

        Args:
            logprobs: Values of `SamplingParams.logprobs` to be ready for.
        """
        for slots in {1, self.sizes.slots} if self.mesh.size == 1 else {self.sizes.slots}:
            warm_up(self._programs(slots), self.params, dataclasses.replace(self.sizes, slots=slots), logprobs)

    # ---------------------------------------------------------------------------------- the rest

    def _requests(self, prompts: Any, sampling: Any) -> tuple[list[Request], list[str | None]]:
        """Checked requests, and the prompts' texts."""
        prompts = list_of_prompts(prompts)
        ids, texts, faults = [], [], {}
        for i, prompt in enumerate(prompts):
            texts.append(prompt if isinstance(prompt, str) else None)
            try:
                ids.append(self._tokenizer("text prompts").encode(prompt) if isinstance(prompt, str) else prompt)
            except InputError as error:
                faults[i] = error.message
                ids.append(())
        each = params_of_each(sampling, len(ids))
        if self.tokenizer is None and any(p.stop for p in each):
            self._tokenizer("stop strings")
        requests = check_requests(ids, each, self.config, self.sizes.max_length, seed=self.seed, known_faults=faults)
        return requests, texts

    def _programs(self, slots: int) -> Programs:
        layout = Layout.of(self.mesh, slots)
        return programs(Setup(self.config, self.numerics, layout, self.definition, self.sampler))

    def _run(self, requests: Sequence[Request], texts: Sequence[str | None]) -> Iterator[Progressed]:
        # One sequence alone needs no batch of slots.
        alone = self.mesh.size == 1 and sum(r.params.n for r in requests) == 1
        sizes = dataclasses.replace(self.sizes, slots=1) if alone else self.sizes
        made = self._programs(sizes.slots)
        return run(made, self.params, requests, sizes, tokenizer=self.tokenizer, texts=texts)

    def _chat_output(self, prompt: ChatPrompt, output: RequestOutput) -> ChatOutput:
        replies = []
        for one in output.outputs:
            # The text, not the ids: a stop may have cut it in the middle of a token.
            reader = self.chat_encoder.stream(prompt)
            reader.push_text(one.text or "")
            reader.finish(one.finish_reason == "stop")
            replies.append(reader.reply)
        return ChatOutput(output.index, tuple(replies), output)

    def _tokenizer(self, what: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{what}: the checkpoint has no {TOKENIZER_FILE}; pass token ids, or add the file")
        return self.tokenizer


def _spelled_out(params: SamplingParams) -> SamplingParams:
    """A reply is read from text in which special tokens can be seen."""
    return dataclasses.replace(params, skip_special_tokens=False)
