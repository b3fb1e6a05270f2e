"""Chat for DeepSeek-V4.1: messages to the ids of a prompt, and the ids of a reply to reasoning, text and tool calls.

Prompt and reply formats are those of DeepSeek's own `deepseek-recipe` package. Its parser drops what it cannot place
(malformed tool markup, text after a block of calls, an incomplete character at the end), so a reply is checked
against its own text, and whatever would be lost is given back as content or as the fault of a call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import deepseek_recipe as recipe

from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.text.tokenizer import IncrementalDecoder, TextTokenizer, checked_ids, json_faults

REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
ROLES = ("system", "user", "assistant", "tool", "latest_reminder")

Piece = tuple[Literal["reasoning", "content", "tool"], str]

_MODEL = "DeepSeek-V4.1-Flash"
_NEEDED = ("Bos", "Eos", "System", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml", "LatestReminder")

_MARK = "｜DSML｜"
_OPEN = re.compile(rf"\s*<{_MARK} ?(?:tool_)?calls>")
_CLOSE = re.compile(rf"\s*</{_MARK} ?(?:tool_)?calls>")
_VALUE = rf"[^<]*(?:<(?!/?{_MARK})[^<]*)*"
_PARAMETER = rf'<{_MARK} ?parameter name="[^"]*" string="(?:true|false)">{_VALUE}</{_MARK} ?parameter>\s*'
_INVOKE = re.compile(rf'\s*<{_MARK} ?invoke name="([^"]*)">\s*(?:{_PARAMETER})*</{_MARK} ?invoke>')
_INVOKE_START = re.compile(rf"<{_MARK} ?invoke")
_INVOKE_END = re.compile(rf"</{_MARK} ?invoke>")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that a reply asks for.

    Attributes:
        id: Name of the call for the message that answers it. The same prompt gives the same ids again.
        name: Name of the tool, as the model wrote it.
        arguments: JSON text of the arguments, as far as the model wrote it; not always valid.
        parsed: The arguments, if they are a JSON object and the call is complete and well-formed.
        fault: Why the call should not be run, or None.
    """

    id: str
    name: str
    arguments: str
    parsed: dict[str, Any] | None
    fault: str | None


@dataclass(frozen=True)
class ChatReply:
    """A reply of the model.

    Attributes:
        reasoning: The thinking before the answer; None if the prompt does not start in it.
        content: The answer, with tool markup that could not be read as calls. Thinking end tags are in neither.
        tool_calls: The calls, in the order of the reply.
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt, and what is needed to read the reply to it.

    Attributes:
        ids: Token ids, special tokens included.
        text: The same as text. Special tokens and text that merely looks like one are alike in it.
        tools: JSON schema of the arguments of every tool that may be called, by name.
        starts_in_reasoning: The reply begins with reasoning.
        starts_in_tool_calls: The prompt has opened a block of tool calls.
        continues: The reply continues the last message of the prompt.
    """

    ids: tuple[int, ...]
    text: str
    tools: Mapping[str, Any]
    starts_in_reasoning: bool
    starts_in_tool_calls: bool
    continues: bool
    _request: recipe.ConversationRequest = field(repr=False, compare=False)


