"""Tokens per second of generation at several batch sizes, and the host's work per decoded token.

    python scripts/bench_generate.py [CHECKPOINT] [--batch 1,8,32] [--tokens 64] [--numerics released]

The host's work is measured in two ways. `host` is the time of a run that the host does not spend waiting for results,
per token; on a CPU it holds whatever the device does inside a dispatch. `bare` is the whole time per token of the same
run with a model that has no layers, so nearly all of it is host work. Times are the best of several runs after a
warm-up; on a shared machine trust ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

import deepinfer_jax as dj
from deepinfer_jax.engine.requests import check_requests
from deepinfer_jax.engine.schedule import Request, Schedule, warm_up
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.generate import Programs, Setup, programs
from deepinfer_jax.parallel.mesh import Layout


@dataclasses.dataclass
class Timing:
    """Seconds of the parts of one run."""

    whole: float = 0.0
    waiting: float = 0.0
    tokens: int = 0


def no_layers(model: dj.V41) -> None:
    """A model of embedding and head alone."""
    model.layers = nnx.List([])


def timed_run(made: Programs, params: Any, requests: list[Request], sizes: Sizes) -> Timing:
    """One run."""
    timing = Timing()

    def fetch(tokens: Any) -> Any:
        start = time.perf_counter()
        out = jax.device_get(tokens)
        timing.waiting += time.perf_counter() - start
        return out

    start = time.perf_counter()
    for update in Schedule(made, params, requests, sizes, fetch=fetch).updates():
        timing.tokens += len(update.ids)
    timing.whole = time.perf_counter() - start
    return timing


def best(made: Programs, params: Any, requests: list[Request], sizes: Sizes, repeats: int) -> Timing:
    """The fastest of several runs."""
    warm_up(made, params, sizes)
    timed_run(made, params, requests, sizes)
    return min((timed_run(made, params, requests, sizes) for _ in range(repeats)), key=lambda t: t.whole)


def main() -> None:
    """Print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="tests/data/v41_tiny")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per prompt")
    parser.add_argument("--steps", default="8", help="tokens per dispatch, for instance 1,4,16")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill call")
    parser.add_argument("--numerics", default="released")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    numerics = dj.Numerics.named(args.numerics)
    config, params = dj.load(args.checkpoint, numerics=numerics, progress=False)
    bare_params = {k: v for k, v in params.items() if k != "layers"}
    length = args.prompt + args.tokens
    sampling = dj.SamplingParams(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True)
    device = jax.devices()[0]
    print(f"{args.checkpoint}, {args.numerics}, {device.device_kind} ({device.platform}), jax {jax.__version__}")
    print(f"prompts of {args.prompt} tokens, {args.tokens} new tokens each, temperature {args.temperature}")
    print("batch steps     tok/s  ms/step prefill tok/s host us/token bare us/token")
    rng = np.random.default_rng(0)
    for batch in map(int, args.batch.split(",")):
        prompts = rng.integers(2, config.text_config.vocab_size - 2, (batch, args.prompt)).tolist()
        requests = check_requests(prompts, [sampling] * batch, config, length)
        one = [dataclasses.replace(r, params=dataclasses.replace(sampling, max_tokens=1)) for r in requests]
        setup = Setup(config, numerics, Layout.of(dj.make_mesh(), batch))
        bare = dataclasses.replace(setup, definition=dj.define(config, no_layers))
        for steps in map(int, args.steps.split(",")):
            sizes = Sizes(batch, length, steps, args.chunk)
            run = best(programs(setup), params, requests, sizes, args.repeats)
            first = best(programs(setup), params, one, sizes, args.repeats)
            empty = best(programs(bare), bare_params, requests, sizes, args.repeats)
            decode = run.whole - first.whole
            made = run.tokens - batch
            print(
                f"{batch:5} {steps:5} {made / decode:9.0f} {decode / (args.tokens - 1) * 1e3:8.2f} "
                f"{batch * args.prompt / first.whole:13.0f} {(run.whole - run.waiting) / run.tokens * 1e6:13.1f} "
                f"{empty.whole / empty.tokens * 1e6:13.1f}"
            )


if __name__ == "__main__":
    main()
