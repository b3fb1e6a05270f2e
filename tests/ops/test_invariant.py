"""The rules that batch invariance rests on, one by one: what the library and the compiler must give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deepinfer_jax.ops.invariant import ROW_TILES, alone, in_row_tiles, inverse_sqrt, sum_channels, sum_few, tile_size

ROWS = (1, 2, 5, 8, 9, 32, 33, 100, 256, 300)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def differing_rows(f, x):
    """Numbers of rows for which f of the first rows of x has other bits than the first rows of f(x)."""
    f = jax.jit(f)
    whole = np.asarray(f(x))
    return [n for n in ROWS if not np.array_equal(np.asarray(f(x[:n])), whole[:n])]


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "n"), [(256, 256), (1024, 24), (100, 8), (2304, 640)])
def test_products_in_row_tiles_do_not_depend_on_the_number_of_rows(k, n, dtype):
    x, w = jnp.asarray(normal(300, k), dtype), jnp.asarray(normal(n, k, seed=1), dtype)

    def product(rows):
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        return lax.dot_general(
            rows, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    assert differing_rows(lambda x: in_row_tiles(product, x), x) == []
    # The tile sizes among themselves, and where in a tile a row stands.
    results = [np.asarray(jax.jit(lambda x, t=t: in_row_tiles(product, x, t))(x)) for t in ROW_TILES]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: in_row_tiles(product, x))(x[::-1]))[::-1], results[0])
    np.testing.assert_allclose(results[0], np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, atol=2e-3)


@pytest.mark.optimized
def test_a_plain_product_does_depend_on_it():
    """The control: without tiles at least one shape must give other bits, or the test above shows nothing."""
    w = normal(256, 256, seed=1)
    assert differing_rows(lambda x: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), normal(300, 256))


@pytest.mark.optimized
@pytest.mark.parametrize("k", [8, 100, 1024, 8192])
def test_sums_do_not_depend_on_the_number_of_rows(k):
    x = normal(300, k)
    assert differing_rows(sum_channels, x) == []
    np.testing.assert_allclose(sum_channels(jnp.asarray(x)), x.astype(np.float64).sum(-1), atol=1e-4 * k**0.5)


def test_a_sum_of_few_goes_from_first_to_last():
    few = normal(300, 4, 6)
    np.testing.assert_array_equal(sum_few(jnp.asarray(few), 1), ((few[:, 0] + few[:, 1]) + few[:, 2]) + few[:, 3])


@pytest.mark.optimized
@pytest.mark.parametrize("width", [1, 4, 20])
@pytest.mark.parametrize("name", ["exp", "log", "cos", "sigmoid", "softplus", "silu", "inverse_sqrt"])
def test_functions_have_the_same_bits_wherever_a_value_stands(name, width):
    f = {
        "exp": jnp.exp, "log": lambda x: jnp.log(jnp.abs(x)), "cos": jnp.cos, "sigmoid": jax.nn.sigmoid,
        "softplus": jax.nn.softplus, "silu": jax.nn.silu, "inverse_sqrt": lambda x: inverse_sqrt(jnp.abs(x)),
    }[name]  # fmt: skip
    x = 3 * normal(300, width)
    assert differing_rows(lambda x: alone(f, x), x) == []
    # Cut out of a larger array, with other work beside it.
    wide = np.concatenate([x, x, x], axis=1)
    cut = jax.jit(lambda x: alone(f, x[:, width : 2 * width]) * 2)
    np.testing.assert_array_equal(cut(wide), 2 * np.asarray(jax.jit(lambda x: alone(f, x))(x)))


def test_the_tile_of_a_number_of_rows():
    sizes = (8, 32, 256)
    assert [tile_size(n, sizes) for n in (1, 8, 9, 31, 32, 255, 256, 5000)] == [8, 8, 8, 8, 32, 32, 256, 256]