class ChatEncoder:
    """Prompts and replies of V4.1 chat.

    Args:
        tokenizer: The tokenizer of the checkpoint.

    Raises:
        TokenizerError: If the tokenizer lacks special tokens of V4.1 prompts (all are named), if its
            `bos_token_id` is another one, or if `deepseek-recipe` cannot read it.
    """

    def __init__(self, tokenizer: TextTokenizer):
        spellings = {name: getattr(recipe.SpecialToken, name).default_str() for name in _NEEDED}
        added = tokenizer.added_tokens
        faults = [f"{text}: missing" for text in spellings.values() if text not in added]
        bos = added.get(spellings["Bos"])
        if bos is not None and tokenizer.bos_token_id not in (None, bos):
            faults.append(f"{spellings['Bos']}: found id {bos}, expected bos_token_id {tokenizer.bos_token_id}")
        if faults:
            raise TokenizerError("tokenizer: its added tokens are not those of DeepSeek-V4.1 chat prompts", faults)
        self._tokenizer = tokenizer
        self._eos = added[spellings["Eos"]]
        try:
            encoding = recipe.Tokenizer.from_str(tokenizer.json_text)
        except Exception as error:  # the binding names no error class
            raise TokenizerError(f"tokenizer: deepseek-recipe cannot read it: {error}") from None
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(encoding)

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        thinking: bool = True,
        reasoning_effort: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Write the prompt of a conversation.

        Text that spells a special token stays text.

        Args:
            messages: OpenAI-style messages: `role`, `content` (a str or a list of text parts), and for an assistant
                `reasoning_content`, `tool_calls` and, in the last message, `prefix` to continue it; for a tool
                `tool_call_id`.
            tools: OpenAI-style function tools.
            tool_choice: "auto", "none", or without thinking "required" or
                `{"type": "function", "function": {"name": ...}}`.
            thinking: Whether the model thinks before it answers.
            reasoning_effort: One of `REASONING_EFFORTS`; the prompt says 50 of 100 for the first two, 75 for the
                next three (and for None), 100 for the last.
            response_format: OpenAI-style; it puts instructions into the prompt, it does not constrain the reply.

        Raises:
            InputError: If anything of this does not make sense.
        """
        body: dict[str, Any] = {"messages": messages, "tool_choice": tool_choice}
        if tools is not None:
            body["tools"] = tools
        if reasoning_effort is not None:
            body["reasoning_effort"] = reasoning_effort
        if response_format is not None:
            body["response_format"] = response_format
        faults = _faults(body, thinking)
        if faults:
            raise InputError("chat: the conversation cannot be written as a prompt", faults)
        body["messages"] = [dict(message) for message in messages]
        request = _convert(body, thinking)
        try:
            ids = self._encoding.encode(request.conversation)
            text = self._encoding.render_conversation(request.conversation).prompt
        except _RECIPE_ERRORS as error:
            raise InputError(f"messages: {_sentence(error)}") from None
        options = request.parsing_options
        stage = options.thinking_initial_stage
        return ChatPrompt(
            ids=tuple(ids),
            text=text,
            tools={tool.name: tool.parameters for tool in request.conversation.tools},
            starts_in_reasoning=stage is not None and stage.starts_in_reasoning(),
            starts_in_tool_calls=options.starts_in_tool_calls,
            continues=bool(messages[-1].get("prefix")),
            _request=request,
        )

    def stream(self, prompt: ChatPrompt) -> ChatStream:
        """A reader for the reply to a prompt, for ids as they come."""
        return ChatStream(self._tokenizer, prompt, self._eos)

    def parse(self, prompt: ChatPrompt, ids: Iterable[int], finished: bool = True) -> ChatReply:
        """Read a whole reply.

        Args:
            prompt: The prompt that was answered.
            ids: Token ids of the reply, with or without the token that ends it.
            finished: False if the reply was cut off by the length limit.

        Raises:
            InputError: If `ids` are no token ids.
        """
        stream = self.stream(prompt)
        stream.push(ids)
        stream.finish(finished)
        return stream.reply


class ChatStream:
    """Reads one reply as its ids come. Made by `ChatEncoder.stream`.

    Pieces are pairs of a kind and a text: "reasoning" and "content" pieces join to those of the reply; "tool" pieces
    show each call as its name, a space and the arguments, on a line of its own.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: ChatPrompt, eos: int):
        options = prompt._request.parsing_options
        # Its JSON mode blanks whatever surrounds the JSON.
        options.parse_json_output = False
        if prompt.continues and options.thinking_initial_stage is None:
            # Without thinking it takes line breaks at the start for those of a new message.
            options.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt._request, "", _MODEL)
        self._processor = recipe.StreamProcessor(generator, options)
        # The processor gets text, not ids: its own decoder drops an incomplete character at the end.
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._prompt = prompt
        self._parses_tools = options.parse_tool_calls
        self._eos = eos
        self._held = 0
        self._raw: list[str] = []
        self._pieces: list[Piece] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._reply: ChatReply | None = None

    @property
    def reply(self) -> ChatReply:
        """The whole reply.

        Raises:
            InputError: If the stream is not finished.
        """
        if self._reply is None:
            raise InputError("reply: the stream is not finished, expected a call of finish first")
        return self._reply

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Read more ids.

        A token at the end that ends the reply is no text of it; with more ids after it, it is.

        Returns: The pieces that became final.

        Raises:
            InputError: If `ids` are no token ids, or the stream is finished.
        """
        if self._reply is not None:
            raise InputError("ids: the stream is finished, expected no push after that")
        new = [self._eos] * self._held + checked_ids(ids)
        self._held = next((n for n, token in enumerate(reversed(new)) if token != self._eos), len(new))
        return self._read(self._decoder.push(new[: len(new) - self._held]))

    def push_text(self, text: str) -> list[Piece]:
        """Read text instead of ids: what a stop string left of a reply, special tokens spelled out.

        Returns: The pieces that became final.
        """
        return self._read(text)

    def finish(self, finished: bool = True) -> list[Piece]:
        """End the reply.

        Args:
            finished: False if the reply was cut off by the length limit.

        Returns:
            The pieces that were held back, and as content what the parser would have lost.

        Raises:
            InputError: If the stream is finished already.
        """
        if self._reply is not None:
            raise InputError("finish: the stream is finished already, expected one call")
        pieces = self._read(self._decoder.finish())
        reason = recipe.InferenceFinishReason.Stop if finished else recipe.InferenceFinishReason.Length
        if not self._processor.finished:
            pieces += self._take(self._processor.push(recipe.InferenceChunk.finish(reason)))
        if not self._processor.finished:
            pieces += self._take(self._processor.finish())
        reasoning, content = ("".join(t for k, t in self._pieces if k == kind) for kind in ("reasoning", "content"))
        sound, rest = self._unread(content, finished)
        if rest and sound == len(self._calls):
            content += rest
            pieces.append(("content", rest))
        self._reply = ChatReply(
            reasoning=reasoning if reasoning or self._prompt.starts_in_reasoning else None,
            content=content,
            tool_calls=self._tool_calls(sound, rest, finished),
        )
        return pieces

    def _read(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._raw.append(text)
        if self._processor.finished:  # a push would raise then
            self._pieces.append(("content", text))
            return [("content", text)]
        return self._take(self._processor.push(recipe.InferenceChunk.text(text, 1)))

    def _take(self, chunks: Iterable[Any]) -> list[Piece]:
        pieces: list[Piece] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json()).get("choices", ()):
                delta = choice["delta"]
                if reasoning := delta.get("reasoning_content"):
                    pieces.append(("reasoning", reasoning))
                if content := delta.get("content"):
                    pieces.append(("content", content))
                for entry in delta.get("tool_calls") or ():
                    pieces.append(("tool", self._call_text(entry)))
        self._pieces += pieces
        return pieces

    def _call_text(self, entry: dict[str, Any]) -> str:
        function = entry["function"]
        arguments = function.get("arguments", "")
        shown = arguments
        if entry["index"] == len(self._calls):
            shown = f"{'\n' if self._calls else ''}{function['name']} {arguments}"
            self._calls.append((function["name"], []))
        self._calls[entry["index"]][1].append(arguments)
        return shown

    def _unread(self, content: str, finished: bool) -> tuple[int, str]:
        """How many of the calls stand in well-formed markup, and the text from there on that nothing represents."""
        raw, names = "".join(self._raw), [name for name, _ in self._calls]
        start = 0 if self._prompt.starts_in_tool_calls else raw.find(f"<{_MARK}")
        if start < 0 or not self._parses_tools:
            return len(names), ""
        sound, rest = _well_formed(raw[start:], names)
        in_closing_tag = any(f"</{_MARK}{name}>".startswith(rest.strip()) for name in (" calls", "tool_calls"))
        if not rest.strip() or (in_closing_tag and not finished):
            return sound, ""
        if content and not names:
            # The parser took the line breaks before the tag for a part of the block.
            head = raw[:start]
            rest = head[len(head.rstrip("\n")) :].removeprefix(content[len(content.rstrip("\n")) :]) + rest
        return sound, rest

    def _tool_calls(self, sound: int, rest: str, finished: bool) -> tuple[ToolCall, ...]:
        digest = hashlib.sha256(repr(self._prompt.ids).encode()).hexdigest()[:24]
        starts = [match.start() for match in _INVOKE_START.finditer(rest)]
        cut_off = not finished and not (starts and _INVOKE_END.search(rest, starts[-1]))
        calls = []
        for index, (name, parts) in enumerate(self._calls):
            arguments = "".join(parts)
            if index >= sound and cut_off and index == len(self._calls) - 1:
                parsed, fault = None, f"{name}: the call was cut off by the length limit, found {rest!r}"
            elif index >= sound:
                parsed, fault = None, f"{name}: the call is not well-formed, found {rest!r}"
            else:
                parsed, fault = _arguments(name, arguments, self._prompt.tools)
            # The parser's own ids are random.
            calls.append(ToolCall(f"call_{index:02d}_{digest}", name, arguments, parsed, fault))
        return tuple(calls)


_RECIPE_ERRORS = (recipe.ConversionError, ValueError, TypeError, RuntimeError, OverflowError)


def _well_formed(markup: str, names: list[str]) -> tuple[int, str]:
    """Count the calls at the start of `markup` that are well-formed and named `names`; also gives the text after."""
    opened = _OPEN.match(markup)
    at = opened.end() if opened else 0
    sound = 0
    while (invoke := _INVOKE.match(markup, at)) and names[sound : sound + 1] == [invoke.group(1)]:
        sound += 1
        at = invoke.end()
    if sound:
        closed = _CLOSE.match(markup, at)
        at = closed.end() if closed else at
        return sound, markup[at:]
    return 0, markup


def _arguments(name: str, text: str, tools: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The arguments of a complete call, and what is wrong with them."""
    faults, parsed = [], None
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        faults.append(f"the arguments are not valid JSON ({error}), found {text!r}")
    else:
        if isinstance(value, dict):
            parsed = value
        else:
            faults.append(f"the arguments are {type(value).__name__}, expected a JSON object")
    schema = tools.get(name)
    if name not in tools:
        faults.append(f"the tool is not among those offered ({', '.join(tools)})")
    elif parsed is not None and isinstance(schema, Mapping) and isinstance(schema.get("required"), list):
        missing = [key for key in schema["required"] if isinstance(key, str) and key not in parsed]
        if missing:
            faults.append(f"the arguments lack the required {', '.join(map(repr, missing))}")
    return parsed, f"{name}: {'; '.join(faults)}" if faults else None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _refuse(spelling: str) -> Any:
    raise ValueError(f"{spelling} is no JSON value")


