# SPDX-License-Identifier: Apache-2.0
"""Interface of processors: an image in, arrays for the encoder and the layout of its placeholders out.

Invariant: a processor depends on the checkpoint's files and on options only, so equal images with equal options give
equal arrays. Arrays hold uint8 pixels after all resizing, and the table that turns them into floats, so what crosses
processes is a quarter of what an encoder takes. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import StartupError, ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.families import FAMILIES
from quire.plugins import import_place

if TYPE_CHECKING:
    from quire.multimodal.processors.sound import SoundProcessor
    from quire.multimodal.processors.video import VideoProcessor

Arrays = dict[str, NDArray[Any]]
Size = tuple[int, int]  # height, width

OPTIONS_FIELD = "mm_processor_kwargs"
IMAGE, VIDEO, AUDIO = "image", "video", "audio"
SCOPES = {
    IMAGE: "images_kwargs",
    VIDEO: "videos_kwargs",
    AUDIO: "audio_kwargs",
}  # Objects inside the options whose keys take precedence.
BESIDE_IMAGES = "beside_images"
"""Option of a sound in a prompt with images, which no request sets, and array of such a sound."""
MAX_PREPARED_PIXELS = 2**26  # Largest sum of pixels after resizing, 192 MiB.


@dataclass(frozen=True)
class Placeholders:
    """Tokens in place of one placeholder token of `Prepared.text`: pairs of token and count, in order."""

    pieces: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Prepared:
    """Processed image.

    Args:
        arrays: name -> array, as `Processor.floats` takes them.
        text: text in place of the marker; each of its placeholder tokens stands for one of `runs`.
        runs: tokens of each placeholder of `text`, in order.
        grid: (frames, rows, columns) of its embeddings, for models that rotate by these three; else zeros.
        both_ways: its positions attend to each other in both directions.
        seconds_per_frame: time between two frames of a video's grid, for models that rotate by time.
    """

    arrays: Arrays = field(repr=False)
    text: str
    runs: tuple[Placeholders, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    both_ways: bool = False
    seconds_per_frame: float = 0.0


class TaskParser(Protocol):
    """Parser of an answer about an image; `size` is the image's (width, height)."""

    def __call__(self, text: str, size: tuple[int, int]) -> dict[str, Any]:
        """Return the answer as a JSON object."""


class MediaTask(NamedTuple):
    """Prompt in words for a task that its text names, and the parser of the answer."""

    text: str
    parse: TaskParser


