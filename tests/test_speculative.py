"""Speculative decoding changes the speed of generation and nothing else, and reports what it did."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import deepinfer_jax as dj
from deepinfer_jax import speculative
from deepinfer_jax.calibration import Outcomes, by_position
from deepinfer_jax.generate import Setup
from deepinfer_jax.parallel.mesh import Layout
from deepinfer_jax.sampling import seed_words
from deepinfer_jax.speculative import DRAFT, TARGET, accepted_length, distribution, draw, judge, speculate
from tests.helpers import results_of

FP32 = dj.Numerics.named("fp32")
BATCHES = (3, 32)
PROMPTS = [[9], [40, 41], [17, 90, 5, 60, 22, 8], [*range(30, 70)], [99] * 17, [*range(2, 35)], [88, 7], [5]]
DRAWS = 1024


@pytest.fixture(scope="module")
def follower(tiny):
    """A target that mostly says the id before the last one, and a drafter that always would: with random weights no
    draft is ever accepted."""
    embed, mtp = tiny.params["embed"], tiny.params["mtp"]
    head = 0.5 * jnp.roll(embed, -1, axis=0)
    unit = embed / jnp.sqrt(jnp.mean(embed**2, axis=-1, keepdims=True))
    u, s, v = np.linalg.svd(np.asarray(unit @ head.T))
    rank = mtp["markov_embed"].shape[1]
    size = tiny.config.text_config.hidden_size
    drafter = {
        "markov_embed": jnp.asarray(u[:, :rank] * s[:rank]),
        "markov_head": jnp.asarray(v[:rank].T),
        # The draft's own norm: what it reads from its block counts for nothing in the tokens, only in the confidence.
        "vectors": {"data": mtp["vectors"]["data"].at[size : 2 * size].set(0)},
    }
    return {**tiny.params, "embed": 6 * embed, "head": head, "mtp": {**mtp, **drafter}}


@pytest.fixture(scope="module")
def run(tiny, follower):
    def run(prompts=PROMPTS, params=follower, **options):
        options = {"temperature": 0, "max_tokens": 24, "batch_size": 32, "chunk": 16, "count": 2, **options}
        return speculate(params, tiny.config, prompts, numerics=FP32, **options)

    return run


@pytest.fixture(scope="module")
def free(run):
    """Greedy, the end-of-sequence id being a token like any other."""
    return run(ignore_eos=True)


@pytest.fixture(scope="module")
def greedy(tiny, follower):
    return dj.generate(
        follower,
        tiny.config,
        PROMPTS,
        dj.SamplingParams(temperature=0, max_tokens=24),
        numerics=FP32,
        max_length=256,
        steps=4,
        chunk=64,
    )


def ids(results):
    return [r.token_ids for r in results]


# ---------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("batch_size", BATCHES)
def test_at_temperature_zero_the_tokens_are_those_of_plain_greedy_decoding(run, greedy, batch_size):
    results = run(batch_size=batch_size)
    assert ids(results) == [tuple(g.outputs[0].token_ids) for g in greedy]
    assert [r.finish_reason for r in results] == [g.outputs[0].finish_reason for g in greedy]
    # It says something only if drafts of every position were accepted and rejected, and some text ended.
    flags = Outcomes.join(r.outcomes for r in results).accepted
    assert all({0, 1} <= set(flags[:, k]) for k in range(3))
    assert {r.finish_reason for r in results} == {"stop", "length"}


@pytest.mark.slow
def test_over_a_mesh_they_are_too(run, greedy):
    results = run(batch_size=4, mesh=dj.make_mesh(2, 2), max_tokens=8)
    assert ids(results) == [tuple(g.outputs[0].token_ids[:8]) for g in greedy]


def test_the_random_model_itself_agrees_too(run, tiny):
    """Where nearly every round gives up the whole block."""
    plain = tiny.generate(PROMPTS, dj.SamplingParams(temperature=0, max_tokens=24))
    assert ids(run(params=tiny.params)) == [tuple(g.outputs[0].token_ids) for g in plain]


def test_without_giving_up_rejected_tokens_it_would_be_other_text(run, greedy, tiny, monkeypatch):
    made = speculative.programs(Setup(tiny.config, FP32, Layout.of(tiny.mesh, BATCHES[0])))

    def keeping(params, state, *, count, rounds=made.rounds):
        """Rounds of which the last one gives up nothing."""
        state, steps = rounds(params, state, count=count)
        last = steps.accepted[-1]
        lengths = state.cache.lengths + jnp.where(last >= 0, 3 - last, 0)
        lengths = jax.device_put(lengths, state.cache.lengths.sharding)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths)), steps

    monkeypatch.setattr(made, "rounds", keeping)
    assert ids(run(batch_size=BATCHES[0])) != [tuple(g.outputs[0].token_ids) for g in greedy]


def test_a_round_drafts_as_if_the_accepted_text_had_been_read_at_once(free, tiny, follower):
    """The drafter's context after rounds of accepting and rejecting is the one of a single prefill."""
    assert min(r.rounds for r in free) > 4
    texts = [[*prompt, r.token_ids[0], *tokens_of(r, r.rounds - 1)] for prompt, r in zip(PROMPTS, free, strict=True)]
    want = np.stack([r.outcomes.confidence[-1] for r in free])
    np.testing.assert_allclose(confidence(follower, tiny.config, texts), want, atol=1e-4)
    # The control: the token before the last is another.
    others = [[*text[:-2], (text[-2] + 50) % 100, text[-1]] for text in texts]
    assert (np.abs(confidence(follower, tiny.config, others) - want).max(axis=1) > 1e-3).all()


