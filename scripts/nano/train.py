"""Trains the nano checkpoint: first the layers, then the drafter on the frozen layers.

    python -m scripts.nano.train --data build/nano --out build/nano/run

One GPU for some minutes. An interrupted run goes on from its last Orbax checkpoint when it is started again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer

from deepinfer_jax.checkpoint.writer import quantize_params, save_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.text.token_map import load_token_map
from scripts.nano.config import NOISE, SEQUENCE, nano_config
from scripts.nano.evaluate import compile_evaluation, evaluate_drafts, evaluate_trunk, quick_loss
from scripts.nano.forward import count
from scripts.nano.model import FLOAT, TRAINED
from scripts.nano.optimizer import learning_rate
from scripts.nano.steps import Trainer, draft_trainer, trunk_trainer
from scripts.nano.streams import DRAFT_MIXTURE, read_streams, sample
from scripts.nano.weights import as_released, initial_params, with_token_map

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

    Metrics go to `out/<name>.jsonl`, a line per 25 steps; `check` adds what it measures to the line.

    Raises:
        SystemExit: A metric that is not finite.
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
        with (out / f"{name}.jsonl").open("a" if begun else "w", encoding="utf-8") as log:
            for i in range(begun, steps):
                rate = np.float32(learning_rate(i, steps, peak))
                state, metrics = trainer.step(state, rate, np.float32(decay), *feed(i))
                window.append(metrics)
                last = i + 1 == steps
                if (i + 1) % LOGGED == 0 or last:
                    means = {k: float(np.mean([float(m[k]) for m in window])) for k in metrics}
                    means |= check(i + 1, trainer.merged(state, params))
                    _write(log, name, {"step": i + 1, "seconds": round(time.perf_counter() - start, 1)} | means)
                    window = []
                if (i + 1) % save_every == 0 or last:
                    manager.save(i + 1, args=ocp.args.StandardSave(state))
    return trainer.merged(state, params)


def _write(log: Any, name: str, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()
    if line["step"] % (10 * LOGGED) == 0 or "held out" in line:
        print(name, "  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)
    if not all(np.isfinite(v) for v in line.values()):
        raise SystemExit(f"{name}: metrics are not finite: {line}")


def main(
    data: Annotated[Path, typer.Option(help="What `prepare` wrote.")] = Path("build/nano"),
    out: Annotated[Path, typer.Option(help="Checkpoint, curves and figures.")] = Path("build/nano/run"),
    states: Annotated[Path | None, typer.Option(help="Orbax checkpoints; below --out by default.")] = None,
    steps: Annotated[int, typer.Option(help="Steps for the layers.")] = 2000,
    draft_steps: Annotated[int, typer.Option(help="Steps for the drafter.")] = 4600,
    batch: Annotated[int, typer.Option(help="Sequences of 1,024 tokens per step.")] = 32,
    anchors: Annotated[int, typer.Option(help="Drafted blocks per sequence and step.")] = 256,
    peak: Annotated[float, typer.Option(help="Learning rate of the plateau.")] = 3e-3,
    decay: Annotated[float, typer.Option(help="Weight decay of matrices, times the learning rate.")] = 2.0,
    draft_decay: Annotated[float, typer.Option(help="The same for the drafter.")] = 0.5,
    save_every: Annotated[int, typer.Option(help="Steps between Orbax checkpoints.")] = 500,
    check_every: Annotated[int, typer.Option(help="Steps between looks at held-out text.")] = 200,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    compute: Annotated[
        str, typer.Option(help="bfloat16, as released, or float32 where that is all there is.")
    ] = "bfloat16",
) -> None:
    """Train, measure, and write the checkpoint in the released format."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "steps": steps, "draft steps": draft_steps, "batch": batch, "anchors": anchors, "peak": peak, "decay": decay,
        "draft decay": draft_decay, "seed": seed, "compute": compute, "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    config, token_map = configured(data)
    trained, plain = (dataclasses.replace(n, compute=compute) for n in (TRAINED, FLOAT))
    train, heldout = read_streams(data, "train"), read_streams(data, "heldout")
    params = initial_params(config, seed)
    print(f"{count(params):,} weights on {settings['device']}", flush=True)

    def of_trunk(i: int) -> tuple:
        return sample(train, seed, i, batch, SEQUENCE)

    def of_drafter(i: int) -> tuple:
        return sample(train, seed + 1, i, batch, SEQUENCE, DRAFT_MIXTURE)[0], jax.random.key(i)

    def check(i: int, params: Params) -> dict[str, float]:
        if i % check_every and i != steps:
            return {}
        return {"held out": quick_loss(params, config, token_map, trained, heldout)}

    layers, drafter = trunk_trainer(config, token_map, trained), draft_trainer(config, token_map, trained, anchors)
    # Programs that are needed later are compiled while the first one runs.
    ahead = threading.Thread(
        target=_compile_ahead, args=(drafter, params, of_drafter, config, token_map, (plain, trained))
    )
    _compile(layers, params, of_trunk)
    ahead.start()
    go = functools.partial(run, peak=peak, out=out, states=states or out / "states", save_every=save_every)
    params = go("trunk", layers, params, of_trunk, steps=steps, decay=decay, check=check)
    ahead.join()
    figures = {"settings": settings, "trunk": evaluate_trunk(params, config, token_map, data, heldout, plain, trained)}
    print(json.dumps(figures["trunk"]["bits per byte"], indent=1), flush=True)
    export(out / "checkpoint", params, config, token_map, data)
    params = go("drafter", drafter, params, of_drafter, steps=draft_steps, decay=draft_decay)
    export(out / "checkpoint", params, config, token_map, data)
    figures["drafter"] = evaluate_drafts(params, config, token_map, trained, heldout)
    print(json.dumps(figures["drafter"], indent=1), flush=True)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def configured(data: Path) -> tuple[ModelConfig, jax.Array]:
    """The configuration for the prepared tokenizer, and its compressed token map."""
    facts = json.loads((data / "sources.json").read_text(encoding="utf-8"))["tokenizer"]
    config = nano_config(facts["compressed_ids"], facts["special_tokens"][NOISE])
    t = config.text_config
    token_map = load_token_map(data, vocab_size=t.vocab_size, compressed_vocab_size=t.engram_compressed_vocab_size)
    return config, jnp.asarray(token_map)


def export(directory: Path, params: Params, config: ModelConfig, token_map: jax.Array, data: Path) -> None:
    """The checkpoint under the released names and dtypes."""
    rounded = with_token_map(as_released(params, config), token_map)
    save_checkpoint(
        directory,
        quantize_params(rounded, config),
        config,
        tokenizer=data / "tokenizer.json",
        max_shard_bytes=SHARD_BYTES,
    )


def _compile(trainer: Trainer, params: Params, feed: Callable[[int], tuple]) -> None:
    state, zero = jax.eval_shape(trainer.first, params), np.float32(0)
    trainer.step.lower(state, zero, zero, *feed(0)).compile()  # type: ignore[attr-defined]


def _compile_ahead(
    drafter: Trainer, params: Params, feed: Callable, config: ModelConfig, token_map: jax.Array, numerics: tuple
) -> None:
    shapes = jax.eval_shape(lambda p: p, params)
    compile_evaluation(shapes, config, token_map, numerics)
    _compile(drafter, shapes, feed)


if __name__ == "__main__":
    typer.run(main)