def _convert(body: dict[str, Any], thinking: bool) -> recipe.ConversationRequest:
    common = {"model": _MODEL, "thinking": {"type": "enabled" if thinking else "disabled"}}
    try:
        return recipe.ChatCompletionRequest(common | body).convert(recipe.ConversionOptions())
    except _RECIPE_ERRORS as error:
        message = _sentence(error)
    # The message does not always say which argument it is about: the one that fails next to a harmless message.
    harmless = common | {"messages": [{"role": "user", "content": "json"}]}
    for names in (("response_format",), ("tools",), ("tools", "tool_choice")):
        given = {name: body[name] for name in names if name in body}
        try:
            recipe.ChatCompletionRequest(harmless | given).convert(recipe.ConversionOptions())
        except _RECIPE_ERRORS:
            raise InputError(f"{names[-1]}: {message}") from None
    raise InputError(f"messages: {message}")


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).removeprefix("invalid request body: ").split())


def _faults(body: Mapping[str, Any], thinking: bool) -> list[str]:
    """The common mistakes, each with the argument that it is in."""
    faults = []
    for name, value in body.items():
        faults += json_faults(value, name)
    messages = body["messages"]
    if not isinstance(messages, list | tuple):
        faults.append(f"messages: found {type(messages).__name__}, expected a list of messages")
    elif not messages:
        faults.append("messages: found none, expected at least one")
    else:
        for index, message in enumerate(messages):
            faults += _message_faults(message, f"messages[{index}]", index == len(messages) - 1)
    if not isinstance(thinking, bool):
        faults.append(f"thinking: found {thinking!r}, expected True or False")
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in REASONING_EFFORTS:
        faults.append(f"reasoning_effort: found {effort!r}, expected one of {', '.join(REASONING_EFFORTS)}")
    elif effort is not None and not thinking:
        faults.append(f"reasoning_effort: found {effort!r} with thinking=False, expected None")
    return faults + _choice_faults(body["tool_choice"], body.get("tools"), thinking)


