"""Images in a prompt: placeholders become spans, and the tower fills the rows they point to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.images import SPAN_FEATURES, Patches, cell_major, span_layout
from deepinfer_jax.model.v41 import Params, encode_image, image_table
from deepinfer_jax.numerics import Numerics

_CELL_BUCKETS = (4, 16, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with their image spans written out.

    Attributes:
        ids: int32[S]; every position of an image holds `image_token_id`.
        image_index: int32[S] row of `image_rows`' table, -1 for text: the `index` of `ImageRows`.
    """

    ids: np.ndarray
    image_index: np.ndarray


def expand_images(ids: Sequence[int], images: Sequence[Patches], config: ModelConfig) -> Prompt:
    """Replace each image token of a prompt by the span of its image.

    Args:
        ids: Token ids with one `image_token_id` per image, in order.
        images: Preprocessed images (`images.preprocess`).

    Raises:
        InputError: The numbers of placeholders and images differ, the model has no vision part, or an id is not
            in the vocabulary.
    """
    tokens = np.asarray(ids, np.int64)
    bad = tokens[(tokens < 0) | (tokens >= config.text_config.vocab_size)]
    if bad.size:
        raise InputError(f"prompt: token id {bad[0]} is not in 0..{config.text_config.vocab_size - 1}")
    if images and config.vision_config is None:
        raise InputError(f"prompt: {len(images)} images, but the configuration has no vision_config")
    holders = np.flatnonzero(tokens == config.image_token_id) if images else np.zeros(0, np.int64)
    if len(holders) != len(images):
        raise InputError(
            f"prompt: {len(holders)} image tokens ({config.image_token_id}) for {len(images)} images, expected one each"
        )
    id_parts, index_parts, done, first = [], [], 0, SPAN_FEATURES
    for at, image in zip(holders, images, strict=True):
        gh, gw = _cells(image, config)
        rows = span_layout(gh, gw)
        rows = np.where(rows >= SPAN_FEATURES, rows - SPAN_FEATURES + first, rows)
        first += gh * gw
        id_parts += [tokens[done:at], np.full(len(rows), config.image_token_id)]
        index_parts += [np.full(at - done, -1), rows]
        done = at + 1
    id_parts.append(tokens[done:])
    index_parts.append(np.full(len(tokens) - done, -1))
    return Prompt(np.concatenate(id_parts).astype(np.int32), np.concatenate(index_parts).astype(np.int32))


def image_rows(params: Params, config: ModelConfig, images: Sequence[Patches], numerics: Numerics) -> jax.Array:
    """The table that `Prompt.image_index` points into: [3 + cells of all images, D].

    Images are padded to a few numbers of cells, so that the tower compiles a few times only.
    """
    vision = config.vision_config
    if vision is None:
        raise InputError("the configuration has no vision_config, so it cannot encode images")
    features = []
    for image in images:
        gh, gw = _cells(image, config)
        patches, coords, valid = cell_major(image, vision.downsample_ratio)
        bucket = next((b for b in _CELL_BUCKETS if b >= gh * gw), gh * gw)
        extra = bucket * vision.downsample_ratio**2 - len(valid)
        encoded = _encode(
            params,
            config,
            np.pad(patches, [(0, extra), (0, 0)]),
            np.pad(coords, [(0, extra), (0, 0)]),
            np.pad(valid, (0, extra)),
            numerics,
        )
        features.append(encoded[: gh * gw])
    return image_table(params, config, jnp.concatenate(features), numerics)


@functools.partial(jax.jit, static_argnums=(1, 5))
def _encode(params: Params, config: ModelConfig, patches, coords, valid, numerics: Numerics) -> jax.Array:
    return encode_image(params, config, patches, coords, valid, numerics=numerics)


def _cells(image: Patches, config: ModelConfig) -> tuple[int, int]:
    assert config.vision_config is not None
    ratio = config.vision_config.downsample_ratio
    return -(-image.rows // ratio), -(-image.cols // ratio)
