# SPDX-License-Identifier: Apache-2.0
"""Decoding of untrusted images and embeddings, in a process that may crash.

Invariant: the number of pixels is known from the header, and checked, before any pixel is decoded. Only listed formats
are tried, so no other decoder of Pillow ever reads a client's bytes. Of an animated or multi-page file the first frame
counts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ClientError, ValidationError
from quire.multimodal.arrays import EMBEDS_DTYPES, read_arrays
from quire.multimodal.door.layout import PlaceholderLayout
from quire.multimodal.processors.base import Prepared, Processor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 89_478_485  # Pillow's own limit: a quarter GiB of RGB.
MAX_SIDE = 2**16
ORIENTATION = 0x0112  # EXIF tag.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
OTHER_FORMATS = {
    name: re.compile(beginning, re.DOTALL | re.IGNORECASE)
    for name, beginning in {
        "an image in HEIC or AVIF": rb".{4}ftyp(heic|heix|hevc|heim|heis|mif1|msf1|avif|avis)",
        "a video, MP4 or MOV": rb".{4}ftyp",
        "a video, WebM or MKV": rb"\x1aE\xdf\xa3",
        "an image in JPEG XL": rb"\xff\x0a|\x00\x00\x00\x0cJXL ",
        "an image in JPEG 2000": rb"\x00\x00\x00\x0cjP  ",
        "an image in ICO": rb"\x00\x00\x01\x00",
        "an image in PNM": rb"P[1-7]\s",
        "an SVG drawing": rb"\s*<(\?xml|svg)",
        "a page in HTML": rb"\s*<(!doctype|html)",
        "a PDF document": rb"%PDF",
    }.items()
}
"""Name of a format that is not read -> how its files begin."""
RAW = "raw"  # Kind of input: pixels of a PIL image, not encoded.
IMAGE, EMBEDS, VIDEO, AUDIO = "image", "embeds", "video", "audio"
FRAMES = "frames"  # Kind of input: RGB pixels of all frames of a video, not encoded.
ITEM_KINDS = {RAW: IMAGE, FRAMES: VIDEO}
"""Kind of input -> kind of the item that it becomes, where the two differ."""
NAMES = {VIDEO: "video", AUDIO: "sound"}
"""Kind of item -> its name in messages; all others are images."""
NPY_MAGIC = b"\x93NUMPY"


def name_of(kind: str) -> str:
    """Return the name, in messages, of an input of this kind."""
    return NAMES.get(ITEM_KINDS.get(kind, kind), IMAGE)


def layout_of(prepared: Prepared, num_pixels: int = 0, size: tuple[int, int] = (0, 0)) -> PlaceholderLayout:
    """Return the layout of an item; `size` is an image's (width, height)."""
    runs = [list(run.pieces) for run in prepared.runs]
    seconds = prepared.seconds_per_frame
    return PlaceholderLayout(
        prepared.text, runs, prepared.grid, prepared.both_ways, num_pixels, seconds, size=size
    )


def read_image(content: bytes, max_pixels: int) -> Image.Image:
    """Return the first frame of an encoded image, turned as its EXIF block says.

    Raises:
        ValidationError: it is no image of a known format, damaged, or too large.
        MemoryError: decoding it needs too much memory.
    """
    if not content:
        raise ValidationError("the image is empty: it has no bytes")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ValidationError(f"the image has more pixels than the limit, {max_pixels}") from None
    except MemoryError:
        raise
    except Exception:  # untrusted bytes; decoders raise anything
        raise ValidationError(f"{_named(content)}; formats are {', '.join(FORMATS)}") from None
    check_size(image.width, image.height, max_pixels)
    try:
        image.load()
        return in_eight_bits(_turned(image))
    except ClientError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # untrusted bytes; decoders raise anything
        raise ValidationError(
            f"the {image.format or 'image'} file is damaged or cut off: {error!s:.80}"
        ) from None


def check_size(width: int, height: int, max_pixels: int, kind: str = IMAGE) -> None:
    """Raise ValidationError if an image, or a frame of a video, is empty or too large."""
    if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE:
        raise ValidationError(f"the {kind} is {width} x {height} pixels; each side must be 1 to {MAX_SIDE}")
    if width * height > max_pixels:
        raise ValidationError(
            f"the {kind} is {width} x {height} = {width * height} pixels, and at most {max_pixels} can be read of it "
            "in this request: send it smaller"
        )


def _named(content: bytes) -> str:
    """Return the words for bytes that are in no format of an image that is read."""
    name = next((name for name, beginning in OTHER_FORMATS.items() if beginning.match(content)), None)
    return "the bytes are no image" if name is None else f"the file is {name}"


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Return an image whose values are 0 to 255; gray values of 16 bits are scaled, which Pillow would cut off.

    Raises:
        ValidationError: the values are numbers of 32 bits, whose range is unknown.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValidationError(
            f"the image has one number of 32 bits for each pixel (mode {image.mode}), of unknown range: convert it "
            "to 8 or 16 bits"
        )
    return image


def _turned(image: Image.Image) -> Image.Image:
    turn = TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1, upright, if there is none that can be read."""
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # untrusted bytes; an EXIF block that is no such block says nothing
        return 1
    return found if isinstance(found, int) else 1


def read_raw(content: bytes, size: tuple[int, int]) -> Image.Image:
    """Return the image of RGB pixels; `size` is (width, height)."""
    return Image.frombytes("RGB", size, content)


def read_embeds(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a safetensors or .npy file: "values" float32 [n, H], and perhaps a grid.

    Raises:
        ValidationError: it is neither, or the values are no finite matrix.
    """
    try:
        arrays = _read_npy(content) if content.startswith(NPY_MAGIC) else read_arrays(content, EMBEDS_DTYPES)
    except ValueError as error:
        raise ValidationError(f"the embeddings are no safetensors or .npy file: {error}") from None
    others = [name for name, array in arrays.items() if array.dtype.kind == "f"]
    if len(others) != 1:
        raise ValidationError(f"the embeddings' file must hold one matrix of floats, got {len(others)}")
    values = arrays[others[0]]
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 2 or not values.size:
        raise ValidationError(f"embeddings must have the shape [n, hidden size], got {list(values.shape)}")
    floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise ValidationError("embeddings must be finite numbers of float32")
    return {"values": floats}


def _read_npy(content: bytes) -> dict[str, NDArray[Any]]:
    try:
        return {"values": np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)}
    except (EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise ValueError(type(error).__name__) from None


def prepare_image(
    processor: Processor, image: Image.Image, options: Mapping[str, Any]
) -> tuple[dict[str, NDArray[Any]], PlaceholderLayout]:
    """Return the arrays and the layout of an image. Raises ValidationError as `Processor.prepare`."""
    size, num_pixels = image.size, image.width * image.height
    try:
        prepared = processor.prepare(image, options)
    except (MemoryError, ClientError):
        raise
    except (ValueError, OSError) as error:  # a mode that Pillow cannot convert
        raise ValidationError(f"the image cannot be converted to RGB: {type(error).__name__}") from None
    return prepared.arrays, layout_of(prepared, num_pixels, size)