class Processor(abc.ABC):
    """Processor of the images of one checkpoint.

    Attributes:
        marker: text that a chat template writes for an image, and a user writes in a prompt; one token.
        placeholder: the token that takes an embedding.
        literals: every token that a processed item may consist of; users' text must not turn into one.
        videos: processor of videos; None: the model takes none.
        takes_images: whether the model takes images; otherwise it has no `marker` and no `placeholder`.
        sounds: processor of sounds; None: the model takes none.
        prefix_form: all positions of a prompt with images attend to one another; the token behind the last image, in
            place of the one with which text begins, and the last token. None: text attends to earlier positions.
    """

    videos: VideoProcessor | None = None
    num_encoded: int = 0
    """Rows of the encoder's output that cross-attention reads of an image; 0: an image has placeholders."""
    takes_images = True
    sounds: SoundProcessor | None = None
    prefix_form: tuple[str, str] | None = None

    leads = False
    """An image comes before its text, which need not have its marker."""

    marker: str
    placeholder: str
    literals: tuple[str, ...]
    OPTIONS: frozenset[str]
    """Options that a request may set."""

    @classmethod
    @abc.abstractmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        """Return the processor of a checkpoint.

        Args:
            options: the operator's, which replace those of the files.

        Raises:
            StartupError: a file is missing or malformed, or an option is not supported.
        """

    @abc.abstractmethod
    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        """Process one image.

        Args:
            options: the request's, checked by `checked_options`.

        Raises:
            ValidationError: the image or an option is not possible for this model.
        """

    @staticmethod
    @abc.abstractmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return what the encoder takes, as transformers' Pillow processor returns it for this one image."""

    def prepare_embeds(self, values: NDArray[np.float32]) -> Prepared:
        """Return the layout of embeddings [n, H] in place of an image.

        Raises:
            ValidationError: the model does not take this number, or none at all.
        """
        raise ValidationError(
            "embeddings in place of images are not supported for this model, whose images have no fixed number "
            "of them; send the image",
            param="messages",
        )

    def read_task(self, text: str) -> MediaTask | None:
        """Return the task that a prompt's text names; None: the text is as the model reads it.

        Raises:
            ValidationError: the task does not go with the rest of the text.
        """
        return None

    def checked_options(self, given: object, kind: str = IMAGE) -> dict[str, Any]:
        """Return a request's options for items of a kind, without their scope.

        Raises:
            ValidationError: an option does not exist for this model; names those that do.
        """
        if not isinstance(given, Mapping):
            raise ValidationError(f"{OPTIONS_FIELD} must be an object", param=OPTIONS_FIELD)
        known = {
            IMAGE: self.OPTIONS,
            VIDEO: frozenset() if self.videos is None else self.videos.OPTIONS,
            AUDIO: frozenset() if self.sounds is None else self.sounds.OPTIONS,
        }
        flat = {name: value for name, value in given.items() if name not in SCOPES.values()}
        _check_known(flat, frozenset().union(*known.values()), OPTIONS_FIELD)
        own = {name: value for name, value in flat.items() if name in known[kind]}
        for each, scope in SCOPES.items():
            inside = given.get(scope, {})
            if not isinstance(inside, Mapping):
                raise ValidationError(f"{OPTIONS_FIELD}.{scope} must be an object", param=OPTIONS_FIELD)
            _check_known(inside, known[each], f"{OPTIONS_FIELD}.{scope}")
            own |= dict(inside) if each == kind else {}
        return own


def _check_known(options: Mapping[Any, Any], known: frozenset[str], where: str) -> None:
    for name in options:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ValidationError(
                f"{where} has {name!r:.60}, but this model's options are: {names}", param=OPTIONS_FIELD
            )


def check_prepared_pixels(num_pixels: int) -> None:
    """Raise ValidationError if an image would be resized to more pixels than are allowed."""
    if num_pixels > MAX_PREPARED_PIXELS:
        raise ValidationError(
            f"the image would be resized to {num_pixels} pixels, the limit is {MAX_PREPARED_PIXELS}; send a smaller "
            f"image or a smaller size in {OPTIONS_FIELD}",
            param=OPTIONS_FIELD,
        )


def request_options(files: JsonObject, options: Mapping[str, Any]) -> JsonObject:
    """Return the image options of a checkpoint with a request's in their place; malformed ones raise StartupError."""
    return JsonObject(OPTIONS_FIELD, {**files.values, **options}) if options else files


@contextmanager
def request_errors() -> Iterator[None]:
    """Raise ValidationError for options of a request that a processor could not read, in place of StartupError."""
    try:
        yield
    except StartupError as error:
        raise ValidationError(str(error), param=OPTIONS_FIELD) from None


def make_processor(architecture: str, model_dir: Path, options: Mapping[str, Any]) -> Processor | None:
    """Return the processor of a checkpoint; None if its architecture takes no images here.

    Raises:
        StartupError: as `Processor.from_files`.
    """
    family = FAMILIES.get(architecture)
    if family is None or not family.processor:
        return None
    kind = import_place(family.processor)
    if not issubclass(kind, Processor):  # of sounds
        return None
    processor: Processor = kind.from_files(model_dir, options)
    return processor


def fixed_embeds(
    text: str, runs: tuple[Placeholders, ...], values: NDArray[np.float32], both_ways: bool
) -> Prepared:
    """Return the layout of embeddings for a model whose images all have the same number of them.

    Raises:
        ValidationError: there are more or fewer.
    """
    wanted = sum(count for run in runs for _, count in run.pieces)
    if len(values) != wanted:
        raise ValidationError(
            f"an image of this model has {wanted} embeddings, got {len(values)}", param="messages"
        )
    return Prepared({}, text, runs, both_ways=both_ways)
