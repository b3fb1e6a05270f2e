"""Generation gives what the model says, whatever the batching."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.requests import needed_length
from deepinfer_jax.engine.schedule import Schedule
from tests.helpers import compilations

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def run(llm, prompts, sampling, **options):
    """`generate` with the fixture's sizes, so that programs are shared."""
    options = {"batch_size": 8, "max_length": 256, "steps": 4, "chunk": 64, **options}
    return dj.generate(llm.params, llm.config, prompts, sampling, numerics=llm.numerics, **options)


def ids(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def logits_of(tiny):
    """Logits of a whole sequence in one call: [length, V]."""
    call = jax.jit(dj.forward, static_argnames=("config", "numerics"))
    cache = dj.init_cache(tiny.config, tiny.numerics, 1, 256)

    def logits(tokens):
        padded = np.zeros((1, 112), np.int32)
        padded[0, : len(tokens)] = tokens
        positions = np.where(np.arange(112) < len(tokens), np.arange(112), -1)[None]
        batch = dj.Batch(jnp.asarray(padded), jnp.asarray(positions), jnp.zeros(1, jnp.int32))
        out, _ = call(tiny.params, tiny.config, batch, cache, numerics=tiny.numerics)
        return np.asarray(out.logits[0, : len(tokens)])

    return logits


@pytest.fixture(scope="module")
def mixed(ragged):
    """Sampling parameters for the fifty prompts: greedy, filtered and plain draws side by side."""
    kinds = [
        {"temperature": 0},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 7, "min_p": 0.01},
        {"temperature": 1.5, "n": 2},
    ]
    return [SamplingParams(max_tokens=3 + i % 11, **kinds[i % 5]) for i in range(50)]


@pytest.fixture(scope="module")
def reference(tiny, ragged, mixed):
    return ids(run(tiny, ragged, mixed))


def test_greedy_generation_is_the_argmax_chain_of_full_forwards(tiny, ragged, logits_of):
    prompts = [ragged[i] for i in (0, 3, 7, 20, 41)] + [[5]]
    for prompt, (generated,) in zip(prompts, ids(run(tiny, prompts, GREEDY)), strict=True):
        chain = list(prompt)
        for token in generated:
            assert token == int(np.argmax(logits_of(chain)[-1]))
            chain.append(token)


def test_a_long_prompt_is_prefilled_in_chunks(tiny):
    """More than one chunk and more than one context limit, against one call for the whole sequence."""
    prompt = np.random.default_rng(2).integers(2, 126, 700).tolist()
    got = ids(run(tiny, [prompt, prompt[:300]], SamplingParams(temperature=0, max_tokens=3), max_length=1024))
    call = jax.jit(dj.forward, static_argnames=("config", "numerics"))
    cache = dj.init_cache(tiny.config, tiny.numerics, 1, 1024)
    for n, ((generated,),) in zip((700, 300), ((g,) for g in got), strict=True):
        tokens = np.array([prompt[:n] + list(generated[:2]) + [0] * (700 - n)], np.int32)
        positions = np.where(np.arange(702) < n + 2, np.arange(702), -1)[None]
        batch = dj.Batch(jnp.asarray(tokens), jnp.asarray(positions), jnp.zeros(1, jnp.int32))
        out, _ = call(tiny.params, tiny.config, batch, cache, numerics=tiny.numerics)
        assert np.argmax(np.asarray(out.logits[0, n - 1 : n + 2]), axis=-1).tolist() == list(generated)


@pytest.mark.parametrize("steps", [1, 16])
def test_steps_per_dispatch_change_no_token(tiny, ragged, mixed, reference, steps):
    assert ids(run(tiny, ragged, mixed, steps=steps)) == reference


@pytest.mark.parametrize("batch_size", [3, 16])
def test_no_grouping_of_fifty_ragged_prompts_changes_a_token(tiny, ragged, mixed, reference, batch_size):
    each = [p if p.seed is not None else SamplingParams(**{**p.to_dict(), "seed": i}) for i, p in enumerate(mixed)]
    order = np.random.default_rng(batch_size).permutation(50)
    shuffled = run(tiny, [ragged[i] for i in order], [each[i] for i in order], batch_size=batch_size, chunk=16)
    assert {int(i): got for i, got in zip(order, ids(shuffled), strict=True)} == dict(enumerate(reference))


