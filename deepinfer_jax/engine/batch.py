"""Batch generation over token ids: requests in, ordered results out. `LLM` adds text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.outputs import RequestOutput, Sample
from deepinfer_jax.engine.requests import check_requests, list_of_prompts, needed_length, params_of_each
from deepinfer_jax.engine.schedule import Request, Schedule, Update
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.errors import InputError
from deepinfer_jax.generate import Programs, Setup, programs
from deepinfer_jax.model.v41 import V41, Params
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.numerics_version import numerics_version
from deepinfer_jax.parallel.mesh import Layout, make_mesh, param_shardings
from deepinfer_jax.sampling import Sampler, sample
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.tokenizer import TextTokenizer


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    numerics: Numerics = Numerics(),  # noqa: B008 - frozen
    batch_size: int = 8,
    max_length: int | None = None,
    steps: int = 8,
    chunk: int = 256,
    seed: int = 0,
    mesh: Mesh | None = None,
    definition: nnx.GraphDef[V41] | None = None,
    sampler: Sampler = sample,
) -> list[RequestOutput]:
    """Continue prompts of token ids.

    Neither the batch size, nor `steps` and `chunk`, nor the order of the prompts, nor the mesh changes what is
    computed; they change its speed (and last bits, and so a token where two are equally probable).

    Args:
        params: Weights; on a mesh of several devices placed by `parallel.mesh.param_shardings`.
        prompts: Token ids, any lengths.
        sampling: One for all prompts, or one each.
        numerics: Which roundings apply.
        batch_size: Sequences generated at once; more than that wait.
        max_length: Most tokens of a sequence, by default as many as these prompts can need. Caches are made for it.
        steps: Tokens decoded per dispatch.
        chunk: Tokens of a prefill call.
        seed: Prompt i without a seed gets seed + i.
        mesh: Of `make_mesh`; default one device.
        definition: A changed model.
        sampler: Another way to draw tokens.

    Returns:
        Results in the order of the prompts; `text` is None.

    Raises:
        InputError: With all faults of the prompts.
    """
    prompts = list_of_prompts(prompts)
    each = params_of_each(sampling, len(prompts))
    if any(p.stop for p in each):
        raise InputError("stop: strings are found in text, which needs a tokenizer: use LLM, or stop_token_ids")
    length = needed_length(prompts, each, config) if max_length is None else max_length
    sizes = Sizes(batch_size, length, steps, chunk)
    requests = check_requests(prompts, each, config, length, seed=seed)
    mesh = make_mesh() if mesh is None else mesh
    params = jax.device_put(params, param_shardings(params, mesh))
    made = programs(Setup(config, numerics, Layout.of(mesh, batch_size), definition, sampler))
    happened = run(made, params, requests, sizes)
    return sorted((p.output for p in happened if p.output is not None), key=lambda output: output.index)


class Progressed(NamedTuple):
    """One step of a run.

    Attributes:
        update: New tokens of a sample.
        sample: All of it so far.
        output: The request's result, when this update finished it.
    """

    update: Update
    sample: Sample
    output: RequestOutput | None


def run(
    made: Programs,
    params: Params,
    requests: Sequence[Request],
    sizes: Sizes,
    *,
    tokenizer: TextTokenizer | None = None,
    texts: Sequence[str | None] | None = None,
) -> Iterator[Progressed]:
    """Everything that happens, as it happens.

    Args:
        tokenizer: Makes text of the ids and finds stop strings in it.
        texts: Prompts as they were given.
    """
    schedule = Schedule(made, params, requests, sizes)
    version = numerics_version(made.setup.numerics, forked=made.setup.definition is not None)
    samples = [[Sample(s, r, tokenizer) for s in range(r.params.n)] for r in requests]
    left = [r.params.n for r in requests]
    for update in schedule.updates():
        one = samples[update.request][update.sample]
        if one.add(update):
            schedule.stop(update.request, update.sample)
        left[update.request] -= one.finish is not None
        finished = one.finish is not None and not left[update.request]
        output = None
        if finished:
            i, text = update.request, None if texts is None else texts[update.request]
            done = tuple(sample.completion() for sample in samples[i])
            # Long runs should not keep what nobody needs any more.
            samples[i] = []
            output = RequestOutput(i, text, tuple(requests[i].ids.tolist()), done, requests[i].seed, version)
        yield Progressed(update, one, output)
