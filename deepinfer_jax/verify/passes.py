"""Axes of the forward pass: the reference's text read at once, after a rollback, beside images, and drafted."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from deepinfer_jax.cache import CacheState, init_cache, rollback
from deepinfer_jax.images import preprocess
from deepinfer_jax.model.step import Batch, ImageRows
from deepinfer_jax.model.v41 import Params, forward
from deepinfer_jax.prompt import Prompt, expand_images, image_rows
from deepinfer_jax.sampling import logprobs
from deepinfer_jax.speculative import SpeculativeResult, speculate
from deepinfer_jax.verify.schedules import Case
from deepinfer_jax.verify.subject import TOP, Comparison, Outcome, Subject, compared, outcome_row

WIDTH = 64
"""Texts are padded to multiples of it, so that few programs are compiled."""


class Reader:
    """Runs texts of a subject through `forward`, one sequence at a time."""

    def __init__(self, subject: Subject):
        self.subject = subject
        numerics = subject.numerics

        def run(params: Params, batch: Batch, cache: CacheState) -> tuple[jax.Array, CacheState]:
            out, cache = forward(params, subject.config, batch, cache, numerics=numerics, definition=subject.definition)
            assert out.logits is not None
            return out.logits[0], cache

        self.run = jax.jit(run)
        self.logprobs = jax.jit(functools.partial(logprobs, count=TOP, invariant=numerics.batch_invariant))

    def empty(self) -> CacheState:
        """A cache for one sequence."""
        return init_cache(self.subject.config, self.subject.numerics, 1, self.subject.room)

    def read(self, tokens: Sequence[int], cache: CacheState, start: int) -> tuple[jax.Array, CacheState]:
        """Logits [len(tokens), V] of tokens that stand from `start` on, and the new cache."""
        width = -(-len(tokens) // WIDTH) * WIDTH
        ids, positions = np.zeros((1, width), np.int32), np.full((1, width), -1, np.int32)
        ids[0, : len(tokens)], positions[0, : len(tokens)] = tokens, np.arange(start, start + len(tokens))
        batch = Batch(jnp.asarray(ids), jnp.asarray(positions), jnp.zeros(1, jnp.int32))
        logits, cache = self.run(self.subject.params, batch, cache)
        return logits[: len(tokens)], cache

    def outcome(self, logits: jax.Array, ids: Sequence[int]) -> Outcome:
        """What a request gave whose tokens had these logits [len(ids), V]."""
        found = jax.device_get(self.logprobs(logits, jnp.asarray(ids, jnp.int32)))
        return Outcome(tuple(ids), np.stack([outcome_row(*row) for row in zip(*found, strict=True)]))


def forced(subject: Subject) -> Iterator[Case]:
    """Prompt and continuation read at once, against the continuation decoded token by token (teacher forcing)."""
    reader = Reader(subject)

    def case() -> list[Comparison]:
        found = []
        for i, prompt in enumerate(subject.workload.prompts):
            logits, _ = reader.read(subject.text(i)[:-1], reader.empty(), 0)
            found.append(reader.outcome(logits[len(prompt) - 1 :], subject.alone[i].ids))
        return compared(range(len(found)), subject.alone, found)

    yield "read at once", case


def rollbacks(subject: Subject, drops: Sequence[int]) -> Iterator[Case]:
    """Tokens run and given up again before the continuation is read."""
    reader = Reader(subject)
    which = range(min(4, len(subject.workload)))

    def one(i: int, drop: int) -> Outcome:
        prompt, ids = subject.workload.prompts[i], subject.alone[i].ids
        first, cache = reader.read(prompt, reader.empty(), 0)
        _, cache = reader.read(ids[::-1][:1] * drop, cache, len(prompt))
        rest, _ = reader.read(ids[:-1], rollback(cache, jnp.full(1, drop, jnp.int32)), len(prompt))
        return reader.outcome(jnp.concatenate([first[-1:], rest]), ids)

    for drop in drops:
        yield (
            f"{drop} tokens",
            lambda drop=drop: compared(which, (subject.alone[i] for i in which), [one(i, drop) for i in which]),
        )


def images(subject: Subject) -> Iterator[Case]:
    """A text beside a prompt with an image, and the other way round. Nothing without a vision part."""
    config, vision = subject.config, subject.config.vision_config
    if vision is None or config.image_token_id is None:
        return
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    shown = [preprocess(Image.fromarray(pixels), vision)]
    text = [t for t in subject.workload.prompts[0] if t != config.image_token_id]
    plain = expand_images(text, [], config)
    with_image = expand_images([config.image_token_id, *text], shown, config)
    table = image_rows(subject.params, config, shown, subject.numerics)

    def case(which: int) -> list[Comparison]:
        both = [plain, with_image]
        alone = _logits(subject, [both[which]], table)[0]
        found = _logits(subject, [both[which], both[1 - which]], table)[0]
        differ = (alone.view(np.uint32) != found.view(np.uint32)).any(axis=-1)
        return [Comparison(0, int(np.argmax(differ)) if differ.any() else None)]

    yield "text beside an image", lambda: case(0)
    yield "image beside a text", lambda: case(1)


def _logits(subject: Subject, prompts: Sequence[Prompt], table: jax.Array) -> list[np.ndarray]:
    """float32[S, V] of each prompt, all of them run together."""
    width = max(len(p.ids) for p in prompts)
    shape = (len(prompts), width)
    ids, positions, index = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    for row, p in enumerate(prompts):
        n = len(p.ids)
        ids[row, :n], positions[row, :n], index[row, :n] = p.ids, np.arange(n), p.image_index
    cache = init_cache(subject.config, subject.numerics, len(prompts), max(subject.room, width))
    batch = Batch(ids, positions, np.arange(len(prompts), dtype=np.int32), ImageRows(table, index))  # type: ignore[arg-type]

    @jax.jit
    def run(params: Params, batch: Batch, cache: CacheState) -> jax.Array | None:
        return forward(params, subject.config, batch, cache, numerics=subject.numerics, definition=subject.definition)[
            0
        ].logits

    logits = np.asarray(run(subject.params, batch, cache))
    return [logits[row, : len(p.ids)] for row, p in enumerate(prompts)]


def drafts(subject: Subject, sizes: Sequence[int]) -> Iterator[Case]:
    """Drafted blocks, their confidence and what was accepted, in other batches. Nothing without a drafter."""
    if not subject.config.draft_stages:
        return
    which = list(range(min(max(sizes), len(subject.workload))))

    def run(batch_size: int) -> list[SpeculativeResult]:
        results = []
        for temperature in (0.0, 1.0):
            results += speculate(
                subject.params,
                subject.config,
                [subject.workload.prompts[i] for i in which],
                numerics=subject.numerics,
                temperature=temperature,
                max_tokens=subject.workload.sampling[0].max_tokens or 1,
                ignore_eos=True,
                batch_size=batch_size,
                definition=subject.definition,
            )
        return results

    alone = functools.cache(lambda: run(1))

    def case(size: int) -> list[Comparison]:
        return [
            Comparison(which[k % len(which)], _first_difference(a, b))
            for k, (a, b) in enumerate(zip(alone(), run(size), strict=True))
        ]

    for size in sizes:
        yield f"batch {size}", lambda size=size: case(size)


def _first_difference(a: SpeculativeResult, b: SpeculativeResult) -> int | None:
    """The first round in which drafts, tokens or bits of the confidence differ."""
    for r in range(max(a.rounds, b.rounds)):
        if r >= min(a.rounds, b.rounds):
            return r
        pairs = ((x.drafted[r], x.tokens[r], x.outcomes.confidence[r].view(np.uint32)) for x in (a, b))
        if any((u != v).any() for u, v in zip(*pairs, strict=True)):
            return r
    return None
