"""The numerics version names what decides bits, and nothing else."""

import dataclasses
import re

import deepinfer_jax as dj
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.numerics_version import numerics_facts, numerics_version
from deepinfer_jax.ops import invariant

RELEASED = dj.Numerics.named("released")


def test_it_is_the_same_again_and_differs_with_every_setting():
    assert re.fullmatch("[0-9a-f]{12}", numerics_version(RELEASED))
    assert numerics_version(RELEASED) == numerics_version(dataclasses.replace(RELEASED))
    others = [dataclasses.replace(RELEASED, compute="float32")]
    for field in ("kv_round_trip", "linear_round_trip", "packed_cache", "batch_invariant"):
        others.append(dataclasses.replace(RELEASED, **{field: not getattr(RELEASED, field)}))
    others.append(dataclasses.replace(RELEASED, kernels=Kernels(finish_rows="cpu")))
    versions = {numerics_version(n) for n in (RELEASED, *others)} | {numerics_version(RELEASED, forked=True)}
    assert len(versions) == 8


def test_tiles_enter_it(monkeypatch):
    before = numerics_version(RELEASED)
    monkeypatch.setattr(invariant, "ROW_TILES", (8, 32, 128))
    assert numerics_version(RELEASED) != before


def test_versions_and_device_stand_in_its_facts():
    facts = numerics_facts(RELEASED)
    assert {"numerics", "tiles", "forked", "deepinfer_jax", "jax", "jaxlib", "device"} == set(facts)
    assert facts["device"] and facts["numerics"]["batch_invariant"] is False
    assert set(facts["numerics"]["kernels"].values()) == {"reference"}


def test_results_carry_it(tiny):
    (output,) = tiny.generate([[6, 9]], dj.SamplingParams(max_tokens=1))
    assert output.numerics_version == output.to_dict()["numerics_version"] == numerics_version(tiny.numerics)
