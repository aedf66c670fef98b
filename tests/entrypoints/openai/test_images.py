# SPDX-License-Identifier: Apache-2.0
"""Images through every door of the server: each gives the same placeholders and files."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.config.arch import Multimodal
from quire.config.multimodal import MultimodalConfig
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.fake_engine import SPECIAL, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import CheckedClient, client_for
from tests.fixtures.folded import folded
from tests.multimodal.door.doors import data_url, encoded, picture
from tests.multimodal.processors.checkpoints import CASES

MARKER, MARKER_ID = "<|image_pad|>", 256
TEMPLATE = (
    "{%- for message in messages %}{{ message.role ~ ':' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}{{ '<|im_start|>' if part.type == 'image' else part.text }}{% endfor %}"
    "{%- endif %}{{ ';' }}{% endfor %}"
)
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
URL = data_url(encoded(picture()))
PLAIN = base64.b64encode(encoded(picture())).decode()


class SeeingTokenizer(FakeTokenizer):
    """The fake one, whose first special token is the marker of an image."""

    def id_of(self, token: str) -> int | None:
        return MARKER_ID if token == "<|im_start|>" else SPECIAL.get(token)


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """An engine of a model that takes images, up to their placeholders."""
    case = dataclasses.replace(CASES["qwen2-vl"], processor={"image_token": "<|im_start|>"})
    made = FakeEngine(SeeingTokenizer(TEMPLATE))
    part_of = Multimodal(case.architecture, {}, (), frozenset({MARKER_ID}))
    options = MultimodalConfig(enable_mm_embeds=True)
    made.config = dataclasses.replace(
        made.config,
        model_arch=dataclasses.replace(made.config.arch, part_of=part_of),
        model_dir=str(case.write(tmp_path)),
        multimodal=options,
    )
    made.input_processor.update_config(made.config)
    return made


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    async with CheckedClient(app) as made:
        yield made
    app.state.server.media.close()


def image(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URL, **fields}}


def user(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": texts}]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": PLAIN}
ANTHROPIC_IMAGE = {"type": "image", "source": SOURCE}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
DOORS = {
    "chat": (CHAT, user(image(), "What?")),
    "chat, plain text": (CHAT, user({"type": "image_url", "image_url": URL}, "What?")),
    "chat, streamed": (CHAT, {**user(image(), "What?"), "stream": True}),
    "responses": (
        RESPONSES,
        {"input": [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": "What?"}]}]},
    ),
    "anthropic": (
        ANTHROPIC,
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE, {"type": "text", "text": "What?"}]}],
        },
    ),
    "anthropic, url": (
        ANTHROPIC,
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": URL}},
                        {"type": "text", "text": "What?"},
                    ],
                }
            ],
        },
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [PLAIN]}]}),
    "ollama, one prompt": ("/api/generate", {"prompt": "What?", "images": [PLAIN]}),
}


@pytest.mark.parametrize("door", DOORS)
async def test_every_api_takes_an_image(client: httpx.AsyncClient, engine: FakeEngine, door: str) -> None:
    path, body = DOORS[door]
    response = await client.post(path, json={"model": "fake-model", **body})
    assert response.status_code == 200, response.text
    ((prompt, _),) = engine.seen
    (item,) = prompt["media"]
    head = list(b"user:")
    rows, columns = item.grid[1:]
    placeholders = [MARKER_ID] * (rows * columns)
    assert prompt["prompt_token_ids"] == [*head, *placeholders, *b"What?;"]
    assert (item.start, item.runs, item.kind) == (5, [(5, 5 + rows * columns)], "image")


async def test_images_of_tool_results_and_systems_are_taken(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "shot", "input": {}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [ANTHROPIC_IMAGE]}],
        },
    ]
    response = await client.post(
        ANTHROPIC, json={"model": "fake-model", "max_tokens": 9, "messages": messages}
    )
    assert response.status_code == 200, response.text
    system = {"role": "system", "content": [image()]}
    response = await client.post(CHAT, json={"messages": [system, *user("x")["messages"]]})
    assert response.status_code == 200, response.text
    assert [len(prompt["media"]) for prompt, _ in engine.seen] == [1, 1]


async def test_usage_counts_the_tokens_of_images(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = (await client.post(CHAT, json=user(image(), image(), "x"))).json()
    num_placeholders = engine.seen[0][0]["prompt_token_ids"].count(MARKER_ID)
    assert num_placeholders == 2 * engine.seen[0][0]["media"][0].num_embeddings
    assert whole["usage"]["prompt_tokens_details"]["image_tokens"] == num_placeholders
    text = (await client.post(CHAT, json=user("x"))).json()
    assert "image_tokens" not in text["usage"]["prompt_tokens_details"]


async def test_options_of_a_request_reach_the_processor(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {**user(image()), "mm_processor_kwargs": {"min_pixels": 28 * 28 * 16}}
    assert (await client.post(CHAT, json=body)).status_code == 200
    (item,) = engine.seen[0][0]["media"]
    assert item.grid[1] * item.grid[2] >= 16
    response = await client.post(CHAT, json={**body, "mm_processor_kwargs": {"size_of_all": 1}})
    assert response.status_code == 400
    assert (
        "'size_of_all', but this model's options are: do_sample_frames, fps, max_frames, max_pixels"
        in response.json()["error"]["message"]
    )


async def test_field_without_effect_is_named(client: httpx.AsyncClient) -> None:
    reply = (await client.post(CHAT, json=user(image(detail="low")))).json()
    assert reply["ignored"] == ["messages[].content[].detail"]
    reply = (await client.post(CHAT, json=user({**image(size=3), "size": 3}))).json()
    assert reply["ignored"] == ["messages[].content[].image_url.size", "messages[].content[].size"]
    reply = (await client.post(CHAT, json={**user("x"), "mm_processor_kwargs": {"max_pixels": 1}})).json()
    assert reply["ignored"] == ["mm_processor_kwargs"]


async def test_a_uuid_stands_for_its_image(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    named = {"type": "image_url", "image_url": None, "uuid": "mine"}
    assert (await client.post(CHAT, json=user(named))).status_code == 400
    assert (await client.post(CHAT, json=user({**image(), "uuid": "mine"}))).status_code == 200
    assert (await client.post(CHAT, json=user(named))).status_code == 200
    assert engine.seen[0][0]["media"] == engine.seen[1][0]["media"]


async def test_markers_of_users_stay_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post(CHAT, json=user("<|im_start|>", image(), "<|im_start|>"))).status_code == 200
    prompt = engine.seen[0][0]
    assert prompt["prompt_token_ids"].count(MARKER_ID) == prompt["media"][0].num_embeddings
    assert prompt["media"][0].start == len("user:<|im_start|>")


BAD = {
    "audio": (
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        "needs input_audio with text",
    ),
    "audio url": (
        {"type": "audio_url", "audio_url": {"url": URL}},
        "is a sound, and this model takes images",
    ),
    "video": ({"type": "video_url", "video_url": {"url": URL}}, "'image/png', which is no video"),
    "frames": ({"type": "video", "video": URL}, "'video', which is not supported"),
    "input video": ({"type": "input_video", "input_video": {"data": "@@"}}, "not valid base64"),
    "file": ({"type": "file", "file": {"file_id": "x"}}, "'file', which is not supported"),
    "pil": ({"type": "image_pil", "image_pil": "x"}, "'image_pil', which is not supported"),
    "no url": ({"type": "image_url"}, "needs image_url with text"),
    "empty": ({"type": "image_url", "image_url": {"url": ""}}, "needs image_url with text"),
    "number": ({"type": "image_url", "image_url": {"url": 3}}, "needs image_url with text"),
    "detail": (image(detail="best"), "detail must be one of auto, low, high, original"),
    "uuid": ({**image(), "uuid": 3}, "uuid must be text"),
    "file id": ({"type": "input_image", "file_id": "x"}, "file_id is not supported"),
    "http": ({"type": "image_url", "image_url": "http://example.com/a.png"}, "--allowed-media-domains: none"),
    "local file": ({"type": "image_url", "image_url": "file:///etc/passwd"}, "--allowed-local-media-path"),
    "scheme": ({"type": "image_url", "image_url": "ftp://example.com/a"}, "must be a URL that begins with"),
    "no image": ({"type": "image_url", "image_url": data_url(b"GIF")}, "the bytes are no image"),
    "wrong type": ({"type": "image_url", "image_url": "data:text/html,x"}, "which is no image"),
    "base64": ({"type": "image_url", "image_url": "data:image/png;base64,@@"}, "not valid base64"),
    "embeds": ({"type": "image_embeds", "image_embeds": "AAAA"}, "no safetensors or .npy file"),
}


@folded("name", BAD)
async def test_bad_part_is_refused_with_a_message(client: httpx.AsyncClient, name: str) -> None:
    part, words = BAD[name]
    response = await client.post(CHAT, json=user("Look.", part))
    error = response.json()["error"]
    assert (response.status_code, error["param"].startswith("messages.0.content.1")) == (400, True), error
    assert words in error["message"]


async def test_models_list_their_modalities(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["architecture"] == {
        "input_modalities": ["text", "image", "video"],
        "output_modalities": ["text"],
    }
    async with client_for(FakeEngine()) as other:
        (card,) = (await other.get("/v1/models")).json()["data"]
    assert card["architecture"]["input_modalities"] == ["text"]


async def test_text_model_refuses_images_with_a_message() -> None:
    async with client_for(FakeEngine()) as client:
        for path, body in DOORS.values():
            response = await client.post(path, json={"model": "fake-model", **body})
            assert response.status_code == 400
            assert "this model takes text only" in response.text


async def test_images_without_pillow_are_refused(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    for name in [name for name in __import__("sys").modules if name.startswith("quire.multimodal.door.door")]:
        monkeypatch.delitem(__import__("sys").modules, name)
    async with client_for(engine) as client:
        response = await client.post(CHAT, json=user(image()))
        assert response.status_code == 400
        assert "pip install 'quire-llm[vision]'" in response.json()["error"]["message"]
        assert (await client.post(CHAT, json=user("x"))).status_code == 200


async def test_only_the_language_model_refuses_images(engine: FakeEngine) -> None:
    engine.config = dataclasses.replace(engine.config, multimodal=MultimodalConfig(language_model_only=True))
    async with client_for(engine) as client:
        response = await client.post(CHAT, json=user(image()))
        assert "--language-model-only" in response.json()["error"]["message"]


async def test_a_checkpoint_without_processor_is_served_for_text(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").unlink()
    async with client_for(engine) as client:
        response = await client.post(CHAT, json=user(image()))
        assert "processor cannot be used" in response.json()["error"]["message"]
        assert str(tmp_path) not in response.text
        assert (await client.post(CHAT, json=user("x"))).status_code == 200
