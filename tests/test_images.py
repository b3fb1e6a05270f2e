"""Check values of plans: worked by hand from DeepSeek's rule, and equal to its `image_processor.py`."""

import dataclasses
import io
import struct
import tracemalloc
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.errors import ImageError
from deepinfer_jax.images import (
    FORMATS,
    ImagePlan,
    Patches,
    cell_major,
    load_image,
    plan_image,
    preprocess,
    span_layout,
)

GREY = -0.003936767578125  # (127 / 255 - 0.5) / 0.5 in float32, rounded to bfloat16


def released() -> VisionConfig:
    vision = ModelConfig.named("deepseek_v41_flash").vision_config
    assert vision is not None
    return vision


VISION = released()
SMALL = dataclasses.replace(VISION, patch_size=2, min_pixels=16, max_image_tokens=64)

visions = st.builds(
    lambda patch, ratio, tokens, pixels, shape: dataclasses.replace(
        VISION,
        patch_size=patch,
        downsample_ratio=ratio,
        max_image_tokens=tokens,
        min_pixels=pixels,
        max_wh_ratio=shape,
    ),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(4, 2000),
    st.integers(1, 300_000),
    st.none() | st.floats(0.001, 100),
)
sides = st.integers(1, 200_000)


def encoded(image, file_format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(width=40, height=30):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def png_header(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# -------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("width", "height", "expected", "n_tokens"),
    [
        (544, 544, ImagePlan(height=546, width=546, rows=39, cols=39, gh=13, gw=13), 184),
        (1, 1, ImagePlan(height=546, width=546, rows=39, cols=39, gh=13, gw=13), 184),
        (640, 480, ImagePlan(height=490, width=644, rows=35, cols=46, gh=12, gw=16), 206),
        (1000, 1000, ImagePlan(height=1008, width=1008, rows=72, cols=72, gh=24, gw=24), 602),
        (2000, 2000, ImagePlan(height=1302, width=1302, rows=93, cols=93, gh=31, gw=31), 994),
        (1920, 1080, ImagePlan(height=966, width=1708, rows=69, cols=122, gh=23, gw=41), 968),
        (1, 10_000, ImagePlan(height=21462, width=42, rows=1533, cols=3, gh=511, gw=1), 1024),
        (10_000, 1, ImagePlan(height=42, width=42882, rows=3, cols=3063, gh=1, gw=1021), 1024),
    ],
)
def test_plans_of_the_released_model(width, height, expected, n_tokens):
    plan = plan_image(width, height, VISION)
    assert plan == expected
    assert plan.n_tokens == n_tokens


def test_a_width_limit_plans_for_the_narrower_image():
    limited = dataclasses.replace(VISION, max_wh_ratio=2.0)
    assert plan_image(4000, 700, limited) == plan_image(1400, 700, VISION)
    assert plan_image(1400, 700, limited) == plan_image(1400, 700, VISION)
    assert plan_image(700, 4000, limited) == plan_image(700, 4000, VISION)


@pytest.mark.parametrize(("limit", "cells"), [(993, 30), (994, 31), (1057, 31), (1058, 32)])
def test_the_token_limit_is_used_up_to_the_last_token(limit, cells):
    plan = plan_image(3000, 3000, dataclasses.replace(VISION, max_image_tokens=limit))
    assert (plan.gh, plan.gw, plan.n_tokens) == (cells, cells, cells * (cells + 1) + 2)


def test_a_width_limit_of_less_than_a_pixel_leaves_one_column():
    plan = plan_image(10, 10, dataclasses.replace(VISION, min_pixels=1, max_wh_ratio=0.001))
    assert (plan.rows, plan.cols) == (3, 1)  # 10 x 0.01 pixels, scaled up to an area of 1: 31 x 0.03


@given(sides, sides, visions)
def test_every_plan_is_whole_and_within_the_token_limit(width, height, vision):
    plan = plan_image(width, height, vision)
    assert plan.n_tokens <= vision.max_image_tokens
    assert plan.n_tokens == len(span_layout(plan.gh, plan.gw))
    assert plan.height == plan.rows * vision.patch_size > 0
    assert plan.width == plan.cols * vision.patch_size > 0
    assert (plan.gh - 1) * vision.downsample_ratio < plan.rows <= plan.gh * vision.downsample_ratio
    assert (plan.gw - 1) * vision.downsample_ratio < plan.cols <= plan.gw * vision.downsample_ratio


@given(sides, sides)
def test_an_image_that_fits_grows_by_less_than_a_patch(width, height):
    plan = plan_image(width, height, VISION)
    if width * height >= VISION.min_pixels and plan.width >= width and plan.height >= height:
        assert plan.width - width < VISION.patch_size
        assert plan.height - height < VISION.patch_size


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_shape_of_an_ordinary_image_is_kept(width, height):
    if 1 / 4 < width / height < 4:
        plan = plan_image(width, height, VISION)
        # Both sides are off by a patch at most, or by a cell after shrinking.
        assert abs(plan.width - plan.height * width / height) <= 42 * max(1, width / height)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_has_no_plan(width, height):
    with pytest.raises(ImageError, match=f"^image: found {width} x {height} pixels, expected at least 1 x 1$"):
        plan_image(width, height, VISION)


# ------------------------------------------------------------------------------------------ reading


def test_every_kind_of_source_gives_the_same_image(tmp_path):
    image = noise()
    data = encoded(image)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    with path.open("rb") as file:
        file.seek(7)
        sources = [path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), file, image]
        for source in sources:
            loaded = load_image(source)
            assert loaded.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(loaded), np.asarray(image))
        assert not file.closed


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_listed_format_is_read(file_format):
    loaded = load_image(encoded(Image.new("RGB", (40, 30), (200, 100, 50)), file_format))
    assert loaded.size == (40, 30)
    np.testing.assert_allclose(np.asarray(loaded)[15, 20], (200, 100, 50), atol=12)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (10, 20, 30)),
        ("L", 77, (77, 77, 77)),
        ("LA", (77, 0), (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("HSV", (0, 255, 255), (255, 0, 0)),
        ("YCbCr", (255, 128, 128), (255, 255, 255)),
        ("I;16", 0x8012, (0x80, 0x80, 0x80)),
        ("I;16B", 0xFFFF, (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(mode, colour, expected):
    assert load_image(Image.new(mode, (3, 2), colour)).getpixel((1, 1)) == expected


def test_a_palette_becomes_its_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 200, 100, 0])
    image.putpixel((1, 0), 1)
    assert np.asarray(load_image(encoded(image))).tolist() == [[[9, 8, 7], [200, 100, 0]]]


def test_sixteen_bit_files_keep_their_upper_bits():
    image = Image.fromarray(np.array([[0, 255, 256, 32768, 65535]], np.uint16))
    for file_format in ("PNG", "TIFF"):
        loaded = load_image(encoded(image, file_format))
        assert np.asarray(loaded)[0, :, 2].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("maxval", [1023, 65535])
def test_a_grey_pnm_of_more_than_eight_bits_uses_its_whole_range(maxval):
    pixels = b"".join(value.to_bytes(2, "big") for value in (0, (maxval + 1) // 2, maxval))
    loaded = load_image(f"P5\n3 1\n{maxval}\n".encode() + pixels)
    assert np.asarray(loaded)[0].tolist() == [[0] * 3, [128] * 3, [255] * 3]


def test_a_pillow_image_keeps_the_frame_it_stands_at():
    frames = [Image.new("RGB", (4, 4), colour) for colour in [(255, 0, 0), (0, 255, 0)]]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as image:
        image.seek(1)
        assert load_image(image).getpixel((0, 0)) == (0, 255, 0)


def test_an_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown rotated
    assert load_image(encoded(noise(40, 30), "JPEG", exif=exif)).size == (40, 30)


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in [(255, 0, 0), (0, 255, 0)]]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load_image(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "image bytes: found 0 bytes, expected an image file"),
        (b"hello", "image bytes: not an image in a supported format (PNG, JPEG, "),
        (encoded(noise(), "EPS"), "image bytes: not an image in a supported format"),
        (encoded(noise())[:200], "image bytes: the image cannot be read: "),
        (encoded(noise(), "JPEG")[:-100], "image bytes: the image cannot be read: "),
        (png_header(0, 5), "image bytes: "),
        (png_header(20_000, 20_000), "image bytes: the image is too large: Image size (400000000 pixels) exceeds"),
        (io.BytesIO(b"hello"), "image file: not an image in a supported format"),
        (io.StringIO("hello"), "image file: the image cannot be read: "),
        ("no/such.png", "no/such.png: there is no such file"),
        ("a\0b", "a\0b: the image cannot be read: embedded null byte"),
        (".", ".: the image cannot be read: "),
        (17, "image: found int, expected a path, bytes, a binary file object or a Pillow image"),
        (None, "image: found NoneType, expected a path"),
        (Image.new("RGB", (0, 3)), "image: found 0 x 3 pixels, expected at least 1 x 1"),
        (Image.new("F", (2, 2)), "image: found pixels of mode 'F', expected 8 or 16 bits per channel"),
        (Image.new("I", (2, 2)), "image: found pixels of mode 'I', expected 8 or 16 bits per channel"),
        (Image.new("La", (2, 2)), "image: the image cannot be read: "),
    ],
)
def test_what_is_not_an_image_is_one_clear_error(source, message):
    with pytest.raises(ImageError) as caught:
        load_image(source)
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text


@pytest.mark.filterwarnings("error")
def test_a_size_that_pillow_warns_about_is_an_error_where_warnings_are():
    with pytest.raises(ImageError, match="the image is too large"):
        load_image(png_header(10_000, 10_000))


def test_a_long_path_gives_a_short_message():
    with pytest.raises(ImageError) as caught:
        load_image("x" * 100_000)
    assert len(str(caught.value)) < 500


@settings(max_examples=300)
@given(st.sampled_from(FORMATS), st.data())
def test_damaged_files_give_an_image_or_an_image_error(file_format, data):
    damaged = bytearray(encoded(noise(12, 9), file_format))
    for _ in range(data.draw(st.integers(0, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        outcome = load_image(damaged).mode
    except ImageError as error:
        outcome = str(error)
    assert outcome == "RGB" or outcome.startswith("image bytes: ")


# ------------------------------------------------------------------------------------------- patches


def test_patches_are_row_major_and_channel_first():
    image = noise(546, 546)  # the planned size, so that nothing is resampled
    result = preprocess(image, VISION)
    assert (result.rows, result.cols, result.patches.shape) == (39, 39, (39 * 39, 3, 14, 14))
    assert result.patches.dtype == np.float32
    pixels = np.asarray(image)
    for row, col, channel, y, x in [(0, 0, 0, 0, 0), (2, 5, 1, 13, 0), (38, 38, 2, 3, 7)]:
        value = np.float32(pixels[row * 14 + y, col * 14 + x, channel])
        expected = float(((value / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).astype(ml_dtypes.bfloat16))
        assert result.patches[row * 39 + col, channel, y, x] == expected


def test_pixel_values_are_bfloat16_from_minus_one_to_one():
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1))[..., None].repeat(3, axis=-1))
    values = preprocess(ramp, dataclasses.replace(SMALL, max_image_tokens=10_000)).patches
    assert (values.min(), values.max()) == (-1, 1)
    np.testing.assert_array_equal(values, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    exact = (np.arange(256) / 255 - 0.5) / 0.5
    np.testing.assert_array_equal(np.unique(values), exact.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_an_image_of_another_shape_is_centred_on_grey():
    result = preprocess(Image.new("RGB", (600, 1100), (255, 255, 255)), VISION)
    assert (result.rows, result.cols) == (79, 43)
    canvas = result.patches.reshape(79, 43, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 79 * 14, 43 * 14)
    inside = canvas[0] == 1
    assert set(np.unique(canvas)) == {np.float32(GREY), np.float32(1)}
    # 1104 rows of 1106 at full width: round(1100 / 600 * 602) = 1104.
    assert np.flatnonzero(inside.all(axis=1)).tolist() == list(range(1, 1105))


def test_resampling_is_the_bicubic_letterbox_of_pillow():
    image = noise(700, 500)
    plan = plan_image(700, 500, VISION)
    expected = np.asarray(ImageOps.pad(image, (plan.width, plan.height), Image.Resampling.BICUBIC, (127,) * 3))
    result = preprocess(image, VISION)
    canvas = result.patches.reshape(plan.rows, plan.cols, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    exact = ((expected / 255 - 0.5) / 0.5).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(canvas.reshape(plan.height, plan.width, 3), exact)


def test_only_beyond_the_width_limit_an_image_is_stretched():
    limited = dataclasses.replace(VISION, max_wh_ratio=2.0)
    assert (preprocess(Image.new("RGB", (2500, 600), (255, 255, 255)), limited).patches == 1).all()
    assert (preprocess(Image.new("RGB", (600, 1100), (255, 255, 255)), limited).patches == np.float32(GREY)).any()


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 10_000), (1533, 3)),
        ((10_000, 1), (3, 3063)),
        ((1, 200_000), (1533, 3)),
        ((200_000, 1), (3, 3063)),
        ((1, 1), (39, 39)),
    ],
)
def test_extreme_shapes_keep_their_content_in_little_memory(size, grid):
    source = Image.new("RGB", size, (255, 255, 255))
    tracemalloc.start()
    result = preprocess(source, VISION)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (result.rows, result.cols) == grid
    assert peak < 64 * 2**20
    canvas = result.patches.reshape(*grid, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, grid[0] * 14, -1)
    line = canvas[0] == 1
    assert line.all(axis=0).any() or line.all(axis=1).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), visions)