def test_nothing_is_compiled_after_the_warm_up(tiny, ragged, mixed):
    tiny.warm_up(logprobs=(None, 3))
    with compilations() as names:
        tiny.generate(ragged, mixed)
        tiny.generate(ragged[5])
        tiny.generate(ragged[:9], SamplingParams(max_tokens=5, logprobs=3))
    assert names == []
    with compilations() as names:
        jax.jit(lambda x: x * 31.5)(1.0)
    # The control: the counter counts.
    assert names


def test_equal_requests_give_equal_tokens_in_any_place(tiny, ragged):
    one = SamplingParams(seed=11, max_tokens=10)
    prompts = [*ragged[:6], ragged[9], *ragged[6:9], ragged[9], ragged[9]]
    got = ids(run(tiny, prompts, [one if p == ragged[9] else SamplingParams(max_tokens=7) for p in prompts]))
    assert got[6] == got[10] == got[11]
    other = ids(run(tiny, [ragged[9]], SamplingParams(seed=12, max_tokens=10)))
    assert other[0] != got[6]


def test_samples_of_a_prompt_differ_and_share_its_prefill(tiny, ragged):
    prompt = ragged[1]
    params = SamplingParams(n=8, seed=5, max_tokens=10)
    (output,) = run(tiny, [prompt], params)
    assert [one.index for one in output.outputs] == list(range(8))
    assert len({one.token_ids for one in output.outputs}) == 8
    # With room for one sample at a time there is nothing to share, and the tokens are the same.
    (alone,) = run(tiny, [prompt], params, batch_size=1)
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in output.outputs]


def test_log_probabilities_are_those_of_a_full_forward(tiny, ragged, logits_of):
    prompts = ragged[:3]
    params = SamplingParams(temperature=1.3, top_k=20, max_tokens=6, logprobs=4)
    for prompt, output in zip(prompts, run(tiny, prompts, params), strict=True):
        (one,) = output.outputs
        want = jax.nn.log_softmax(jnp.asarray(logits_of([*prompt, *one.token_ids])[len(prompt) - 1 : -1]))
        assert len(one.logprobs) == len(one.token_ids) == 6
        for row, entry, token in zip(np.asarray(want), one.logprobs, one.token_ids, strict=True):
            assert entry.token_id == token
            assert abs(entry.logprob - row[token]) < 1e-4
            assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:4].tolist()
            np.testing.assert_allclose([p for _, p in entry.top], np.sort(row)[::-1][:4], atol=1e-4)


def test_logprobs_zero_is_the_chosen_token_and_none_is_nothing(tiny, ragged):
    each = [SamplingParams(max_tokens=3, logprobs=k) for k in (0, None, 2)]
    chosen, nothing, two = (o.outputs[0].logprobs for o in run(tiny, ragged[:3], each))
    assert [len(entry.top) for entry in chosen] == [0, 0, 0]
    assert nothing is None
    assert [len(entry.top) for entry in two] == [2, 2, 2]


def test_a_stop_id_ends_a_sample_and_is_its_last_token(tiny, ragged):
    (free,) = run(tiny, [ragged[2]], GREEDY)
    tokens = free.outputs[0].token_ids
    stop = tokens[5]
    first = tokens.index(stop)
    for steps in (1, 4):
        (output,) = run(
            tiny, [ragged[2]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,)), steps=steps
        )
        (one,) = output.outputs
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (tokens[: first + 1], "stop", stop)


def test_no_stop_before_min_tokens_and_none_at_all_with_ignore_eos(tiny, ragged):
    (free,) = run(tiny, [ragged[2]], GREEDY)
    first = free.outputs[0].token_ids[0]
    early = SamplingParams(temperature=0, max_tokens=12, min_tokens=4, stop_token_ids=(first,))
    (output,) = run(tiny, [ragged[2]], early)
    # The id is not drawn before it may end the sample.
    assert first not in output.outputs[0].token_ids[:4]
    # Make the first greedy token the end-of-sequence id of the model.
    config = dj.ModelConfig.from_dict({**tiny.config.to_dict(), "eos_token_id": int(first)})
    options = {"numerics": tiny.numerics, "batch_size": 8, "max_length": 256, "steps": 4, "chunk": 64}
    (ended,) = dj.generate(tiny.params, config, [ragged[2]], GREEDY, **options)
    assert ended.outputs[0].token_ids == (first,)
    assert ended.outputs[0].stop_reason == first
    ignoring = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (whole,) = dj.generate(tiny.params, config, [ragged[2]], ignoring, **options)
    assert whole.outputs[0].token_ids == free.outputs[0].token_ids


