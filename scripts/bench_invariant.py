"""The price of `Numerics.batch_invariant`: time with the mode on over time with it off, taking turns in one run.

    python scripts/bench_invariant.py [CHECKPOINT] [--batch 1,8] [--rounds 4]

Decoding: 96 tokens after a prompt of 32, in a batch. Prefill: one prompt of 512. Medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import numpy as np

import deepinfer_jax as dj

DECODE = dj.SamplingParams(temperature=0, max_tokens=97, ignore_eos=True)
PREFILL = dj.SamplingParams(temperature=0, max_tokens=1)


def seconds(llm: dj.LLM, prompts: list[list[int]], sampling: dj.SamplingParams) -> float:
    """Time of one call."""
    start = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - start


def main() -> None:
    """Print a line per batch size and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="checkpoints/nano")
    parser.add_argument("--batch", default="1,8", help="batch sizes")
    parser.add_argument("--rounds", type=int, default=4, help="times that both take turns")
    args = parser.parse_args()
    plain = dj.Numerics.named("released")
    config, params = dj.load(args.checkpoint, numerics=plain, progress=False)
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [0, *random.integers(10, config.text_config.vocab_size // 2, length - 1).tolist()]

    for batch in map(int, args.batch.split(",")):
        modes = (plain, dataclasses.replace(plain, batch_invariant=True))
        options = {"max_length": 1024, "batch_size": batch, "steps": 32, "progress": False}
        llms = [dj.LLM.of(config, params, numerics=mode, **options) for mode in modes]
        cases = {"decode": ([prompt(32) for _ in range(batch)], DECODE), "prefill": ([prompt(512)], PREFILL)}
        for name, case in cases.items():
            for llm in llms:
                seconds(llm, *case)
            times = [[seconds(llm, *case) for llm in llms] for _ in range(args.rounds)]
            ratios = [on / off for off, on in times]
            print(
                f"batch {batch}, {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
                f"times the time without the mode, {statistics.median(off for off, _ in times):.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