def tokens_of(result, rounds):
    """What the first rounds said."""
    tokens = result.tokens[:rounds]
    return tokens[tokens >= 0].tolist()


def confidence(params, config, texts):
    """Confidence logits of a draft after the last token of each text, everything before it read in one call."""
    return read_at_once(params, config, texts)[1]


def read_at_once(params, config, texts):
    """Logits after every token but the last of each of eight texts, and the confidence of a draft after the last."""
    tokens, positions = np.zeros((8, 80), np.int32), np.full((8, 80), -1, np.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text) - 1], positions[i, : len(text) - 1] = text[:-1], np.arange(len(text) - 1)
    batch = dj.Batch(tokens, positions, np.arange(8, dtype=np.int32))
    return jax.device_get(_read_at_once(params, batch, np.array([t[-1] for t in texts], np.int32), config=config))


@functools.partial(jax.jit, static_argnames="config")
def _read_at_once(params, batch, last, *, config):
    cache = dj.init_cache(config, FP32, 8, 128)
    out, cache = dj.forward(params, config, batch, cache, numerics=FP32)
    cache = dj.draft_context(params, config, out.features, batch, cache, numerics=FP32)
    drafted = dj.draft(params, config, last, cache.lengths, batch.slots, cache, numerics=FP32)
    return out.logits, drafted.confidence


# ---------------------------------------------------------------------------------------- where it ends


def test_a_text_ends_within_a_block_and_nothing_after_it_counts(run, sampled, tiny):
    eos = tiny.config.eos_token_id
    within = rejected = 0
    for r in [*run(), *sampled]:
        flags, tokens = r.outcomes.accepted, r.tokens
        assert eos not in r.token_ids[:-1]
        assert (r.finish_reason == "stop") == (r.token_ids[-1] == eos)
        emitted, accepted = (tokens >= 0).sum(axis=1), (flags == 1).sum(axis=1)
        # Verified are the accepted drafts and the one that was rejected, if one was.
        assert ((flags >= 0).sum(axis=1) == np.minimum(emitted, 3)).all()
        ended = accepted == emitted
        assert (tokens[ended, emitted[ended] - 1] == eos).all()
        assert (accepted[~ended] == emitted[~ended] - 1).all()
        assert (np.isnan(r.outcomes.analytic) == (flags < 0)).all()
        within += int((ended & (emitted < 3)).sum())
        # A drafted end hides what is behind it, accepted or not.
        assert (flags[:, 1:] == -2).tolist() == (np.cumsum(r.drafted == eos, axis=1) > 0)[:, :-1].tolist()
        rejected += int((~ended & (flags == -2).any(axis=1)).sum())
    assert within > 0 and rejected > 0


