"""Pages: taken, shared, given back, and never two owners by accident."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.cache import page_tokens

CONFIG = dj.ModelConfig.named("tiny")
RELEASED = dj.Numerics()


def held(cache: dj.CacheState, slot: int) -> list[int]:
    row = np.asarray(cache.block_table[slot])
    return row[row >= 0].tolist()


def check(cache: dj.CacheState) -> None:
    """Every page is counted as often as block tables name it."""
    table = np.asarray(cache.block_table)
    counts = np.bincount(table[table >= 0], minlength=cache.page_refs.shape[0])
    np.testing.assert_array_equal(cache.page_refs, counts)


def test_by_default_every_slot_owns_its_pages():
    cache = dj.init_cache(CONFIG, RELEASED, 3, 150)
    check(cache)
    assert [len(held(cache, s)) for s in range(3)] == [3, 3, 3]
    assert int(cache.page_refs.max()) == 1


def test_pages_are_taken_as_lengths_grow_and_come_back():
    cache = dj.init_cache(CONFIG, RELEASED, 3, 256, num_pages=5)
    assert held(cache, 0) == []
    cache, fits = dj.reserve(cache, CONFIG, jnp.asarray([64, 65, 0]))
    assert bool(fits)
    check(cache)
    assert [len(held(cache, s)) for s in range(3)] == [1, 2, 0]
    again, fits = dj.reserve(cache, CONFIG, jnp.asarray([10, 100, 0]))
    assert bool(fits), "a slot keeps what it has"
    assert held(again, 1) == held(cache, 1)
    full, fits = dj.reserve(cache, CONFIG, jnp.asarray([64, 65, 200]))
    assert not bool(fits), "4 more pages were asked for, 2 are free"
    np.testing.assert_array_equal(full.block_table, cache.block_table)
    cache = dj.release(cache, jnp.asarray([1]))
    check(cache)
    cache, fits = dj.reserve(cache, CONFIG, jnp.asarray([0, 0, 200]))
    assert bool(fits)
    check(cache)
    _, fits = dj.reserve(cache, CONFIG, jnp.asarray([0, 0, 257]))
    assert not bool(fits), "longer than the block table"


def test_a_fork_shares_only_pages_that_cannot_change_any_more():
    cache = dj.init_cache(CONFIG, RELEASED, 2, 256, num_pages=8)
    cache, _ = dj.reserve(cache, CONFIG, jnp.asarray([200, 0]))
    for length, shared in ((128, 1), (136, 2), (135, 1), (5, 0)):
        lengths = jnp.asarray([length, 0])
        source = dataclasses.replace(cache, lengths=lengths, written=lengths)
        forked, fits = dj.fork(source, CONFIG, jnp.int32(0), jnp.int32(1))
        assert bool(fits)
        check(forked)
        assert len(set(held(forked, 0)) & set(held(forked, 1))) == shared
        assert forked.lengths.tolist() == [length, length]
    small = dj.init_cache(CONFIG, RELEASED, 2, 256, num_pages=4)
    small, _ = dj.reserve(small, CONFIG, jnp.asarray([256, 0]))
    small = dataclasses.replace(small, lengths=jnp.asarray([200, 0]), written=jnp.asarray([200, 0]))
    unchanged, fits = dj.fork(small, CONFIG, jnp.int32(0), jnp.int32(1))
    assert not bool(fits), "no page is free for the part that must be copied"
    np.testing.assert_array_equal(unchanged.block_table, small.block_table)


def test_pages_fit_every_ratio():
    text = dataclasses.replace(CONFIG.text_config, compress_ratios=(0, 3, 3, 5, 5, 5, 0, 0))
    config = dataclasses.replace(CONFIG, text_config=text)
    assert page_tokens(CONFIG) == 64
    assert page_tokens(config) == 75


@pytest.mark.parametrize(("slots", "length"), [(0, 10), (1, 0), (1, 1025)])
def test_sizes_that_make_no_sense_are_refused(slots, length):
    with pytest.raises(dj.DeepInferError, match=f"cache of {slots} slots of {length} tokens: expected"):
        dj.init_cache(CONFIG, RELEASED, slots, length)
