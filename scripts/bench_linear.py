"""Linears on packed weights on a CPU: custom calls against the reference, in turns.

    python scripts/bench_linear.py [CHECKPOINT]

Prints the time of an FP4 product of the released width, and of decoding with a small checkpoint. The reference decodes
the weight at each use (as a model must that does not fit expanded); `expanded` is it with weights decoded before.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as dj
from deepinfer_jax.formats import quantize_weight
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.ops.linear import quantized_linear

RELEASED = dj.Numerics.named("released")
CUSTOM = dataclasses.replace(RELEASED, kernels=Kernels(linear="cpu"))


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def products(rounds: int) -> None:
    """One expert's matrix, 4608 x 5120, at 1, 8 and 32 rows."""
    random = np.random.default_rng(0)
    w = quantize_weight(jnp.asarray(random.standard_normal((4608, 5120), np.float32)), "fp4")
    wide = w.decode(jnp.bfloat16)
    for rows in (1, 8, 32):
        x = jnp.asarray(random.standard_normal((rows, 5120), np.float32), jnp.bfloat16)
        reference = jax.jit(lambda x, w: quantized_linear(x, w, RELEASED))
        custom = jax.jit(lambda x, w: quantized_linear(x, w, CUSTOM))
        times = in_turns(
            {
                "reference": lambda x=x, f=reference: f(x, w),
                "expanded": lambda x=x, f=reference: f(x, wide),
                "custom": lambda x=x, f=custom: f(x, w),
            },
            rounds,
        )
        _print(f"FP4 4608 x 5120, {rows} rows", times)


def decoding(checkpoint: str, rounds: int) -> None:
    """96 tokens after a prompt of 32, at batch 1 and 8."""
    random = np.random.default_rng(0)
    sampling = dj.SamplingParams(temperature=0, max_tokens=97, ignore_eos=True)
    for batch in (1, 8):
        options = {"max_length": 256, "batch_size": batch, "steps": 32, "progress": False}
        llms = {
            "reference": dj.LLM(checkpoint, numerics=RELEASED, expand="none", **options),
            "expanded": dj.LLM(checkpoint, numerics=RELEASED, **options),
            "custom": dj.LLM(checkpoint, numerics=CUSTOM, **options),
        }
        prompts = [[0, *random.integers(10, 4000, 31).tolist()] for _ in range(batch)]
        calls = {name: lambda llm=llm, p=prompts: llm.generate(p, sampling) for name, llm in llms.items()}
        _print(f"decoding, batch {batch}", in_turns(calls, rounds))


def _print(case: str, times: dict[str, float]) -> None:
    ratios = "  ".join(f"{name} {seconds / times['custom']:.2f} x" for name, seconds in times.items())
    print(f"{case}: custom {times['custom'] * 1e3:.1f} ms; {ratios}", flush=True)


def main() -> None:
    """Both benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="checkpoints/nano")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    products(args.rounds)
    decoding(args.checkpoint, args.rounds)


if __name__ == "__main__":
    main()
