"""The sampler draws from the distribution that the parameters describe, and from nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling import (
    SamplerRows,
    block_stops,
    filtered,
    is_stop,
    logprobs,
    request_key,
    sample,
    seed_words,
    stop_bits,
)

pytestmark = pytest.mark.optimized

VOCAB = 40
DRAWS = 20_000
draw = jax.jit(sample)


def rows(count, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=7, number=0, stop=(), min_position=0):
    def fill(value, dtype):
        return jnp.full(count, value, dtype)

    return SamplerRows(
        fill(temperature, jnp.float32),
        fill(top_p, jnp.float32),
        fill(top_k, jnp.int32),
        fill(min_p, jnp.float32),
        jnp.tile(jnp.asarray(seed_words(seed))[None], (count, 1)),
        fill(number, jnp.uint32),
        jnp.tile(jnp.asarray(stop_bits(stop, VOCAB))[None], (count, 1)),
        fill(min_position, jnp.int32),
    )


def expected(logits, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The distribution, written down in float64 without looking at the implementation."""
    p = scipy.special.softmax(np.float64(logits) / temperature)
    p = np.where(p >= min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    total = 0.0
    for token in order:
        if total >= top_p:
            p[token] = 0
        total += p[token]
    return p / p.sum()


LOGITS = np.random.default_rng(3).normal(0, 1, VOCAB).astype(np.float32)
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
]


def frequencies(**settings):
    positions = jnp.arange(DRAWS, dtype=jnp.int32)
    tokens = draw(jnp.tile(jnp.asarray(LOGITS)[None], (DRAWS, 1)), rows(DRAWS, **settings), positions)
    return np.bincount(np.asarray(tokens), minlength=VOCAB)


def chi_square(counts, p):
    """p-value; rare tokens are put together, so that the approximation holds."""
    rare = p * DRAWS < 10
    groups = [*np.flatnonzero(~rare)]
    seen = np.append(counts[groups], counts[rare].sum())
    want = np.append(p[groups], p[rare].sum()) * DRAWS
    keep = want > 0
    assert seen[~keep].sum() == 0
    return scipy.stats.chisquare(seen[keep], want[keep] * seen.sum() / want[keep].sum()).pvalue


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_pass_a_chi_square_test(settings):
    p = expected(LOGITS, **settings)
    counts = frequencies(**settings)
    assert counts[p == 0].sum() == 0
    assert chi_square(counts, p) > 1e-4


def test_the_chi_square_test_would_notice_another_temperature():
    assert chi_square(frequencies(temperature=1.05), expected(LOGITS)) < 1e-6


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    st.floats(0.05, 1.0),
    st.integers(0, VOCAB),
    st.floats(0.0, 1.0),
)
@settings(max_examples=60)
def test_filters_keep_what_the_definition_keeps(logits, top_p, top_k, min_p):
    logits = np.asarray(logits, np.float32)
    p = expected(logits, top_p=top_p, top_k=top_k, min_p=min_p)
    scaled = jnp.asarray(logits - logits.max())[None]
    kept = np.isfinite(np.asarray(filtered(scaled, rows(1, top_p=top_p, top_k=top_k, min_p=min_p)))[0])
    # Sums in float32 decide whether a token on the very edge of top_p or min_p is in.
    sure = expected(logits, top_p=max(top_p - 1e-5, 1e-9), top_k=top_k, min_p=min(min_p + 1e-6, 1.0)) > 0
    never = expected(logits, top_p=min(top_p + 1e-5, 1.0), top_k=top_k, min_p=max(min_p - 1e-6, 0.0)) == 0
    assert kept[sure].all()
    assert not kept[never].any()
    assert kept[np.argmax(p)]


def test_a_draw_depends_on_seed_sample_and_position_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (16, VOCAB)), jnp.float32)
    position = jnp.arange(16, dtype=jnp.int32) % 5
    alone = [draw(logits[i : i + 1], rows(1), position[i : i + 1])[0] for i in range(16)]
    order = rng.permutation(16)
    together = draw(logits[order], rows(16), position[order])
    np.testing.assert_array_equal(together, jnp.stack(alone)[order])
    # Controls: another seed, sample or position is another draw.
    base = draw(logits, rows(16), position)
    for other in (draw(logits, rows(16, seed=8), position), draw(logits, rows(16, number=1), position)):
        assert (np.asarray(base) != np.asarray(other)).sum() > 4
    assert (np.asarray(base) != np.asarray(draw(logits, rows(16), position + 1))).sum() > 4


def test_neighbours_that_are_filtered_change_nothing():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 2, (2, VOCAB)), jnp.float32)
    position = jnp.asarray([3, 4], jnp.int32)
    plain, narrow = rows(2), rows(2, top_k=2, top_p=0.5, min_p=0.2, temperature=0.0)
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[0], b[0]]), plain, narrow)
    assert draw(logits, mixed, position)[0] == draw(logits, plain, position)[0]


def test_keys_are_those_of_jax_for_seeds_of_32_bits():
    one = request_key(jnp.asarray(seed_words(12345)), jnp.uint32(2), jnp.int32(9))
    two = jax.random.fold_in(jax.random.fold_in(jax.random.key(12345), 2), 9)
    np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(two))
    high = request_key(jnp.asarray(seed_words(12345 + 2**40)), jnp.uint32(2), jnp.int32(9))
    assert (jax.random.key_data(high) != jax.random.key_data(one)).any()


def test_temperature_zero_takes_the_first_of_the_best():
    logits = jnp.asarray([[0.0, 5.0, 5.0, 1.0] + [0.0] * (VOCAB - 4)])
    assert draw(logits, rows(1, temperature=0.0), jnp.zeros(1, jnp.int32))[0] == 1


def test_a_tiny_temperature_does_not_overflow():
    logits = jnp.asarray(LOGITS)[None] * 1e4
    token = draw(logits, rows(1, temperature=1e-38), jnp.zeros(1, jnp.int32))[0]
    assert token == np.argmax(LOGITS)


def test_stop_ids_are_blocked_until_they_are_allowed():
    logits = jnp.zeros((2, VOCAB)).at[:, 33].set(9.0)
    early = rows(2, temperature=0.0, stop=(33, 0), min_position=5)
    blocked = block_stops(logits, early, jnp.asarray([4, 5], jnp.int32))
    assert np.isneginf(np.asarray(blocked[0]))[[0, 33]].all()
    assert np.isfinite(np.asarray(blocked[1])).all()
    assert draw(logits, early, jnp.asarray([4, 5], jnp.int32)).tolist() == [1, 33]
    assert is_stop(jnp.asarray([33, 32], jnp.int32), early).tolist() == [True, False]


def test_logprobs_are_those_of_the_model_itself():
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 3, (3, VOCAB)), jnp.float32)
    want = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
    got = logprobs(logits, jnp.asarray([4, 5, -1], jnp.int32), 6)
    np.testing.assert_allclose(got.chosen[:2], want[[0, 1], [4, 5]], atol=1e-5)
    order = np.argsort(-want, axis=-1, kind="stable")[:, :6]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(want, order, -1), atol=1e-5)
