"""Trains the nano checkpoint: first the layers, then the drafter on the frozen layers.

    python -m scripts.nano.train layers --data build/nano --out build/nano/run
    python -m scripts.nano.own_text build/nano/run/checkpoint --data build/nano
    python -m scripts.nano.train drafter --data build/nano --out build/nano/run
    python -m scripts.nano.train drafter --data build/nano --out build/nano/run --more 1

One GPU for some minutes each. An interrupted run goes on from its last Orbax checkpoint when it is started again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer

from deepinfer_jax.checkpoint import load
from deepinfer_jax.checkpoint.writer import quantize_params, save_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.text.token_map import load_token_map
from scripts.nano.config import NOISE, SEQUENCE, nano_config
from scripts.nano.evaluate import evaluate_drafts, evaluate_trunk, quick_loss
from scripts.nano.forward import count
from scripts.nano.model import FLOAT, TRAINED
from scripts.nano.optimizer import learning_rate
from scripts.nano.steps import Trainer, draft_trainer, trunk_trainer
from scripts.nano.streams import DRAFT_MIXTURE, read_streams, sample
from scripts.nano.weights import as_released, initial_params, is_quantized, with_token_map

SHARD_BYTES = 15 << 20
LOGGED = 25
"""Steps between lines of the log."""


def run(
    name: str,
    trainer: Trainer,
    params: Params,
    feed: Callable[[int], tuple],
    *,
    steps: int,
    peak: float,
    decay: float,
    out: Path,
    states: Path,
    save_every: int,
    check: Callable[[int, Params], dict[str, float]] = lambda i, params: {},
) -> Params:
    """All steps, going on from the last checkpoint in `states`; gives the trained tree.

    Metrics go to `out/<name>.jsonl`, a line per 25 steps, with the steps that were skipped since their metrics were not
    finite, if any; `check` adds what it measures to the line.

    Raises:
        SystemExit: No step of a line had finite metrics.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    # Closed also on Ctrl-C: what is being saved then is saved to its end.
    with ocp.CheckpointManager((states / name).absolute(), options=options) as manager:
        state, begun = trainer.first(params), 0
        if manager.latest_step() is not None:
            begun = int(manager.latest_step() or 0)
            state = dict(manager.restore(begun, args=ocp.args.StandardRestore(state)))
            print(f"{name}: goes on from step {begun}", flush=True)
        start, window = time.perf_counter(), []
        with _log(out / f"{name}.jsonl", begun) as log:
            for i in range(begun, steps):
                rate = np.float32(learning_rate(i, steps, peak))
                state, metrics = trainer.step(state, rate, np.float32(decay), *feed(i))
                window.append(metrics)
                last = i + 1 == steps
                if (i + 1) % LOGGED == 0 or last:
                    means = _means([{k: float(v) for k, v in m.items()} for m in window])
                    means |= check(i + 1, trainer.merged(state, params))
                    _write(log, name, {"step": i + 1, "seconds": round(time.perf_counter() - start, 1)} | means)
                    window = []
                if (i + 1) % save_every == 0 or last:
                    manager.save(i + 1, args=ocp.args.StandardSave(state))
    return trainer.merged(state, params)


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    finite = [m for m in window if np.isfinite(list(m.values())).all()]
    skipped = len(window) - len(finite)
    means = {k: float(np.mean([m[k] for m in finite])) if finite else float("nan") for k in window[0]}
    return means | ({"skipped": float(skipped)} if skipped else {})


