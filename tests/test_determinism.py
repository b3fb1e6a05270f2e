"""Batch invariance of the trained checkpoint: a request's bits, whatever runs beside it and however it is cut.

Generation compares ids and the bits of log-probabilities, at temperature 0 and 1; passes compare all logits. With the
mode off the chunks must differ, or they show nothing; batches of generation have no such control yet.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.text.tokenizer import TextTokenizer

PATH = "checkpoints/nano"
TEXTS = [
    "And the LORD spake unto Moses, saying,",
    "Elizabeth",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of",
    "hacker: n.",
    "The function returns",
    "melancholy",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness",
]
CHUNKS = (1, 17)


def numerics(tag, on):
    return dataclasses.replace(dj.Numerics.named(tag), batch_invariant=on)


@functools.lru_cache(maxsize=4)
def loaded(tag, root):
    config, params = dj.load(root / PATH, numerics=dj.Numerics.named(tag), progress=False)
    return config, params, TextTokenizer.from_directory(root / PATH, bos_token_id=config.bos_token_id)


def outcomes(tag, root, on, prompts, **options):
    """Ids and bits of log-probabilities of every prompt, alternately greedy and sampled with a seed of its own."""
    config, params, tokenizer = loaded(tag, root)
    llm = LLM.of(config, params, tokenizer, numerics=numerics(tag, on), max_length=256, progress=False, **options)
    sampling = [
        dj.SamplingParams(
            temperature=float(TEXTS.index(text) % 2), seed=TEXTS.index(text), max_tokens=12, logprobs=2, ignore_eos=True
        )
        for text in prompts
    ]
    return [
        (out.token_ids, tuple(np.float32(t.logprob).tobytes() for t in out.logprobs or ()))
        for out in (o.outputs[0] for o in llm.generate(list(prompts), sampling))
    ]


@pytest.fixture(scope="module")
def root(request):
    return request.config.rootpath


@pytest.mark.slow
@pytest.mark.optimized
def test_a_request_has_the_same_bits_in_every_batch_chunk_and_dispatch(root):
    reference = outcomes("released", root, True, TEXTS, batch_size=7)
    assert outcomes("released", root, True, TEXTS, batch_size=1, steps=4, chunk=32) == reference
    # Other neighbours, other places in the batch.
    assert outcomes("released", root, True, TEXTS[::-1], batch_size=7)[::-1] == reference


def passes(tag, root, on, chunk, batch):
    """Bits of all logits of one text, computed in chunks, in a batch of copies that run other texts."""
    config, params, tokenizer = loaded(tag, root)
    mode = numerics(tag, on)
    ids = np.array(tokenizer.encode(TEXTS[2] + " " + TEXTS[6])[:40], np.int32)
    rows = np.stack([np.roll(ids, i) for i in range(batch)])
    cache = dj.init_cache(config, mode, num_slots=batch, max_length=256)
    run = jax.jit(lambda p, b, c: dj.forward(p, config, b, c, numerics=mode))
    found = []
    for start in range(0, len(ids), chunk):
        part = rows[:, start : start + chunk]
        positions = np.broadcast_to(np.arange(start, start + part.shape[1], dtype=np.int32), part.shape)
        batch_of = dj.Batch(jnp.asarray(part), jnp.asarray(positions), slots=jnp.arange(batch, dtype=jnp.int32))
        out, cache = run(params, batch_of, cache)
        found.append(np.asarray(out.logits)[0])
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("tag", ["released", "fp32"])
def test_prefill_gives_the_bits_of_decoding_in_every_chunk_size(tag, root):
    reference = passes(tag, root, True, 40, 2)
    for chunk in CHUNKS:
        np.testing.assert_array_equal(passes(tag, root, True, chunk, 2), reference, err_msg=f"chunks of {chunk}")
    np.testing.assert_array_equal(passes(tag, root, True, 40, 9), reference)


@pytest.mark.slow
@pytest.mark.optimized
def test_without_the_mode_some_of_these_differ(root):
    """The control."""
    assert (passes("fp32", root, False, 1, 2) != passes("fp32", root, False, 40, 2)).any()
