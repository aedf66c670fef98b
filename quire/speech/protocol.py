# SPDX-License-Identifier: Apache-2.0
"""Fields of transcription requests, and their reading from multipart bodies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.errors import ValidationError
from quire.sampling_params import MAX_BEAM_WIDTH
from quire.speech.requests import FALLBACK_TEMPERATURES, SpeechOptions

MULTIPART = "multipart/form-data"
MAX_FIELDS, MAX_FIELD_BYTES = 64, 64 * 2**10
MAX_TEXT_CHARS = 16_384
LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
FILE = "file"

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]


class TranscriptionRequest(EngineRequest):
    """Fields of /v1/audio/transcriptions; those of a form are texts, which are converted."""

    model_config = ConfigDict(strict=False, extra="forbid", json_schema_extra={"additionalProperties": True})
    samples: ClassVar[bool] = True

    file: Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]
    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=MAX_TEXT_CHARS)
    hotwords: str | None = Field(None, max_length=MAX_TEXT_CHARS)
    response_format: ResponseFormat = "json"
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-1, le=2**63 - 1)
    max_completion_tokens: int | None = Field(None, ge=1)
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    chunking_strategy: Literal["auto"] | None = None
    vad_filter: bool = False
    stream: bool = False
    stream_format: Literal["openai", "vllm"] = "openai"
    beam_size: int = Field(1, ge=1, le=MAX_BEAM_WIDTH)

    def options(self, task: str) -> SpeechOptions:
        """Return the options of a transcription.

        Raises:
            ValidationError: two fields exclude each other.
        """
        with_times = self.response_format in ("srt", "vtt", "verbose_json")
        if self.stream and with_times:
            raise ValidationError(
                f"a stream has no times: response_format must be json or text, got {self.response_format}",
                param="response_format",
            )
        if self.timestamp_granularities and not with_times:
            raise ValidationError(
                "timestamp_granularities needs response_format verbose_json, srt or vtt",
                param="timestamp_granularities",
            )
        return SpeechOptions(
            language=self.language,
            task=task,
            prompt=self.prompt or "",
            hotwords=self.hotwords or "",
            temperatures=(self.temperature,) if self.temperature else FALLBACK_TEMPERATURES,
            timestamps=with_times,
            no_speech=self.response_format == "verbose_json",
            seed=None if self.seed == -1 else self.seed,
            max_tokens=self.max_completion_tokens,
            words=self.wants_words,
            vad_filter=self.vad_filter,
            is_live=self.stream,
            beam_size=self.beam_size,
        )

    @property
    def wants_words(self) -> bool:
        """True if words with times are wanted."""
        return "word" in (self.timestamp_granularities or ())

    @property
    def wants_segments(self) -> bool:
        """True unless words alone are wanted."""
        return not self.timestamp_granularities or "segment" in self.timestamp_granularities


async def read_form(request: Request, target: Path) -> dict[str, Any]:
    """Write the form's file to `target`; return all fields, `file` by its name. Parts are never held in memory whole.

    Raises:
        ValidationError: the body is no such form, has no file, or has too many or too long fields.
    """
    if not request.headers.get("content-type", "").lower().startswith(MULTIPART):
        raise ValidationError(
            f"the body must be sent as {MULTIPART}, with the sound as the field {FILE!r}", param=FILE
        )
    try:
        form = await request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    except HTTPException as error:
        raise ValidationError(f"the form cannot be read: {error.detail:.200}") from None
    try:
        sound = form.get(FILE)
        if not isinstance(sound, UploadFile):
            raise ValidationError("file is required: the sound, as a file of the form", param=FILE)
        with target.open("wb") as file:
            shutil.copyfileobj(sound.file, file)
        return {
            **_fields([(name, value) for name, value in form.multi_items() if isinstance(value, str)]),
            FILE: "sound",
        }
    finally:
        await form.close()


def _fields(items: list[tuple[str, str]]) -> dict[str, Any]:
    """Return fields by name; lists are fields given several times, with or without brackets."""
    found: dict[str, Any] = {}
    for name, value in items:
        plain = name.removesuffix("[]")
        if plain in LISTS or name.endswith("[]"):
            found.setdefault(plain, []).append(value)
        elif plain in found:
            raise ValidationError(f"{plain:.64} is given twice", param=plain[:64])
        elif value or plain not in TranscriptionRequest.model_fields:
            found[plain] = value if plain in TranscriptionRequest.model_fields else _value(value)
    return found


def _value(text: str) -> Any:
    """Return the number, truth value or null that a text is in JSON; else the text."""
    try:
        value = json.loads(text) if len(text) < 32 else text
    except ValueError:
        return text
    return value if isinstance(value, int | float | None) else text