def _log(file: Path, begun: int) -> TextIO:
    """The log, to write to: without the lines of steps that were lost and are run again."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if begun and file.is_file() else []
    log = file.open("w", encoding="utf-8")
    log.writelines(line for line in lines if json.loads(line)["step"] <= begun)
    return log


def _write(log: TextIO, name: str, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()
    if line["step"] % (10 * LOGGED) == 0 or "held out" in line:
        print(name, "  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)
    if not all(np.isfinite(v) for v in line.values()):
        raise SystemExit(f"{name}: metrics are not finite: {line}")


app = typer.Typer(help="Train the nano checkpoint.", add_completion=False, pretty_exceptions_enable=False)

Data = Annotated[Path, typer.Option(help="What `prepare` wrote.")]
Out = Annotated[Path, typer.Option(help="Checkpoint, curves and figures.")]
States = Annotated[Path | None, typer.Option(help="Orbax checkpoints; below --out by default.")]
Steps = Annotated[int, typer.Option(help="Steps in all.")]
SequencesPerStep = Annotated[int, typer.Option(help="Sequences of 1,024 tokens per step.")]
Peak = Annotated[float, typer.Option(help="Learning rate of the plateau.")]
Decay = Annotated[float, typer.Option(help="Weight decay of matrices, times the learning rate.")]
SaveEvery = Annotated[int, typer.Option(help="Steps between Orbax checkpoints.")]
Seed = Annotated[int, typer.Option(help="Of weights and batches.")]
Compute = Annotated[str, typer.Option(help="bfloat16, as released, or float32 where that is all there is.")]


@app.command()
def layers(
    data: Data = Path("build/nano"),
    out: Out = Path("build/nano/run"),
    states: States = None,
    steps: Steps = 2000,
    batch: SequencesPerStep = 32,
    peak: Peak = 3e-3,
    decay: Decay = 2.0,
    save_every: SaveEvery = 500,
    check_every: Annotated[int, typer.Option(help="Steps between looks at held-out text.")] = 200,
    seed: Seed = 0,
    compute: Compute = "bfloat16",
) -> None:
    """Train all but the drafter, measure, and write the checkpoint (with a drafter that knows nothing)."""
    settings = {"steps": steps, "batch": batch, "peak": peak, "decay": decay, "seed": seed, "compute": compute}
    config, token_map = configured(data)
    trained, plain = (dataclasses.replace(n, compute=compute) for n in (TRAINED, FLOAT))
    train, heldout = read_streams(data, "train"), read_streams(data, "heldout")
    out.mkdir(parents=True, exist_ok=True)
    params = initial_params(config, seed)
    print(f"{count(params):,} weights on {jax.devices()[0].device_kind}", flush=True)

    def check(i: int, params: Params) -> dict[str, float]:
        if i % check_every and i != steps:
            return {}
        return {"held out": quick_loss(params, config, token_map, trained, heldout)}

    params = run(
        "layers",
        trunk_trainer(config, token_map, trained),
        params,
        lambda i: sample(train, seed, i, batch, SEQUENCE),
        steps=steps,
        peak=peak,
        decay=decay,
        out=out,
        states=states or out / "states",
        save_every=save_every,
        check=check,
    )
    export(out / "checkpoint", with_token_map(as_released(params, config), token_map), config, data)
    figures = evaluate_trunk(params, config, token_map, data, heldout, plain, trained)
    print(json.dumps(figures["bits per byte"], indent=1), flush=True)
    write_figures(out, "layers", settings, figures)


@app.command()
def drafter(
    data: Data = Path("build/nano"),
    out: Out = Path("build/nano/run"),
    states: States = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The trained layers; what `layers` wrote to --out by default.")
    ] = None,
    steps: Steps = 12500,
    batch: SequencesPerStep = 32,
    more: Annotated[
        int, typer.Option(help="0 trains a new drafter; 1, 2, ... go on from the checkpoint's, a turn each.", min=0)
    ] = 0,
    anchors: Annotated[int, typer.Option(help="Drafted blocks per sequence and step.")] = 256,
    peak: Peak = 3e-3,
    decay: Decay = 0.5,
    save_every: SaveEvery = 500,
    seed: Seed = 0,
    compute: Compute = "bfloat16",
) -> None:
    """Train the drafter on the layers of a checkpoint, measure, and write layers and drafter.

    A turn that goes on has its own learning rate from warm-up to decay, its own log, batches and figures.
    """
    name = f"drafter{more or ''}"
    settings = {
        "steps": steps,
        "batch": batch,
        "anchors": anchors,
        "peak": peak,
        "decay": decay,
        "seed": seed,
        "compute": compute,
    }
    config, token_map = configured(data)
    trained = dataclasses.replace(TRAINED, compute=compute)
    train, heldout = read_streams(data, "train", DRAFT_MIXTURE), read_streams(data, "heldout")
    out.mkdir(parents=True, exist_ok=True)
    released = read_released(checkpoint or out / "checkpoint", config)
    params = decoded(released) if more else decoded(released) | {"mtp": initial_params(config, seed)["mtp"]}
    order = seed + 1 + more

    def feed(i: int) -> tuple:
        return sample(train, order, i, batch, SEQUENCE, DRAFT_MIXTURE)[0], jax.random.fold_in(jax.random.key(i), more)

    params = run(
        name,
        draft_trainer(config, token_map, trained, anchors),
        params,
        feed,
        steps=steps,
        peak=peak,
        decay=decay,
        out=out,
        states=states or out / "states",
        save_every=save_every,
    )
    mtp = as_released(params, config)["mtp"]
    export(out / "checkpoint", with_token_map(released | {"mtp": mtp}, token_map), config, data)
    figures = evaluate_drafts(params, config, token_map, trained, heldout)
    print(json.dumps(figures, indent=1), flush=True)
    write_figures(out, name, settings, figures)


def configured(data: Path) -> tuple[ModelConfig, jax.Array]:
    """The configuration for the prepared tokenizer, and its compressed token map."""
    facts = json.loads((data / "sources.json").read_text(encoding="utf-8"))["tokenizer"]
    config = nano_config(facts["compressed_ids"], facts["special_tokens"][NOISE])
    t = config.text_config
    token_map = load_token_map(data, vocab_size=t.vocab_size, compressed_vocab_size=t.engram_compressed_vocab_size)
    return config, jnp.asarray(token_map)


def read_released(checkpoint: Path, config: ModelConfig) -> Params:
    """The quantised tree of a checkpoint, without the token map.

    Raises:
        SystemExit: The checkpoint has another configuration than the data ask for.
    """
    found, params = load(checkpoint, expand="none", progress=False)
    if found.to_dict() != config.to_dict():
        raise SystemExit(f"{checkpoint}: its config.json is not that of this data and recipe")
    return {name: leaf for name, leaf in params.items() if name != "token_map"}


def decoded(params: Params) -> Params:
    """float32 masters from a quantised tree."""

    def one(leaf: Any) -> jax.Array:
        return leaf.decode(jnp.float32) if is_quantized(leaf) else leaf.astype(jnp.float32)

    return jax.tree.map(one, params, is_leaf=is_quantized)


def export(directory: Path, params: Params, config: ModelConfig, data: Path) -> None:
    """The checkpoint under the released names and dtypes; matrices that are quantised already stay as they are."""
    save_checkpoint(
        directory,
        quantize_params(params, config),
        config,
        tokenizer=data / "tokenizer.json",
        max_shard_bytes=SHARD_BYTES,
    )


def write_figures(out: Path, name: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Settings and figures of one training into `figures.json`, beside what it holds of the other."""
    file = out / "figures.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known[name] = {"settings": settings | {"device": jax.devices()[0].device_kind}} | figures
    file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
