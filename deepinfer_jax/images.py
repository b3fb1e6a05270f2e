"""Images on the host: reading, the size plan, letterboxing, patches, and the layout of an image in the prompt.

The rules are those of DeepSeek's `inference/image_processor.py`. An image of `rows` x `cols` patches goes through
the vision tower; the aligner joins `ratio` x `ratio` patches into a cell, and `gh` x `gw` cells become the features
of the prompt.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from typing import IO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.errors import ImageError

ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image
"""What `load_image` reads: a path, the bytes of a file, a binary file object, or a Pillow image."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Accepted file formats. A short list, because some of Pillow's others run external programs."""

SPAN_START, SPAN_END, SPAN_NEWLINE, SPAN_FEATURES = 0, 1, 2, 3
"""Rows of the table that `span_layout` refers to; the features follow from `SPAN_FEATURES` on."""

_FILL = (127, 127, 127)


@dataclass(frozen=True)
class ImagePlan:
    """Size of an image after resizing.

    Attributes:
        height: Pixels, a multiple of the patch size.
        width: Pixels, a multiple of the patch size.
        rows: Patches from top to bottom.
        cols: Patches from left to right.
        gh: Cells from top to bottom; the last may be partly empty.
        gw: Cells from left to right; the last may be partly empty.
    """

    height: int
    width: int
    rows: int
    cols: int
    gh: int
    gw: int

    @property
    def n_tokens(self) -> int:
        """Positions in the prompt: start, a newline after every row of cells, end."""
        return self.gh * (self.gw + 1) + 2


@dataclass(frozen=True, eq=False)
class Patches:
    """One image, cut up for the vision tower.

    Attributes:
        patches: (rows * cols, 3, P, P) float32 in [-1, 1], row-major; every value is a bfloat16 value.
        rows: Patches from top to bottom.
        cols: Patches from left to right.
    """

    patches: NDArray[np.float32]
    rows: int
    cols: int


def load_image(source: ImageSource) -> Image.Image:
    """Read one image and convert it to 8-bit RGB, as the reference does with Pillow.

    Of an animation the first frame is taken, of a Pillow image the one it stands at. Transparency is dropped, not
    blended, and an EXIF orientation is not applied: the reference feeds the model that way. Grey images of 16 bits
    keep their upper 8, where Pillow would clip.

    Args:
        source: See `ImageSource`. A file object is read from its start and stays open.

    Raises:
        ImageError: If there is no such file, it is not an intact image in one of `FORMATS`, it has no pixels, it is
            too large by Pillow's limit (`Image.MAX_IMAGE_PIXELS`), or its pixels have no defined colour range.
    """
    if isinstance(source, Image.Image):
        return _decoded(source, "image")
    file: str | os.PathLike[str] | IO[bytes]
    if isinstance(source, bytes | bytearray | memoryview):
        name, file = "image bytes", io.BytesIO(source)
        if not len(source):
            raise ImageError("image bytes: found 0 bytes, expected an image file")
    elif isinstance(source, str | os.PathLike):
        name, file = _short(os.fsdecode(source)), source
    elif hasattr(source, "read"):
        name, file = "image file", source
    else:
        raise ImageError(
            f"image: found {type(source).__name__}, expected a path, bytes, a binary file object or a Pillow image"
        )
    try:
        with Image.open(file, formats=FORMATS) as opened:
            return _decoded(opened, name)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name}: there is no such file") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not an image in a supported format ({', '.join(FORMATS)})") from None
    except Exception as error:  # hostile bytes make the decoders raise almost anything
        raise _unreadable(name, error) from None


