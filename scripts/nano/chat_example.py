"""One conversation to learn from, and its token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_jax.text.chat import ChatEncoder, ChatPrompt
from deepinfer_jax.text.tokenizer import TextTokenizer

_DSML = "｜DSML｜"
_THINKING_END = "</think>"

Message = Mapping[str, Any]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """What the assistant answers.

    Attributes:
        content: Text.
        calls: Tools to call after the text, with their arguments.
        reasoning: Thoughts before the text; only with thinking.
    """

    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True)
class Example:
    """A conversation whose replies are to be learned.

    Attributes:
        kind: What it teaches.
        turns: Messages of the other roles, and replies; the last one is a reply.
        origins: Documents that the answers come from, as `source/name`.
        fact: What it is about, if not `origins`; examples of one fact are held out together.
        tools: Tools that are offered.
        response_format: As of `ChatEncoder.prepare`.
    """

    kind: str
    turns: tuple[Message | Reply, ...]
    origins: tuple[str, ...] = ()
    fact: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None

    @property
    def thinking(self) -> bool:
        """Whether the last reply has thoughts."""
        last = self.turns[-1]
        return isinstance(last, Reply) and last.reasoning is not None

    def after(self, *turns: Message | Reply, kind: str | None = None) -> Example:
        """The same example with messages before it."""
        return replace(self, turns=(*turns, *self.turns), kind=kind or self.kind)


def ask(kind: str, question: str, answer: str, **more: Any) -> Example:
    """A question and its answer."""
    return Example(kind, (user(question), Reply(answer)), **more)


def user(content: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    """A message of the system."""
    return {"role": "system", "content": content}


def reply_text(reply: Reply) -> str:
    """A reply as the model writes it, up to the token that ends it."""
    text = reply.content
    if reply.reasoning is not None:
        text = reply.reasoning + _THINKING_END + text
    if not reply.calls:
        return text
    rows = [f"<{_DSML} calls>"]
    for name, arguments in reply.calls:
        rows.append(f'<{_DSML} invoke name="{name}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            shown = value if is_string else json.dumps(value)
            flag = "true" if is_string else "false"
            rows.append(f'<{_DSML} parameter name="{key}" string="{flag}">{shown}</{_DSML} parameter>')
        rows.append(f"</{_DSML} invoke>")
    return f"{text}\n\n" + "\n".join([*rows, f"</{_DSML} calls>"])


@dataclass(frozen=True)
class Encoded:
    """An example as ids.

    Attributes:
        ids: The whole conversation, from BOS to the EOS of the last reply.
        mask: 1 where an id belongs to a reply that is to be learned, its EOS included.
    """

    ids: list[int]
    mask: list[int]


class ExampleEncoder:
    """Turns examples into ids, and checks that the model's own reader finds in them what was meant.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._chat = ChatEncoder(tokenizer)
        (self._eos,) = tokenizer.encode("<｜end▁of▁sentence｜>")

    def encode(self, example: Example) -> Encoded:
        """The ids of an example.

        With thinking only the last reply is learned, as prompts leave out the thoughts of those before.

        Args:
            example: The conversation.

        Raises:
            ValueError: If a reply is read as something else, or later turns show it in another way.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for at, turn in enumerate(example.turns):
            if not isinstance(turn, Reply):
                continue
            last = at == len(example.turns) - 1
            if example.thinking and not last:
                continue
            prompt = self._prompt(example, at)
            if list(prompt.ids[: len(ids)]) != ids:
                raise ValueError(f"{example}: the prompt shows the earlier reply in another way: {prompt.text!r}")
            reply = [*self._tokenizer.encode(reply_text(turn)), self._eos]
            self._check(prompt, reply, turn)
            ids = [*prompt.ids, *reply]
            spans.append((len(prompt.ids), len(ids)))
        mask = [0] * len(ids)
        for start, end in spans:
            mask[start:end] = [1] * (end - start)
        return Encoded(ids, mask)

    def _prompt(self, example: Example, at: int) -> ChatPrompt:
        return self._chat.prepare(
            to_messages(example.turns[:at]),
            tools=example.tools or None,
            thinking=example.thinking,
            response_format=example.response_format,
        )

    def _check(self, prompt: ChatPrompt, ids: list[int], meant: Reply) -> None:
        found = self._chat.parse(prompt, ids)
        calls = tuple((call.name, call.parsed) for call in found.tool_calls)
        faults = [call.fault for call in found.tool_calls if call.fault]
        if (found.content, found.reasoning, calls) != (meant.content, meant.reasoning, meant.calls) or faults:
            raise ValueError(f"reply: found {found}, expected {meant}")


def to_messages(turns: tuple[Message | Reply, ...]) -> list[Message]:
    """OpenAI-style messages; the results of tools get the ids of the calls before them."""
    messages: list[Message] = []
    waiting: list[str] = []
    for turn in turns:
        if isinstance(turn, Reply):
            message = _assistant(turn, first_id=len(messages))
            waiting = [call["id"] for call in message.get("tool_calls", ())]
            messages.append(message)
        elif turn["role"] == "tool":
            messages.append({**turn, "tool_call_id": waiting.pop(0)})
        else:
            messages.append(turn)
    return messages


def _assistant(reply: Reply, first_id: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{first_id}_{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for n, (name, arguments) in enumerate(reply.calls)
        ]
    return message
