# SPDX-License-Identifier: Apache-2.0
"""The routes with a whole engine: OpenAI's client, forms, errors, files left behind."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from tests.speech.tiny import save_tiny_whisper

PATH = "/v1/audio/transcriptions"


def sound(seconds: float = 1.5) -> bytes:
    samples = np.random.default_rng(0).standard_normal(int(seconds * 16_000)) * 3000
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")


@pytest.fixture
async def client(checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig.from_args(model=str(checkpoint), dtype="float32", gpu_memory_utilization=0.02)
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    app = build_app(engine, ServerConfig())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://quire/v1") as made:
        made.app = app  # type: ignore[attr-defined]
        yield made
    app.state.speech.close()
    await engine.shutdown()


async def test_routes_openai_client_gets_text_whole_and_streamed(client: httpx.AsyncClient) -> None:
    stock = openai.AsyncOpenAI(api_key="x", base_url="http://quire/v1", http_client=client)
    file = ("a.wav", sound())
    whole = await stock.audio.transcriptions.create(model="", file=file, temperature=0.5, language="de")
    again = await stock.audio.transcriptions.create(model="", file=file, temperature=0.5, language="de")
    stream = await stock.audio.transcriptions.create(
        model="", file=file, temperature=0.5, language="de", stream=True
    )
    events = [event async for event in stream]
    assert whole.text == again.text
    assert [event.type for event in events].count("transcript.text.delta") > 3
    assert [event.type for event in events].count("transcript.text.done") == 1
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == whole.text
    verbose = await stock.audio.transcriptions.create(model="", file=file, response_format="verbose_json")
    assert verbose.language in ("english", "german")
    assert verbose.duration == 1.5
    times = [time for segment in verbose.segments or [] for time in (segment.start, segment.end)]
    assert times == sorted(times)
    timed = await stock.audio.transcriptions.create(
        model="",
        file=file,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert timed.text == verbose.text
    assert bool(timed.words) == bool(timed.text.strip())
    with pytest.warns(DeprecationWarning, match="deprecated"):
        translated = await stock.audio.translations.create(model="", file=file, temperature=0.5)
    assert isinstance(translated.text, str)
    left = [path.name for path in client.app.state.speech.store._files.directory.iterdir()]  # type: ignore[attr-defined]
    assert not [name for name in left if name.startswith(("upload", "pcm"))]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"language": "tlh"}, "language"),
    ({"response_format": "diarized_json"}, "response_format"),
    ({"stream": "true", "response_format": "srt"}, "response_format"),
    ({"timestamp_granularities[]": "phrase"}, "timestamp_granularities.0"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": "0.5"}, "top_p"),
    ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
    ({"prompt": "<|endoftext|>"}, "prompt"),
]


async def test_routes_bad_field_is_named(client: httpx.AsyncClient) -> None:
    for fields, param in BAD_FIELDS:
        reply = await client.post(f"http://quire{PATH}", data=fields, files={"file": ("a.wav", sound(0.2))})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_routes_bad_body_is_refused(client: httpx.AsyncClient) -> None:
    plain = await client.post(f"http://quire{PATH}", json={"file": "a"})
    broken = await client.post(f"http://quire{PATH}", files={"file": ("a.wav", b"RIFF....WAVEfmt ")})
    foreign = await client.post(
        f"http://quire{PATH}", files={"file": ("a.wav", sound(0.2))}, headers={"origin": "http://other"}
    )
    assert [reply.status_code for reply in (plain, broken, foreign)] == [400, 400, 400]


async def test_routes_beam_size_searches_whole_and_streamed(client: httpx.AsyncClient) -> None:
    def form(**fields: str) -> dict[str, Any]:
        return {
            "files": {"file": ("a.wav", sound(0.5))},
            "data": {"language": "de", "beam_size": "3", **fields},
        }

    whole = await client.post("/audio/transcriptions", **form())
    assert whole.status_code == 200
    streamed = await client.post("/audio/transcriptions", **form(stream="true"))
    done = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    # These weights only repeat themselves, so the whole text is one of the next temperature, which streams do not try.
    assert [event["type"] for event in done] == ["transcript.text.delta", "transcript.text.done"]
    assert done[-1]["text"] == done[0]["delta"] != whole.json()["text"]
    for wrong in ("0", "65", "many"):
        reply = await client.post("/audio/transcriptions", **form(beam_size=wrong))
        assert reply.status_code == 400
        assert "beam_size" in reply.json()["error"]["message"]
