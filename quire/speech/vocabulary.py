# SPDX-License-Identifier: Apache-2.0
"""Special tokens of a Whisper checkpoint, and what its generation config says of them.

Invariant: torch-free; every id comes from the checkpoint's files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from quire.config import EngineConfig
from quire.errors import ModelLoadError, ValidationError
from quire.models.generation_config import GENERATION
from quire.models.json_object import JsonObject, optional_json_object
from quire.speech.features import HOP, RATE
from quire.speech.languages import LANGUAGES, code_of

ARCHITECTURE = "WhisperForConditionalGeneration"
MAX_INITIAL_TIMESTAMP = 50  # 1 s, unless the checkpoint says otherwise.
TIMESTAMP_S = 0.02
TASKS = ("transcribe", "translate")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


def hears(config: EngineConfig) -> bool:
    """Return whether a resolved configuration is of a model that transcribes."""
    part = None if config.model_arch is None else config.arch.part_of
    return part is not None and part.architecture == ARCHITECTURE and not config.model.skip_tokenizer_init


@dataclass(frozen=True)
class SpeechVocabulary:
    """Tokens and sizes of a checkpoint.

    Args:
        end, start, previous, no_speech, no_timestamps: ids of the special tokens.
        languages: code -> id; empty for an English-only model.
        tasks: task -> id; empty for an English-only model.
        suppressed: ids that are never sampled; `suppressed_first`: nor as the first token.
        max_initial: highest timestamp, in steps of 0.02 s, of a window's first token.
        num_encoded: positions of the encoder's output before the decoder's tokens.
        context: positions of the decoder.
        num_bins, num_frames: size of a window's spectrogram.
    """

    end: int
    start: int
    previous: int
    no_speech: int
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial: int
    num_encoded: int
    context: int
    num_bins: int
    num_frames: int

    @property
    def first_timestamp(self) -> int:
        """Id of 0.00 s; those of later times follow."""
        return self.no_timestamps + 1

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self.num_frames * HOP

    @property
    def window_s(self) -> float:
        """Seconds of a window."""
        return self.window_samples / RATE

    @cached_property
    def language_of(self) -> dict[int, str]:
        """Code of each language's token."""
        return {token: code for code, token in self.languages.items()}

    def checked_language(self, given: str | None) -> str | None:
        """Return the code of a language given by code or name; None: to be detected.

        Raises:
            ValidationError: the model does not know it.
        """
        if given is None or not given.strip():
            return None if self.languages else "en"
        code = code_of(given)
        if not self.languages and code == "en":
            return code
        if code not in self.languages:
            known = ", ".join(self.languages) if self.languages else "en (the model is English-only)"
            raise ValidationError(
                f"language is {given!r:.40}; this model has the languages {known}", param="language"
            )
        return code

    def check_task(self, task: str) -> None:
        """Raise ValidationError if the model cannot do this task."""
        if task not in TASKS:
            raise ValidationError(f"task must be {' or '.join(TASKS)}, got {task!r:.40}", param="task")
        if task == "translate" and not self.tasks:
            raise ValidationError("this model is English-only and does not translate", param="model")


def read_vocabulary(config: EngineConfig, tokenizer_file: Path | None) -> SpeechVocabulary:
    """Return the tokens of the checkpoint of a resolved configuration.

    Args:
        tokenizer_file: tokenizer.json.

    Raises:
        ModelLoadError: a token is missing.
    """
    part = config.arch.part_of
    assert part is not None, "a model that hears has an encoder"
    if tokenizer_file is None:
        raise ModelLoadError(f"{config.model_dir}: a model that transcribes needs its tokenizer.json")
    ids = tokenizers.Tokenizer.from_file(str(tokenizer_file)).get_vocab(with_added_tokens=True)
    directory = Path(config.model_dir)
    generation = optional_json_object(directory / GENERATION)
    whole = JsonObject(str(directory), json.loads(part.config))
    return _vocabulary(config, ids, generation, whole)


def _vocabulary(
    config: EngineConfig, ids: Mapping[str, int], generation: JsonObject, whole: JsonObject
) -> SpeechVocabulary:
    part = config.arch.part_of
    assert part is not None, "a model that hears has an encoder"

    def token(*names: str) -> int:
        found = next((ids[name] for name in names if name in ids), None)
        if found is None:
            raise ModelLoadError(f"{config.model_dir}: its tokenizer has no token {' or '.join(names)}")
        return found

    is_multilingual = bool(_either(generation, whole, "is_multilingual", token("<|endoftext|>") != 50256))
    codes = [match[1] for match in map(_LANGUAGE.fullmatch, ids) if match is not None]
    return SpeechVocabulary(
        end=token("<|endoftext|>"),
        start=token("<|startoftranscript|>"),
        previous=token("<|startofprev|>"),
        no_speech=token("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=token("<|notimestamps|>"),
        languages={code: ids[f"<|{code}|>"] for code in LANGUAGES if code in codes and is_multilingual},
        tasks={task: token(f"<|{task}|>") for task in TASKS} if is_multilingual else {},
        suppressed=_ids(generation, whole, "suppress_tokens"),
        suppressed_first=_ids(generation, whole, "begin_suppress_tokens"),
        max_initial=generation.get("max_initial_timestamp_index") or MAX_INITIAL_TIMESTAMP,
        num_encoded=part.encoder_positions,
        context=config.model.max_model_len - part.encoder_positions,
        num_bins=whole.integer("num_mel_bins", 80),
        num_frames=2 * part.encoder_length,
    )


def _either(first: JsonObject, second: JsonObject, name: str, default: object) -> object:
    for file in (first, second):
        if file.get(name) is not None:
            return file.get(name)
    return default


def _ids(first: JsonObject, second: JsonObject, name: str) -> tuple[int, ...]:
    found = _either(first, second, name, ())
    if not isinstance(found, list | tuple) or not all(type(token) is int for token in found):
        raise ModelLoadError(f"{first.where}: {name} must be a list of token ids, got {found!r:.100}")
    return tuple(found)
