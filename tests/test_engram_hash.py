"""Check values: DeepSeek's released tables, and rows computed by the torch reference's `EngramHash`."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import engram_hash

PACKAGE = Path(engram_hash.__file__).parent
RELEASED = ((1, 14), 4, 8, 16_000_000)


def is_prime(n):
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def loads_jax(module):
    # The package's own __init__ loads jax for its public names, so an empty package stands in for it.
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('deepinfer_jax')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['deepinfer_jax'] = package\n"
        f"importlib.import_module({module!r})\n"
        "print('jax' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def scalar_rows(ids, primes, multipliers, pad, heads):
    """The rule with Python integers, one position, layer and column at a time."""
    out = []
    for position in range(len(ids)):
        layers = []
        for sizes, factors in zip(primes, multipliers, strict=True):
            tokens, cut = [], False
            for back in range(len(factors)):
                cut = cut or position < back or ids[position - back] < 0
                tokens.append(pad if cut else ids[position - back])
            rows, start = [], 0
            for column, size in enumerate(sizes):
                mixed = 0
                for back in range(column // heads + 2):
                    mixed ^= tokens[back] * factors[back]
                rows.append(mixed % size + start)
                start += size
            layers.append(rows)
        out.append(layers)
    return out


def test_the_released_tables_have_the_declared_rows():
    first, second = engram_hash.primes(*RELEASED)
    assert len(first) == len(second) == 24
    assert first[:3] == (16000057, 16000079, 16000081)
    assert second[:2] == (16000477, 16000487)
    assert second[-1] == 16000889
    assert (sum(first), sum(second)) == (384006168, 384016682)


def test_the_released_primes_are_all_primes_in_their_range_in_order():
    flat = [p for layer in engram_hash.primes(*RELEASED) for p in layer]
    assert flat == [n for n in range(16_000_000, flat[-1] + 1) if is_prime(n)]


def test_the_released_primes_take_less_than_a_second():
    engram_hash.primes.cache_clear()
    start = time.perf_counter()
    engram_hash.primes(*RELEASED)
    assert time.perf_counter() - start < 1


def test_the_tiny_tables_follow_the_same_rule():
    primes = engram_hash.primes((0, 1), 4, 2, 100)
    assert primes == ((101, 103, 107, 109, 113, 127), (131, 137, 139, 149, 151, 157))
    assert [sum(p) for p in primes] == [660, 864]


@given(st.integers(0, 300_000), st.integers(1, 4), st.integers(2, 5), st.integers(1, 9))
def test_primes_are_the_smallest_unused_ones_from_the_vocabulary_size_on(low, n_layers, ngram, heads):
    primes = engram_hash.primes(tuple(range(n_layers)), ngram, heads, low)
    assert [len(p) for p in primes] == [(ngram - 1) * heads] * n_layers
    flat = [p for layer in primes for p in layer]
    assert flat == [n for n in range(low, flat[-1] + 1) if is_prime(n)]


def test_the_largest_supported_vocabulary_size_has_primes_too():
    ((first, *_),) = engram_hash.primes((0,), 2, 8, 2**30)
    assert first == 1073741827


def test_no_layer_means_no_primes_and_no_multipliers():
    assert engram_hash.primes((), 4, 8, 100) == ()
    assert engram_hash.offsets(()) == ()
    assert engram_hash.multipliers((), 4, 100) == ()


def test_offsets_are_running_sums_of_each_layer():
    assert engram_hash.offsets(((5, 7, 11), (13, 17, 19))) == ((0, 5, 12), (0, 13, 30))
    primes = engram_hash.primes(*RELEASED)
    offsets = engram_hash.offsets(primes)
    assert [o[-1] + p[-1] for o, p in zip(offsets, primes, strict=True)] == [384006168, 384016682]


def test_the_released_multipliers():
    assert engram_hash.multipliers((1, 14), 4, 99092) == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


@given(st.integers(0, 100), st.integers(1, 200_000))
def test_multipliers_are_odd_and_their_products_fit_int64(layer, size):
    (row,) = engram_hash.multipliers((layer,), 4, size)
    assert all(m % 2 == 1 and m > 0 and m * (size - 1) < 2**63 for m in row)


def test_released_rows_equal_the_reference():
    primes, multipliers = engram_hash.primes(*RELEASED), engram_hash.multipliers((1, 14), 4, 99092)
    rows = engram_hash.addresses([5, 99091, 7, 1234], primes, multipliers, 2, 8)
    assert rows.shape == (4, 2, 24)
    assert rows[3][:, [0, 8, 23]].tolist() == [[6305544, 129550535, 377867968], [3237479, 137271049, 376016469]]
    assert rows[0][:, [0, 8, 23]].tolist() == [[5412672, 143494632, 372009279], [6939818, 131576092, 382274687]]


def test_tiny_rows_equal_the_reference_around_a_dead_position():
    primes, multipliers = engram_hash.primes((0, 1), 4, 2, 100), engram_hash.multipliers((0, 1), 4, 64)
    rows = engram_hash.addresses([5, 10, engram_hash.DEAD, 20, 25, 63], primes, multipliers, 1, 2)
    assert rows[:, 0].tolist() == [
        [14, 182, 269, 406, 445, 634],
        [19, 131, 241, 391, 488, 583],
        [38, 194, 220, 356, 469, 552],
        [34, 188, 249, 399, 509, 589],
        [84, 101, 236, 326, 468, 657],
        [31, 179, 295, 326, 453, 659],
    ]
    assert rows[5, 1].tolist() == [109, 149, 333, 523, 573, 730]


@given(st.lists(st.integers(-1, 63), max_size=12), st.integers(0, 63), st.integers(1, 3), st.integers(2, 4))
def test_rows_equal_the_rule_in_scalar_arithmetic(ids, pad, heads, ngram):
    primes, multipliers = engram_hash.primes((2, 7), ngram, heads, 50), engram_hash.multipliers((2, 7), ngram, 64)
    rows = engram_hash.addresses(np.array(ids, np.int64), primes, multipliers, pad, heads)
    assert rows.shape == (len(ids), 2, (ngram - 1) * heads)
    assert rows.tolist() == scalar_rows(ids, primes, multipliers, pad, heads)


def test_sequences_of_a_batch_do_not_see_each_other():
    primes, multipliers = engram_hash.primes(*RELEASED), engram_hash.multipliers((1, 14), 4, 99092)
    ids = np.random.default_rng(0).integers(0, 99092, (2, 3, 9))
    rows = engram_hash.addresses(ids, primes, multipliers, 2, 8)
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(rows[index], engram_hash.addresses(ids[index], primes, multipliers, 2, 8))


def test_a_row_depends_on_exactly_the_last_tokens():
    primes, multipliers = engram_hash.primes(*RELEASED), engram_hash.multipliers((1, 14), 4, 99092)
    ids = np.arange(100, 110)
    before = engram_hash.addresses(ids, primes, multipliers, 2, 8)
    ids[4] = 99
    after = engram_hash.addresses(ids, primes, multipliers, 2, 8)
    changed = (before != after).any(axis=1)  # position, column
    assert np.flatnonzero(changed[:, :8].any(axis=1)).tolist() == [4, 5]
    assert np.flatnonzero(changed[:, 8:16].any(axis=1)).tolist() == [4, 5, 6]
    assert np.flatnonzero(changed[:, 16:].any(axis=1)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "module", ["deepinfer_jax.engram_hash", "deepinfer_jax.images", "deepinfer_jax.text.token_map"]
)
def test_host_side_modules_do_not_load_jax(module):
    assert loads_jax(module) == "False"


def test_the_search_for_jax_sees_a_module_that_loads_it():
    assert loads_jax("deepinfer_jax.cache") == "True"
