"""Pictures of a training run, `loss.png` and `experts.png`: `python -m scripts.nano.draw build/nano/run`.

They ship with a checkpoint of limited size, so they are small: half-size, with a palette.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

FAIR_SHARE = 0.2
"""Least share of an expert that the project asks for, as a part of 1 / experts."""


def read_log(file: Path) -> dict[str, np.ndarray]:
    """Columns of a `.jsonl` log; NaN where a line lacks a value."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = sorted({name for line in lines for name in line})
    return {name: np.array([line.get(name, np.nan) for line in lines]) for name in names}


def draw_loss(trunk: dict[str, np.ndarray], drafter: dict[str, np.ndarray] | None, file: Path) -> None:
    """Loss of the layers, with looks at held-out text, and of the drafter beside it."""
    figure, axes = plt.subplots(1, 1 if drafter is None else 2, figsize=(10, 4), squeeze=False)
    left = axes[0, 0]
    left.plot(trunk["step"], trunk["loss"], label="training (weighted)")
    if "held out" in trunk:
        seen = ~np.isnan(trunk["held out"])
        left.plot(trunk["step"][seen], trunk["held out"][seen], "o-", label="held-out prose")
    left.set(xlabel="step", ylabel="nats per token", title="Layers", ylim=(0, 7))
    left.legend()
    if drafter is not None:
        right = axes[0, 1]
        right.plot(drafter["step"], drafter["loss"], label="KL(layers || draft), nats")
        right.plot(drafter["step"], drafter["expected length"], label="expected tokens of a round at temperature 1")
        right.set(xlabel="step", title="Drafter", ylim=(0, 6))
        right.legend()
    _save(figure, file)


def draw_experts(loads: dict[str, list[float]], file: Path) -> None:
    """Share of each expert on held-out text, 1 being fair; layers from top to bottom."""
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(loads) + 1.5))
    widest = max(map(len, loads.values()))
    table = np.full((len(loads), widest), np.nan)
    for row, share in enumerate(loads.values()):
        table[row, : len(share)] = np.array(share) * len(share)
    image = axes.imshow(table, aspect="auto", vmin=0, vmax=2, cmap="RdBu")
    axes.set_yticks(range(len(loads)), [name.removesuffix(".ffn.load") for name in loads])
    least = float(np.nanmin(table))
    axes.set(xlabel="expert", title=f"Load of every expert over its fair share (least {least:.2f}, bar {FAIR_SHARE})")
    figure.colorbar(image)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=60)
    plt.close(figure)
    shrink(file)


def shrink(file: Path, widest: int = 750, colours: int = 16) -> None:
    """Rewrite a picture with a palette, and at most so many pixels wide."""
    with Image.open(file) as image:
        small = image.convert("RGB")
    if small.width > widest:
        small = small.resize((widest, round(small.height * widest / small.width)), Image.Resampling.LANCZOS)
    small.quantize(colours).save(file, optimize=True)


def main(folder: Annotated[Path, typer.Argument(help="The --out of a training run.")]) -> None:
    """Draw what the logs and figures of a run hold; the checkpoint's reliability diagram is made smaller."""
    drafter = folder / "drafter.jsonl"
    second = read_log(drafter) if drafter.is_file() and drafter.stat().st_size else None
    draw_loss(read_log(folder / "layers.jsonl"), second, folder / "loss.png")
    if (folder / "figures.json").is_file():
        figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
        draw_experts(figures["layers"]["loads"] | figures["drafter"]["loads"], folder / "experts.png")
    diagram = folder / "checkpoint" / "confidence.png"
    if diagram.is_file():
        shrink(diagram)


if __name__ == "__main__":
    typer.run(main)
