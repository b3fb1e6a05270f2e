"""The tensor table against the audit of the released shards."""

import collections
import dataclasses
import itertools

import jax
import pytest

from deepinfer_jax.checkpoint.safetensors import open_checkpoint
from deepinfer_jax.checkpoint.table import leaf_shapes, memory_per_device, tensor_table
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.formats import QuantizedTensor


@pytest.fixture(scope="module")
def released():
    return tensor_table(ModelConfig.named("deepseek_v41_flash"))


def test_the_released_checkpoint_has_the_audited_tensors_and_bytes(released):
    assert len(released) == len({spec.name for spec in released}) == 96_085
    assert sum(spec.nbytes for spec in released) == 510_286_023_000
    dtypes = collections.Counter(spec.dtype for spec in released)
    assert dtypes == {"F8_E4M3": 357, "I8": 47_232, "F8_E8M0": 47_589, "BF16": 520, "F32": 387}
    config = dataclasses.replace(ModelConfig.named("deepseek_v41_flash"), vision_config=None)
    text = tensor_table(config)
    assert (len(text), sum(spec.nbytes for spec in text)) == (95_822, 509_315_516_760)


def test_each_layer_has_the_audited_number_of_tensors(released):
    prefix = [spec.name.split(".") for spec in released]
    layers = collections.Counter(int(p[1]) for p in prefix if p[0] == "layers")
    special = {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341} | dict.fromkeys((24, 28, 32, 36), 2337)
    assert layers == {i: special.get(i, 2334) for i in range(40)}
    assert collections.Counter(int(p[1]) for p in prefix if p[0] == "mtp") == {0: 801, 1: 798, 2: 802}
    assert sum(p[0] == "vision" for p in prefix) == 259
    assert sum(p[0] == "aligner" for p in prefix) == 4


@pytest.mark.parametrize("name", ["deepseek_v41_flash", "tiny"])
def test_every_element_of_the_weight_tree_comes_from_exactly_one_tensor(name):
    """But for the padding rows of Engram tables and the token map, which no tensor fills."""
    config = ModelConfig.named(name)
    regions = collections.defaultdict(list)
    for spec in tensor_table(config):
        regions[spec.path].append((spec.lead or (0, 1), (spec.offset, spec.offset + spec.width)))
    for path, leaf in leaf_shapes(config).items():
        if path == ("token_map",):
            continue
        array = leaf.record if isinstance(leaf, QuantizedTensor) else leaf
        has_lead = any(spec.lead for spec in tensor_table(config) if spec.path == path)
        inner = array.size // array.shape[0] if has_lead else array.size
        by_lead = collections.defaultdict(list)
        for lead, span in regions[path]:
            by_lead[lead].append(span)
        for spans in by_lead.values():
            spans.sort()
            assert spans[0][0] == 0, path
            assert spans[-1][1] == inner, path
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans)), path
        leads = sorted(by_lead)
        assert leads[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(leads)), path
        padding = (array.shape[0] if has_lead else 1) - leads[-1][1]
        assert padding == 0 or (path[-2:] == ("engram", "embed") and padding < 64)


@pytest.mark.parametrize("name", ["v41_tiny", "v41_tiny_noengram"])
def test_the_table_of_a_fixture_is_what_its_file_holds(data_dir, name):
    stored = open_checkpoint(data_dir / name).tensors
    table = {spec.name: (spec.dtype, spec.shape) for spec in tensor_table(ModelConfig.from_file(data_dir / name))}
    assert table == {key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()}


def test_memory_per_device_falls_with_devices_and_adds_up():
    config = ModelConfig.named("deepseek_v41_flash")
    one, eight = memory_per_device(config, 1), memory_per_device(config, 8)
    leaves = jax.tree.leaves(dict(enumerate(leaf_shapes(config).values())))
    assert sum(one.values()) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert eight["copied to each"] == one["copied to each"]
    assert eight["split over devices"] * 8 == pytest.approx(one["split over devices"], abs=8 * len(leaves))
