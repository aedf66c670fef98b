# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that configure its processor.

Invariant: older checkpoints have `preprocessor_config.json`, newer ones the same object inside `processor_config.json`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, optional_json_object, read_json_object
from quire.multimodal.processors.base import IMAGE, SCOPES, VIDEO, Processor

IMAGE_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
GENERAL = frozenset(
    {
        *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "do_pad", "pad_size", "do_convert_rgb"),
    }
)
"""Keys that a file may lack though the processor reads them."""
INSIDE, VIDEO_INSIDE = "image_processor", "video_processor"


class ProcessorFiles:
    """Objects of the files.

    Attributes:
        model_dir: where they are.
        config: config.json.
        image: options of the image processor, the operator's included.
        video: those of the video processor, which are the image processor's in older checkpoints.
        processor: options of the processor around it; empty if there is no such file.
    """

    def __init__(self, model_dir: Path, options: Mapping[str, Any]) -> None:
        self.config = read_json_object(model_dir / "config.json")
        self.processor = optional_json_object(model_dir / PROCESSOR_FILE)
        image = optional_json_object(model_dir / IMAGE_FILE)
        if INSIDE in self.processor:
            image = self.processor.child(INSIDE)
        elif not has_file(model_dir / IMAGE_FILE):
            raise ModelLoadError(
                f"{model_dir} has neither {IMAGE_FILE} nor {INSIDE!r} in {PROCESSOR_FILE}; without them the model "
                "takes no images (--language-model-only)"
            )
        video = optional_json_object(model_dir / VIDEO_FILE)
        if VIDEO_INSIDE in self.processor:
            video = self.processor.child(VIDEO_INSIDE)
        elif not has_file(model_dir / VIDEO_FILE):
            video = image
        self.image = _with_options(image, options, SCOPES[IMAGE])
        self.video = _with_options(video, options, SCOPES[VIDEO])
        self.model_dir = model_dir

    @property
    def vision(self) -> JsonObject:
        """The encoder's part of config.json."""
        return self.config.child("vision_config")

    def token(self, name: str, usual: str) -> str:
        """Return a token by its name in the processor's or the tokenizer's file; `usual` if neither has it."""
        return token_of(self.model_dir, name, usual)


def check_options(options: Mapping[str, Any], processor: Processor, model_dir: Path) -> None:
    """Raise ConfigError if an option of the operator is none of a processor, and no key of its files."""
    if not options:
        return
    files = ProcessorFiles(model_dir, {})
    own = processor.OPTIONS | (frozenset() if processor.videos is None else processor.videos.OPTIONS)
    known = {*own, *files.image.values, *files.video.values, *GENERAL, *SCOPES.values()}
    scopes = [options.get(scope) for scope in SCOPES.values()]
    given = [options, *(scope for scope in scopes if isinstance(scope, dict))]
    for name in (name for each in given for name in each):
        if name not in known:
            raise ConfigError(
                f"--mm-processor-kwargs has {name!r:.60}, which this model's processor does not read; its options "
                f"are {', '.join(sorted(own)) or 'none'}, and the keys of {IMAGE_FILE}"
            )


def token_of(model_dir: Path, name: str, usual: str) -> str:
    """Return a token as `ProcessorFiles.token` does."""
    tokenizer = optional_json_object(model_dir / "tokenizer_config.json")
    processor = optional_json_object(model_dir / PROCESSOR_FILE)
    places = (processor.values, tokenizer.get("extra_special_tokens"), tokenizer.values)
    found = (place.get(name) for place in places if isinstance(place, dict))
    return next((_literal(value) for value in found if _literal(value)), usual)


def _with_options(values: JsonObject, options: Mapping[str, Any], scope: str) -> JsonObject:
    """Return the object of a file with an operator's options, those of the scope above all."""
    flat = {name: value for name, value in options.items() if name not in SCOPES.values()}
    inside = options.get(scope, {})
    return values.with_values(**{**flat, **(inside if isinstance(inside, dict) else {})})


def _literal(value: Any) -> str:
    """Return a token's text, which files have plain or inside an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


class FilesProcessor(Processor):
    """Base of processors that the files of a checkpoint configure."""

    @abc.abstractmethod
    def __init__(self, files: ProcessorFiles) -> None:
        """Read the files.

        Raises:
            StartupError: a file is malformed, or an option is not supported.
        """

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        return cls(ProcessorFiles(model_dir, options))
