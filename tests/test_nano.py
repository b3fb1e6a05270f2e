"""The checkpoint that ships: strict reading, a loss far from chance, drafts that decoding agrees with, words."""

import json
import math
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.calibration import load_calibration
from deepinfer_jax.checkpoint.reader import checkpoint_faults, open_checkpoint
from deepinfer_jax.speculative import accepted_length, speculate

NANO = Path(__file__).resolve().parents[1] / "checkpoints" / "nano"
PROMPTS = Path(__file__).parent / "data" / "nano_heldout.jsonl"
FP32 = dj.Numerics.named("fp32")


@pytest.fixture(scope="module")
def nano():
    return dj.load(NANO, numerics=FP32, expand="float32", progress=False)


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line)["token_ids"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_its_files_are_what_the_configuration_asks_for():
    assert checkpoint_faults(open_checkpoint(NANO), dj.ModelConfig.from_file(NANO)) == []
    sizes = [f.stat().st_size for f in NANO.iterdir()]
    assert max(sizes) < 16 << 20
    assert sum(sizes) <= 24 << 20
    assert load_calibration(NANO / "confidence.json", block_size=5).overall_after <= 0.03


def test_it_guesses_held_out_text_better_than_chance_and_drafts_are_accepted(nano, prompts):
    """Over a few held-out beginnings; greedy drafts give the tokens of plain decoding in fewer rounds."""
    config, params = nano
    some = [p for p in prompts if len(p) == 48][:4]
    tokens = jnp.asarray(some, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32), tokens.shape)
    cache = dj.init_cache(config, FP32, num_slots=4, max_length=48)
    out, _ = dj.forward(
        params, config, dj.Batch(tokens, positions, slots=jnp.arange(4, dtype=jnp.int32)), cache, numerics=FP32
    )
    assert out.logits is not None
    logits = np.asarray(out.logits, np.float64)[:, :-1]
    chosen = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    nats = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    assert nats.mean() < 0.6 * math.log(config.text_config.vocab_size)

    drafted = speculate(params, config, some, temperature=0, numerics=FP32, max_tokens=24, batch_size=4, chunk=64)
    plain = dj.generate(params, config, some, dj.SamplingParams(temperature=0, max_tokens=24), numerics=FP32)
    assert [r.token_ids for r in drafted] == [tuple(p.outputs[0].token_ids) for p in plain]
    assert accepted_length(drafted) > 1.5


def test_it_loads_and_writes_words():
    start = time.perf_counter()
    llm = dj.LLM(str(NANO), max_length=256, batch_size=2, progress=False)
    (output,) = llm.generate(
        ["And the LORD spake unto Moses, saying,"], dj.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    )
    text = output.outputs[0].text
    print(f"loaded and generated in {time.perf_counter() - start:.1f} s")
    words = [w.strip(".,;:!?").lower() for w in text.split()]
    assert len(words) >= 10
    assert sum(w in {"the", "and", "of", "unto", "to", "in", "i", "that", "he", "thou"} for w in words) >= 3
