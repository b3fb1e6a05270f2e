"""The promise holds on the trained checkpoint, in every axis; a fault is caught, and found where it was planted.

The control with the mode off is in `tests/cli/test_verify.py`.
"""

import dataclasses
import functools
import json

import jax.numpy as jnp
import pytest

import deepinfer_jax as dj
from deepinfer_jax.ops import moe
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.verify import AXES, Subject, Workload, verify
from deepinfer_jax.verify.report import page

# The dearest axes are spread over two tests, which run side by side.
FIRST = ("batch size", "place in the batch", "neighbours", "fork", "drafter", "tokens per dispatch")
REST = tuple(axis for axis in AXES if axis not in (*FIRST, "images"))


def mode(tag, on=True):
    return dataclasses.replace(dj.Numerics.named(tag), batch_invariant=on)


@functools.lru_cache(maxsize=4)
def loaded(path, tag):
    return dj.load(path, numerics=dj.Numerics.named(tag), progress=False)


@pytest.fixture(scope="module")
def root(request):
    return request.config.rootpath


@pytest.fixture(scope="module")
def nano(root):
    """The trained checkpoint, and held-out beginnings."""
    path = root / "checkpoints" / "nano"
    lines = (root / "tests" / "data" / "nano_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["token_ids"] for line in lines]

    def subject(tag, on=True):
        config, params = loaded(path, tag)
        return Subject(config, params, mode(tag, on), Workload.of(prompts, count=12, max_tokens=8), path=path)

    return subject


@pytest.fixture(scope="module")
def tiny_subject(data_dir):
    """Random weights with all parts, vision included."""
    path = data_dir / "v41_tiny"

    def subject(tag, on=True, count=10):
        config, params = loaded(path, tag)
        prompts = [[6, 9, 10, 44, 3, 90, 17], [40, 41], list(range(20, 50))]
        return Subject(config, params, mode(tag, on), Workload.of(prompts, count=count, max_tokens=6), path=path)

    return subject


def what_differs(report):
    return [(r.axis, r.name) for r in report.results if r.differing]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("axes", [FIRST, REST], ids=["batch", "rest"])
def test_requests_to_the_trained_model_have_the_same_bits_in_every_axis(nano, axes):
    report = verify(nano("released"), axes=axes)
    assert what_differs(report) == [] and report.holds
    assert report.left_out == () and {r.axis for r in report.results} == set(axes)
    assert report.finding is None and report.origin() is None


@pytest.mark.slow
@pytest.mark.optimized
def test_texts_and_images_do_not_disturb_each_other(tiny_subject):
    report = verify(tiny_subject("released"), axes=("images",))
    assert report.holds and report.compared == 2


def halves(x, w, out_dtype=None, invariant=False):
    """A linear whose sums are split where there are more than eight rows."""
    if x.size // x.shape[-1] <= 8:
        return linear(x, w, out_dtype, invariant)
    k = x.shape[-1] // 2
    return linear(x[..., :k], w[:, :k], jnp.float32) + linear(x[..., k:], w[:, k:], jnp.float32)


@pytest.mark.slow
def test_a_planted_fault_is_caught_and_located(tiny_subject, monkeypatch):
    """The router's product, made to depend on the number of rows. `gate` is what reads `linear` in `ops/moe.py`."""
    subject = tiny_subject("fp32")
    monkeypatch.setattr(moe, "linear", halves)
    # Programs are kept by setup: one that nothing else runs is compiled with the fault.
    numerics = dataclasses.replace(subject.numerics, packed_cache=False)
    planted = Subject(subject.config, subject.params, numerics, subject.workload)
    report = verify(planted, axes=("batch size",))
    assert not report.holds
    found = report.finding
    assert found is not None and found.origin is not None
    assert found.origin.name in ("layers.0.ffn.weights", "layers.0.ffn.experts")
    assert "gate" in found.origin.op and "layer 0, gate" in (report.origin() or "")
    # Everything before it is equal, and what follows is not.
    names = [d.name for d in found.differences]
    before = found.differences[: names.index(found.origin.name)]
    assert len(before) > 10 and all(d.first is None for d in before)
    text = page(report, "a <title>")
    assert text.count("class=first") == 1 and "a &lt;title&gt;" in text and "gate" in text
    kept = json.loads(json.dumps(report.to_dict()))
    assert kept["holds"] is False and kept["differing"] == report.differing
    assert kept["differences"]["intermediates"][len(before)]["name"] == found.origin.name


def test_bad_input_is_named(tiny_subject):
    with pytest.raises(dj.DeepInferError, match="axis: found 'weather', expected one of batch size"):
        verify(tiny_subject("fp32"), axes=("weather",))
    with pytest.raises(dj.DeepInferError, match="prompt 1: empty"):
        Workload.of([[1], []], count=4, max_tokens=2)
    with pytest.raises(dj.DeepInferError, match="prompts: found none"):
        Workload.of([], count=4, max_tokens=2)
    subject = tiny_subject("fp32")
    with pytest.raises(dj.DeepInferError, match=r"request 0: 3 tokens and 5000 more exceed"):
        dataclasses.replace(subject, workload=Workload.of([[1, 2, 3]], count=2, max_tokens=5000))


def test_nothing_compared_is_not_a_promise_kept(nano):
    report = verify(nano("fp32"), axes=("images",))
    assert report.left_out == ("images",) and not report.holds
    assert report.summary() == "nothing was compared: no axis applies"
