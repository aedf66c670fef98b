# SPDX-License-Identifier: Apache-2.0
"""Processor of a checkpoint by transformers: its placeholders and its arrays, as they are.

Invariant: transformers is imported by `prepare` alone, in a process that decodes images, and without torch. The rest
reads files, so an API process imports neither.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ModelLoadError, UnsupportedModelError, ValidationError
from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, read_json_object
from quire.models.transformers_backend.reader import transformers_has
from quire.multimodal.processors.base import Arrays, Placeholders, Prepared, Processor, check_prepared_pixels
from quire.multimodal.processors.files import ProcessorFiles

_MARKERS = {"AyaVisionForConditionalGeneration": "<image>"}
"""Architecture -> usual marker, where it is no placeholder."""
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_CHANNELS = 3


class HostedProcessor(Processor):
    """Processor of one checkpoint, by the class of transformers that its files name."""

    OPTIONS = frozenset()

    def __init__(
        self,
        model_dir: Path,
        options: Mapping[str, Any],
        tokens: Iterable[str],
        marker: str,
        placeholder: str,
    ) -> None:
        self._model_dir = model_dir
        self._options = dict(options)
        self.marker, self.placeholder = marker, placeholder
        self.literals = tuple(dict.fromkeys((marker, placeholder, *tokens)))

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Self:
        files = ProcessorFiles(model_dir, {})
        architecture = str(next(iter(files.config.get("architectures") or ()), ""))
        if not transformers_has(architecture):
            raise UnsupportedModelError(
                f"images for {architecture} need a transformers that has it: pip install 'quire-llm[hf]'"
            )
        added, wanted = _added_tokens(model_dir), _placeholder_id(files.config)
        placeholder = next((token["content"] for token in added if token["id"] == wanted), None)
        if placeholder is None:
            raise ModelLoadError(
                f"{model_dir}/tokenizer.json has no added token {wanted}, which config.json names as an image's"
            )
        special = [token["content"] for token in added if token.get("special")]
        marker = files.token("image_token", _MARKERS.get(architecture, placeholder))
        return cls(model_dir, options, special, marker, placeholder)

    @cached_property
    def _theirs(self) -> Any:
        """Processor of transformers."""
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # The import would take seconds and 1 GB.
        import transformers

        auto: Any = transformers.AutoProcessor
        return auto.from_pretrained(
            self._model_dir, backend="pil", local_files_only=True, trust_remote_code=False
        )

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        kwargs: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "np", **self._options}
        try:
            found = self._theirs(images=[image], text=[self.marker], **kwargs)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            kind = type(self._theirs).__name__
            raise ValidationError(f"{kind} of transformers cannot process the image: {error}") from error
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in _OF_TEXT}
        check_prepared_pixels(arrays["pixel_values"].size // _CHANNELS)
        names = self._theirs.tokenizer.convert_ids_to_tokens(found["input_ids"][0].tolist())
        pieces = tuple((name, len([*same])) for name, same in itertools.groupby(names))
        return Prepared(arrays, self.placeholder, (Placeholders(pieces),))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return dict(arrays)


def _placeholder_id(config: JsonObject) -> int:
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    return config.integer(key)


def _added_tokens(model_dir: Path) -> list[dict[str, Any]]:
    path = model_dir / "tokenizer.json"
    if not has_file(path):
        raise ModelLoadError(f"{model_dir} has no tokenizer.json, which names the tokens of an image")
    return list(read_json_object(path).get("added_tokens") or ())