def test_any_image_gives_the_planned_grid(width, height, vision):
    plan = plan_image(width, height, vision)
    result = preprocess(Image.new("L", (width, height), 255), vision)
    assert (result.rows, result.cols) == (plan.rows, plan.cols)
    assert result.patches.shape == (plan.rows * plan.cols, 3, vision.patch_size, vision.patch_size)
    assert result.patches.max() > 0.5


# --------------------------------------------------------------------------------------- cells, span


@pytest.mark.parametrize(("rows", "cols", "ratio"), [(5, 7, 3), (6, 6, 3), (1, 1, 3), (4, 3, 2), (2, 5, 1)])
def test_cells_hold_their_patches_row_by_row(rows, cols, ratio):
    values = np.random.default_rng(0).normal(size=(rows * cols, 3, 2, 2)).astype(np.float32)
    cells, coords, valid = cell_major(Patches(values, rows, cols), ratio)
    assert (cells.dtype, coords.dtype, valid.dtype) == (np.float32, np.int32, np.bool_)
    index = 0
    for cell_row in range(-(-rows // ratio)):
        for cell_col in range(-(-cols // ratio)):
            for row in range(cell_row * ratio, (cell_row + 1) * ratio):
                for col in range(cell_col * ratio, (cell_col + 1) * ratio):
                    inside = row < rows and col < cols
                    expected = values[row * cols + col].ravel() if inside else np.zeros(12, np.float32)
                    np.testing.assert_array_equal(cells[index], expected)
                    assert coords[index].tolist() == [row, col]
                    assert valid[index] == inside
                    index += 1
    assert len(cells) == len(coords) == len(valid) == index
    assert valid.sum() == rows * cols


def test_the_span_has_a_newline_after_every_row():
    assert span_layout(2, 3).tolist() == [0, 3, 4, 5, 2, 6, 7, 8, 2, 1]
    assert span_layout(1, 1).tolist() == [0, 3, 2, 1]
    assert span_layout(2, 3).dtype == np.int32


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_span_uses_each_feature_once_in_order(gh, gw):
    span = span_layout(gh, gw)
    assert len(span) == gh * (gw + 1) + 2
    assert span[span >= 3].tolist() == list(range(3, 3 + gh * gw))
    assert (span == 2).sum() == gh
