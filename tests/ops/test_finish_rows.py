"""finish_rows: one test body for every backend that is there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.formats import decode_rows, encode_rows, row_bytes
from deepinfer_jax.ops.finish_rows import finish_rows
from deepinfer_jax.ops.rows import RowLayout
from tests.ops.backends import custom_backends

FORMATS = ("fp8", "fp4_e4m3", "fp4_e8m0")


def arguments(rows, width, rope, dtype, fmt, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, width), np.float32) * np.exp(random.uniform(-3, 3, (rows, 1))).astype(np.float32)
    angle = random.uniform(-4, 4, (rows, rope // 2)).astype(np.float32)
    pool = random.integers(0, 256, (2 * rows + 3, row_bytes(fmt, width)), np.uint8)
    index = random.permutation(2 * rows + 3)[:rows].astype(np.int32)
    index[::3] = -1
    return {
        "x": jnp.asarray(x, dtype),
        "weight": jnp.asarray(random.uniform(0.5, 1.5, width), jnp.float32),
        "table": (jnp.cos(angle), jnp.sin(angle)),
        "layout": RowLayout(width, fmt, dtype),
        "eps": 1e-6,
        "index": jnp.asarray(index),
        "pool": jnp.asarray(pool),
    }


@pytest.mark.parametrize("backend", custom_backends("finish_rows"))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("rows", "width", "rope"), [(1, 512, 64), (37, 512, 64), (130, 128, 64), (7, 64, 16), (9, 32, 16)]
)
def test_rows_are_those_of_the_reference(backend, dtype, fmt, rows, width, rope):
    kwargs = arguments(rows, width, rope, dtype, fmt)
    expected, expected_pool = finish_rows(**kwargs)
    found, pool = finish_rows(**kwargs, backend=backend)
    # Another order of the norm's sum may move a value over the edge of a rounding, by one step.
    differs = np.asarray(found) != np.asarray(expected)
    assert differs.mean() < 1e-3
    a, b = (np.asarray(decode_rows(r, fmt, width, jnp.float32)) for r in (found, expected))
    scale = np.abs(b).reshape(rows, -1, 16).max(-1).repeat(16, -1)
    assert np.all(np.abs(a - b) <= scale * (0.0625 if fmt == "fp8" else 0.34))
    # Rows are written where they belong, and nowhere else.
    index = np.asarray(kwargs["index"])
    untouched = np.setdiff1d(np.arange(len(pool)), index[index >= 0])
    np.testing.assert_array_equal(np.asarray(pool)[untouched], np.asarray(kwargs["pool"])[untouched])
    np.testing.assert_array_equal(np.asarray(pool)[index[index >= 0]], np.asarray(found)[index >= 0])
    assert expected_pool.shape == pool.shape


@pytest.mark.parametrize("backend", custom_backends("finish_rows"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_is_exact(backend, fmt):
    """Values that the norm leaves as they are: every byte must be the encoder's."""
    random = np.random.default_rng(1)
    # Squares of +-1 sum to the width without any rounding, so the norm is 1 exactly, and weights make the values.
    x = random.choice(np.float32([-1, 1]), (200, 128))
    weight = (random.standard_normal(128) * np.exp2(random.integers(-20, 8, 128))).astype(np.float32)
    weight[::7] = np.float32(0.25) * random.integers(0, 28, len(weight[::7]))
    table = (jnp.ones((200, 8)), jnp.zeros((200, 8)))
    layout = RowLayout(128, fmt, jnp.float32)
    nowhere = jnp.full(200, -1, jnp.int32), jnp.zeros((0, row_bytes(fmt, 128)), jnp.uint8)
    found, _ = finish_rows(jnp.asarray(x), jnp.asarray(weight), table, layout, 0.0, *nowhere, backend=backend)
    np.testing.assert_array_equal(found, encode_rows(jnp.asarray(x * weight), fmt))


@pytest.mark.parametrize("backend", custom_backends("finish_rows"))
def test_a_row_does_not_depend_on_the_others(backend):
    kwargs = arguments(64, 512, 64, jnp.bfloat16, "fp8")
    whole, _ = finish_rows(**kwargs, backend=backend)
    for n in (1, 3, 33):
        part = kwargs | {
            "x": kwargs["x"][:n],
            "table": tuple(t[:n] for t in kwargs["table"]),
            "index": kwargs["index"][:n],
        }
        np.testing.assert_array_equal(finish_rows(**part, backend=backend)[0], np.asarray(whole)[:n])


@pytest.mark.parametrize("backend", custom_backends("finish_rows"))
def test_a_donated_pool_is_written_in_place(backend):
    kwargs = arguments(5, 512, 64, jnp.bfloat16, "fp8")
    pool = kwargs.pop("pool")
    rest = {name: kwargs.pop(name) for name in ("layout", "eps")}
    step = jax.jit(functools.partial(finish_rows, **rest, backend=backend), donate_argnames="pool")
    compiled = step.lower(**kwargs, pool=pool).compile()
    assert " copy(" not in (compiled.as_text() or "")
    address = pool.unsafe_buffer_pointer()
    _, written = step(**kwargs, pool=pool)
    assert written.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("backend", custom_backends("finish_rows"))
def test_what_a_kernel_cannot_do_is_said(backend):
    kwargs = arguments(3, 96, 16, jnp.float16, "fp8") | {"layout": RowLayout(96, None, jnp.float16)}
    with pytest.raises(NotImplementedError, match="rows are not packed") as error:
        finish_rows(**kwargs, backend=backend)
    assert "width: found 96" in str(error.value) and "dtype: found float16" in str(error.value)
