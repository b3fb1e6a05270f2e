"""Speculative decoding with the checkpoint's own drafter, as a measurement: what it accepts, and how sure it was.

A round drafts a block after the last accepted token, verifies it with one forward, accepts some drafts from the left,
and gives up the rest. A batch of prompts runs to its end before the next one starts. Each transition below is written
for one device's share, like those of `generate.py`. Exponentials and sums follow `ops/invariant.py` in every mode, so
that a draw does not depend on the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from deepinfer_jax.cache import ROLLBACK, CacheState, init_cache, rollback
from deepinfer_jax.calibration import Outcomes
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.progress import RunProgress
from deepinfer_jax.engine.requests import check_requests, list_of_prompts, needed_length, params_of_each
from deepinfer_jax.engine.schedule import Request
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.errors import InputError
from deepinfer_jax.generate import Setup
from deepinfer_jax.model.step import Batch
from deepinfer_jax.model.v41 import V41, Logits, Params, draft, draft_context, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.invariant import alone, fence, sum_channels
from deepinfer_jax.parallel.mesh import Layout, make_mesh, param_shardings, param_specs
from deepinfer_jax.sampling import gumbel, request_key, seed_words
from deepinfer_jax.sampling_params import SamplingParams

# What a draw at a position is for. A round drafts and judges positions that it may not come to decide, and how far it
# comes depends on what it drew there: so these draws are those of the round too. A token after the accepted drafts is
# drawn once for a position.
DRAFT, ACCEPT, TARGET = range(3)

_NO_STOP = -2


class Rows(NamedTuple):
    """What B sequences ask for.

    Attributes:
        prompt: int32[B] tokens of the prompt, 0 without a request; end: int32[B] length at which a row stops.
        seed: uint32[B, 2] high and low word.
        temperature: float32[B]; 0 takes the most probable token.
        stop: int32[B] id that ends a row, or a negative number that no token has.
    """

    prompt: jax.Array
    end: jax.Array
    seed: jax.Array
    temperature: jax.Array
    stop: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "token", "active", "rows"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class State:
    """What B slots are doing.

    Attributes:
        cache: Everything before `token`; its length is where `token` stands.
        token: int32[B] the last accepted token, not run yet.
        active: bool[B] whether the slot goes on.
        rows: What was asked for.
    """

    cache: CacheState
    token: jax.Array
    active: jax.Array
    rows: Rows


class Round(NamedTuple):
    """What a round did, for B slots.

    Attributes:
        drafted: int32[B, n] tokens.
        tokens: int32[B, 1 + n] accepted drafts and the token after them, up to the end of the text; then -1.
        accepted: int32[B] drafts among them; -1 for a slot that was not active.
        confidence: float32[B, n] logits of the confidence head.
        analytic: float32[B, n] how probable acceptance was before the draft was drawn, had those before been accepted.
    """

    drafted: jax.Array
    tokens: jax.Array
    accepted: jax.Array
    confidence: jax.Array
    analytic: jax.Array


class Verdict(NamedTuple):
    """Result of `judge`.

    Attributes:
        accepted: int32[B] drafts from the left.
        token: int32[B] the token after them.
        analytic: float32[B, n] sum of min(p, q / r): as in `Round`; r is `judge`'s, 1 where p is all that matters.
    """

    accepted: jax.Array
    token: jax.Array
    analytic: jax.Array


# ------------------------------------------------------------------------------------- the rule


def distribution(logits_BNV: jax.Array, temperature_B: jax.Array) -> jax.Array:
    """Probabilities [B, N, V] at a temperature; at 0 all on the most probable token, the lowest id among equals."""
    t = temperature_B[:, None, None]
    # The maximum goes first, so that no temperature, however small, overflows.
    weights = alone(jnp.exp, (logits_BNV - jnp.max(logits_BNV, axis=-1, keepdims=True)) / jnp.where(t > 0, t, 1))
    best = jax.nn.one_hot(jnp.argmax(logits_BNV, axis=-1), logits_BNV.shape[-1], dtype=logits_BNV.dtype)
    return jnp.where(t > 0, weights / sum_channels(weights)[..., None], best)


def draw(
    weights_BV: jax.Array, seed_B2: jax.Array, position_B: jax.Array, purpose: int, round_B: jax.Array | None = None
) -> jax.Array:
    """Token ids int32[B], with probabilities proportional to the weights; functions of (seed, position, purpose), for
    drafts also of the round: int32[B] where its first draft stands."""
    round_B = jnp.zeros_like(position_B) if round_B is None else round_B

    keys = jax.vmap(partial(_key, purpose))(seed_B2, position_B, round_B)
    scores = alone(jnp.log, weights_BV) + gumbel(keys, weights_BV.shape[1])
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def judge(
    target_BNV: jax.Array, drafter_BKV: jax.Array, drafted_BK: jax.Array, seed_B2: jax.Array, position_B: jax.Array
) -> Verdict:
    """Block verification (Sun et al. 2024): a block is judged as a whole, and never accepts less on average than the
    rule that judges token by token, whatever drafter and target are. The tokens are distributed as if drawn from p.

    With r_0 = 1 and r_k = min(1, r_{k-1} p(x_k) / q(x_k)), r_k is the probability that the first k drafts are
    accepted: a draft that is likelier than q says makes up for one before it that is less so. What p has more than q
    after k drafts, s_k = sum of max(0, r_k p - q), is what a token after them is drawn from. k drafts pass with
    probability s_k / (s_k + 1 - r_k), the whole block with r_K, and the last k that passes is taken. At temperature 0
    a draft is accepted iff it is the target's choice.

    Args:
        target_BNV: Distributions p after each token of the block, N = K + 1.
        drafter_BKV: Distributions q that the drafted tokens were drawn from.
        drafted_BK: int32 tokens.
        position_B: int32 where the first of them stands.
    """
    count = drafted_BK.shape[1]
    p = jnp.take_along_axis(target_BNV[:, :count], drafted_BK[..., None], axis=-1)[..., 0]
    q = jnp.take_along_axis(drafter_BKV, drafted_BK[..., None], axis=-1)[..., 0]
    kept_BN = _kept(p, q)
    # After the block nothing was drafted, so all of p is left, and s_K / (s_K + 1 - r_K) = r_K.
    scaled = fence(kept_BN[..., None] * target_BNV)
    left = jnp.maximum(scaled - jnp.pad(drafter_BKV, [(0, 0), (0, 1), (0, 0)]), 0)
    mass, lost = sum_channels(left[:, 1:]), 1 - kept_BN[:, 1:]
    # Nothing lost and nothing left: target and drafter agree on what follows.
    chance = jnp.where(lost > 0, mass / jnp.where(lost > 0, mass + lost, 1), 1)
    number = jnp.arange(1, count + 1, dtype=jnp.int32)[None]
    accepted = jnp.max(jnp.where(_uniform(seed_B2, position_B, count) < chance, number, 0), axis=1)
    left, target_BV = (jnp.take_along_axis(x, accepted[:, None, None], axis=1)[:, 0] for x in (left, target_BNV))
    # Where both are equal but for their last bits, rounding can leave nothing.
    left = jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, target_BV)
    token = draw(left, seed_B2, position_B + accepted, TARGET)
    before, shared = kept_BN[:, :count], sum_channels(jnp.minimum(scaled[:, :count], drafter_BKV))
    return Verdict(accepted, token, jnp.where(before > 0, shared / jnp.where(before > 0, before, 1), 0))


def _kept(p_BK: jax.Array, q_BK: jax.Array) -> jax.Array:
    """r_0 ... r_K of `judge`, [B, K + 1]. q may be 0 for a draft that another rule chose."""

    def following(r: jax.Array, pq: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        p, q = pq
        r = jnp.where(r * p > 0, r * p / jnp.maximum(q, r * p), 0)
        return r, r

    one = jnp.ones_like(p_BK[:, 0])
    _, r_KB = lax.scan(following, one, (p_BK.T, q_BK.T))
    return jnp.concatenate([one[:, None], r_KB.T], axis=1)


def _uniform(seed_B2: jax.Array, position_B: jax.Array, count: int) -> jax.Array:
    """The noise of accepting, float32[B, count]: one value for each draft of a round that begins at the position."""
    places = position_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]

    def one(seed: jax.Array, place: jax.Array, start: jax.Array) -> jax.Array:
        return jax.random.uniform(_key(ACCEPT, seed, place, start))

    return jax.vmap(jax.vmap(one, (None, 0, None)))(seed_B2, places, position_B)


def _key(purpose: int, seed: jax.Array, position: jax.Array, start: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(request_key(seed, jnp.uint32(0), position), purpose), start)


# ------------------------------------------------------------------- transitions, for one device's share


def init_state(setup: Setup, max_length: int, rows: Rows) -> State:
    """Empty slots that are about to run the prompts of `rows`."""
    slots = rows.prompt.shape[0]
    cache = init_cache(setup.config, setup.numerics, slots, max_length)
    return State(cache, jnp.zeros(slots, jnp.int32), jnp.zeros(slots, bool), rows)


def prefill(params: Params, setup: Setup, state: State, batch: Batch) -> State:
    """Run a chunk of the prompts, slot by row; a row whose prompt ends in it gets its first token."""
    rows = state.rows
    logits, features, cache = _forward(params, setup, batch, state.cache, "last")
    cache = _feed(params, setup, features, batch, cache)
    first = draw(distribution(logits[:, None], rows.temperature)[:, 0], rows.seed, rows.prompt, TARGET)
    complete = (batch.positions[:, 0] >= 0) & (cache.lengths == rows.prompt)
    goes_on = (first != rows.stop) & (rows.prompt + 1 < rows.end)
    return State(cache, jnp.where(complete, first, state.token), state.active | (complete & goes_on), rows)


def one_round(params: Params, setup: Setup, state: State) -> tuple[State, Round]:
    """Draft, verify, accept, and give up the rest, for every active slot."""
    cache, rows, position = state.cache, state.rows, state.cache.lengths
    slots = jnp.arange(position.shape[0], dtype=jnp.int32)

    def choose(logits: jax.Array, k: int) -> jax.Array:
        return draw(
            distribution(logits[:, None], rows.temperature)[:, 0], rows.seed, position + 1 + k, DRAFT, position + 1
        )

    with jax.named_scope("draft"):
        block = draft(
            params,
            setup.config,
            state.token,
            position,
            slots,
            cache,
            choose=choose,
            numerics=setup.numerics,
            exchange=setup.layout.exchange,
            definition=setup.definition,
        )
    offset = jnp.arange(block.tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(state.active[:, None], position[:, None] + offset, -1)
    with jax.named_scope("verify"):
        logits, features, cache = _forward(params, setup, Batch(block.tokens, positions, slots), cache, "all")
    target, drafter = (distribution(x, rows.temperature) for x in (logits, block.logits))
    verdict = judge(target, drafter, block.tokens[:, 1:], rows.seed, position + 1)
    tokens, accepted, stopped = _emitted(block.tokens[:, 1:], verdict, rows.stop)
    # The anchor and the accepted drafts stay; the token after them is the next anchor.
    kept = Batch(block.tokens, jnp.where(offset <= accepted[:, None], positions, -1), slots)
    cache = _feed(params, setup, features, kept, cache)
    cache = rollback(cache, jnp.where(state.active, offset.shape[1] - 1 - accepted, 0))
    active = state.active & ~stopped & (cache.lengths + 1 < rows.end)
    done = Round(
        block.tokens[:, 1:],
        jnp.where(state.active[:, None], tokens, -1),
        jnp.where(state.active, accepted, -1),
        block.confidence,
        verdict.analytic,
    )
    token = jnp.where(state.active, verdict.token, state.token)
    return State(cache, token, active, rows), done


def rounds(params: Params, setup: Setup, state: State, *, count: int) -> tuple[State, Round]:
    """`count` rounds; the leading axis of the result numbers them."""
    return lax.scan(lambda s, _: one_round(params, setup, s), state, length=count)


def _emitted(drafted_BK: jax.Array, verdict: Verdict, stop_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [B, K + 1] of a round up to its end of text (then -1), the drafts among them, and whether it ended."""
    number = jnp.arange(drafted_BK.shape[1] + 1)[None, :]
    last = verdict.accepted[:, None]
    tokens = jnp.where(number == last, verdict.token[:, None], jnp.pad(drafted_BK, [(0, 0), (0, 1)]))
    ends = (tokens == stop_B[:, None]) & (number <= last)
    live = (number <= last) & (jnp.cumsum(ends, axis=1) - ends == 0)
    accepted = jnp.minimum(verdict.accepted, jnp.sum(live, axis=1, dtype=jnp.int32))
    return jnp.where(live, tokens, -1), accepted, jnp.any(ends, axis=1)