def test_the_end_of_sequence_id_can_be_ignored(run, free):
    assert all(len(r.token_ids) == 24 for r in free)
    for one, two in zip(run(), free, strict=True):
        assert two.token_ids[: len(one.token_ids)] == one.token_ids


@pytest.mark.parametrize("most", [1, 2, 7])
def test_tokens_end_at_the_limit_and_rounds_are_reported_whole(run, free, most):
    for r, g in zip(run(max_tokens=most, ignore_eos=True), free, strict=True):
        assert r.token_ids == g.token_ids[:most]
        assert r.finish_reason == "length"
        said = int((r.tokens >= 0).sum())
        assert most - 1 <= said < most + 3
        # The rounds are those of a longer run: where a text is cut off changes none.
        np.testing.assert_array_equal(r.tokens, g.tokens[: r.rounds])
        assert math.isnan(r.accepted_length) if most == 1 else r.accepted_length == said / r.rounds


def test_the_accepted_length_is_that_of_all_rounds(run):
    results = run()
    said = sum(int((r.tokens >= 0).sum()) for r in results)
    assert accepted_length(results) == said / sum(r.rounds for r in results)
    assert 1.2 < accepted_length(results) < 4
    assert math.isnan(accepted_length([]))


# ---------------------------------------------------------------------------------------------- sampled


def test_a_sample_depends_on_its_seed_alone(run):
    together = run(temperature=1)
    assert ids(run(temperature=1, batch_size=3)) == ids(together)
    for i in (1, 4):
        assert run([PROMPTS[i]], temperature=1, seed=i)[0].token_ids == together[i].token_ids
    assert ids(run(temperature=1, seed=100)) != ids(together)


@pytest.fixture(scope="module")
def sampled(run):
    """One prompt, many seeds, one round each."""
    return run([PROMPTS[2]] * DRAWS, temperature=1, max_tokens=2, seed=5)


@pytest.fixture(scope="module")
def exact(tiny, follower):
    """Distributions of the first token [V], and after each of them: the target's and the drafter's [V, V]."""
    vocab, n = tiny.config.text_config.vocab_size, len(PROMPTS[2])
    texts = [[*PROMPTS[2], x, 0] for x in range(vocab)]
    logits = [read_at_once(follower, tiny.config, texts[i : i + 8])[0] for i in range(0, vocab, 8)]
    p = scipy.special.softmax(np.concatenate(logits).astype(np.float64), axis=-1)
    # What the drafter of `follower` says depends on the token before alone.
    mtp = follower["mtp"]
    q = scipy.special.softmax(np.asarray(mtp["markov_embed"] @ mtp["markov_head"].T, np.float64), axis=-1)
    return p[0, n - 1], p[:, n], q


def chi_square(tokens, p):
    """p-value; rare tokens are put together, so that the approximation holds."""
    counts, want = np.bincount(tokens, minlength=len(p)), np.asarray(p, np.float64) * len(tokens)
    rare = want < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    seen, want = seen[want > 0], want[want > 0]
    return scipy.stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue


def test_sampled_tokens_have_the_distribution_of_plain_sampling(sampled, exact):
    first, after, drafter = exact
    assert chi_square([r.token_ids[0] for r in sampled], first) > 1e-4
    pairs = np.array([r.token_ids for r in sampled if len(r.token_ids) == 2])
    # After the end-of-sequence id there is no second token.
    live = np.where(np.arange(len(first)) == 1, 0, first)[:, None] / (1 - first[1])
    assert chi_square(pairs[:, 1], (live * after).sum(axis=0)) > 1e-4
    assert chi_square(step(pairs), by_step(live * after)) > 1e-4
    # The control: what would come if every draft were accepted is another distribution, and the test sees it.
    assert chi_square(step(pairs), by_step(live * drafter)) < 1e-6


