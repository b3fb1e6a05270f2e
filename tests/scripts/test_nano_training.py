"""The nano recipe's training: what a batch holds, what a step moves, what is written, and going on after a stop."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint import load
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.numerics import Numerics
from scripts.nano import draw, train
from scripts.nano.config import nano_config
from scripts.nano.optimizer import balanced, learning_rate
from scripts.nano.steps import draft_trainer, trunk_trainer
from scripts.nano.streams import MIXTURE, Stream, sample, windows
from scripts.nano.weights import as_released, initial_params, vector_layouts, with_token_map

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 64,
    "q_lora_rank": 32, "o_lora_rank": 32, "n_routed_experts": 4, "sliding_window": 8, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, "index_topk": 4, "engram_vocab_size": 50, "dspark_n_routed_experts": 2,
}  # fmt: skip
NUMERICS = Numerics("float32", packed_cache=False)


@pytest.fixture(scope="module")
def small():
    config = nano_config(100, 3, **SMALL)
    return config, jnp.asarray(np.random.default_rng(0).integers(0, 100, 128), jnp.int32)


def stream(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 128, 2000).astype(np.uint16)
    starts = np.arange(0, 2000, 61)
    tokens[starts] = 0
    return Stream(tokens, np.ones(2000, np.float32), starts)


def test_a_batch_depends_on_the_step_alone():
    streams = {name: stream(i) for i, name in enumerate(MIXTURE)}
    tokens, weight = sample(streams, seed=3, step=8, batch=40, length=32)
    again, _ = sample(streams, seed=3, step=8, batch=40, length=32)
    other, _ = sample(streams, seed=3, step=9, batch=40, length=32)
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != other).any()
    assert weight.shape == tokens.shape == (40, 32)
    # About half of them begin with a document.
    assert 10 <= (tokens[:, 0] == 0).sum() <= 30


@pytest.mark.parametrize("length", [5, 32, 100, 129])
def test_windows_score_every_token_but_the_first_once(length):
    tokens = np.arange(1, length + 1)
    rows, scored = windows(tokens, 32)
    assert sorted(rows[scored]) == list(range(2, length + 1))
    context = np.where(scored, np.arange(32)[None], 99)
    assert context[1:].min(initial=99) >= 16


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [learning_rate(i, 1000, 2.0) for i in range(1000)]
    assert max(rates) == rates[200] == 2.0
    assert rates[0] < 0.03 and rates[-1] < 0.05
    assert all(a >= b for a, b in itertools.pairwise(rates[150:]))


def test_router_biases_move_towards_the_fair_share_and_nothing_else_moves(small):
    config, _ = small
    params = initial_params(config, 0)
    load = {"layers.2.ffn.load": jnp.asarray([0.7, 0.1, 0.1, 0.1]), "mtp.1.ffn.load": jnp.asarray([0.2, 0.8])}
    after = balanced(params, config, load, jnp.float32(0.5))
    layouts = vector_layouts(config)
    for path, old in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = tuple(k.key for k in path)
        new = functools.reduce(lambda node, name: node[name], names, after)
        moves = {("layers", 2): [-0.5, 0.5, 0.5, 0.5], ("mtp", "stages", 1): [0.5, -0.5]}.get(names[:-2])
        if names not in layouts or moves is None:
            np.testing.assert_array_equal(old, new)
            continue
        change = np.asarray(new - old)
        for name, (start, stop) in layouts[names].spans().items():
            expected = moves if name.startswith("ffn.gate.bias") else np.zeros(stop - start)
            np.testing.assert_allclose(change[start:stop], expected, err_msg=name)


def test_the_files_hold_what_was_trained(small, tmp_path, monkeypatch):
    """Masters -> rounded -> written -> read -> decoded: the rounded values to the bit."""
    config, token_map = small
    params = initial_params(config, 5)
    source = tmp_path / "data"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    released = with_token_map(as_released(params, config), token_map)
    train.export(tmp_path / "checkpoint", released, config, source)
    monkeypatch.setattr("deepinfer_jax.checkpoint.reader._token_map", lambda path, config: np.asarray(token_map))
    _, read = load(tmp_path / "checkpoint", progress=False)
    rounded = as_released(params, config)
    read = {name: leaf for name, leaf in read.items() if name != "token_map"}
    flat = jax.tree_util.tree_flatten_with_path(read, is_leaf=lambda x: isinstance(x, QuantizedTensor))[0]
    for path, leaf in flat:
        expected = functools.reduce(lambda node, k: node[k.key], path, rounded)
        value = leaf.decode(jnp.float32) if isinstance(leaf, QuantizedTensor) else leaf.astype(jnp.float32)
        if path[-1].key == "embed" and value.ndim == 3:
            # Rows that pad the table to a multiple of devices are not in the files.
            rows = config.text_config.engram_num_embeddings[config.layers[path[1].key].engram]
            value, expected = value[:rows], expected[:rows]
        np.testing.assert_array_equal(value, expected, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_training_learns_and_goes_on_after_a_stop_as_if_there_had_been_none(small, tmp_path):
    config, token_map = small
    # One sentence over and over, at lengths that fill the compressed layers.
    sentence = np.random.default_rng(2).integers(4, 128, 24)
    tokens = jnp.asarray(np.stack([np.tile(sentence, 3)[i : i + 40] for i in range(4)]), jnp.int32)
    trainer = trunk_trainer(config, token_map, NUMERICS)
    params = initial_params(config, 1)

    def feed(i):
        return tokens, jnp.ones(tokens.shape, jnp.float32)

    def go(folder, steps):
        folder.mkdir(exist_ok=True)
        copy = jax.tree.map(jnp.copy, params)
        return train.run(
            "trunk",
            trainer,
            copy,
            feed,
            steps=steps,
            peak=5e-3,
            decay=0.1,
            out=folder,
            states=folder / "s",
            save_every=6,
        )

    whole = go(tmp_path / "whole", 12)
    log = draw.read_log(tmp_path / "whole" / "trunk.jsonl")
    first = trainer.step(trainer.first(jax.tree.map(jnp.copy, params)), np.float32(0), np.float32(0), *feed(0))[1]
    assert log["loss"][-1] < float(first["loss"]) - 0.5
    # A stop after six steps: the rate of a step depends on the planned length, so it is planned for twelve.
    stopped = tmp_path / "stopped"
    stopped.mkdir()

    def stop_at_seven(i):
        if i == 7:
            raise KeyboardInterrupt
        return feed(i)

    with pytest.raises(KeyboardInterrupt):
        train.run(
            "trunk", trainer, jax.tree.map(jnp.copy, params), stop_at_seven, steps=12, peak=5e-3, decay=0.1,
            out=stopped, states=stopped / "s", save_every=6,
        )  # fmt: skip
    (stopped / "trunk.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    again = go(stopped, 12)
    assert draw.read_log(stopped / "trunk.jsonl")["step"].tolist() == [6, 12]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    draw.draw_loss(log, None, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_batch_without_a_finite_gradient_is_skipped(small):
    config, token_map = small
    tokens = jnp.asarray(np.random.default_rng(3).integers(4, 128, (2, 40)), jnp.int32)
    trainer = trunk_trainer(config, token_map, NUMERICS)
    begun = trainer.first(initial_params(config, 1))
    before = jax.tree.map(np.asarray, begun["layers"])
    broken = jnp.full(tokens.shape, jnp.nan, jnp.float32)
    state, metrics = trainer.step(begun, np.float32(1e-3), np.float32(0), tokens, broken)
    assert np.isnan(float(metrics["loss"]))
    for (path, a), b in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(state["layers"]), strict=True):
        # Vectors hold the router biases, which follow the load whatever the loss is.
        if path[-1].key != "data":
            np.testing.assert_array_equal(a, b)
        assert np.isfinite(b).all()
    lines = train._means([{"loss": 1.0}, {"loss": float("nan")}, {"loss": 2.0}])
    assert lines == {"loss": 1.5, "skipped": 1.0}
    assert np.isnan(train._means([{"loss": float("nan")}])["loss"])


@pytest.mark.slow
def test_the_drafter_learns_on_frozen_layers(small):
    config, token_map = small
    tokens = jnp.asarray(np.tile(np.arange(5, 29), (2, 2))[:, :40], jnp.int32)
    trainer = draft_trainer(config, token_map, NUMERICS, anchors=8)
    params = initial_params(config, 1)
    state = trainer.first(params)
    before = jax.tree.map(np.asarray, state["layers"])
    losses = []
    for i in range(10):
        state, metrics = trainer.step(state, np.float32(5e-3), np.float32(0), tokens, jax.random.key(i))
        losses.append(float(metrics["loss"]) + float(metrics["confidence loss"]))
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state["layers"]), strict=True):
        np.testing.assert_array_equal(a, b)
    merged = trainer.merged(state, params)
    assert merged["embed"] is params["embed"]
    assert json.dumps(jax.tree.map(lambda x: list(x.shape), merged["mtp"]["main_proj"])) == "[64, 192]"


def test_a_drafter_starts_from_the_layers_that_a_checkpoint_holds(small, tmp_path, monkeypatch):
    config, token_map = small
    params = as_released(initial_params(config, 5), config)
    (tmp_path / "tokenizer.json").write_text("{}")
    train.export(tmp_path / "checkpoint", with_token_map(params, token_map), config, tmp_path)
    monkeypatch.setattr("deepinfer_jax.checkpoint.reader._token_map", lambda path, config: np.asarray(token_map))
    released = train.read_released(tmp_path / "checkpoint", config)
    masters = train.decoded(released)
    # Layers and drafter, as a training that goes on needs them.
    assert jax.tree.map(jnp.shape, masters) == jax.tree.map(jnp.shape, params)
    np.testing.assert_array_equal(masters["mtp"]["main_proj"], params["mtp"]["main_proj"])
    for name in ("embed", "head"):
        np.testing.assert_array_equal(masters[name], params[name])
    np.testing.assert_array_equal(masters["layers"][3]["ffn"]["w13"], params["layers"][3]["ffn"]["w13"])
    # Written again beside another drafter, the layers keep their very bytes.
    mtp = as_released(initial_params(config, 6), config)["mtp"]
    train.export(tmp_path / "again", with_token_map(released | {"mtp": mtp}, token_map), config, tmp_path)
    again = train.read_released(tmp_path / "again", config)
    del released["mtp"], again["mtp"]
    for a, b in zip(jax.tree.leaves(released), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(SystemExit, match="not that of this data"):
        train.read_released(tmp_path / "checkpoint", nano_config(101, 3, **SMALL))