def _forward(
    params: Params, setup: Setup, batch: Batch, cache: CacheState, which: Logits
) -> tuple[jax.Array, jax.Array, CacheState]:
    """Logits, features for the drafter, and the new cache."""
    out, cache = forward(
        params,
        setup.config,
        batch,
        cache,
        numerics=setup.numerics,
        logits=which,
        exchange=setup.layout.exchange,
        definition=setup.definition,
    )
    assert out.logits is not None and out.features is not None
    return out.logits, out.features, cache


def _feed(params: Params, setup: Setup, features: jax.Array, batch: Batch, cache: CacheState) -> CacheState:
    with jax.named_scope("draft_context"):
        return draft_context(
            params, setup.config, features, batch, cache, numerics=setup.numerics, definition=setup.definition
        )


# ------------------------------------------------------------------------------------------ over a mesh


class Programs:
    """The transitions, compiled for a setup. `prefill` and `rounds` take the state donated and give a new one."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.init = jax.jit(self._init, static_argnums=0)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.rounds = jax.jit(self._rounds, donate_argnums=1, static_argnames="count")

    def _init(self, max_length: int, rows: Rows) -> State:
        split = self.setup.layout.rows
        return self.setup.layout.spmd(partial(init_state, self.setup, max_length), (split,), split)(rows)

    def _prefill(self, params: Params, state: State, batch: Batch) -> State:
        layout = self.setup.layout

        def share(params: Params, state: State, batch: Batch) -> State:
            return prefill(params, self.setup, state, batch)

        specs = (param_specs(params, layout.mesh.size), layout.rows, layout.rows)
        return layout.spmd(share, specs, layout.rows)(params, state, batch)

    def _rounds(self, params: Params, state: State, *, count: int) -> tuple[State, Round]:
        layout = self.setup.layout

        def share(params: Params, state: State) -> tuple[State, Round]:
            return rounds(params, self.setup, state, count=count)

        specs = (param_specs(params, layout.mesh.size), layout.rows)
        return layout.spmd(share, specs, (layout.rows, P(None, layout.slot_axes)))(params, state)


@functools.lru_cache(maxsize=16)
def programs(setup: Setup) -> Programs:
    """The programs of a setup: the same object every time, so that nothing is compiled twice."""
    return Programs(setup)


# -------------------------------------------------------------------------------------------- results


@dataclasses.dataclass(frozen=True, eq=False)
class SpeculativeResult:
    """The continuation of one prompt, and its R rounds.

    The last round may go beyond `max_tokens`: `token_ids` ends there, the round is reported whole, so that where a
    sample was cut off does not count against the drafter.

    Attributes:
        index: Number of the prompt.
        token_ids: New tokens, the one that stopped the sample included.
        finish_reason: `stop` or `length`.
        drafted: int32[R, n] of each round.
        tokens: int32[R, 1 + n] of each round: accepted drafts and the token after them; then -1.
        outcomes: What verification said of each round's drafts.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    drafted: np.ndarray
    tokens: np.ndarray
    outcomes: Outcomes

    @property
    def rounds(self) -> int:
        """Rounds, which is forwards after the prompt."""
        return len(self.tokens)

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a round, the one after the accepted drafts included; nan without a round."""
        return accepted_length([self])


def accepted_length(results: Iterable[SpeculativeResult]) -> float:
    """Mean tokens of a round over all rounds of all results; nan without a round."""
    tokens = [int(n) for r in results for n in (r.tokens >= 0).sum(axis=1)]
    return sum(tokens) / len(tokens) if tokens else math.nan


def _result(index: int, request: Request, first: int, steps: Any) -> SpeculativeResult:
    """From the records of one slot: a Round on the host, rounds first."""
    drafted, tokens, accepted, confidence, analytic = (x[steps.accepted >= 0] for x in steps)
    k = np.arange(drafted.shape[1])[None, :]
    verified = k < (tokens >= 0).sum(axis=1, keepdims=True)
    ends = np.isin(drafted, list(request.stop_ids))
    beyond = np.cumsum(ends, axis=1) - ends > 0
    flags = np.where(beyond, -2, np.where(verified, k < accepted[:, None], -1)).astype(np.int8)
    outcomes = Outcomes(confidence, flags, np.where(verified, analytic, np.nan).astype(np.float32))
    assert request.params.max_tokens is not None
    ids = (first, *tokens[tokens >= 0].tolist())[: request.params.max_tokens]
    return SpeculativeResult(index, ids, "stop" if ids[-1] in request.stop_ids else "length", drafted, tokens, outcomes)


# --------------------------------------------------------------------------------------------- running


def speculate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    numerics: Numerics = Numerics(),  # noqa: B008 - frozen
    temperature: float = 1.0,
    seed: int = 0,
    max_tokens: int = 128,
    ignore_eos: bool = False,
    batch_size: int = 8,
    chunk: int = 64,
    count: int = 8,
    mesh: Mesh | None = None,
    definition: nnx.GraphDef[V41] | None = None,
    progress: bool = False,
) -> list[SpeculativeResult]:
    """Continue prompts by drafting and verifying, and report every round.

    At temperature 0 the tokens are those of plain greedy decoding (but where two are equally probable); above it they
    have the distribution of plain sampling, with other draws. Neither the batch nor its order changes a draw.

    Args:
        params: Weights; on a mesh of several devices placed by `parallel.mesh.param_shardings`.
        prompts: Token ids, any lengths.
        numerics: Which roundings apply.
        temperature: Of the target and of the drafts.
        seed: Prompt i draws with seed + i.
        max_tokens: Most new tokens of a prompt.
        ignore_eos: Go on after the end-of-sequence id.
        batch_size: Prompts run at once, each batch to its end.
        chunk: Tokens of each row in a prefill call.
        count: Rounds per dispatch.
        mesh: Of `make_mesh`; default one device.
        definition: A changed model.
        progress: Show a progress bar.

    Returns:
        Results in the order of the prompts.

    Raises:
        InputError: No drafter, a block longer than a cache can give up, or all faults of the prompts.
    """
    block = check_drafter(config)
    prompts = list_of_prompts(prompts)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)
    each = params_of_each(sampling, len(prompts))
    # A round may run a whole block beyond the end.
    length = min(needed_length(prompts, each, config), config.text_config.max_position_embeddings - block)
    requests = check_requests(prompts, each, config, length, seed=seed)
    sizes = Sizes(batch_size, length + block, count, chunk)
    mesh = make_mesh() if mesh is None else mesh
    made = programs(Setup(config, numerics, Layout.of(mesh, batch_size), definition))
    params = jax.device_put(params, param_shardings(params, mesh))
    results = []
    with RunProgress(len(requests), progress) as bar:
        for start in range(0, len(requests), batch_size):
            results += _run_batch(made, params, requests[start : start + batch_size], start, sizes, bar)
    return results


def check_drafter(config: ModelConfig) -> int:
    """Tokens of a drafted block. Raises InputError where none can be verified."""
    block = config.text_config.dspark_block_size
    if not config.draft_stages:
        raise InputError("num_nextn_predict_layers: found 0, expected at least 1: there is no drafter")
    if block > ROLLBACK:
        raise InputError(f"dspark_block_size: found {block}, expected at most {ROLLBACK}, what a cache can give up")
    return block


def _run_batch(
    made: Programs, params: Params, requests: Sequence[Request], start: int, sizes: Sizes, bar: RunProgress
) -> list[SpeculativeResult]:
    put = made.setup.layout.put_rows
    state = made.init(sizes.max_length, put(_rows(requests, sizes.slots)))
    for batch in _chunks(requests, sizes, made.setup.layout.shards):
        state = made.prefill(params, state, put(batch))
    first, active = jax.device_get((state.token, state.active))
    done = []
    # One dispatch at least, so that a batch without a round has records too: of no rounds.
    while not done or active.any():
        state, steps = made.rounds(params, state, count=sizes.steps)
        steps, active = jax.device_get((steps, state.active))
        bar.advance(bar.tokens, int((steps.tokens >= 0).sum()))
        done.append(steps)
    bar.advance(bar.prompts, len(requests))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *done)
    slots = (jax.tree.map(lambda x, slot=slot: x[:, slot], whole) for slot in range(len(requests)))
    return [
        _result(start + i, request, int(first[i]), steps)
        for i, (request, steps) in enumerate(zip(requests, slots, strict=True))
    ]


def _rows(requests: Sequence[Request], slots: int) -> Rows:
    """Requests in the first slots, nothing in the others."""
    whole, seed = np.zeros((2, slots), np.int32), np.zeros((slots, 2), np.uint32)
    temperature, stop = np.zeros(slots, np.float32), np.full(slots, _NO_STOP, np.int32)
    for i, request in enumerate(requests):
        whole[:, i] = len(request.ids), request.end
        seed[i], temperature[i] = seed_words(request.seed), request.params.temperature
        stop[i] = next(iter(request.stop_ids), _NO_STOP)
    return Rows(whole[0], whole[1], seed, temperature, stop)  # type: ignore[arg-type]


def _chunks(requests: Sequence[Request], sizes: Sizes, shards: int) -> Iterable[Batch]:
    """The prompts, padded to chunks of one shape."""
    # Slots are numbered on each device.
    slots = np.arange(sizes.slots, dtype=np.int32) % (sizes.slots // shards)
    longest = max(len(request.ids) for request in requests)
    width = -(-longest // sizes.chunk) * sizes.chunk
    tokens, positions = np.zeros((sizes.slots, width), np.int32), np.full((sizes.slots, width), -1, np.int32)
    for i, request in enumerate(requests):
        tokens[i, : len(request.ids)] = request.ids
        positions[i, : len(request.ids)] = np.arange(len(request.ids))
    for part in np.split(np.arange(width), width // sizes.chunk):
        yield Batch(tokens[:, part], positions[:, part], slots)  # type: ignore[arg-type]