def step(pairs):
    """How far the second token is from the first: what drafter and target differ in most."""
    return (pairs[:, 1] - pairs[:, 0]) % 128


def by_step(joint):
    """Its distribution, from that of pairs."""
    pairs = np.argwhere(np.ones_like(joint))
    return np.bincount(step(pairs), joint.reshape(-1), len(joint))


def test_drafts_are_accepted_as_often_as_the_distributions_say(sampled, exact):
    """The analytic acceptance is exact: that of the true distributions, and the mean of what happened."""
    _, after, drafter = exact
    rounds = [r for r in sampled if r.rounds]
    outcomes = Outcomes.join(r.outcomes for r in rounds)
    want = np.minimum(after, drafter).sum(axis=-1)[[r.token_ids[0] for r in rounds]]
    np.testing.assert_allclose(outcomes.analytic[:, 0], want, atol=1e-4)
    for position in by_position(outcomes):
        spread = math.sqrt(position.analytic * (1 - position.analytic) / position.verified)
        assert position.verified > 300
        assert abs(position.acceptance - position.analytic) < 4 * spread


# --------------------------------------------------------------------------------------------- the rule

ROWS, VOCAB = 20_000, 12
P, Q = (np.random.default_rng(s).dirichlet(np.full(VOCAB, 0.7), 3).astype(np.float32) for s in (3, 4))


def judged(drafting=Q, purpose=DRAFT):
    """Tokens that come out of blocks of two, when drafts are drawn from `drafting`; -1 where none does."""
    seed = jnp.tile(jnp.asarray(seed_words(9))[None], (ROWS, 1))
    at = 3 * jnp.arange(ROWS, dtype=jnp.int32)
    rows = [jnp.tile(jnp.asarray(d)[None], (ROWS, 1)) for d in drafting[:2]]
    drafted = jnp.stack(
        [draw(d, seed, at + k, purpose, at if purpose == DRAFT else None) for k, d in enumerate(rows)], 1
    )
    target, drafter = (jnp.tile(jnp.asarray(d)[None], (ROWS, 1, 1)) for d in (P, Q[:2]))
    verdict = jax.jit(judge)(target, drafter, drafted, seed, at)
    number = np.arange(3)[None]
    accepted, token = np.asarray(verdict.accepted)[:, None], np.asarray(verdict.token)[:, None]
    padded = np.pad(np.asarray(drafted), [(0, 0), (0, 1)])
    return np.where(number < accepted, padded, np.where(number == accepted, token, -1)), verdict


def test_the_rule_gives_the_targets_distribution():
    """Of whole texts: what a round leaves open is drawn from the target, as later rounds would."""
    tokens, verdict = judged()
    random = np.random.default_rng(0)
    later = np.stack([random.choice(VOCAB, ROWS, p=p.astype(np.float64) / p.astype(np.float64).sum()) for p in P], 1)
    texts = np.where(tokens >= 0, tokens, later)
    joint = np.einsum("a,b,c->abc", *P).reshape(-1)
    assert chi_square(texts @ [VOCAB**2, VOCAB, 1], joint) > 1e-4
    overlap = np.minimum(P[0], Q[0]).sum()
    np.testing.assert_allclose(verdict.analytic[:, 0], overlap, atol=1e-6)


def token_by_token():
    """Mean number of accepted drafts where each is judged on its own: accept with min(1, p / q), stop at the first."""
    first, second = np.minimum(P[:2], Q[:2]).sum(axis=-1)
    return first + first * second


def block_by_block():
    """The same by the definition of block verification, over all pairs of drafts."""
    one = np.minimum(1, P[0] / Q[0])
    two = np.minimum(1, one[:, None] * P[1] / Q[1])
    return Q[0] @ one + np.einsum("a,b,ab", Q[0], Q[1], two)


