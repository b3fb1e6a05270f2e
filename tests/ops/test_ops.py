"""Each op against a plain restatement in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import engram_hash
from deepinfer_jax.config import ModelConfig, engram_primes
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops import hyper_connection, moe
from deepinfer_jax.ops.engram import addresses
from deepinfer_jax.ops.linear import grouped_output_linear, quantized_linear
from deepinfer_jax.ops.norm_rope import rope, rope_frequencies, rope_table
from deepinfer_jax.ops.rows import RowLayout, Rows, write_rows
from deepinfer_jax.ops.select_entries import select_entries
from deepinfer_jax.ops.sparse_attention import sparse_attention
from deepinfer_jax.ops.tiles import map_tiles

pytestmark = pytest.mark.optimized

FP32 = Numerics.named("fp32")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def test_released_yarn_frequencies_have_the_published_values():
    f = rope_frequencies(ModelConfig.named("deepseek_v41_flash").text_config, "yarn")
    want = {0: 1, 14: 5.28686e-3, 15: 3.63554e-3, 16: 2.26562e-3, 24: 1.953125e-5, 25: 5.37231e-6, 31: 5.68053e-7}
    np.testing.assert_allclose(f[list(want)], list(want.values()), rtol=3e-6)


def test_rope_turns_pairs_as_complex_numbers_and_back():
    text = ModelConfig.named("tiny").text_config
    positions = jnp.asarray([[0, 1, 37, 100_000]])
    x = normal(1, 4, 2, 64)
    table = rope_table(positions, text, "yarn")
    got = np.asarray(rope(jnp.asarray(x), table))
    z = x[..., -16:].reshape(1, 4, 2, 8, 2).astype(np.float64)
    # The angle is a float32 product; the rest of the reference is float64.
    angle = (np.float32([[0], [1], [37], [100_000]]) * rope_frequencies(text, "yarn")).astype(np.float64)
    turned = (z[..., 0] + 1j * z[..., 1]) * np.exp(1j * angle)[None, :, None, :]
    np.testing.assert_allclose(got[..., -16:].reshape(z.shape)[..., 0], turned.real, atol=2e-6)
    np.testing.assert_allclose(got[..., -16:].reshape(z.shape)[..., 1], turned.imag, atol=2e-6)
    np.testing.assert_array_equal(got[..., :-16], x[..., :-16])
    np.testing.assert_allclose(rope(jnp.asarray(got), table, inverse=True), x, atol=2e-6)


@pytest.mark.parametrize("name", ["tiny", "deepseek_v41_flash"])
def test_device_addresses_equal_the_64_bit_hash(name):
    text = ModelConfig.named(name).text_config
    rng = np.random.default_rng(3)
    ids = rng.integers(0, text.engram_compressed_vocab_size, (3, 200))
    ids[0, :5], ids[1, 50] = text.engram_compressed_vocab_size - 1, -1
    primes = engram_primes(text)
    multipliers = engram_hash.multipliers(
        text.engram_layer_ids, text.engram_max_ngram_size, text.engram_compressed_vocab_size
    )
    want = engram_hash.addresses(ids, primes, multipliers, 2, text.engram_n_heads)
    blocked, lookback = np.zeros(ids.shape, bool), []
    for k in range(text.engram_max_ngram_size):
        source = np.pad(ids, [(0, 0), (k, 0)], constant_values=-1)[:, : ids.shape[1]]
        blocked |= source < 0
        lookback.append(np.where(blocked, 2, source))
    got = addresses(jnp.asarray(np.stack(lookback, -1), jnp.int32), primes, multipliers, text.engram_n_heads)
    np.testing.assert_array_equal(np.stack(got, axis=2), want)


def test_addresses_are_right_at_the_largest_product():
    # Compressed id and multiplier as large as they may be: the product just fits 63 bits.
    size = 129_280
    bound = (2**63 - 1) // size // 2
    multiplier, c = 2 * (bound - 1) + 1, size - 1
    got = addresses(jnp.asarray([[c, c]], jnp.int32), ((16_000_057,),), ((multiplier, multiplier - 2),), 1)
    assert int(got[0][0, 0]) == ((c * multiplier) ^ (c * (multiplier - 2))) % 16_000_057


def test_attention_is_one_softmax_over_both_lists_with_a_sink():
    window, compressed = normal(50, 64), normal(70, 64, seed=1)
    q, sink = normal(40, 4, 64, seed=2), normal(4, seed=3)
    rng = np.random.default_rng(0)
    wi = np.stack([rng.permutation(50)[:8] for _ in range(40)])
    ci = np.stack([rng.permutation(70)[:5] for _ in range(40)])
    wi[rng.random(wi.shape) < 0.3] = -1
    ci[rng.random(ci.shape) < 0.3] = -1
    wi[7], ci[7] = -1, -1
    layout = RowLayout(64, None, jnp.float32)
    got = sparse_attention(
        jnp.asarray(q), Rows(jnp.asarray(window), layout), jnp.asarray(wi), Rows(jnp.asarray(compressed), layout),
        jnp.asarray(ci), jnp.asarray(sink),
    )  # fmt: skip
    for t in range(40):
        rows = np.concatenate([window[wi[t][wi[t] >= 0]], compressed[ci[t][ci[t] >= 0]]]).astype(np.float64)
        e = np.exp(q[t] @ rows.T / 8)
        want = (e / (e.sum(-1, keepdims=True) + np.exp(sink)[:, None])) @ rows
        np.testing.assert_allclose(got[t], want, atol=2e-6)
    assert (np.asarray(got[7]) == 0).all(), "a query without any row gives 0"


def test_selection_keeps_the_best_visible_entries_inside_the_candidate_pool():
    b, s, h, d, n, top_k, size, pool = 2, 20, 4, 32, 23, 5, 4, 3
    q, keys, weights = normal(b, s, h, d), normal(b, n, d, seed=1), normal(b, s, h, seed=2)
    visible = np.random.default_rng(0).integers(0, n + 1, (b, s)).astype(np.int32)
    arrays = [jnp.asarray(a) for a in (q, keys, weights, visible)]
    first = select_entries(*arrays, top_k=top_k, block_size=size, publish_blocks=pool)
    score = np.einsum("bsht,bsh->bst", np.maximum(np.einsum("bshd,btd->bsht", q, keys), 0), weights)
    second = select_entries(*arrays, top_k=top_k, block_size=size, limit_blocks=first.blocks)
    for i in range(b):
        for j in range(s):
            seen = score[i, j, : visible[i, j]]
            best = np.sort(np.argsort(-seen, kind="stable")[:top_k])
            entries = np.asarray(first.entries[i, j])
            np.testing.assert_array_equal(entries[entries >= 0], best)
            blocks = {k: seen[k * size : (k + 1) * size].max() for k in range(-(-len(seen) // size))}
            if blocks:
                blocks[(len(seen) - 1) // size] = np.inf
            chosen = set(sorted(blocks, key=lambda k: -blocks[k])[:pool])
            got = np.asarray(first.blocks[i, j])
            assert set(got[got >= 0].tolist()) == chosen
            inside = np.where([k // size in chosen for k in range(len(seen))], seen, -np.inf)
            best = np.argsort(-inside, kind="stable")[:top_k]
            entries = np.asarray(second.entries[i, j])
            np.testing.assert_array_equal(entries[entries >= 0], np.sort(best[inside[best] > -np.inf]))


@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_routed_experts_equal_a_loop_over_tokens(tokens):
    experts, k, d, i = 6, 3, 64, 32
    x, w13, w2 = normal(tokens, d), normal(experts, 2 * i, d, seed=1) / 8, normal(experts, d, i, seed=2) / 6
    routing = moe.gate(
        jnp.asarray(x),
        jnp.asarray(normal(experts, d, seed=4)),
        jnp.asarray(normal(1, experts, seed=5)),
        top_k=k,
        scale=1.5,
    )
    valid = np.arange(tokens) % 7 != 3
    got = moe.routed_experts(
        jnp.asarray(x), routing, jnp.asarray(valid), jnp.asarray(w13), jnp.asarray(w2), w13.shape[0], 1.0, FP32
    )
    for t in range(tokens):
        want = np.zeros(d)
        for e, weight in zip(np.asarray(routing.experts[t]), np.asarray(routing.weights[t]), strict=True):
            g, u = np.split(w13[e] @ x[t], 2)
            g, u = np.minimum(g, 1), np.clip(u, -1, 1)
            want += w2[e] @ (g / (1 + np.exp(-g)) * u * weight)
        np.testing.assert_allclose(got[t], want if valid[t] else 0 * want, atol=3e-6)


def test_the_gate_chooses_by_biased_score_and_weighs_by_plain_score():
    x, w, bias = normal(9, 64), normal(7, 64, seed=1), 3 * normal(9, 7, seed=2)
    got = moe.gate(jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias), top_k=3, scale=2.5)
    score = np.sqrt(np.log1p(np.exp(x.astype(np.float64) @ w.T)))
    chosen = np.sort(np.argsort(-(score + bias), axis=-1)[:, :3], axis=-1)
    np.testing.assert_array_equal(got.experts, chosen)
    picked = np.take_along_axis(score, chosen, -1)
    np.testing.assert_allclose(got.weights, 2.5 * picked / picked.sum(-1, keepdims=True), rtol=2e-6)


def test_sinkhorn_is_doubly_stochastic_and_ends_on_columns():
    k = np.asarray(hyper_connection.sinkhorn(jnp.asarray(normal(50, 4, 4)), 1e-6, 20))
    np.testing.assert_allclose(k.sum(-2), 1, atol=3e-6)
    np.testing.assert_allclose(k.sum(-1), 1, atol=1e-3)


def test_hyper_connections_mix_streams_by_the_formulas():
    c, d = 4, 32
    h, fn, base, scale = normal(1, 3, c, d), normal(24, c * d, seed=1) / 11, normal(24, seed=2), normal(3, seed=3)
    got = hyper_connection.mixes(
        *(jnp.asarray(a) for a in (h, fn, base, scale)), norm_eps=1e-20, eps=1e-6, iterations=20
    )
    x = h.reshape(1, 3, c * d).astype(np.float64)
    m = (x @ fn.T) / np.sqrt((x**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(got.pre, 1 / (1 + np.exp(-(m[..., :4] * scale[0] + base[:4]))) + 1e-6, rtol=1e-5)
    np.testing.assert_allclose(got.post, 2 / (1 + np.exp(-(m[..., 4:8] * scale[1] + base[4:8]))), rtol=1e-5)
    y = normal(1, 3, d, seed=9)
    comb = np.asarray(got.comb, np.float64)
    want = np.asarray(got.post)[..., None] * y[:, :, None] + np.einsum("bsjk,bsjd->bskd", comb, h)
    np.testing.assert_allclose(hyper_connection.expand(jnp.asarray(y), jnp.asarray(h), got), want, atol=2e-6)
    want = np.einsum("bsc,bscd->bsd", np.asarray(got.pre), h)
    np.testing.assert_allclose(hyper_connection.collapse(jnp.asarray(h), got.pre), want, atol=2e-6)


def test_the_output_projection_is_block_diagonal():
    x, w = normal(2, 3, 4 * 32), normal(4 * 8, 32, seed=1)
    want = np.concatenate([x[..., g * 32 : g * 32 + 32] @ w[g * 8 : g * 8 + 8].T for g in range(4)], -1)
    np.testing.assert_allclose(grouped_output_linear(jnp.asarray(x), jnp.asarray(w), 4, FP32), want, atol=1e-5)


def test_the_round_trip_of_linear_inputs_is_a_switch():
    x, w = jnp.asarray(normal(3, 64)), jnp.asarray(normal(5, 64, seed=1))
    plain = quantized_linear(x, w, FP32)
    np.testing.assert_allclose(plain, np.asarray(x) @ np.asarray(w).T, atol=1e-5)
    assert (np.asarray(quantized_linear(x, w, Numerics.named("fp32_all"))) != np.asarray(plain)).any()


def test_rows_are_written_where_asked_and_dropped_at_minus_one():
    pool = jnp.zeros((2, 3, 4))
    out = np.asarray(write_rows(pool, jnp.asarray([4, -1, 0]), jnp.asarray(normal(3, 4))))
    np.testing.assert_array_equal(out[1, 1], normal(3, 4)[0])
    np.testing.assert_array_equal(out[0, 0], normal(3, 4)[2])
    assert (out != 0).any(-1).sum() == 2


@pytest.mark.parametrize("n", [1, 7, 8, 9, 24])
def test_tiles_cover_every_element_once(n):
    x = {"a": jnp.asarray(normal(n, 3)), "b": None}
    got = map_tiles(lambda t: t["a"] * 2, x, 8)
    np.testing.assert_array_equal(got, np.asarray(x["a"]) * 2)
    assert jax.tree.structure(map_tiles(lambda t: t, x, 8)) == jax.tree.structure(x)
