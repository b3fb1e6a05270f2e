"""Held-out figures: bits per byte with and without quantisation, the load of every expert, accepted drafts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.v41 import Params
from deepinfer_jax.numerics import Numerics
from scripts.nano.config import SEQUENCE
from scripts.nano.forward import drafts, next_token_loss, trunk
from scripts.nano.steps import drafted_positions
from scripts.nano.streams import Stream, windows
from scripts.nano.weights import as_released, with_token_map

BATCH = 8
PROSE = ("bible", "austen", "devil", "jargon", "wordnet")


def evaluate_trunk(
    params: Params,
    config: ModelConfig,
    token_map: jax.Array,
    data: Path,
    heldout: dict[str, Stream],
    plain: Numerics,
    trained: Numerics,
) -> dict[str, Any]:
    """Bits per byte of every held-out source for the float masters and for what the files hold, and expert loads.

    Bits of all tokens of a document, its end token included, over the bytes of its text.
    """
    sizes = json.loads((data / "sources.json").read_text(encoding="utf-8"))["sources"]
    table: dict[str, dict[str, float]] = {}
    loads: dict[str, Any] = {}
    for kind, numerics in (("float", plain), ("quantised", trained)):
        weights = params if kind == "float" else as_released(params, config)
        weights = with_token_map(weights, token_map)
        bits, total = {}, 0
        for name, stream in heldout.items():
            nats, load, tokens = _stream_loss(weights, config, numerics, stream)
            total += tokens
            for tap, share in load.items():
                loads.setdefault(kind, {}).setdefault(tap, 0)
                loads[kind][tap] = loads[kind][tap] + share * tokens
            if name in sizes:
                bits[name] = nats["all"] / math.log(2) / sizes[name]["heldout"]["bytes"]
            else:
                bits[f"{name} (bits per learned token)"] = nats["learned"] / math.log(2)
        prose = [(bits[n] * sizes[n]["heldout"]["bytes"], sizes[n]["heldout"]["bytes"]) for n in PROSE]
        bits["prose"] = sum(b for b, _ in prose) / sum(n for _, n in prose)
        table[kind] = bits
        loads[kind] = {tap: (v / total).tolist() for tap, v in loads[kind].items()}
    cost = table["quantised"]["prose"] / table["float"]["prose"] - 1
    least = min(min(v) * len(v) for v in loads["quantised"].values())
    return {"bits per byte": table, "cost of quantisation": cost, "least load": least, "loads": loads["quantised"]}


def _stream_loss(
    params: Params, config: ModelConfig, numerics: Numerics, stream: Stream
) -> tuple[dict[str, float], dict[str, np.ndarray], int]:
    rows, scored = windows(stream.tokens, SEQUENCE)
    weight, _ = windows((stream.weight == 1).astype(np.int32), SEQUENCE)
    # The first token of a document is given, not guessed.
    scored &= rows != 0
    total, learned, count, load = 0.0, 0.0, 0, {}
    for i in range(0, len(rows), BATCH):
        part = np.zeros((BATCH, SEQUENCE), np.int32)
        part[: len(rows[i : i + BATCH])] = rows[i : i + BATCH]
        nats, taps = _losses(params, config, jnp.asarray(part), numerics)
        keep = scored[i : i + BATCH]
        nats = np.asarray(nats)[: len(keep)]
        total += float((nats * keep[:, 1:]).sum())
        mark = keep & (weight[i : i + BATCH] == 1)
        learned += float((nats * mark[:, 1:]).sum())
        count += int(mark[:, 1:].sum())
        for tap, share in taps.items():
            load[tap] = load.get(tap, 0) + np.asarray(share, np.float64) * len(keep)
    load = {tap: v / len(rows) for tap, v in load.items()}
    return {"all": total, "learned": learned / max(count, 1)}, load, len(stream.tokens)


def _loss_of(params: Params, config: ModelConfig, tokens: jax.Array, numerics: Numerics) -> tuple[jax.Array, dict]:
    out = trunk(params, config, tokens, numerics)
    return next_token_loss(out.logits, tokens), {k: v for k, v in out.taps.items() if k.endswith("load")}


_losses = jax.jit(_loss_of, static_argnums=(1, 3))


def quick_loss(
    params: Params, config: ModelConfig, token_map: jax.Array, trained: Numerics, heldout: dict[str, Stream]
) -> float:
    """Nats per token of the first windows of the held-out prose, to watch a run by."""
    rows = np.concatenate([windows(heldout[name].tokens, SEQUENCE)[0][:2] for name in PROSE])[:BATCH]
    weights = with_token_map(as_released(params, config), token_map)
    return float(np.mean(_losses(weights, config, jnp.asarray(rows), trained)[0]))


def evaluate_drafts(
    params: Params, config: ModelConfig, token_map: jax.Array, trained: Numerics, heldout: dict[str, Stream]
) -> dict[str, Any]:
    """On held-out text with the true tokens before each draft: mean acceptance of each position at temperature 1,
    share of positions whose argmax is the layers' own, and the load of the stages' experts."""
    weights = with_token_map(as_released(params, config), token_map)
    sums: dict[str, Any] = {}
    for i, stream in enumerate(heldout.values()):
        rows, _ = windows(stream.tokens, SEQUENCE)
        for j in range(0, len(rows) - BATCH + 1, BATCH):
            out = _accepted(weights, config, jnp.asarray(rows[j : j + BATCH]), jax.random.key(1000 * i + j), trained)
            for name, value in out.items():
                sums.setdefault(name, []).append(np.asarray(value, np.float64))
    means = {name: np.mean(values, axis=0) for name, values in sums.items()}
    loads = {name: v for name, v in means.items() if name.endswith("load")}
    return {
        "acceptance at temperature 1": means["accepted"].tolist(),
        "agreement at temperature 0": means["agreed"].tolist(),
        "least load": min(min(v) * len(v) for v in loads.values()),
        "loads": {name: v.tolist() for name, v in loads.items()},
    }


def _acceptance(
    params: Params, config: ModelConfig, tokens: jax.Array, key: jax.Array, numerics: Numerics
) -> dict[str, jax.Array]:
    n = config.text_config.dspark_block_size
    at = jax.random.randint(key, (tokens.shape[0], 64), 0, tokens.shape[1] - n)
    out = trunk(params, config, tokens, numerics)
    logits, _, load = drafts(params, config, tokens, out.features, at, numerics)
    target = drafted_positions(out.logits, at, n)
    gap = jnp.abs(jax.nn.softmax(target) - jax.nn.softmax(logits))
    agreed = jnp.argmax(target, -1) == jnp.argmax(logits, -1)
    return {"accepted": (1 - 0.5 * gap.sum(-1)).mean(0), "agreed": agreed.mean(0)} | load


_accepted = jax.jit(_acceptance, static_argnums=(1, 4))
