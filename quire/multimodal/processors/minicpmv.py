# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.6: the whole image, and slices of a large one, each in its own proportions; a video is such frames.

Papers: LLaVA-UHD (2403.11703), MiniCPM-V (2408.01800).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.door.layout import NUMBER
from quire.multimodal.processors.base import (
    OPTIONS_FIELD,
    Arrays,
    Placeholders,
    Prepared,
    Size,
    check_prepared_pixels,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
from quire.multimodal.processors.pixels import (
    BICUBIC,
    HALVES,
    PIXELS,
    TABLE,
    as_rgb,
    channels_first,
    pixels_of,
    resample_of,
    resized,
    size_of,
    table_of,
)
from quire.multimodal.processors.resampling import resampled
from quire.multimodal.processors.video import (
    MAX_FRAMES,
    USUAL_FPS,
    Clip,
    VideoFacts,
    VideoProcessor,
    check_video_pixels,
)

MERGES = {"16x": 4, "4x": 2}
"""Value of `downsample_mode` -> side, in patches, of what becomes one embedding."""
MAX_SLICES, SLICING = "max_slice_nums", "slice_mode"
MOST_FRAMES, STACKING = "max_num_frames", "stack_frames"
_MOST_SLICES = 64
_STEP = 0.1  # Seconds between the places of a long video of which some are sampled.
_SLICES, _PATCH = "slices", "patch_size"  # Names of arrays: uint8 [..., k, h, w, 3] and int64 [1].
IMAGE_NAMES, VIDEO_NAMES = (
    ("pixel_values", "target_sizes"),
    ("pixel_values_videos", "target_sizes_videos"),
)
"""Names of arrays for the encoder: the patches of all tiles, and the rows and columns of each tile."""


class Cut(NamedTuple):
    """Sizes of an image as a whole, and of its slices if it has rows and columns of them."""

    whole: Size
    grid: Size | None = None
    slice: Size = (0, 0)

    @property
    def slices(self) -> Size:
        """(height, width) of all slices together."""
        rows, columns = self.grid or (0, 0)
        return rows * self.slice[0], columns * self.slice[1]


@dataclass(frozen=True)
class Cutter:
    """Sizes with as many pixels as the encoder was trained for.

    Args:
        unit: side of an embedding in pixels.
        side: of the square with as many pixels.
    """

    unit: int
    side: int

    def cut(self, size: Size, most: int) -> Cut:
        """Return the sizes for an image (height, width) with up to so many slices."""
        grid = best_grid(size, most, self.side)
        whole = self._best_size(size, grow=grid is None)
        if grid is None:
            return Cut(whole)
        height, width = (rounded(side, count) / count for side, count in zip(size, grid, strict=True))
        return Cut(whole, grid, self._best_size((height, width), grow=True))

    def count(self, size: Size) -> int:
        """Return the embeddings of a whole image or a slice."""
        return (size[0] // self.unit) * (size[1] // self.unit)

    def _best_size(self, size: tuple[float, float], *, grow: bool) -> Size:
        """Return a size of whole embeddings in proportion, of `side` squared pixels or of fewer."""
        height, width = size
        if grow or height * width > self.side**2:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        return rounded(height, self.unit), rounded(width, self.unit)


@dataclass(frozen=True)
class Frames:
    """Placeholders of images that are shown as a whole and in slices.

    Args:
        placeholder: the token that takes an embedding.
        whole, slice: markers before and behind.
    """

    placeholder: str
    whole: tuple[str, str]
    slice: tuple[str, str]

    def text(self, cut: Cut) -> str:
        """Return the text in place of one image."""
        whole, one = (self.placeholder.join(ends) for ends in (self.whole, self.slice))
        rows, columns = cut.grid or (0, 0)
        return whole + "\n".join([one * columns] * rows)

    def runs(self, cut: Cut, cutter: Cutter) -> list[Placeholders]:
        """Return the tokens of each placeholder of one image."""
        rows, columns = cut.grid or (0, 0)
        sizes = [cut.whole, *[cut.slice] * (rows * columns)]
        return [Placeholders(((self.placeholder, cutter.count(size)),)) for size in sizes]


class MiniCPMVProcessor(FilesProcessor):
    """Processor that gives an image as many pixels as the encoder was trained for, and so each slice."""

    OPTIONS = frozenset({MAX_SLICES, SLICING})

    def __init__(self, files: ProcessorFiles) -> None:
        image = self._image = files.image
        self._table = table_of(image, HALVES, HALVES)
        self._resample = resample_of(image, BICUBIC)
        image.only("do_resize", True)
        mode = files.config.choice("downsample_mode", tuple(MERGES), "16x")
        self._patch, self._cutter = patch_of(image), cutter_of(image, mode)
        most_slices(image)
        self.placeholder = self.marker = files.token("image_token", "<|image_pad|>")
        ends = {
            name: (
                files.token(f"{name}_start_token", f"<{name}>"),
                files.token(f"{name}_end_token", f"</{name}>"),
            )
            for name in ("image", "slice", "image_id")
        }
        self._frames = Frames(self.placeholder, ends["image"], ends["slice"])
        is_numbered = files.processor.flag("use_image_id", image.flag("use_image_id", True))
        self._number = NUMBER.join(ends["image_id"]) if is_numbered else ""
        self.literals = (self.placeholder, *(token for pair in ends.values() for token in pair))
        self.videos = MiniCPMVVideos(files, mode, self._frames, self._number)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            most = most_slices(request_options(self._image, options))
        image = as_rgb(image)
        cut = self._cutter.cut(size_of(image), most)
        arrays: Arrays = {
            PIXELS: self._resized(image, cut.whole),
            TABLE: self._table,
            _PATCH: np.array([self._patch], np.int64),
        }
        if cut.grid is not None:
            arrays[_SLICES] = in_slices(self._resized(image, cut.slices), cut.grid)
        runs = self._frames.runs(cut, self._cutter)
        return Prepared(arrays, self._number + self._frames.text(cut), tuple(runs))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the patches [1, 3, p, n * p] of all tiles, and their rows and columns [k, 2], by the names of an image
        or of a video.
        """
        patch, table = int(arrays[_PATCH][0]), arrays[TABLE]
        frames, slices = arrays[PIXELS], arrays.get(_SLICES)
        is_video = frames.ndim == 4
        if not is_video:
            frames, slices = frames[None], None if slices is None else slices[None]
        tiles: list[NDArray[np.uint8]] = []
        for number, frame in enumerate(frames):
            tiles += [frame] if slices is None else [frame, *slices[number]]
        rows = [_in_rows(channels_first({PIXELS: tile, TABLE: table}), patch) for tile in tiles]
        sizes = [[side // patch for side in tile.shape[:2]] for tile in tiles]
        values, grids = VIDEO_NAMES if is_video else IMAGE_NAMES
        return {
            values: np.concatenate(rows, axis=-1)[None],
            grids: np.array(sizes, dtype=np.int32),
        }

    def _resized(self, image: Image.Image, size: Size) -> NDArray[np.uint8]:
        check_prepared_pixels(size[0] * size[1])
        return pixels_of(resized(image, size, self._resample))


class MiniCPMVVideos(VideoProcessor):
    """Processor of videos whose frames are images, each perhaps in slices.

    Composites of several frames (`stack_frames`), which transformers makes of square frames only, are not supported.

    Args:
        mode: the model's `downsample_mode`.
        images: placeholders of images.
        number: text before a video that says its number.
    """

    OPTIONS = frozenset({"do_sample_frames", MOST_FRAMES, MAX_SLICES, SLICING})
    samples_arrays = True

    def __init__(self, files: ProcessorFiles, mode: str, images: Frames, number: str) -> None:
        super().__init__(files, HALVES, HALVES, BICUBIC)
        video = self._video
        video.only(STACKING, 1)
        self._patch, self._cutter, self._number = patch_of(video), cutter_of(video, mode), number
        self._frames = Frames(self.placeholder, images.whole, images.slice)
        most_slices(video)

    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        most = video.integer(MOST_FRAMES, 128, high=MAX_FRAMES)
        if not facts.fps and not facts.is_encoded:
            raise ValidationError(
                "frames are sampled by their times, and the rate of these is unknown; send them with metadata that has "
                f"'fps', or set do_sample_frames in {OPTIONS_FIELD} to false",
                param=OPTIONS_FIELD,
            )
        fps, last = facts.fps or USUAL_FPS, facts.num_frames - 1
        seconds = facts.num_frames / fps
        if seconds <= most:
            return [int(second * fps) for second in range(math.ceil(seconds))]
        count = int(seconds / _STEP)
        places = np.linspace(0, count - 1, most, dtype=int).tolist() if count > most else range(count)
        return [min(int(round(place * _STEP, 1) * fps), last) for place in places]

    def prepare(
        self, clip: Clip, frames: Iterable[NDArray[np.uint8]], options: Mapping[str, Any]
    ) -> Prepared:
        """See `VideoProcessor.prepare`."""
        with request_errors():
            most = most_slices(self._with(options))
        count, cut = len(clip.indices), self._cutter.cut(clip.facts.size, most)
        check_video_pixels(count, cut.whole)
        check_video_pixels(count, cut.slices)
        whole, slices = np.empty((count, *cut.whole, 3), np.uint8), []
        for place, frame in zip(whole, frames, strict=True):
            place[:] = resampled(frame, cut.whole, self._resample)
            if cut.grid is not None:
                slices.append(in_slices(resampled(frame, cut.slices, self._resample), cut.grid))
        arrays: Arrays = {PIXELS: whole, TABLE: self._table, _PATCH: np.array([self._patch], np.int64)}
        if slices:
            arrays[_SLICES] = np.stack(slices)
        runs = self._frames.runs(cut, self._cutter) * count
        return Prepared(arrays, self._number + self._frames.text(cut) * count, tuple(runs))


def patch_of(image: JsonObject) -> int:
    """Return the side of a patch."""
    return image.integer("patch_size", 14)


def cutter_of(image: JsonObject, mode: str) -> Cutter:
    """Return the sizes of a model's images or frames. Raises StartupError: they are for another `downsample_mode`."""
    image.only("downsample_mode", mode)
    return Cutter(patch_of(image) * MERGES[mode], image.integer("scale_resolution", 448))


def most_slices(image: JsonObject) -> int:
    """Return the most slices of an image or a frame; 1: it is shown as a whole only."""
    most = image.integer(MAX_SLICES, 9, high=_MOST_SLICES)
    return most if image.flag(SLICING, True) else 1


def in_slices(pixels: NDArray[np.uint8], grid: Size) -> NDArray[np.uint8]:
    """Return the slices [k, h, w, 3] of pixels [H, W, 3], row by row."""
    rows, columns = grid
    down, across = pixels.shape[0] // rows, pixels.shape[1] // columns
    tiles = pixels.reshape(rows, down, columns, across, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(rows * columns, down, across, 3))


def rounded(length: float, unit: int) -> int:
    """Return the multiple of a unit that is nearest to a length, at least one unit."""
    return max(round(length / unit) * unit, unit)


def best_grid(size: Size, most: int, side: int) -> Size | None:
    """Return the rows and columns of an image's slices, nearest to its proportions; None: it is small enough."""
    height, width = size
    ratio = math.log(width / height)
    wanted = min(math.ceil(width * height / (side * side)), most)
    if wanted <= 1:
        return None
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    best, least = (1, 1), math.inf
    for rows, columns in grids:
        error = abs(ratio - math.log(columns / rows))
        if error < least or (error == least and rows > best[0]):
            best, least = (rows, columns), error
    return best


def _in_rows(values: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
    """Return the patches of an image [3, H, W] side by side: [3, patch, n * patch]."""
    rows, columns = (side // patch for side in values.shape[1:])
    split = values.reshape(3, rows, patch, columns, patch).transpose(0, 2, 1, 3, 4)
    return split.reshape(3, patch, -1)
