"""Custom calls in compiled programs: nothing is copied or gathered, and every wrong argument is named."""

import functools
import importlib
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.errors import InputError
from deepinfer_jax.formats import quantize_weight, row_bytes
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.ops import custom_call as calls
from deepinfer_jax.ops.finish_rows import finish_rows
from deepinfer_jax.ops.packed_linear import packed_linear
from deepinfer_jax.ops.rows import RowLayout

needs_module = pytest.mark.skipif(calls.unavailable("cpu") is not None, reason=f"cpu: {calls.unavailable('cpu')}")
LAYOUT = RowLayout(64, "fp8", jnp.float32)
BYTES = row_bytes("fp8", 64)


def rows(n, seed=0):
    random = np.random.default_rng(seed)
    table = (jnp.ones((n, 8)), jnp.zeros((n, 8)))
    return jnp.asarray(random.standard_normal((n, 64), np.float32)), jnp.ones(64), table, LAYOUT, 1e-6


def write(pool, index, n=4):
    return finish_rows(*rows(n), index, pool, backend="cpu")[1]


def copies(compiled, shape):
    """Copies of an array of this shape in a compiled program."""
    text = f"u8[{','.join(map(str, shape))}]"
    return re.findall(rf"= {re.escape(text)}\S* (?:copy|dynamic-update-slice)\(", compiled.as_text() or "")


@needs_module
def test_a_loop_over_layers_and_steps_writes_one_pool_in_place():
    index = jnp.arange(4, dtype=jnp.int32)

    def steps(pool):
        def layer(pool, i):
            return write(pool, index + 4 * i), None

        return jax.lax.fori_loop(0, 3, lambda _, p: jax.lax.scan(layer, p, jnp.arange(5, dtype=jnp.int32))[0], pool)

    pool = jnp.zeros((64, BYTES), jnp.uint8)
    step = jax.jit(steps, donate_argnums=0)
    assert copies(step.lower(pool).compile(), pool.shape) == []
    address = pool.unsafe_buffer_pointer()
    written = step(pool)
    assert written.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(written[:4], written[16:20])
    assert np.any(written[:20]) and not np.any(written[20:])


@needs_module
def test_inside_shard_map_nothing_is_gathered_or_copied():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def step(pool, index):
        return write(pool, index, n=2)

    each = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)
    pool = jax.device_put(jnp.zeros((32, BYTES), jnp.uint8), split)
    index = jax.device_put(jnp.asarray([0, 3, -1, 1, 7, 2, 5, -1], jnp.int32), split)
    whole = jax.jit(each, donate_argnums=0)
    compiled = whole.lower(pool, index).compile()
    assert "all-gather" not in (compiled.as_text() or "") and copies(compiled, (8, BYTES)) == []
    before = [s.data.unsafe_buffer_pointer() for s in pool.addressable_shards]
    written = whole(pool, index)
    assert [s.data.unsafe_buffer_pointer() for s in written.addressable_shards] == before
    used = np.flatnonzero(np.asarray(written).any(axis=1))
    np.testing.assert_array_equal(used, [0, 3, 9, 18, 23, 29])


@needs_module
def test_a_pool_that_is_still_needed_is_left_alone():
    pool, index = jnp.zeros((8, BYTES), jnp.uint8), jnp.arange(4, dtype=jnp.int32)
    written = jax.jit(write)(pool, index)
    assert np.any(written) and not np.any(pool)


@needs_module
def test_a_handler_names_every_wrong_argument():
    shapes = [jax.ShapeDtypeStruct((4, BYTES), jnp.uint8), jax.ShapeDtypeStruct((9, BYTES), jnp.uint8)]
    x, weight, (cos, sin), *_ = rows(4)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(
            calls.custom_call(
                "finish_rows", "cpu", shapes, x, weight[:32], cos[:3], sin, jnp.zeros(5, jnp.int32),
                jnp.zeros((9, BYTES), jnp.uint8), eps=1e-6, format=0,
            )
        )  # fmt: skip
    text = str(error.value)
    assert "weight: found shape [32], expected [64]" in text
    assert "cos: found shape [3, 8], expected [4, any]" in text and "index: found shape [5], expected [4]" in text


@needs_module
def test_a_pool_without_alias_is_refused():
    shapes = [jax.ShapeDtypeStruct((4, BYTES), jnp.uint8), jax.ShapeDtypeStruct((9, BYTES), jnp.uint8)]
    x, weight, table, *_ = rows(4)
    pool, index = jnp.zeros((9, BYTES), jnp.uint8), jnp.zeros(4, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected input and result aliased"):
        jax.block_until_ready(
            calls.custom_call("finish_rows", "cpu", shapes, x, weight, *table, index, pool, eps=1e-6, format=0)
        )


@needs_module
def test_many_calls_at_once_share_the_threads():
    """More programs at once than there are threads, each of which waits for parts that others may hold."""
    random = np.random.default_rng(0)
    w = quantize_weight(jnp.asarray(random.standard_normal((512, 256), np.float32)), "fp4")
    step = jax.jit(functools.partial(packed_linear, backend="cpu"))
    inputs = [jnp.asarray(random.standard_normal((16, 256), np.float32)) for _ in range(24)]
    alone = [np.asarray(step(x, w)) for x in inputs]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda x: np.asarray(step(x, w)), inputs * 3))
    for i, found in enumerate(together):
        np.testing.assert_array_equal(found, alone[i % 24])


@pytest.fixture
def fresh():
    """Forgets what was found out about the module, before and after."""
    for cached in (calls._module, calls._built):
        cached.cache_clear()
    yield
    for cached in (calls._module, calls._built):
        cached.cache_clear()


def test_without_the_module_a_named_backend_is_an_error(fresh, monkeypatch):
    def refuse(name, *args):
        raise ImportError("no such module")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert "the compiled module is missing" in (calls.unavailable("cpu", "finish_rows") or "")
    assert calls.unavailable("reference") is None and calls.cuda_build() == {}
    with pytest.raises(NotImplementedError, match=r"finish_rows: backend 'cpu' cannot be used: the compiled module"):
        write(jnp.zeros((8, BYTES), jnp.uint8), jnp.arange(4, dtype=jnp.int32))


def test_without_a_gpu_cuda_is_an_error_and_says_why():
    if any(d.platform in ("gpu", "cuda") for d in jax.devices()):
        pytest.skip("there is a GPU")
    why = calls.unavailable("cuda", "finish_rows") or ""
    assert "no CUDA kernels" in why or "JAX has no GPU" in why or "module is missing" in why
    with pytest.raises(NotImplementedError, match="backend 'cuda' cannot be used"):
        finish_rows(*rows(4), jnp.arange(4), jnp.zeros((8, BYTES), jnp.uint8), backend="cuda")


def test_kernels_are_named_and_print_as_a_table():
    assert Kernels.named("reference") == Kernels()
    assert Kernels.named("cpu") == Kernels("cpu", "cpu", "cpu", "cpu")
    assert Kernels.named("cuda") == Kernels("cuda", "cuda", "cuda", "reference")
    assert str(Kernels(linear="cpu")).splitlines()[::3] == ["finish_rows  reference", "linear       cpu"]
    with pytest.raises(InputError, match="found 'gpu', expected one of reference, cpu, cuda"):
        Kernels.named("gpu")
