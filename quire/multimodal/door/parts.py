# SPDX-License-Identifier: Apache-2.0
"""Content parts with media: found in messages, checked, and taken out of them.

Invariant: a part's place stays: `{"type": "image"}` stands where it was, which chat templates read. Forms are those of
OpenAI (chat and Responses) and vLLM; other vendors' routes translate theirs to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ValidationError
from quire.inputs import ChatMessage

IMAGE_PART = {"type": "image"}
IMAGE_KINDS = ("image_url", "input_image", "image_pil", "image_embeds")
OTHER_KINDS = (
    *("input_audio", "audio_url", "audio_embeds", "video", "video_url", "input_video", "video_embeds"),
    *("file", "input_file", "document", "prompt_embeds"),
)
DETAILS = (None, "auto", "low", "high", "original")
MAX_UUID_CHARS = 256


@dataclass(frozen=True)
class MediaPart:
    """One image of a request, not read yet.

    Args:
        where: its field, for errors.
        source: URL, PIL image or array; None if `uuid` names an image that the server has.
        is_embeds: the source is base64 of a file of embeddings.
        is_base64: the source is base64 of an image, without a URL's beginning.
        uuid: the client's name of the content.
    """

    where: str
    source: Any
    is_embeds: bool = False
    is_base64: bool = False
    uuid: str = ""


@dataclass(frozen=True)
class FoundMedia:
    """Messages without their media, the media in order, and fields that have no effect."""

    messages: list[ChatMessage]
    parts: list[MediaPart]
    idle: list[str]


def is_media(part: Any) -> bool:
    """Return whether a content part holds anything but text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and (kind in IMAGE_KINDS or kind in OTHER_KINDS)


def first_media(messages: Sequence[Any]) -> tuple[str, str] | None:
    """Return the field and the type of the first part with media; None if there is none."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if is_media(part):
                return f"messages.{index}.content.{number}", part["type"]
    return None


def find_media(messages: Sequence[Any], *, offline: bool = False) -> FoundMedia:
    """Take the media out of messages.

    Args:
        offline: the caller is this process, and may pass PIL images.

    Raises:
        ValidationError: a part is malformed, or of a kind that is not supported; names it.
    """
    found = FoundMedia([], [], [])
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(map(is_media, content)):
            where = f"messages.{index}.content"
            parts = [_place(part, f"{where}.{number}", found, offline) for number, part in enumerate(content)]
            message = {**message, "content": parts}
        found.messages.append(message)
    return found


def _place(part: Any, where: str, found: FoundMedia, offline: bool) -> Any:
    if not is_media(part):
        return part
    kind = part["type"]
    if kind in OTHER_KINDS or (kind == "image_pil" and not offline):
        raise ValidationError(
            f"{where} has the type {kind!r}, which is not supported; this model takes text and image_url",
            param=where,
        )
    found.parts.append(_read(part, kind, where, found.idle))
    return IMAGE_PART


def _read(part: dict[str, Any], kind: str, where: str, idle: list[str]) -> MediaPart:
    uuid = part.get("uuid")
    if not isinstance(uuid, str | None) or len(uuid or "") > MAX_UUID_CHARS:
        raise ValidationError(
            f"{where}.uuid must be text of at most {MAX_UUID_CHARS} characters", param=f"{where}.uuid"
        )
    name = "image_url" if kind == "input_image" else kind
    if part.get("file_id") is not None:
        raise ValidationError(
            f"{where}.file_id is not supported: this server keeps no files; send image_url",
            param=f"{where}.file_id",
        )
    unknown = part.keys() - {"type", name, "uuid", "detail", "file_id", "cache_control"}
    if unknown:
        raise ValidationError(f"{where} has an unknown field {min(unknown)!r:.60}", param=where)
    value, detail = part.get(name), part.get("detail")
    if name == "image_url" and isinstance(value, dict):
        detail = value.get("detail", detail)
        if unknown := value.keys() - {"url", "detail"}:
            raise ValidationError(f"{where}.image_url has an unknown field {min(unknown)!r:.60}", param=where)
        value = value.get("url")
    if not isinstance(detail, str | None) or detail not in DETAILS:
        allowed = ", ".join(filter(None, DETAILS))
        raise ValidationError(f"{where}.detail must be one of {allowed}, got {detail!r:.40}", param=where)
    if detail not in (None, "auto"):
        idle.append("messages[].content[].detail")
    if value is None and uuid:
        return MediaPart(where, None, uuid=uuid)
    if kind != "image_pil" and (not isinstance(value, str) or not value):
        raise ValidationError(f"{where} needs {name} with text: a URL, or base64 of embeddings", param=where)
    return MediaPart(where, value, is_embeds=kind == "image_embeds", uuid=uuid or "")
