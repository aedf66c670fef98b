# SPDX-License-Identifier: Apache-2.0
"""Companion checkpoints: a language model and an encoder that a multimodal checkpoint names and does not contain.

Ultravox's files have little more than its projector. What they name and where it lies is resolved once, with the
config; the readers of all parts then see one config.json.
Invariant: torch-free. A part whose tensors the checkpoint has itself is read from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config.arch import Multimodal
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.config_overrides import TEXT, with_overrides
from quire.models.gguf.model import is_gguf
from quire.models.json_object import JsonObject, optional_json_object, read_json_object
from quire.models.multimodal import AUDIO, FOR_ALL_PARTS, WRAPPERS
from quire.models.tied_head import TIE
from quire.models.weight_files import StoredTensors

FindModel = Callable[[str], Path]
"""Directory of a model by its name; raises ModelLoadError if there is none."""
EXTRACTOR_FILE = "preprocessor_config.json"
_LANGUAGE_ID, _ENCODER_ID = "text_model_id", "audio_model_id"
_LANGUAGE_PREFIX, _ENCODER_PREFIX = "language_model.", "audio_tower."
_PLACEHOLDER, _OLD_DEFAULT = "audio_token_index", 32000
_USUAL_LANGUAGE = {"model_type": "llama"}
_USUAL_ENCODER = {
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}
"""Values of a Whisper that its file may omit, as those of the smallest one."""


@dataclass(frozen=True)
class AssembledConfig:
    """Config of a whole model with those of its parts, and the last fields of `Multimodal`."""

    config: JsonObject
    language_dir: str = ""
    encoder_dir: str = ""
    processor_files: str = ""

    def placed(self, part_of: Multimodal | None) -> Multimodal | None:
        """Return the multimodal model with the places of its parts."""
        if part_of is None or not self.processor_files:
            return part_of
        return replace(
            part_of,
            language_dir=self.language_dir,
            encoder_dir=self.encoder_dir,
            processor_files=self.processor_files,
        )


def assemble(
    architecture: str, config: JsonObject, overrides: Mapping[str, Any], model_dir: Path, find: FindModel
) -> AssembledConfig:
    """Return the config of a model whose parts may be elsewhere; of any other model the config as it is.

    Args:
        config: config.json of `model_dir`, with `overrides` applied.
        find: called for the parts that are elsewhere.

    Raises:
        ModelLoadError: a companion is not there, or its config.json is malformed.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None or not wrapper.has_companions:
        return AssembledConfig(config)
    stored = StoredTensors(model_dir).names
    language, language_dir = _part(config, stored, TEXT, _LANGUAGE_ID, _LANGUAGE_PREFIX, find)
    encoder, encoder_dir = _part(config, stored, AUDIO, _ENCODER_ID, _ENCODER_PREFIX, find)
    inside = overrides.get(TEXT)
    language = with_overrides(_alone(language), inside if isinstance(inside, dict) else {})
    parts = {TEXT: _USUAL_LANGUAGE | language, AUDIO: _USUAL_ENCODER | encoder}
    values = {key: value for key, value in config.values.items() if key != TIE} | parts
    if values.get(_PLACEHOLDER) == _OLD_DEFAULT and _is_in_vocabulary(_OLD_DEFAULT, parts[TEXT]):
        del values[_PLACEHOLDER]  # a word of this language model
    extractor = _extractor(model_dir, encoder_dir, parts[AUDIO])
    return AssembledConfig(
        JsonObject(config.where, values, refused=config.refused),
        language_dir,
        encoder_dir,
        json.dumps({"config.json": values, EXTRACTOR_FILE: extractor}),
    )


def _part(
    config: JsonObject, stored: tuple[str, ...], inside: str, id_key: str, prefix: str, find: FindModel
) -> tuple[dict[str, Any], str]:
    """Return a part's config, and the directory of its weights; "" if `stored` are among them."""
    is_stored = any(name.startswith(prefix) for name in stored)
    if id_key not in config or (is_stored and inside in config):
        return (config.child(inside).values if inside in config else {}), ""
    name = config.text(id_key)
    hint = f'name its directory by --hf-overrides \'{{"{id_key}": "DIRECTORY"}}\''
    try:
        found = find(name)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{config.where}: {id_key} names another checkpoint that is needed: {error}; {hint}"
        ) from error
    if is_gguf(found):
        raise ModelLoadError(f"{config.where}: {id_key} names {found}, and GGUF cannot be a part; {hint}")
    return read_json_object(found / "config.json").values, "" if is_stored else str(found)


def _alone(language: dict[str, Any]) -> dict[str, Any]:
    """Return a language model's config without the other parts that its checkpoint may have."""
    text = language.get(TEXT)
    if not isinstance(text, dict):
        return language
    return {key: language[key] for key in (*FOR_ALL_PARTS, TIE) if key in language} | text


def _is_in_vocabulary(token_id: int, language: Mapping[str, Any]) -> bool:
    size = language.get("vocab_size")
    return isinstance(size, int) and token_id < size


def _extractor(model_dir: Path, encoder_dir: str, encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the feature extractor: those of the first directory with its file, else Whisper's own."""
    for directory in (model_dir, *([Path(encoder_dir)] if encoder_dir else [])):
        if has_file(directory / EXTRACTOR_FILE):
            return optional_json_object(directory / EXTRACTOR_FILE).values
    return {"feature_size": encoder["num_mel_bins"]}
