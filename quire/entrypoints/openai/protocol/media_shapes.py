# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of images, videos and sounds in requests, from the table of parts that the door reads.

Invariant: a schema with the key `MEDIA` holds for a server whose model takes that kind; `of_server` drops it elsewhere,
where such a part is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.multimodal.door.parts import (
    DETAILS,
    ITEM_KINDS,
    MAX_UUID_CHARS,
    NESTED,
    OFFLINE_KINDS,
    SOUND_FORMATS,
    TAKEN,
)

Schema = dict[str, Any]
MEDIA = "x-media"
EMBEDS = "embeds"
"""Kind of embeddings in place of an image, which the operator enables."""
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_SOURCES = ("url", "data")
_DETAIL: Schema = {"enum": list(DETAILS)}
_NAME: Schema = {"type": ["string", "null"], "maxLength": MAX_UUID_CHARS}
_FORMAT: Schema = {"enum": [None, *SOUND_FORMATS]}
_FIELDS = {"url": _TEXT, "data": _TEXT, "detail": _DETAIL, "format": _FORMAT}


def media_part(kind: str) -> Schema:
    """Return the schema of a content part of this type: with its value, or with a name that the server knows."""
    field = "image_url" if kind == "input_image" else kind
    value = _value(field)
    known = {"type": {"enum": [kind]}, "detail": _DETAIL, "file_id": _NULL}
    name = {"type": "string", "minLength": 1, "maxLength": MAX_UUID_CHARS}
    forms = (
        ({**known, field: value, "uuid": _NAME}, ["type", field]),
        ({**known, field: _nothing(field), "uuid": name}, ["type", "uuid"]),
    )
    options = [{"type": "object", "properties": own, "required": required} for own, required in forms]
    return {"anyOf": options, MEDIA: _kind_of(kind)}


def media_parts(*kinds: str) -> list[Schema]:
    """Return the schemas of these types of parts; by default of all that come over HTTP."""
    return [media_part(kind) for kind in kinds or TAKEN if kind not in OFFLINE_KINDS]


def of_media(schema: Schema, kind: str = "image") -> Schema:
    """Return a schema for servers whose model takes a kind."""
    return {**schema, MEDIA: kind}


def of_server(schema: Any, kinds: frozenset[str]) -> Any:
    """Return a schema without what this server's model does not take."""
    if isinstance(schema, list):
        return [of_server(one, kinds) for one in schema if not _is_refused(one, kinds)]
    if isinstance(schema, dict):
        return {key: of_server(value, kinds) for key, value in schema.items() if key != MEDIA}
    return schema


def _is_refused(schema: Any, kinds: frozenset[str]) -> bool:
    return isinstance(schema, dict) and MEDIA in schema and schema[MEDIA] not in kinds


def _kind_of(kind: str) -> str:
    return EMBEDS if kind == "image_embeds" else ITEM_KINDS.get(kind, "image")


def _value(field: str) -> Schema:
    """Return the schema of a part's value: text, or for some an object with one of two sources."""
    if field not in NESTED:
        return _TEXT
    sources = [name for name in _SOURCES if name in NESTED[field]]
    objects = [_object(field, [each for each in sources if each != source]) for source in sources]
    required = zip(objects, sources, strict=True)
    return {"anyOf": [_TEXT, *({**each, "required": [source]} for each, source in required)]}


def _nothing(field: str) -> Schema:
    """Return the schema of a value that is left out."""
    return {"anyOf": [_NULL, _object(field, _SOURCES)]} if field in NESTED else _NULL


def _object(field: str, absent: Sequence[str]) -> Schema:
    """Return the schema of a part's object without these fields."""
    inside = {name: _NULL if name in absent else _FIELDS[name] for name in sorted(NESTED[field])}
    return {"type": "object", "properties": inside}
