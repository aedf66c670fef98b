# SPDX-License-Identifier: Apache-2.0
"""Images, videos and sounds in the published document: as the door reads them, and only where the model takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema_rs

from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.openapi.limits import ServerLimits
from quire.entrypoints.openai.protocol.media_shapes import EMBEDS, MEDIA, media_parts, of_server
from quire.errors import ValidationError
from quire.multimodal.door.parts import OFFLINE_KINDS, TAKEN, find_media
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.fixtures.folded import folded

URL = "data:image/png;base64,AA=="
KINDS = [kind for kind in TAKEN if kind not in OFFLINE_KINDS]
ALL = frozenset({"image", "video", "audio", EMBEDS})
VALUES: list[Any] = [
    URL, "", None, 3, [URL], {}, {"url": URL}, {"url": None}, {"data": "AA=="}, {"url": 3},
    {"url": URL, "detail": "low"}, {"url": URL, "detail": "sharp"},
    {"data": "AA==", "format": "wav"}, {"data": "AA==", "format": "midi"}, {"data": "AA==", "format": None},
]  # fmt: skip
MORE: list[dict[str, Any]] = [
    {}, {"uuid": "a"}, {"uuid": 3}, {"uuid": "a" * 257}, {"uuid": None}, {"detail": "high"}, {"detail": "x"},
    {"file_id": "f"}, {"file_id": None},
]  # fmt: skip


def is_read(part: dict[str, Any]) -> bool:
    try:
        find_media([{"role": "user", "content": [part]}])
    except ValidationError:
        return False
    return True


@folded("kind", KINDS)
def test_a_part_fits_if_the_door_reads_it(kind: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(of_server({"anyOf": media_parts()}, ALL))
    field = "image_url" if kind == "input_image" else kind
    seen = set()
    for value in VALUES:
        for more in MORE:
            part = {"type": kind, field: value, **more}
            has_unknown = isinstance(value, dict) and not is_read({"type": kind, field: value | {"url": URL}})
            if has_unknown or ("detail" in more and isinstance(value, dict)):
                continue  # fields of an object that the type has not are ignored; a part's detail may be inside
            seen.add(is_read(part))
            assert validator.is_valid(part) == is_read(part), part
    assert seen == {True, False}


def document(*media: str) -> dict[str, Any]:
    app = build_app(FakeEngine(), ServerConfig())  # type: ignore[arg-type]
    limits = replace(ServerLimits.from_server(app.state.server), media=frozenset(media))
    written = app.state.document.under(limits)
    assert isinstance(written, dict)
    assert MEDIA not in json.dumps(written)
    return written


def fits(written: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    schema = written["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return bool(jsonschema_rs.is_valid({**schema, "components": written["components"]}, body))


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "hi"}]}]}


IMAGE = {"type": "image_url", "image_url": {"url": URL}}
VIDEO = {"type": "video_url", "video_url": {"url": URL}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
VECTORS = {"type": "image_embeds", "image_embeds": "AA=="}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
BODIES = {
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
    },
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "hi", "images": ["AA=="]}]},
}


def test_a_server_describes_the_media_that_its_model_takes() -> None:
    text, images, all_kinds = document(), document("image"), document(*ALL)
    for part, wanted in (
        (IMAGE, (False, True, True)),
        (VIDEO, (False, False, True)),
        (SOUND, (False, False, True)),
        (VECTORS, (False, False, True)),
    ):
        found = [fits(written, "/v1/chat/completions", chat(part)) for written in (text, images, all_kinds)]
        assert tuple(found) == wanted
    for path, body in BODIES.items():
        body = body | {"model": "fake-model"} if "model" in body else body
        assert [fits(written, path, body) for written in (text, images)] == [False, True], path