def _message_faults(message: Any, where: str, last: bool) -> list[str]:
    if not isinstance(message, Mapping):
        return [f"{where}: found {type(message).__name__}, expected a dict with role and content"]
    faults = []
    role = message.get("role")
    if role not in ROLES:
        faults.append(f"{where}.role: found {role!r}, expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None:
        if not (role == "assistant" and message.get("tool_calls")):
            faults.append(f"{where}.content: missing, expected a str or a list of parts")
    elif isinstance(content, list | tuple):
        for index, part in enumerate(content):
            faults += _part_faults(part, f"{where}.content[{index}]")
    elif not isinstance(content, str):
        faults.append(f"{where}.content: found {type(content).__name__}, expected a str or a list of parts")
    if message.get("prefix") and not (last and role == "assistant"):
        faults.append(f"{where}.prefix: found on message of role {role!r}, expected only on a last one of assistant")
    return faults


def _part_faults(part: Any, where: str) -> list[str]:
    if not isinstance(part, Mapping):
        return [f"{where}: found {type(part).__name__}, expected a dict with type and text"]
    kind = part.get("type")
    if kind in ("image_url", "image", "input_image"):
        return [f"{where}: images in chat are not supported yet"]
    if kind != "text":
        return [f"{where}.type: found {kind!r}, expected 'text'"]
    text = part.get("text")
    return [] if isinstance(text, str) else [f"{where}.text: found {type(text).__name__}, expected a str"]


def _choice_faults(choice: Any, tools: Any, thinking: bool) -> list[str]:
    if choice in ("auto", "none"):
        return []
    function = choice.get("function") if isinstance(choice, Mapping) else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(named, str):
        return [
            f"tool_choice: found {choice!r}, expected 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        ]
    faults = []
    if thinking:
        faults.append(f"tool_choice: found {choice!r} while thinking, which cannot force a call: pass thinking=False")
    if not tools:
        faults.append(f"tool_choice: found {choice!r} without tools, expected 'auto' or 'none'")
    return faults