def test_a_prompt_up_to_the_limit_runs_and_one_more_is_refused(tiny):
    prompt = [7] * 255
    (output,) = run(tiny, [prompt], SamplingParams(temperature=0))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
    with pytest.raises(dj.DeepInferError, match="prompt 0: 256 tokens leave no room to generate, max_length is 256"):
        run(tiny, [[7] * 256], None)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt 1: empty, expected at least one token"),
        ([3, 128], "prompt 1: token id 128 at 1 is not in 0..127"),
        ([3, -1], "prompt 1: token id -1 at 1 is not in 0..127"),
        ([3, 1.5], "prompt 1: found 1.5 at 1, expected token ids"),
        ([True], "prompt 1: found True at 0, expected token ids"),
        ("abc", "prompt 1: found str, expected token ids"),
        (None, "prompt 1: found NoneType, expected token ids"),
        ([3] * 200, "prompt 1: 200 tokens and max_tokens 100 exceed max_length 256"),
    ],
)
def test_a_bad_prompt_is_named(tiny, prompt, said):
    with pytest.raises(dj.DeepInferError) as error:
        run(tiny, [[5], prompt, []], SamplingParams(max_tokens=100))
    assert said in error.value.faults
    assert "prompt 2: empty, expected at least one token" in error.value.faults


def test_bad_sampling_arguments_are_named(tiny):
    with pytest.raises(dj.DeepInferError, match="found 2 SamplingParams for 1 prompts"):
        run(tiny, [[5]], [GREEDY, GREEDY])
    with pytest.raises(dj.DeepInferError, match="found dict, expected SamplingParams"):
        run(tiny, [[5]], [{}])
    with pytest.raises(dj.DeepInferError, match=r"prompt 0: stop_token_ids has 500, expected ids of 0 to 127"):
        run(tiny, [[5]], SamplingParams(stop_token_ids=(500,)))
    with pytest.raises(dj.DeepInferError, match="slots: found 0"):
        run(tiny, [[5]], GREEDY, batch_size=0)


def test_no_prompts_give_no_results(tiny):
    assert run(tiny, [], GREEDY) == []


def test_what_cannot_be_done_without_a_tokenizer_or_a_prompt_is_refused(tiny):
    with pytest.raises(dj.DeepInferError, match="stop: strings are found in text, which needs a tokenizer"):
        run(tiny, [[5]], SamplingParams(stop="x"))
    with pytest.raises(dj.DeepInferError, match="prompt 0: found NoneType, expected token ids"):
        run(tiny, [None], GREEDY, max_length=None)
    with pytest.raises(dj.DeepInferError, match="prompts: found NoneType, expected texts or lists of token ids"):
        run(tiny, None, GREEDY)


def test_caches_are_made_for_what_the_requests_need(tiny):
    config = dj.ModelConfig.named("deepseek_v41_flash")
    some = SamplingParams(max_tokens=100)
    assert needed_length([[1] * 28, [1] * 29], [some, some], config) == 256
    assert needed_length([[1]], [SamplingParams()], config) == 4096
    assert needed_length([[1] * 5000], [SamplingParams()], config) == 8192
    assert needed_length([[1] * 2_000_000], [some], config) == 1_048_576


def test_another_sampler_draws_the_tokens(tiny, ragged):
    def second_best(logits, rows, positions):
        return jnp.argsort(-logits, axis=-1)[:, 1].astype(jnp.int32)

    outputs = run(tiny, ragged[:2], SamplingParams(max_tokens=4, logprobs=2), sampler=second_best)
    for output in outputs:
        assert [e.top[1][0] for e in output.outputs[0].logprobs] == list(output.outputs[0].token_ids)


def test_a_run_reads_results_one_dispatch_late(tiny, ragged):
    """The device always has the next dispatch when the host waits for one."""
    from deepinfer_jax.engine.requests import check_requests
    from deepinfer_jax.engine.sizes import Sizes

    made, events = tiny._programs(8), []

    class Watched(Schedule):
        def _decode(self, state):
            events.append("dispatch")
            return super()._decode(state)

    def fetch(tokens):
        events.append("read")
        return jax.device_get(tokens)

    requests = check_requests(ragged[:8], [SamplingParams(max_tokens=16)] * 8, tiny.config, 256)
    list(Watched(made, tiny.params, requests, Sizes(8, 256, 4), fetch=fetch).updates())
    assert events == ["dispatch", "dispatch", "read", "dispatch", "read", "dispatch", "read", "read"]
    assert collections.Counter(events)["dispatch"] == 4