def test_it_accepts_what_the_definition_says_and_more_than_judging_each_token():
    _, verdict = judged()
    accepted = np.asarray(verdict.accepted)
    assert abs(accepted.mean() - block_by_block()) < 4 * accepted.std() / ROWS**0.5
    # Not by chance: the better rule is better by more than the noise.
    assert accepted.mean() > token_by_token() + 4 * accepted.std() / ROWS**0.5
    # And the probability that is reported is that of what happened, also at the second draft.
    reached = accepted >= 1
    assert abs((accepted[reached] == 2).mean() - np.asarray(verdict.analytic)[reached, 1].mean()) < 0.02


TEXTS, LENGTH = 200_000, 5
CHAIN, GUESS = (np.random.default_rng(s).dirichlet(np.full(3, 2.0), 3).astype(np.float32) for s in (6, 7))


def rounds_of_a_chain(round_of):
    """Texts of LENGTH tokens that rounds of three drafts make of a Markov chain, from token 0 on."""
    chain, guess = jnp.asarray(CHAIN), jnp.asarray(GUESS)
    seed = jnp.stack([jnp.zeros(TEXTS, jnp.uint32), jnp.arange(TEXTS, dtype=jnp.uint32)], axis=1)

    def one(state, _):
        text, length = state
        last = text[jnp.arange(TEXTS), length]
        block = [last]
        for k in range(3):
            block.append(draw(guess[block[-1]], seed, length + 1 + k, DRAFT, round_of(length + 1)))
        block = jnp.stack(block, axis=1)
        verdict = judge(chain[block], guess[block[:, :3]], block[:, 1:], seed, length + 1)
        number = jnp.arange(4)[None]
        said = jnp.where(number < verdict.accepted[:, None], jnp.pad(block[:, 1:], [(0, 0), (0, 1)]), -1)
        said = jnp.where(number == verdict.accepted[:, None], verdict.token[:, None], said)
        at = jnp.where((said >= 0) & (length < LENGTH)[:, None], length[:, None] + 1 + number, LENGTH + 9)
        text = text.at[jnp.arange(TEXTS)[:, None], at].set(said, mode="drop")
        return (text, jnp.minimum(length + 1 + verdict.accepted, LENGTH)), None

    first = jnp.zeros((TEXTS, LENGTH + 4), jnp.int32), jnp.zeros(TEXTS, jnp.int32)
    (text, _), _ = jax.jit(lambda state: jax.lax.scan(one, state, length=LENGTH))(first)
    return np.asarray(text)[:, 1 : LENGTH + 1]


