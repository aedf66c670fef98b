# SPDX-License-Identifier: Apache-2.0
"""Sounds through the chat route: forms of parts, usage, modalities, and refusals in words."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.config.arch import Multimodal
from quire.config.multimodal import MultimodalConfig
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import CheckedClient, client_for
from tests.entrypoints.openai.test_images import MARKER_ID, SeeingTokenizer
from tests.fixtures.hearing_models import HEARING, sound, write_files
from tests.multimodal.door.test_sounds import base, wav

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{%- for message in messages %}{{ message.role ~ ':' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}{{ '<|im_start|>' if part.type == 'audio' else part.text }}{% endfor %}"
    "{%- endif %}{{ ';' }}{% endfor %}"
)
DATA = base(wav())
URL = f"data:audio/wav;base64,{DATA}"
COUNT = HEARING["qwen2-audio"].count(9_000)


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """An engine of a model that takes sounds, up to their placeholders."""
    family = HEARING["qwen2-audio"]
    (tmp_path / "config.json").write_text(json.dumps(family.config().to_dict()))
    write_files("qwen2-audio", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"audio_token": "<|im_start|>"}))
    made = FakeEngine(SeeingTokenizer(TEMPLATE))
    part_of = Multimodal(family.architecture, {}, (), frozenset({MARKER_ID}))
    made.config = dataclasses.replace(
        made.config,
        model_arch=dataclasses.replace(made.config.arch, part_of=part_of),
        model_dir=str(tmp_path),
        multimodal=MultimodalConfig(limit_mm_per_prompt={"audio": 2}),
    )
    made.input_processor.update_config(made.config)
    return made


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine, ServerConfig(max_audio_bytes=32 * 1024))  # type: ignore[arg-type]
    async with CheckedClient(app) as made:
        yield made
    app.state.server.media.close()


def user(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": "fake-model", "messages": [{"role": "user", "content": texts}]}


def spoken(**fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav", **fields}}


FORMS = {
    "input_audio": spoken(),
    "a URL in data": spoken(data=URL),
    "url": {"type": "input_audio", "input_audio": {"url": URL}},
    "another format": spoken(format="mp3"),
    "audio_url": {"type": "audio_url", "audio_url": {"url": URL}},
    "plain text": {"type": "audio_url", "audio_url": URL},
}


async def test_every_form_of_a_part_is_the_same_sound(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for form in FORMS.values():
        response = await client.post(CHAT, json=user("Hear:", form, "What?"))
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        assert (details["audio_tokens"], "image_tokens" in details) == (COUNT, False)
    prompts = [prompt for prompt, _ in engine.seen]
    assert len({prompt["media"][0].digest for prompt in prompts}) == 1
    ids = [*b"user:Hear:", *[MARKER_ID] * COUNT, *b"What?;"]
    assert all(prompt["prompt_token_ids"] == ids for prompt in prompts)
    assert prompts[0]["media"][0].kind == "audio"


async def test_sounds_of_several_turns_keep_their_places(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    other = base(wav(sound(5_000, 1)))
    body = user(spoken(), "<|im_start|>")
    body["messages"] += [
        {"role": "assistant", "content": "Yes."},
        *user("And", spoken(data=other))["messages"],
    ]
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    ((prompt, _),) = engine.seen
    first, second = prompt["media"]
    assert first.num_embeddings == COUNT
    assert second.num_embeddings == HEARING["qwen2-audio"].count(5_000)
    assert first.digest != second.digest
    assert first.end < second.start


async def test_models_name_sound_as_a_modality(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "audio"]


BAD = {
    "a name of no format": (spoken(format="xyz"), "must be one of wav, mp3"),
    "a format that is no text": (spoken(format=["wav"]), "must be one of wav, mp3"),
    "no data": (spoken(data=""), "base64 in data, or a URL"),
    "no base64": (spoken(data="@@"), "not valid base64"),
    "no sound": (spoken(data=base(b"words, words, words")), "cannot be decoded"),
    "truncated": (spoken(data=base(wav()[:20])), "ends inside its header"),
    "of another type": (
        {"type": "audio_url", "audio_url": {"url": "data:image/png;base64,AA"}},
        "is no audio",
    ),
    "a host": (
        {"type": "audio_url", "audio_url": {"url": "http://example.com/a.wav"}},
        "allowed-media-domains",
    ),
    "a file": ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "reads no files"),
    "offline": ({"type": "audio", "audio": URL}, "'audio', which is not supported"),
    "embeddings": ({"type": "audio_embeds", "audio_embeds": "AA"}, "which is not supported"),
    "an image": (
        {"type": "image_url", "image_url": {"url": URL}},
        "is an image, and this model takes sounds",
    ),
    "too large": (spoken(data=base(wav(sound(16_000)) + bytes(1024))), "(--max-audio-bytes)"),
}


async def test_bad_parts_are_refused_with_a_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for name, (part, words) in BAD.items():
        response = await client.post(CHAT, json=user("Hear.", part))
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        assert words in error["message"], name
        assert error["param"].startswith("messages.0.content.1"), name
    response = await client.post(CHAT, json=user(spoken(), spoken(), spoken()))
    assert (response.status_code, "the limit is 2" in response.text) == (400, True)
    assert not engine.seen


async def test_model_without_sound_input_refuses_sounds() -> None:
    engine = FakeEngine(SeeingTokenizer(TEMPLATE))
    async with client_for(engine) as client:
        response = await client.post(CHAT, json=user("Hear.", spoken()))
    assert response.status_code == 400
    assert "takes text only, got 'input_audio'" in response.json()["error"]["message"]
