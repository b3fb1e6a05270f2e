"""Text that the trained layers write themselves: the drafter meets it in use, and corpora hold little like it.

    python -m scripts.nano.own_text build/nano/run/checkpoint --data build/nano

Prompts are like the held-out ones, but from training text. Each is continued greedily once and sampled some times:
what is sampled wanders off from every corpus, and drafts are hardest there. The texts become one more source of the
drafter, `train/own.npy`, or are added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import deepinfer_jax as dj
from scripts.nano.prompts import prompts_of
from scripts.nano.streams import MIXTURE, OWN


def written(llm: dj.LLM, prompts: Sequence[Sequence[int]], new: int, sampled: int) -> list[np.ndarray]:
    """Each prompt with a continuation, uint16[N]: all continuations of the first prompt, then of the second, ..."""
    found = [
        llm.generate(list(prompts), dj.SamplingParams(temperature=temperature, n=n, max_tokens=new))
        for temperature, n in ((0.0, 1), (1.0, sampled))
    ]
    return [
        np.array([*prompt, *sample.token_ids], np.uint16)
        for prompt, *outputs in zip(prompts, *found, strict=True)
        for output in outputs
        for sample in output.outputs
    ]


def main(
    checkpoint: Annotated[Path, typer.Argument(help="The trained layers; the drafter is not asked.")],
    data: Annotated[Path, typer.Option(help="What `prepare` wrote.")] = Path("build/nano"),
    count: Annotated[int, typer.Option(help="Prompts of each source.")] = 600,
    sampled: Annotated[int, typer.Option(help="Sampled continuations beside each greedy one.", min=1)] = 3,
    new: Annotated[int, typer.Option(help="Tokens of a continuation.")] = 160,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    add: Annotated[bool, typer.Option("--add", help="Keep the texts that are there already.")] = False,
) -> None:
    """Write `own.npy` beside the other sources of `train`."""
    config = dj.ModelConfig.from_file(checkpoint)
    room = min(1024, config.text_config.max_position_embeddings) - new
    each = {name: prompts_of(data / "train", name, count) for name in MIXTURE}
    prompts = [prompt for row in zip(*each.values(), strict=True) for prompt in row if len(prompt) <= room]
    llm = dj.LLM(checkpoint, batch_size=batch, max_length=room + new, steps=16, chunk=16 * batch, seed=seed)
    texts = written(llm, prompts, new, sampled)
    file = data / "train" / f"{OWN}.npy"
    stream = np.concatenate([np.load(file), *texts] if add else texts)
    np.save(file, stream)
    print(f"{len(texts):,} texts, {len(stream):,} tokens in all")


if __name__ == "__main__":
    typer.run(main)