def of_the_chain():
    """Probability of every text of LENGTH tokens."""
    joint = CHAIN[0].astype(np.float64)
    for _ in range(LENGTH - 1):
        joint = (joint[:, None] * np.tile(CHAIN, (len(joint) // 3, 1))).reshape(-1)
    return joint


def test_texts_of_many_rounds_have_the_targets_distribution():
    texts = rounds_of_a_chain(lambda start: start)
    assert chi_square(texts @ 3 ** np.arange(LENGTH)[::-1], of_the_chain()) > 1e-4


def test_they_would_not_if_rounds_shared_their_drafts_noise():
    """How far a round comes depends on drafts beyond that point, so the next round must not draw them again."""
    texts = rounds_of_a_chain(lambda start: None)
    assert chi_square(texts @ 3 ** np.arange(LENGTH)[::-1], of_the_chain()) < 1e-6


def values(tokens, k):
    return tokens[tokens[:, k] >= 0, k]


@pytest.mark.parametrize("mistake", [{"drafting": np.roll(Q, 1, axis=-1)}, {"purpose": TARGET}], ids=["q", "noise"])
def test_the_rule_would_fail_with_other_drafts_or_shared_noise(mistake):
    """Drafts that q does not describe, or noise that draws the draft and its replacement too."""
    tokens, _ = judged(**mistake)
    assert chi_square(values(tokens, 0), P[0]) < 1e-6


def test_at_temperature_zero_a_draft_is_accepted_iff_it_is_the_targets_choice():
    logits = jnp.asarray([[[0.0, 2, 2, 1], [5, 0, 0, 0], [0, 0, 3, 0]]] * 3, jnp.float32)
    p = distribution(logits, jnp.zeros(3))
    assert np.argmax(p, axis=-1)[0].tolist() == [1, 0, 2] and (np.max(p, axis=-1) == 1).all()
    drafted = jnp.asarray([[1, 0], [1, 2], [2, 0]], jnp.int32)
    seed, at = jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.int32)
    verdict = judge(p, jax.nn.one_hot(drafted, 4), drafted, seed, at)
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.token.tolist() == [2, 0, 1]
    # The last one's second draft is never reached.
    assert verdict.analytic.tolist() == [[1, 1], [1, 0], [0, 0]]


def test_a_drafter_that_equals_the_target_is_always_accepted():
    """And a draft that is rejected though nothing is left, as rounding might have it, is drawn anew from the target."""
    logits = np.random.default_rng(1).normal(0, 3, (64, 3, VOCAB)).astype(np.float32)
    p = distribution(jnp.asarray(logits), jnp.full(64, 0.7))
    seed, at = jnp.zeros((64, 2), jnp.uint32), 4 * jnp.arange(64, dtype=jnp.int32)
    drafted = jnp.stack([draw(p[:, k], seed, at + k, DRAFT, at) for k in range(2)], axis=1)
    verdict = judge(p, p[:, :2], drafted, seed, at)
    assert (np.asarray(verdict.accepted) == 2).all()
    np.testing.assert_allclose(verdict.analytic, 1, atol=1e-6)
    impossible = jnp.zeros((64, 2), jnp.int32)
    p = p.at[..., 0].set(0)
    again = judge(p, p[:, :2], impossible, seed, at)
    assert (np.asarray(again.accepted) == 0).all()
    assert (np.take_along_axis(np.asarray(p[:, 0]), np.asarray(again.token)[:, None], axis=1) > 0).all()


# ------------------------------------------------------------------------------------------- bad input


def changed(config, **fields):
    return dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, **fields))


def test_what_cannot_be_run_is_named(run, tiny):
    with pytest.raises(dj.DeepInferError, match="prompt 1: token id 128 at 0"):
        run([[5], [128], []])
    with pytest.raises(dj.DeepInferError, match="prompt 0: 1000 tokens and max_tokens 24 exceed max_length 1021"):
        run([[5] * 1000])
    with pytest.raises(dj.DeepInferError, match="temperature: found -1"):
        run(temperature=-1)
    for fields, said in (
        ({"dspark_block_size": 9}, "dspark_block_size: found 9, expected at most 8"),
        ({"num_nextn_predict_layers": 0, "compress_ratios": tiny.config.text_config.compress_ratios[:6]},
         "num_nextn_predict_layers: found 0, expected at least 1"),
    ):  # fmt: skip
        with pytest.raises(dj.DeepInferError, match=said):
            speculate(tiny.params, changed(tiny.config, **fields), [[5]], numerics=FP32)


# ------------------------------------------------------------------------------------- how it is computed


@pytest.mark.slow
@pytest.mark.optimized
def test_rounds_are_pure_and_hold_no_copy_of_the_cache(tiny):
    made = speculative.programs(Setup(tiny.config, FP32, Layout.of(tiny.mesh, 8)))
    none = np.zeros(8, np.int32)
    rows = speculative.Rows(none, none, np.zeros((8, 2), np.uint32), np.zeros(8, np.float32), none)
    state = jax.eval_shape(lambda rows: made._init(259, rows), rows)
    assert not jax.make_jaxpr(lambda p, s: made._rounds(p, s, count=2))(tiny.params, state).effects
    text = made.rounds.lower(tiny.params, state, count=2).compile().as_text()
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.cache) if leaf.ndim >= 3}
    assert not shapes & results_of(text, "copy").keys()
