"""The nano recipe's model: trained values are those that the engine computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache import init_cache
from deepinfer_jax.checkpoint.writer import quantize_params
from deepinfer_jax.model.step import Batch
from deepinfer_jax.model.v41 import draft, draft_context, forward
from deepinfer_jax.numerics import Numerics
from scripts.nano.config import nano_config
from scripts.nano.forward import drafts, next_token_loss, trunk
from scripts.nano.weights import as_released, initial_params, with_token_map

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 64,
    "q_lora_rank": 32, "o_lora_rank": 32, "n_routed_experts": 4, "sliding_window": 8, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, "index_topk": 4, "engram_vocab_size": 50, "dspark_n_routed_experts": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    config = nano_config(100, 3, **SMALL)
    params = as_released(initial_params(config, seed=1), config)
    token_map = jnp.asarray(np.random.default_rng(0).integers(0, 100, 128), jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 128, (2, 45)), jnp.int32)
    return config, params, token_map, tokens


def served(params, config, tokens, numerics):
    cache = init_cache(config, numerics, tokens.shape[0], 64)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = Batch(tokens, positions, jnp.arange(tokens.shape[0]))
    out, cache = jax.jit(forward, static_argnames=("config", "numerics"))(
        params, config, batch, cache, numerics=numerics
    )
    return out, draft_context(params, config, out.features, batch, cache, numerics=numerics)


@pytest.mark.parametrize("tag", ["fp32", "fp32_kv"])
def test_the_trained_form_computes_what_the_engine_computes(small, tag):
    """Caches packed there, unpacked here; tiles there, dense products here. Last-bit differences only."""
    config, params, token_map, tokens = small
    numerics = Numerics.named(tag)
    unpacked = Numerics(numerics.compute, numerics.kv_round_trip, numerics.linear_round_trip, packed_cache=False)
    dense = jax.jit(trunk, static_argnums=(1, 3))(with_token_map(params, token_map), config, tokens, unpacked)
    quantised = with_token_map(quantize_params(params | {"token_map": token_map}, config), token_map)
    out, _ = served(quantised, config, tokens, numerics)
    off = np.abs(np.asarray(dense.logits - out.logits)).max(-1)
    assert np.median(off) < 1e-5
    # A value on the edge of a bin or a tie of scores may move a position in rounded arithmetic.
    assert (off < 1e-4).mean() >= (1 if tag == "fp32" else 0.9)
    anchors = jnp.asarray([[0, 7, 39], [3, 20, 30]])
    logits, confidence, _ = jax.jit(drafts, static_argnums=(1, 5))(
        with_token_map(params, token_map), config, tokens, out.features, anchors, unpacked
    )
    # The engine's rings hold the window before the last position only.
    _, before = served(quantised, config, tokens[:, :39], numerics)
    one = draft(
        quantised, config, tokens[:1, 39], jnp.asarray([39]), jnp.asarray([0]), before, numerics=numerics,
        choose=lambda _, k: tokens[:1, 40 + k],
    )  # fmt: skip
    np.testing.assert_allclose(logits[2], one.logits[0], atol=1e-4)
    np.testing.assert_allclose(confidence[2], one.confidence[0], atol=1e-4)


def test_released_arithmetic_has_gradients_everywhere(small):
    config, params, token_map, tokens = small
    numerics = Numerics("float32", packed_cache=False)  # a CPU has no batched bfloat16 product with float32 sums

    @jax.jit
    def gradient(params):
        def loss(params):
            out = trunk(with_token_map(as_released(params, config), token_map), config, tokens, numerics)
            return next_token_loss(out.logits, tokens).mean() + sum(
                v for k, v in out.taps.items() if k.endswith("index_loss")
            )

        return jax.grad(loss)(params)

    zero = []
    for path, g in jax.tree_util.tree_flatten_with_path(gradient(params))[0]:
        assert np.isfinite(np.asarray(g)).all(), path
        name = jax.tree_util.keystr(path)
        if not np.asarray(g).any() and "mtp" not in name:
            zero.append(name)
    assert zero == []
