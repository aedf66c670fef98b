# SPDX-License-Identifier: Apache-2.0
"""/v1/realtime with a stock WebSocket client and a whole engine: events, refusals, limits, what is left behind."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.speech import realtime, realtime_route
from tests.entrypoints.openai.serving import LiveServer, live_server
from tests.speech.test_routes import sound
from tests.speech.tiny import save_tiny_whisper

KEY = "sk-of-the-test"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")


@contextlib.asynccontextmanager
async def serving(checkpoint: Path, **options: Any) -> AsyncIterator[LiveServer]:
    config = EngineConfig.from_args(model=str(checkpoint), dtype="float32", gpu_memory_utilization=0.02)
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    try:
        async with live_server(engine, **options) as server:  # type: ignore[arg-type]
            yield server
    finally:
        await engine.shutdown()


def address(server: LiveServer) -> str:
    return server.url.replace("http", "ws") + realtime_route.PATH


async def tell(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def event(socket: ClientConnection) -> dict[str, Any]:
    found = json.loads(await asyncio.wait_for(socket.recv(), 60))
    assert isinstance(found, dict)
    return found


def audio(seconds: float) -> str:
    return base64.b64encode(sound(seconds)[44:]).decode()


async def transcript(socket: ClientConnection) -> tuple[list[str], dict[str, Any]]:
    """Return the deltas up to the next text's end, and the last event."""
    deltas = []
    while (found := await event(socket))["type"] == "transcription.delta":
        deltas.append(found["delta"])
    return deltas, found


async def until_closed(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return the events before the server closes the connection."""
    found = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            found.append(await event(socket))
    return found


async def test_realtime_stock_client_gets_texts_of_its_sounds(checkpoint: Path) -> None:
    async with serving(checkpoint) as server:
        async with connect(address(server)) as socket:
            assert (await event(socket))["type"] == "session.created"
            await tell(socket, "session.update", model="", language="de")
            assert (await event(socket))["session"]["language"] == "de"
            await tell(socket, "input_audio_buffer.commit")  # clients of vLLM begin so
            found = []
            for _ in range(2):
                for _ in range(3):
                    await tell(socket, "input_audio_buffer.append", audio=audio(0.5))
                await tell(socket, "input_audio_buffer.commit", final=True)
                deltas, done = await transcript(socket)
                assert done["type"] == "transcription.done"
                assert "".join(deltas) == done["text"] != ""
                assert done["usage"]["completion_tokens"] > 0
                found.append(done["text"])
            assert found[0] == found[1]
            await _check_mistakes(socket)
            await tell(socket, "input_audio_buffer.append", audio=audio(0.4))
            await tell(socket, "input_audio_buffer.clear")
            await tell(socket, "input_audio_buffer.commit", final=True)
            assert await transcript(socket) == ([], {**done, "text": "", "usage": _nothing()})
            await tell(socket, "input_audio_buffer.append", audio=audio(3.0))
        folder = server.app.state.speech.store._files.directory
        assert folder.is_dir()
    assert not folder.exists()


def _nothing() -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


async def _check_mistakes(socket: ClientConnection) -> None:
    """A mistake is named, and costs nothing else."""
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"type": "response.create"}, "it must be session.update"),
        ({"type": "input_audio_buffer.append", "audio": "###"}, "not valid base64"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "whole 16-bit samples"),
        ({"type": "input_audio_buffer.append"}, "must be base64"),
        ({"type": "session.update", "model": "other"}, "other"),
        ({"type": "session.update", "session": {"language": "tlh"}}, "tlh"),
        ({"type": "session.update", "sample_rate": 10}, "8000 to 48000"),
        ({"type": "session.update", "prompt": "<|endoftext|>"}, "special token"),
        ({"type": "session.update", "voice": "alloy"}, "'voice'"),
    ]
    for message, words in mistakes:
        await socket.send(json.dumps(message))
        found = await event(socket)
        assert (found["type"], words in found["error"]) == ("error", True), found
    for text in ("[" * 100_000, "[]", "{}", "\x00"):
        await socket.send(text)
        assert (await event(socket))["type"] == "error"


async def test_realtime_only_for_keys_and_own_pages(checkpoint: Path) -> None:
    async with serving(checkpoint, api_key=(KEY,)) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        refused: list[tuple[dict[str, str], int]] = [
            ({}, 401),
            ({"authorization": "Bearer other"}, 401),
            ({**headers, "origin": "http://evil.example"}, 403),
        ]
        for given, status in refused:
            with pytest.raises(InvalidStatus) as error:
                await connect(address(server), additional_headers=given, origin=None)
            assert error.value.response.status_code == status
        with pytest.raises(InvalidStatus):
            await connect(server.url.replace("http", "ws") + "/v1/models", additional_headers=headers)
        async with httpx.AsyncClient() as client:
            plain = await client.get(server.url + realtime_route.PATH, headers=headers)
        assert (plain.status_code, "is a WebSocket" in plain.text) == (400, True)
        async with connect(address(server), additional_headers=headers) as socket:
            assert (await event(socket))["type"] == "session.created"


async def test_realtime_bounds_sessions_errors_and_messages(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime_route, "MAX_SESSIONS", 1)
    async with serving(checkpoint) as server:
        async with connect(address(server)) as socket:
            with pytest.raises(InvalidStatus) as error:
                await connect(address(server))
            assert error.value.response.status_code == 503
            for _ in range(realtime.MAX_ERRORS + 1):
                await socket.send("nonsense")
            assert (await until_closed(socket))[-1]["code"] == "session_ended"
        for message in ("x" * (2**20 + 1), b"bytes"):
            async with connect(address(server)) as socket:
                await event(socket)
                await socket.send(message)
                await until_closed(socket)
        async with connect(address(server)) as socket:  # the places are free again
            assert (await event(socket))["type"] == "session.created"


async def test_realtime_silent_session_ends(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime_route, "IDLE_S", 0.0)
    async with serving(checkpoint) as server, connect(address(server)) as socket:
        assert (await event(socket))["type"] == "session.created"
        assert (await event(socket))["code"] == "idle_timeout"
        assert await until_closed(socket) == []


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_sample_buffer_windows_hold_every_sample(rate: int) -> None:
    samples = np.random.default_rng(0).standard_normal(3 * rate).astype(np.float32)
    buffer, found = realtime.SampleBuffer(16_000), []
    for part in np.array_split(samples, 17):
        buffer.add(part, rate)
        while (window := buffer.pop_window()) is not None:
            found.append(window)
        assert len(buffer) <= 16_000
    buffer.finish()
    found.append(buffer.pop_rest())
    whole = realtime.SampleBuffer(10**9)
    whole.add(samples, rate)
    whole.finish()
    assert np.allclose(np.concatenate(found), whole.pop_rest(), atol=1e-5)
    assert all(0 < len(one) <= 16_000 for one in found)
    assert buffer.is_empty
