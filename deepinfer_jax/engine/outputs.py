"""Results, and how they are put together from tokens as these come."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer_jax.engine.schedule import FinishReason, Request, Update
from deepinfer_jax.text.tokenizer import IncrementalDecoder, TextTokenizer


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's own distribution.

    Attributes:
        token_id, logprob: The token that was chosen.
        top: (token id, log-probability) of the most probable tokens, descending.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        index: Number of the sample.
        text: What was generated, without the token or string that stopped it; None without a tokenizer.
        token_ids: All generated ids, the one that stopped it included.
        finish_reason: `stop` (a stop id or string) or `length`.
        stop_reason: The id or string that stopped it, or None.
        logprobs: One entry per id, if asked for.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        index: Its number in the call.
        prompt: Its text; None if it was given as ids.
        prompt_token_ids: Its ids.
        outputs: `n` samples.
        seed: With which the call gives the same again.
        numerics_version: Of the arithmetic that made it (`numerics_version.py`).
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    seed: int
    numerics_version: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run. Nothing of it is left behind; what was finished is in `finished`.

    Attributes:
        finished: RequestOutputs in the order of their prompts.
        total: Prompts of the run.
    """

    def __init__(self, finished: list[RequestOutput], total: int):
        self.finished, self.total = finished, total
        super().__init__(f"interrupted: {len(finished)} of {total} prompts were finished")


class Sample:
    """One sample under way.

    With stop strings tokens are looked at one by one, so that the result does not depend on how many come at once.
    """

    def __init__(self, index: int, request: Request, tokenizer: TextTokenizer | None):
        self.index, self.request = index, request
        self.ids: list[int] = []
        self.text = ""
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        params = request.params
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._shown = 0
        # Where the search for stop strings begins.
        self._searched = 0

    def add(self, update: Update) -> bool:
        """Take new tokens. Returns whether a stop string ended the sample while the device goes on."""
        params = self.request.params
        for i, token in enumerate(update.ids):
            self.ids.append(token)
            if update.logprobs is not None:
                chosen, top, top_ids = update.logprobs
                pairs = tuple(zip(top_ids[i].tolist(), top[i].tolist(), strict=True))
                self.logprobs.append(TokenLogprobs(token, float(chosen[i]), pairs))
            last = i == len(update.ids) - 1
            stopped_by_id = last and update.finish == "stop"
            # The end-of-sequence id is never text.
            if not stopped_by_id or (params.include_stop and token in params.stop_token_ids):
                self._append("" if self._decoder is None else self._decoder.push([token]))
            if self._stop_string():
                return update.finish is None or not last
            if stopped_by_id:
                self.stop_reason = token
        if update.finish is not None:
            self._append("" if self._decoder is None else self._decoder.finish())
            if not self._stop_string():
                self.finish = update.finish
        return False

    def new_text(self) -> str:
        """Text since the last call that no stop string can take back any more."""
        end = len(self.text)
        if self.finish is None:
            end -= max((_overlap(self.text, stop) for stop in self.request.params.stop), default=0)
        shown, self._shown = self.text[self._shown : end], max(self._shown, end)
        return shown

    def completion(self) -> Completion:
        """The finished sample."""
        assert self.finish is not None
        return Completion(
            self.index,
            None if self._decoder is None else self.text,
            tuple(self.ids),
            self.finish,
            self.stop_reason,
            tuple(self.logprobs) if self.request.params.logprobs is not None else None,
        )

    def _append(self, text: str) -> None:
        self.text += text

    def _stop_string(self) -> bool:
        params = self.request.params
        if not params.stop:
            return False
        if len(self.ids) <= params.min_tokens:
            self._searched = len(self.text)
            return False
        found = [(at, stop) for stop in params.stop if (at := self.text.find(stop, self._searched)) >= 0]
        if not found:
            # A stop string may still begin in the text that is there.
            self._searched = max(self._searched, len(self.text) - max(map(len, params.stop)) + 1)
            return False
        # The one that is complete first; among those the longest.
        at, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self.text = self.text[: at + len(stop) if params.include_stop else at]
        self.finish, self.stop_reason = "stop", stop
        return True


def _overlap(text: str, stop: str) -> int:
    """Length of the longest start of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
