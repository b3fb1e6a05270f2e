"""From what a caller passes to checked requests. Every fault of a call is reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.schedule import Request
from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling_params import SamplingParams

SEEDS = 1 << 64

DEFAULT_LENGTH = 4096
"""Tokens of a sequence where nobody says more, prompt included."""


def params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt: the same for all, or one each."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    params = list(params)
    bad = next((p for p in params if not isinstance(p, SamplingParams)), None)
    if bad is not None:
        raise InputError(f"sampling: found {type(bad).__name__}, expected SamplingParams")
    if len(params) != count:
        raise InputError(f"sampling: found {len(params)} SamplingParams for {count} prompts, expected one or one each")
    return params


def list_of_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list. Raises InputError for what can be neither."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):
        array = np.asarray(prompts)
        return [array] if array.ndim == 1 else list(array)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise InputError(f"prompts: found {type(prompts).__name__}, expected texts or lists of token ids")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int | np.integer) else prompts


def check_requests(
    prompts: Sequence[Iterable[int]],
    params: Sequence[SamplingParams],
    config: ModelConfig,
    max_length: int,
    *,
    seed: int = 0,
    known_faults: Mapping[int, str] | None = None,
) -> list[Request]:
    """Requests for prompts given as token ids.

    Args:
        prompts, params: One each.
        max_length: Most tokens of a sequence.
        seed: Prompt i without a seed of its own gets seed + i.
        known_faults: What is wrong with prompts that could not even be made ids.

    Raises:
        InputError: With every prompt that is empty, too long, not a list of ids, or has an id out of range, and every
            stop id out of range.
    """
    faults: list[str] = []
    requests = []
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        ids, fault = _ids(prompt, config.text_config.vocab_size)
        fault = (known_faults or {}).get(i) or fault or _length_fault(len(ids), p, max_length)
        if fault:
            faults.append(f"prompt {i}: {fault}")
        wrong = [t for t in p.stop_token_ids if t >= config.text_config.vocab_size]
        if wrong:
            faults.append(
                f"prompt {i}: stop_token_ids has {wrong[0]}, expected ids of 0 to {config.text_config.vocab_size - 1}"
            )
        limit = max_length - len(ids) if p.max_tokens is None else p.max_tokens
        if not fault:
            filled = dataclasses.replace(p, max_tokens=limit)
            stop_ids = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else {config.eos_token_id})
            own = (seed + i) % SEEDS if p.seed is None else p.seed
            requests.append(Request(ids, filled, own, frozenset(stop_ids)))
    if faults:
        raise InputError("prompts that cannot be run", faults)
    return requests


def needed_length(prompts: Sequence[Any], params: Sequence[SamplingParams], config: ModelConfig) -> int:
    """A cache length for the requests: the next power of two, or the model's limit if that is less. Requests without
    `max_tokens` get room for `DEFAULT_LENGTH` tokens."""
    limit = config.text_config.max_position_embeddings
    # What is no prompt at all is named by `check_requests`.
    sizes = (len(prompt) if isinstance(prompt, Sized) else 0 for prompt in prompts)
    lengths = (
        max(size + 1, DEFAULT_LENGTH) if p.max_tokens is None else size + p.max_tokens
        for size, p in zip(sizes, params, strict=True)
    )
    most = max(lengths, default=1)
    return min(limit, 1 << max(6, (most - 1).bit_length()))


def _ids(prompt: Iterable[int], vocab_size: int) -> tuple[np.ndarray, str | None]:
    none = np.zeros(0, np.int32)
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        return none, f"found {type(prompt).__name__}, expected token ids"
    values = np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else list(prompt)
    for at, token in enumerate(values):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            return none, f"found {token!r} at {at}, expected token ids"
        if not 0 <= token < vocab_size:
            return none, f"token id {token} at {at} is not in 0..{vocab_size - 1}"
    if not values:
        return none, "empty, expected at least one token"
    return np.asarray(values, np.int32), None


def _length_fault(length: int, params: SamplingParams, max_length: int) -> str | None:
    if length >= max_length:
        return f"{length} tokens leave no room to generate, max_length is {max_length}"
    if params.max_tokens is not None and length + params.max_tokens > max_length:
        return f"{length} tokens and max_tokens {params.max_tokens} exceed max_length {max_length}"
    if params.max_tokens is None and length + params.min_tokens > max_length:
        return f"{length} tokens and min_tokens {params.min_tokens} exceed max_length {max_length}"
    return None
