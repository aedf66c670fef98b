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

PLACES = {"image": {"type": "image"}, "video": {"type": "video"}, "audio": {"type": "audio"}}
IMAGE_KINDS = ("image_url", "input_image", "image_pil", "image", "image_embeds")
VIDEO_KINDS = ("video_url", "input_video", "video")
SOUND_KINDS = ("input_audio", "audio_url", "audio")
OFFLINE_KINDS = ("image_pil", "image", "video", "audio")
TAKEN = (*IMAGE_KINDS, *VIDEO_KINDS, *SOUND_KINDS)
ITEM_KINDS = {**dict.fromkeys(VIDEO_KINDS, "video"), **dict.fromkeys(SOUND_KINDS, "audio")}
"""Kind of part -> kind of its item; all others are images."""
OTHER_KINDS = (
    *("audio_embeds", "video_embeds"),
    *("file", "input_file", "document", "prompt_embeds"),
)
NESTED = {
    "image_url": {"url", "detail"},
    "video_url": {"url"},
    "input_video": {"url", "data"},
    "input_audio": {"url", "data", "format"},
    "audio_url": {"url"},
}
"""Parts whose value may be an object -> its fields; `data` is base64."""
DATA_KINDS = [name for name, fields in NESTED.items() if "data" in fields]
SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "mp4", "m4a", "aac", "webm", "mpeg", "mpga")
"""Values of a sound's `format`, without effect: its first bytes decide."""
DETAILS = (None, "auto", "low", "high", "original")
MAX_UUID_CHARS = 256


@dataclass(frozen=True)
class MediaPart:
    """One image, video or sound of a request, not read yet.

    Args:
        where: its field, for errors.
        source: URL, PIL image, array or pair of samples and rate; None if `uuid` names an item that the server has.
        is_embeds: the source is base64 of a file of embeddings.
        is_base64: the source is base64 of the item, without a URL's beginning.
        uuid: the client's name of the content.
        kind: "image", "video" or "audio".
    """

    where: str
    source: Any
    is_embeds: bool = False
    is_base64: bool = False
    uuid: str = ""
    kind: str = "image"


@dataclass(frozen=True)
class FoundMedia:
    """Messages without their media, the media in order, and fields that have no effect."""

    messages: list[ChatMessage]
    parts: list[MediaPart]
    idle: list[str]


def is_media(part: Any) -> bool:
    """Return whether a content part holds anything but text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and (kind in TAKEN or kind in OTHER_KINDS)


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
        offline: the caller is this process, and may pass PIL images and frames.

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
    if kind in OTHER_KINDS or (kind in OFFLINE_KINDS and not offline):
        raise ValidationError(
            f"{where} has the type {kind!r}, which is not supported; models take text, and image_url, video_url, "
            "input_audio or audio_url",
            param=where,
        )
    found.parts.append(_read(part, kind, where, found.idle))
    return PLACES[found.parts[-1].kind]


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
    _check_fields(part, {"type", name, "uuid", "detail", "file_id", "cache_control"}, where)
    value, is_base64 = part.get(name), False
    detail = part.get("detail")
    if name in NESTED and isinstance(value, dict):
        _check_fields(value, NESTED[name], f"{where}.{name}")
        detail = value.get("detail", detail)
        _check_format(value.get("format"), f"{where}.{name}.format")
        is_base64 = value.get("url") is None and value.get("data") is not None
        value = value.get("data") if is_base64 else value.get("url")
        is_base64 = is_base64 and str(value)[:5].lower() != "data:"  # some clients send a whole URL
    _check_detail(detail, where, idle)
    item_kind = ITEM_KINDS.get(kind, "image")
    if value is None and uuid:
        return MediaPart(where, None, uuid=uuid, kind=item_kind)
    if kind in OFFLINE_KINDS and value is None:
        raise ValidationError(
            f"{where} needs {name}: the {item_kind} itself, its path or its URL", param=where
        )
    if kind not in OFFLINE_KINDS and (not isinstance(value, str) or not value):
        raise ValidationError(f"{where} needs {name} with text: {_form_of(name)}", param=where)
    is_embeds = kind == "image_embeds"
    return MediaPart(where, value, is_embeds=is_embeds, is_base64=is_base64, uuid=uuid or "", kind=item_kind)


def _form_of(name: str) -> str:
    """Return the words for the text that a part of this type needs."""
    if name in DATA_KINDS:
        return "base64 in data, or a URL"
    return 'a URL, or {"url": URL}' if name in NESTED else "base64 of a file with embeddings"


def _check_fields(value: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := value.keys() - known:
        raise ValidationError(f"{where} has an unknown field {min(unknown)!r:.60}", param=where)


def _check_format(given: Any, where: str) -> None:
    if given is not None and given not in SOUND_FORMATS:
        raise ValidationError(
            f"{where} must be one of {', '.join(SOUND_FORMATS)}, got {given!r:.40}", param=where
        )


def _check_detail(detail: Any, where: str, idle: list[str]) -> None:
    if not isinstance(detail, str | None) or detail not in DETAILS:
        allowed = ", ".join(filter(None, DETAILS))
        raise ValidationError(f"{where}.detail must be one of {allowed}, got {detail!r:.40}", param=where)
    if detail not in (None, "auto"):
        idle.append("messages[].content[].detail")