def plan_image(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    """Choose the size of an image: enlarged to about `min_pixels`, shrunk to `max_image_tokens`, else as it is.

    Sides are rounded up to whole patches, or down when the image is shrunk.

    Args:
        width: Pixels of the image as read.
        height: Pixels of the image as read.
        vision: Patch size, downsampling ratio and limits.

    Raises:
        ImageError: If a side is not positive.
    """
    if width < 1 or height < 1:
        raise ImageError(f"image: found {width} x {height} pixels, expected at least 1 x 1")
    patch, ratio = vision.patch_size, vision.downsample_ratio
    w: float = width
    h: float = height
    if vision.max_wh_ratio is not None and w > h * vision.max_wh_ratio:
        w = h * vision.max_wh_ratio
    if w * h < vision.min_pixels:
        scale = (vision.min_pixels / (w * h)) ** 0.5
        # A width limit far below 1 can leave less than a pixel; the reference divides by zero there.
        w, h = max(int(w * scale), 1), max(int(h * scale), 1)
    plan = _grid(math.ceil(h / patch), math.ceil(w / patch), patch, ratio)
    if plan.n_tokens > vision.max_image_tokens:
        plan = _grid(*_shrink(w, h, patch, ratio, vision.max_image_tokens), patch, ratio)
    return plan


def preprocess(source: ImageSource, vision: VisionConfig) -> Patches:
    """Read, resize and letterbox one image, and cut it into patches.

    The image keeps its shape on a grey ground. Only one that exceeds a `max_wh_ratio` is stretched to the planned
    size. An image so thin that its short side would round to nothing keeps a line of one pixel.

    Raises:
        ImageError: As in `load_image`.
    """
    image = load_image(source)
    plan = plan_image(image.width, image.height, vision)
    size = (plan.width, plan.height)
    if vision.max_wh_ratio is not None and image.width >= vision.max_wh_ratio * image.height:
        image = image.resize(size)
    else:
        image = _letterbox(image, size)
    p = vision.patch_size
    pixels = np.asarray(image).reshape(plan.rows, p, plan.cols, p, 3)
    pixels = pixels.transpose(0, 2, 4, 1, 3).reshape(plan.rows * plan.cols, 3, p, p)
    return Patches(_pixel_values()[pixels], plan.rows, plan.cols)


def cell_major(patches: Patches, ratio: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.bool_]]:
    """Regroup patches so that those of one aligner cell are consecutive.

    The grid is filled up at the right and the bottom to whole cells. With `cells = gh * gw`, cells are row-major,
    and so are the patches inside a cell; the aligner then needs no gather.

    Args:
        patches: The image.
        ratio: `downsample_ratio`, patches along a side of a cell.

    Returns:
        Flattened patches (cells * ratio * ratio, 3 * P * P) with zeros where the grid was filled up, the row and
        column of each patch (cells * ratio * ratio, 2), and whether it is a patch of the image (the same length).
    """
    gh, gw = -(-patches.rows // ratio), -(-patches.cols // ratio)
    row, col = np.meshgrid(np.arange(gh * ratio), np.arange(gw * ratio), indexing="ij")
    coords = np.stack([row, col], axis=-1).astype(np.int32)
    coords = coords.reshape(gh, ratio, gw, ratio, 2).swapaxes(1, 2).reshape(-1, 2)
    row, col = coords.T
    valid = (row < patches.rows) & (col < patches.cols)
    flat = patches.patches.reshape(patches.rows * patches.cols, -1)
    cells = np.zeros((len(coords), flat.shape[1]), np.float32)
    cells[valid] = flat[row[valid] * patches.cols + col[valid]]
    return cells, coords, valid


def span_layout(gh: int, gw: int) -> NDArray[np.int32]:
    """Which vector stands at each position of an image in the prompt.

    Args:
        gh: Cells from top to bottom.
        gw: Cells from left to right.

    Returns:
        (gh * (gw + 1) + 2,) rows of the table [image_start, image_end, image_newline, feature 0, feature 1, ...]:
        the start, then each row of cells followed by a newline, then the end.
    """
    features = SPAN_FEATURES + np.arange(gh * gw).reshape(gh, gw)
    lines = np.concatenate([features, np.full((gh, 1), SPAN_NEWLINE)], axis=1)
    return np.concatenate([[SPAN_START], lines.ravel(), [SPAN_END]]).astype(np.int32)


# ------------------------------------------------------------------------------------------- reading


def _decoded(image: Image.Image, name: str) -> Image.Image:
    if image.width < 1 or image.height < 1:
        raise ImageError(f"{name}: found {image.width} x {image.height} pixels, expected at least 1 x 1")
    # Pillow scales a PGM file of more than 8 bits to 0..65535, but calls it mode I, which has no range of its own.
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if image.mode in ("I", "F") and not wide:
        raise ImageError(f"{name}: found pixels of mode {image.mode!r}, expected 8 or 16 bits per channel")
    try:
        if wide:
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # as in load_image; decoding happens here
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: Exception) -> ImageError:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return ImageError(f"{name}: the image is too large: {_short(str(error))}")
    reason = str(error) or type(error).__name__
    return ImageError(f"{name}: the image cannot be read: {_short(reason)}")


def _short(text: str) -> str:
    """One line of at most 200 characters: paths and decoder messages may be of any length."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."


# ------------------------------------------------------------------------------------------ planning


def _grid(rows: int, cols: int, patch: int, ratio: int) -> ImagePlan:
    return ImagePlan(rows * patch, cols * patch, rows, cols, math.ceil(rows / ratio), math.ceil(cols / ratio))


def _shrink(w: float, h: float, patch: int, ratio: int, max_tokens: int) -> tuple[int, int]:
    """Patch rows and columns of the largest size of about this shape that fits `max_tokens` positions.

    The order of the floating-point operations is the reference's: it decides about single patches.
    """
    shape = h / w
    cell = patch * ratio
    fit_w = math.sqrt((max_tokens - 2) / shape + 0.25) - 0.5  # cells, from gh * (gw + 1) + 2 = max_tokens
    fit_h = fit_w * shape
    if fit_w < 1:  # one column of cells, each followed by a newline
        return (max_tokens - 2) // 2 * ratio, ratio
    if fit_h < 1:  # one row of cells and its newline
        return ratio, (max_tokens - 3) * ratio
    scale = min(math.floor(fit_w) * cell / w, math.floor(fit_h) * cell / h)
    # With cells of a single patch the short side can round to nothing; the reference fails there.
    return max(math.floor(h * scale / patch), 1), max(math.floor(w * scale / patch), 1)


# -------------------------------------------------------------------------------------------- pixels


def _letterbox(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    width, height = size
    # ImageOps.pad would round the short side of a very thin image to 0 and return nothing but the ground.
    if round(image.height / image.width * width) == 0:
        image = image.resize((width, 1))
    elif round(image.width / image.height * height) == 0:
        image = image.resize((1, height))
    return ImageOps.pad(image, size, color=_FILL)


def _pixel_values() -> NDArray[np.float32]:
    """(256,) model input of each 8-bit value: scaled to [-1, 1] in float32, then rounded to bfloat16."""
    # A product with 1/255 instead of the quotient would round value 127, the ground, to another bfloat16 value.
    values = (np.arange(256, dtype=np.float32) / 255 - 0.5) / 0.5
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
