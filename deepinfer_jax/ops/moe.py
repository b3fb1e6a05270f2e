"""Mixture of experts: the gate, and experts over tiles of rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.formats import GROUP, QuantizedTensor, decode_rows, fp8_round_trip, row_bytes
from deepinfer_jax.kernels import Backend
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.custom_call import check, custom_call
from deepinfer_jax.ops.exchange import LOCAL, Exchange
from deepinfer_jax.ops.invariant import alone, fence, sum_few
from deepinfer_jax.ops.linear import linear, quantized_linear
from deepinfer_jax.ops.packed_linear import grouped_packed_linear


class Routing(NamedTuple):
    """Chosen experts of each token, ascending by expert id so that sums have one order.

    Attributes:
        experts: int32[T, k].
        weights: float32[T, k].
    """

    experts: jax.Array
    weights: jax.Array


def gate(
    x_TD: jax.Array,
    w_ED: jax.Array,
    bias_TE: jax.Array,
    *,
    top_k: int,
    scale: float,
    invariant: bool = False,
    backend: Backend = "reference",
) -> Routing:
    """`choose_experts` of the logits x . w in float32."""
    logit = linear(x_TD, w_ED, jnp.float32, invariant)
    return choose_experts(logit, bias_TE, top_k=top_k, scale=scale, invariant=invariant, backend=backend)


def choose_experts(
    logit_TE: jax.Array,
    bias_TE: jax.Array,
    *,
    top_k: int,
    scale: float,
    invariant: bool = False,
    backend: Backend = "reference",
) -> Routing:
    """score = sqrt(softplus(logit)); the k best of score + bias, weighted by their normalised scores.

    Args:
        logit_TE: float32.
        bias_TE: float32 added for the choice only ([1, E], or one row per token).
        scale: `routed_scaling_factor`.
        backend: Custom calls take at most 512 experts and 32 choices. Their scores may differ in the last bits.
    """
    if backend != "reference":
        tokens, experts = logit_TE.shape
        check(
            "gate",
            experts=None if experts <= 512 else f"found {experts}, expected at most 512",
            top_k=None if 1 <= top_k <= min(32, experts) else f"found {top_k}, expected 1 to {min(32, experts)}",
        )
        chosen = [jax.ShapeDtypeStruct((tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32)]
        return Routing(*custom_call("gate", backend, chosen, logit_TE, bias_TE, scale=float(scale)))
    logit = logit_TE
    score = jnp.sqrt(alone(jax.nn.softplus, logit) if invariant else jax.nn.softplus(logit))
    experts = jnp.sort(lax.top_k(score + bias_TE, top_k)[1], axis=-1)
    weights = jnp.take_along_axis(score, experts, axis=-1)
    if top_k > 1:
        total = sum_few(weights, -1)[..., None] if invariant else jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total + 1e-20)
    weights = weights * scale
    return Routing(experts.astype(jnp.int32), fence(weights) if invariant else weights)


def swiglu(gate_up: jax.Array, limit: float, invariant: bool = False) -> jax.Array:
    """silu(min(g, limit)) * clip(u, +-limit) in float32 of [..., 2 I] = (g, u); limit 0 is none."""
    g, u = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    if limit > 0:
        g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    return (alone(jax.nn.silu, g) if invariant else jax.nn.silu(g)) * u


def expert_activation(gate_up: jax.Array, weight: jax.Array | None, limit: float, numerics: Numerics) -> jax.Array:
    """The input of an expert's second linear: `swiglu` of [..., 2 I], times a weight [...] (None: 1), in its dtype.

    With a custom call the result has been through FP8 already, as the linear would do it; twice is as once.
    """
    backend = numerics.kernels.swiglu
    if backend == "reference":
        y = swiglu(gate_up, limit, numerics.batch_invariant)
        return (y if weight is None else y * weight[..., None]).astype(gate_up.dtype)
    width = gate_up.shape[-1] // 2
    check(
        "swiglu",
        numerics=None if numerics.linear_round_trip else "inputs of linears are not rounded to FP8; use the reference",
        width=None if width % GROUP == 0 else f"found {width}, expected a multiple of {GROUP}",
    )
    lead = gate_up.shape[:-1]
    rows = gate_up.reshape(-1, 2 * width)
    weights = jnp.ones(rows.shape[0], jnp.float32) if weight is None else weight.reshape(-1)
    packed = jax.ShapeDtypeStruct((rows.shape[0], row_bytes("fp8", width)), jnp.uint8)
    (packed,) = custom_call("swiglu", backend, [packed], rows, weights, limit=float(limit))
    return decode_rows(packed, "fp8", width, gate_up.dtype).reshape(*lead, width)


def mlp(
    x: jax.Array, w13: jax.Array | QuantizedTensor, w2: jax.Array | QuantizedTensor, limit: float, numerics: Numerics
) -> jax.Array:
    """One expert without routing weight: [..., D] -> [..., D]."""
    y = expert_activation(quantized_linear(x, w13, numerics), None, limit, numerics)
    return quantized_linear(y, w2, numerics)


def routed_experts(
    x_TD: jax.Array,
    routing: Routing,
    valid_T: jax.Array,
    w13: jax.Array | QuantizedTensor,
    w2: jax.Array | QuantizedTensor,
    num_experts: int,
    limit: float,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
) -> jax.Array:
    """float32[T, D]: the routed experts' outputs, summed in the order of expert ids.

    Where devices share the experts, rows go to all of them, every device runs its own experts, and the outputs come
    back one by one, so that the sum has the same order on any number of devices.

    Args:
        valid_T: Rows that count; the others give 0.
        w13: [E, 2 I, D], gate rows first; w2: [E, D, I]. E of `num_experts` where `exchange` splits them.
    """
    held = (w13.record if isinstance(w13, QuantizedTensor) else w13).shape[0]
    pair_expert = jnp.where(valid_T[:, None], routing.experts, num_experts)
    if not exchange.is_split(held, num_experts):
        outputs = _expert_outputs(x_TD, pair_expert, routing.weights, w13, w2, limit, numerics)
    else:
        with jax.named_scope("dispatch"):
            every_x, every_expert, every_weight = map(exchange.gather, (x_TD, pair_expert, routing.weights))
        local = every_expert - exchange.first(held, num_experts)
        local = jnp.where((local >= 0) & (local < held), local, held)
        outputs = _expert_outputs(every_x, local, every_weight, w13, w2, limit, numerics)
        with jax.named_scope("combine"):
            outputs = exchange.reduce(outputs)
    total = jnp.zeros(x_TD.shape, jnp.float32)
    for j in range(outputs.shape[1]):
        total = total + outputs[:, j].astype(jnp.float32)
    return total


def _expert_outputs(
    x_TD: jax.Array,
    pair_expert_Tk: jax.Array,
    weights_Tk: jax.Array,
    w13: jax.Array | QuantizedTensor,
    w2: jax.Array | QuantizedTensor,
    limit: float,
    numerics: Numerics,
) -> jax.Array:
    """[T, k, D]: the weighted output of each chosen expert; 0 where the expert id is E (none).

    Rows are sorted by expert into tiles of one expert each, so that the arithmetic of a row does not depend on
    how many others chose its expert, no row is dropped, and an expert without rows costs nothing.
    """
    tokens, k = pair_expert_Tk.shape
    num_experts = (w13.record if isinstance(w13, QuantizedTensor) else w13).shape[0]
    tiles = _tile_rows(pair_expert_Tk.reshape(-1), num_experts, 8 if tokens <= 64 else 32)
    pair_weight = weights_Tk.reshape(-1)
    if numerics.kernels.linear != "reference":
        out = _packed_tiles(x_TD, tiles, pair_weight, k, w13, w2, limit, numerics)
        return _of_pairs(out, tiles, tokens)

    def one_tile(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, pair = args
        x = x_TD[jnp.maximum(pair, 0) // k]

        def run() -> jax.Array:
            weight = pair_weight[jnp.maximum(pair, 0)]
            y = expert_activation(quantized_linear(x, w13[expert], numerics), weight, limit, numerics)
            return quantized_linear(y, w2[expert], numerics)

        return lax.cond(pair[0] >= 0, run, lambda: jnp.zeros_like(x))

    return _of_pairs(lax.map(one_tile, (tiles.expert, tiles.pair)), tiles, tokens)


def _packed_tiles(
    x_TD: jax.Array,
    tiles: _Tiles,
    pair_weight: jax.Array,
    k: int,
    w13: jax.Array | QuantizedTensor,
    w2: jax.Array | QuantizedTensor,
    limit: float,
    numerics: Numerics,
) -> jax.Array:
    """[tiles, rows, D] by custom calls, which take all tiles at once and skip what is not used."""
    pair = jnp.maximum(tiles.pair, 0)
    used = jnp.sum(tiles.pair >= 0, axis=1, dtype=jnp.int32)
    matrix = jnp.where(used > 0, tiles.expert, -1)

    def product(x: jax.Array, w: jax.Array | QuantizedTensor) -> jax.Array:
        x = fp8_round_trip(x) if numerics.linear_round_trip else x
        return grouped_packed_linear(x, w, matrix, used, numerics.kernels.linear).astype(x_TD.dtype)

    return product(expert_activation(product(x_TD[pair // k], w13), pair_weight[pair], limit, numerics), w2)


def _of_pairs(out: jax.Array, tiles: _Tiles, tokens: int) -> jax.Array:
    """[tiles, rows, D] -> [T, k, D]: the row of each pair, 0 for pairs without expert."""
    out = out.reshape(-1, out.shape[-1])
    rows = jnp.where(tiles.row_of_pair >= 0, tiles.row_of_pair, 0)
    return jnp.where((tiles.row_of_pair >= 0)[:, None], out[rows], 0).reshape(tokens, -1, out.shape[-1])


class _Tiles(NamedTuple):
    expert: jax.Array
    """int32[tiles]: the expert of each tile."""
    pair: jax.Array
    """int32[tiles, rows]: the (token, choice) pair of each row, -1 unused; used rows come first."""
    row_of_pair: jax.Array
    """int32[pairs]: flat row of each pair, -1 for pairs without expert."""


def _tile_rows(pair_expert: jax.Array, num_experts: int, tile: int) -> _Tiles:
    """Lay pairs out in tiles of one expert. An expert id of `num_experts` means none."""
    pairs = pair_expert.shape[0]
    count = min(pairs, -(-pairs // tile) + num_experts)
    order = jnp.argsort(pair_expert, stable=True)
    sorted_expert = pair_expert[order]
    size = jnp.zeros(num_experts + 1, jnp.int32).at[pair_expert].add(1)[:num_experts]
    first_pair = jnp.cumsum(size) - size
    tiles_of = -(-size // tile)
    first_tile = jnp.cumsum(tiles_of) - tiles_of
    expert = jnp.minimum(sorted_expert, num_experts - 1)
    row = first_tile[expert] * tile + jnp.arange(pairs, dtype=jnp.int32) - first_pair[expert]
    row = jnp.where(sorted_expert < num_experts, row, -1)
    slot = jnp.where(row < 0, count * tile, row)
    pair = jnp.full(count * tile, -1, jnp.int32).at[slot].set(order.astype(jnp.int32), mode="drop")
    tile_expert = jnp.searchsorted(jnp.cumsum(tiles_of), jnp.arange(count), side="right")
    row_of_pair = jnp.zeros(pairs, jnp.int32).at[order].set(row)
    return _Tiles(jnp.minimum(tile_expert, num_experts - 1).astype(jnp.int32), pair.reshape(count, tile), row_of_pair)
