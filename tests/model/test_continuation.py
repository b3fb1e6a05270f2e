"""Continuation is exact: prefill, chunks, token by token, rollback, fork and a saved cache give one function."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.cache import ROLLBACK
from deepinfer_jax.cache_file import load_cache, save_cache
from deepinfer_jax.compare import read_golden

FP32 = dj.Numerics.named("fp32")
RELEASED = dj.Numerics.named("released")


@dataclasses.dataclass
class Runner:
    """A model and calls of any sizes: chunks are padded to a few widths, so that few programs are compiled."""

    config: dj.ModelConfig
    params: dict
    ids: np.ndarray
    numerics: dj.Numerics = FP32

    def __post_init__(self):
        self.forward = jax.jit(functools.partial(dj.forward, config=self.config, numerics=self.numerics))

    def empty(self) -> dj.CacheState:
        return dj.init_cache(self.config, self.numerics, 3, 128)

    def step(self, cache, start, stop, slots=(0, 1), rows=(0, 1), ids=None):
        """Logits [rows, stop - start, V] of tokens start..stop-1 and the new cache."""
        ids = self.ids if ids is None else ids
        n = stop - start
        width = next(w for w in (1, 5, 40) if w >= n)
        # Always two rows; one alone gets a row of padding for company.
        tokens, positions = np.zeros((2, width), np.int32), np.full((2, width), -1, np.int32)
        tokens[: len(rows), :n], positions[: len(rows), :n] = ids[list(rows), start:stop], np.arange(start, stop)
        slots = (*slots, *(s for s in range(2) if s not in slots))[:2]
        batch = dj.Batch(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(slots, jnp.int32))
        out, cache = self.forward(self.params, batch=batch, cache=cache)
        return np.asarray(out.logits)[: len(rows), :n], cache


@pytest.fixture(scope="module")
def runner(data_dir) -> Runner:
    config, params = dj.load(data_dir / "v41_tiny", numerics=FP32, expand="float32", progress=False)
    return Runner(config, params, read_golden(data_dir / "v41_tiny")["ids"])


@pytest.fixture(scope="module")
def whole(runner) -> np.ndarray:
    return runner.step(runner.empty(), 0, 37)[0]


def test_token_by_token_equals_one_prefill(runner, whole):
    cache, parts = runner.empty(), []
    for t in range(37):
        out, cache = runner.step(cache, t, t + 1)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    assert cache.lengths.tolist() == [37, 37, 0]


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks_equal_one_prefill(runner, whole, seed):
    rng = np.random.default_rng(seed)
    cache, parts, at = runner.empty(), [], 0
    while at < 37:
        n = min(int(rng.choice([1, 2, 3, 4, 5, 6, 11, 17])), 37 - at)
        out, cache = runner.step(cache, at, at + n)
        parts.append(out)
        at += n
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("dropped", range(1, ROLLBACK + 1))
def test_after_giving_up_tokens_the_next_ones_are_as_if_they_had_never_been(runner, whole, dropped):
    """Other tokens were there first: everything they left behind must be dead."""
    length = 20
    wrong = runner.ids.copy()
    wrong[:, length : length + dropped] = 5
    _, cache = runner.step(runner.empty(), 0, length)
    for t in range(length, length + dropped):
        _, cache = runner.step(cache, t, t + 1, ids=wrong)
    cache = dj.rollback(cache, jnp.asarray([dropped, dropped, 0]))
    parts = []
    for a, b in ((length, length + 1), (length + 1, length + 6), (length + 6, 37)):
        out, cache = runner.step(cache, a, b)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole[:, length:], atol=1e-5)


def test_rollback_refuses_what_the_rings_no_longer_hold(runner):
    _, cache = runner.step(runner.empty(), 0, 20)
    with pytest.raises(dj.DeepInferError, match=r"slot 1: holds 20 tokens .* asked to give up 9, at most 8"):
        dj.rollback(cache, jnp.asarray([8, 9, 0]))
    cache = dj.rollback(cache, jnp.asarray([5, 5, 0]))
    with pytest.raises(dj.DeepInferError, match=r"slot 0: holds 15 tokens .* asked to give up 4, at most 3"):
        dj.rollback(cache, jnp.asarray([4, 3, 0]))
    with pytest.raises(dj.DeepInferError, match="asked to give up -1"):
        dj.rollback(cache, jnp.asarray([-1, 0, 0]))


def test_forks_go_their_own_ways(runner, whole):
    """Slot 2 continues slot 0; then both differ, and neither sees the other's tokens."""
    other = runner.ids.copy()
    other[0, 25:] = other[1, 25:]
    want_other = runner.step(runner.empty(), 0, 37, ids=other)[0]
    _, cache = runner.step(runner.empty(), 0, 25)
    cache, fits = dj.fork(cache, runner.config, jnp.int32(0), jnp.int32(2))
    assert bool(fits)
    ids = np.stack([runner.ids[0], other[0]])
    a, cache = runner.step(cache, 25, 30, slots=(0, 2), ids=ids)
    b, cache = runner.step(cache, 30, 37, slots=(0, 2), ids=ids)
    got = np.concatenate([a, b], 1)
    np.testing.assert_allclose(got[0], whole[0, 25:], atol=1e-5)
    np.testing.assert_allclose(got[1], want_other[0, 25:], atol=1e-5)


