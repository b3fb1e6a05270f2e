"""Images in prompts: placeholders, spans, tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint import load
from deepinfer_jax.compare import read_golden
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.images import Patches
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.prompt import expand_images, image_rows

CONFIG = ModelConfig.named("tiny")


def image(rows: int, cols: int) -> Patches:
    return Patches(np.ones((rows * cols, 3, 2, 2), np.float32), rows, cols)


def test_each_placeholder_becomes_the_span_of_its_image():
    prompt = expand_images([5, 126, 6, 126, 7], [image(3, 4), image(2, 2)], CONFIG)
    first = [126] * (1 * 3 + 2)
    second = [126] * (1 * 2 + 2)
    assert prompt.ids.tolist() == [5, *first, 6, *second, 7]
    # Table: start, end, newline, two features of the first image, one of the second.
    assert prompt.image_index.tolist() == [-1, 0, 3, 4, 2, 1, -1, 0, 5, 2, 1, -1]


def test_text_alone_is_left_as_it_is():
    prompt = expand_images([5, 6], [], CONFIG)
    assert prompt.ids.tolist() == [5, 6] and prompt.image_index.tolist() == [-1, -1]


def test_faults_of_a_prompt_are_named():
    with pytest.raises(InputError, match=r"1 image tokens \(126\) for 2 images"):
        expand_images([126], [image(1, 1)] * 2, CONFIG)
    with pytest.raises(InputError, match=r"token id 128 is not in 0\.\.127"):
        expand_images([128], [], CONFIG)


def test_padding_cells_do_not_change_features(data_dir):
    """One image of 6 cells runs in a bucket of 16: the golden has no padding."""
    numerics = Numerics.named("fp32_kv")
    config, params = load(data_dir / "v41_tiny_noengram", numerics=numerics, expand="float32", progress=False)
    golden = read_golden(data_dir / "v41_tiny_noengram")
    rows, cols = (int(v) for v in golden["vl.grid"][:2])
    one = Patches(golden["vl.patches"], rows, cols)
    table = image_rows(params, config, [one, one], numerics)
    assert table.shape == (3 + 12, 64) and table.dtype == jnp.float32
    for part in (table[3:9], table[9:]):
        np.testing.assert_allclose(part, golden["vl.features"], atol=1e-4)
