"""The price of `Numerics.batch_invariant`: time with the mode on over time with it off, taking turns in one run.

    python scripts/bench_invariant.py [CHECKPOINT] [--batch 1,8,64] [--rounds 4]
    python scripts/bench_invariant.py --real-width [--batch 1,8]

Decoding: tokens after a prompt of 32, in a batch. Prefill: one long prompt. Medians, with the least and the most.
With `--real-width` the model is layer 2 of the released one (it has compressor and indexer), with 8 of its 384 experts
and random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

import deepinfer_jax as dj
from deepinfer_jax.checkpoint.reader import expand_params
from deepinfer_jax.layer_slice import slice_layers
from deepinfer_jax.model.v41 import Params, abstract_params

EXPERTS = 8
VOCABULARY = 8192


def seconds(llm: dj.LLM, prompts: list[list[int]], sampling: dj.SamplingParams) -> float:
    """Time of one call."""
    start = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - start


def real_width() -> tuple[dj.ModelConfig, Params]:
    """One layer of the released width. The vocabulary is cut, so that the head does not hide the layer."""
    config = slice_layers(dj.ModelConfig.named("deepseek_v41_flash"), 2, 2)
    text = dataclasses.replace(
        config.text_config, n_routed_experts=EXPERTS, vocab_size=VOCABULARY, dspark_noise_token_id=VOCABULARY - 1
    )
    config = dataclasses.replace(config, text_config=text)
    random = np.random.default_rng(0)

    def leaf(like: jax.ShapeDtypeStruct) -> np.ndarray:
        """Random bytes that are finite numbers in every format."""
        size = like.size * like.dtype.itemsize
        return random.integers(0, 56, size, np.uint8, endpoint=True).view(like.dtype).reshape(like.shape)

    params = jax.tree.map(leaf, abstract_params(config))
    return config, expand_params(jax.tree.map(jax.numpy.asarray, params), "bfloat16")


def main() -> None:
    """Print a line per batch size and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="checkpoints/nano")
    parser.add_argument("--batch", default="1,8,64", help="batch sizes")
    parser.add_argument("--real-width", action="store_true", help="one layer of the released width")
    parser.add_argument("--rounds", type=int, default=4, help="times that both take turns")
    args = parser.parse_args()
    plain = dj.Numerics.named("released")
    if args.real_width:
        (config, params), new, long = real_width(), 16, 256
    else:
        (config, params), new, long = dj.load(args.checkpoint, numerics=plain, progress=False), 96, 512
    decode = dj.SamplingParams(temperature=0, max_tokens=new + 1, ignore_eos=True)
    once = dj.SamplingParams(temperature=0, max_tokens=1)
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [0, *random.integers(10, config.text_config.vocab_size // 2, length - 1).tolist()]

    for batch in map(int, args.batch.split(",")):
        modes = (plain, dataclasses.replace(plain, batch_invariant=True))
        options = {"max_length": 1024, "batch_size": batch, "steps": 32, "progress": False}
        llms = [dj.LLM.of(config, params, numerics=mode, **options) for mode in modes]
        cases = {"decode": ([prompt(32) for _ in range(batch)], decode), "prefill": ([prompt(long)], once)}
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
