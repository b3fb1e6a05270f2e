import pickle

import pytest

from deepinfer_jax import errors

KINDS = [
    errors.ConfigError,
    errors.CheckpointError,
    errors.CacheError,
    errors.ImageError,
    errors.TokenizerError,
    errors.InputError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_by_the_base_class(kind):
    with pytest.raises(errors.DeepInferError, match=r"^one sentence$"):
        raise kind("one sentence")


def test_a_single_message_is_the_whole_text():
    error = errors.ImageError("image: found 0 bytes")
    assert str(error) == error.message == "image: found 0 bytes"
    assert error.faults == ()


def test_several_faults_are_listed_under_a_counted_heading():
    error = errors.ConfigError("bad file", (text for text in ["a: missing", "b: unknown"]))
    assert str(error) == "bad file (2 faults)\n  - a: missing\n  - b: unknown"
    assert str(errors.ConfigError("bad file", ["a: missing"])) == "bad file (1 fault)\n  - a: missing"


@pytest.mark.parametrize(("count", "rest"), [(50, None), (51, "  ... and 1 more"), (1000, "  ... and 950 more")])
def test_the_text_shows_fifty_faults_and_the_attribute_keeps_all(count, rest):
    error = errors.CheckpointError("bad tensors", [f"tensor {i}" for i in range(count)])
    lines = str(error).splitlines()
    assert lines[0] == f"bad tensors ({count} faults)"
    assert lines[1:51] == [f"  - tensor {i}" for i in range(50)]
    assert lines[51:] == ([] if rest is None else [rest])
    assert len(error.faults) == count


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_the_way_between_processes(kind):
    copy = pickle.loads(pickle.dumps(kind("bad", ["x", "y"])))
    assert type(copy) is kind
    assert (copy.message, copy.faults, str(copy)) == ("bad", ("x", "y"), "bad (2 faults)\n  - x\n  - y")
