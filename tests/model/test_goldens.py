"""The model against goldens of an independent implementation, for every configuration that ships with the tests."""

import dataclasses

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint import load
from deepinfer_jax.compare import compare, read_golden
from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics import Numerics

FIXTURES = ("v41_tiny", "v41_tiny_noengram")
# Modes in which the reference agrees with itself when its weights get last-bit noise: at least 90 % of positions
# within 1e-4. In the others an early value on the edge of a bin moves most of what follows, whoever computes it.
OTHERS = {
    "odd_rows": ("fp32", "fp32_kv", "fp32_all"),
    # Inputs of linears do not know about candidates, ratios and sources, and every mode costs compilation.
    "no_candidates": ("fp32", "fp32_kv"),
    "ratio4": ("fp32", "fp32_kv"),
    "first_layer_source": ("fp32", "fp32_kv"),
    "three_sources": ("fp32", "fp32_kv"),
    "wide_window": ("fp32", "fp32_kv"),
    "long": ("fp32",),
}


@pytest.mark.optimized
@pytest.mark.parametrize("name", FIXTURES)
def test_every_position_of_the_fixtures_agrees(data_dir, name):
    """Logits, features, drafts, confidence and the image; float32 with and without round trips: all within 1e-4."""
    config, params = load(data_dir / name, numerics=Numerics.named("fp32"), expand="float32", progress=False)
    golden = read_golden(data_dir / name)
    results = list(compare(params, config, golden, tags=("fp32", "fp32_kv", "fp32_all"), strict=True))
    assert {(r.tag, r.what) for r in results} == {
        (tag, what)
        for tag in ("fp32", "fp32_kv", "fp32_all")
        for what in ("logits", "features", "draft logits", "confidence")
    } | {("image", "vision features"), ("image", "logits")}
    for r in results:
        assert r.largest <= 1e-4, r
        assert r.agreement in (None, 1.0), r


@pytest.mark.optimized
@pytest.mark.parametrize("name", FIXTURES)
def test_the_released_arithmetic_agrees_loosely(data_dir, name):
    config, params = load(data_dir / name, progress=False)
    results = list(compare(params, config, read_golden(data_dir / name), tags=("bf16_all",), strict=True))
    assert [r.what for r in results] == ["logits", "features", "draft logits", "confidence"]
    assert all(np.isfinite(r.largest) for r in results)
    assert results[0].agreement is not None
    assert results[0].agreement >= 0.6


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_of_the_architecture_agree(data_dir, name):
    """Other widths, windows, ratios, expert counts, source layouts, lengths past several pages.

    In fp32 every position; with round trips all but those that a value on the edge of a bin moves.
    """
    folder = data_dir / "goldens" / name
    config, params = load(folder, numerics=Numerics.named("fp32"), expand="float32", progress=False)
    results = list(compare(params, config, read_golden(folder), tags=OTHERS[name]))
    assert {r.tag for r in results} >= set(OTHERS[name])
    for r in results:
        if (r.tag, r.what) == ("image", "logits"):
            # A single sequence: one moved position may move all after it. A fault of the span would move almost all.
            assert r.median <= 1e-4, r
        else:
            assert r.passed, r


def test_weights_kept_quantised_give_the_same_as_expanded_ones(data_dir):
    golden = read_golden(data_dir / "v41_tiny_noengram")
    config, params = load(data_dir / "v41_tiny_noengram", expand="none", progress=False)
    assert any(leaf.dtype == np.uint8 for leaf in jax.tree.leaves(params))
    for r in compare(params, config, golden, tags=("fp32",)):
        assert r.largest <= 1e-4, r


def test_chunks_agree_with_the_goldens_too(data_dir):
    """16 tokens attend beside the ring, the last 5 are written in place: both paths of the window."""
    config, params = load(data_dir / "v41_tiny", numerics=Numerics.named("fp32"), expand="float32", progress=False)
    golden = {k: v for k, v in read_golden(data_dir / "v41_tiny").items() if not k.startswith("vl.")}
    for r in compare(params, config, golden, tags=("fp32",), chunk=16):
        assert r.largest <= 1e-4, r


def test_a_wrong_weight_makes_the_comparison_fail(data_dir):
    config, params = load(data_dir / "v41_tiny", numerics=Numerics.named("fp32"), expand="float32", progress=False)
    data = params["layers"][3]["vectors"]["data"]
    params["layers"][3]["vectors"]["data"] = data.at[7].add(0.5)
    results = list(compare(params, config, read_golden(data_dir / "v41_tiny"), tags=("fp32",)))
    assert not results[0].passed
    assert results[0].first is not None


def test_a_golden_that_does_not_fit_is_bad_input(data_dir, tmp_path):
    config, params = load(data_dir / "v41_tiny", numerics=Numerics.named("fp32"), expand="float32", progress=False)
    golden = read_golden(data_dir / "v41_tiny")
    with pytest.raises(InputError, match=r"golden\.npz has no released\.logits"):
        list(compare(params, config, golden, tags=("released",)))
    golden["fp32.logits"] = golden["fp32.logits"][..., :100]
    with pytest.raises(InputError, match=r"fp32 logits has shape \(2, 37, 100\), this model gives \(2, 37, 128\)"):
        list(compare(params, config, golden, tags=("fp32",)))
    with pytest.raises(InputError, match="there is no such file"):
        read_golden(tmp_path)
    (tmp_path / "golden.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(InputError, match="not a readable npz file"):
        read_golden(tmp_path)
    assert dataclasses.is_dataclass(config)