def test_a_slot_can_be_used_again_and_rows_of_padding_touch_nothing(runner, whole):
    _, cache = runner.step(runner.empty(), 0, 37)
    cache = dj.release(cache, jnp.asarray([0]), keep_pages=True)
    before = jax.tree.map(np.asarray, cache)
    padding = dj.Batch(jnp.zeros((2, 5), jnp.int32), jnp.full((2, 5), -1), jnp.asarray([0, 1]))
    _, after = runner.forward(runner.params, batch=padding, cache=cache)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    # Row 1 of the text into slot 0, while slot 1 keeps its own.
    out, cache = runner.step(after, 0, 37, slots=(0,), rows=(1,))
    np.testing.assert_allclose(out[0], whole[1], atol=1e-5)
    assert cache.lengths.tolist() == [37, 37, 0]


def test_rows_of_a_batch_may_stand_at_different_lengths(runner, whole):
    _, cache = runner.step(runner.empty(), 0, 12, slots=(0,), rows=(0,))
    _, cache = runner.step(cache, 0, 7, slots=(1,), rows=(1,))
    tokens, positions = np.zeros((2, 5), np.int32), np.full((2, 5), -1, np.int32)
    tokens[0, :5], positions[0, :5] = runner.ids[0, 12:17], np.arange(12, 17)
    tokens[1, :2], positions[1, :2] = runner.ids[1, 7:9], np.arange(7, 9)
    batch = dj.Batch(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray([0, 1]))
    out, cache = runner.forward(runner.params, batch=batch, cache=cache)
    np.testing.assert_allclose(out.logits[0], whole[0, 12:17], atol=1e-5)
    np.testing.assert_allclose(out.logits[1, :2], whole[1, 7:9], atol=1e-5)
    assert cache.lengths.tolist() == [17, 9, 0]


@pytest.mark.parametrize("numerics", [FP32, RELEASED], ids=["fp32", "released"])
def test_a_saved_cache_goes_on_bit_for_bit(runner, tmp_path, numerics):
    run = dataclasses.replace(runner, numerics=numerics)
    _, cache = run.step(run.empty(), 0, 21)
    save_cache(tmp_path / "cache.safetensors", cache, run.config, numerics)
    loaded = load_cache(tmp_path / "cache.safetensors", run.config, numerics)
    assert jax.tree.structure(cache) == jax.tree.structure(loaded)
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    want, got = run.step(cache, 21, 26)[0], run.step(loaded, 21, 26)[0]
    assert want.tobytes() == got.tobytes()


def test_a_cache_file_that_does_not_fit_is_refused(runner, tmp_path):
    path = tmp_path / "cache.safetensors"
    save_cache(path, runner.empty(), runner.config, FP32)
    with pytest.raises(dj.DeepInferError, match="another configuration or other numerics"):
        load_cache(path, runner.config, RELEASED)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(dj.DeepInferError, match="truncated"):
        load_cache(path, runner.config, FP32)
    with pytest.raises(dj.DeepInferError, match="there is no such file"):
        load_cache(tmp_path / "none", runner.config, FP32)


def test_packed_caches_have_the_released_layout():
    config = dj.ModelConfig.named("deepseek_v41_flash")
    cache = jax.eval_shape(lambda: dj.init_cache(config, RELEASED, 2, 1024))
    sources = [c for c in cache.layers if c.compressed is not None]
    assert [c.compressed.shape[1:] for c in sources] == [(32, 288)] * 3 + [(64, 288)]
    assert [c.index_keys.shape[1:] for c in sources] == [(32, 68)] * 3 + [(64, 68)]
    assert {c.window.shape for c in cache.layers} == {(2, 136, 528)}
    assert [r.shape for r in cache.draft] == [(2, 136, 528)] * 3
    page = sum(np.prod(c.compressed.shape[1:]) + np.prod(c.index_keys.shape[1:]) for c in sources)
    assert page / 64 == 890, "the published bytes per token"
