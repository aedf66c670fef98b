# SPDX-License-Identifier: Apache-2.0
"""Sounds and clients that mean ill: every one costs itself, and leaves no file."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import srt
import webvtt

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.speech import formats
from quire.speech.desk import desk_of
from quire.speech.transcript import Segment, Transcription, words_in
from quire.speech.words import Word
from tests.entrypoints.openai.serving import LiveServer, live_server
from tests.speech.test_routes import PATH, sound
from tests.speech.tiny import save_tiny_whisper


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[LiveServer]:
    """Server whose core is a process, and comes back when it is killed."""
    config = EngineConfig.from_args(model=str(checkpoint), dtype="float32", gpu_memory_utilization=0.02)
    engine = AsyncLLM(config)
    await engine.wait_ready()
    try:
        async with live_server(engine) as found:  # type: ignore[arg-type]
            yield found
    finally:
        await engine.shutdown()


def left(server: LiveServer) -> list[str]:
    folder = server.app.state.speech.store._files.directory
    return [path.name for path in folder.iterdir() if path.name.startswith(("upload", "pcm"))]


async def posted(client: httpx.AsyncClient, content: bytes, **fields: Any) -> httpx.Response:
    data = {"language": "en", "temperature": "0.5", **fields}
    return await client.post(PATH, data=data, files={"file": ("a.wav", content)})


def wav(samples: np.ndarray, rate: int, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format="WAV")
    return file.getvalue()


def forms() -> dict[str, bytes]:
    """Return one sound in odd forms."""
    samples = np.random.default_rng(0).standard_normal(8_000) * 0.1
    return {
        "8 bits": wav(samples, 16_000, "PCM_U8"),
        "stereo": wav(np.stack([samples, samples], axis=1), 16_000, "PCM_16"),
        "odd rate": wav(samples, 11_027, "PCM_24"),
        "floats": wav(samples, 48_000, "DOUBLE"),
        "truncated": wav(samples, 16_000, "PCM_16")[:-1001],
        "size unknown": sound(0.3)[:40] + b"\xff\xff\xff\xff" + sound(0.3)[44:],
        "one sample": sound(1 / 16_000),
        "silence": wav(np.zeros(9_600), 16_000, "PCM_16"),
    }


def bombs() -> dict[str, bytes]:
    """Return files that cannot be used."""
    head = sound(0.0)
    flac = io.BytesIO()
    soundfile.write(flac, np.zeros(2_000), 16_000, format="FLAC")
    nan = wav(np.full(100, np.nan), 16_000, "FLOAT")
    return {
        "NaN": nan,
        "no samples": head,
        "half a header": head[:30],
        "claims 4 GB of format": b"RIFF\0\0\0\0WAVEfmt \xff\xff\xff\xff" + bytes(100),
        "text": b"hello" * 1000,
        "zeros": bytes(1000),
        "broken flac": flac.getvalue()[:60] + np.random.default_rng(1).bytes(200),
        "zip": zlib.compress(bytes(10**6)),
        "64000 channels": head[:22] + struct.pack("<H", 64_000) + head[24:] + bytes(1000),
        "rate of 0": head[:24] + bytes(4) + head[28:] + bytes(1000),
    }


async def test_odd_sounds_are_read_and_bombs_refused(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for name, content in forms().items():
            reply = await posted(client, content, response_format="verbose_json")
            assert reply.status_code == 200, (name, reply.text)
        for name, content in bombs().items():
            reply = await posted(client, content)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file"), (name, reply.text)
            assert "/" not in reply.json()["error"]["message"].replace("quire-llm", ""), name
        long = await posted(client, sound(0.5)[:44] + bytes(26 * 2**20))
        assert (long.status_code, "--max-audio-bytes" in long.text) == (413, True)
        assert (await posted(client, sound(0.5))).status_code == 200
    assert left(server) == []


async def test_sound_above_the_limit_of_requests_is_taken(server: LiveServer) -> None:
    desk_of(server.app).store._max_seconds = 1.0
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        reply = await posted(client, sound(0.0)[:40] + struct.pack("<I", 17 * 2**20) + bytes(17 * 2**20))
    assert reply.status_code == 400  # it was received whole, and is too long
    assert "longer than" in reply.text


async def test_client_gone_in_mid_upload_leaves_nothing(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        wanted = (await posted(client, sound())).text
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9000000\r\n"
            writer.write(f"{head}content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
            writer.write(b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(2**20))
            await writer.drain()
            writer.close()
        assert (await posted(client, sound())).text == wanted
    server.lifecycle.on_signal()
    folder = server.app.state.speech.store._files.directory
    await server.code()
    assert not folder.exists()


async def test_core_killed_in_mid_file_gives_same_text(server: LiveServer) -> None:
    content = sound(30.0)  # 50 windows
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        wanted = await posted(client, content, response_format="verbose_json")
        async with client.stream(
            "POST",
            PATH,
            data={"language": "en", "temperature": "0.5", "stream": "true", "seed": "0"},
            files={"file": ("a.wav", content)},
        ) as stream:
            lines = stream.aiter_lines()
            first = await anext(lines)
            os.kill(server.app.state.server.engine._clients[0].process.pid, signal.SIGKILL)
            rest = [line async for line in lines if line.startswith("data: {")]
        assert first.startswith("data: ")
        assert "transcript.text.done" in rest[-1]
        again = await posted(client, content, response_format="verbose_json")
    assert again.json()["text"] == wanted.json()["text"]
    assert left(server) == []


def transcription(rng: np.random.Generator) -> Transcription:
    """Return segments whose texts try to break subtitles."""
    texts = (
        " a --> b",
        " <i>&amp;</i>",
        " two\nlines\n\n3\n00:00:01,000 --> 00:00:02,000\nx",
        " WEBVTT",
        " 你好 ",
    )
    segments, time = [], 0.0
    for text in rng.permutation(texts):
        end = round(time + float(rng.uniform(0.1, 4000)), 3)
        words = [
            Word(str(text), time, round((time + end) / 2, 3)),
            Word(" ok", round((time + end) / 2, 3), end),
        ]
        segments.append(Segment(time, end, str(text), [], 0.0, 0.0, 1.0, words=words))
        time = end
    return Transcription("", "en", time, segments)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("words", [False, True])
def test_subtitles_are_read_by_libraries(seed: int, words: bool) -> None:
    found = transcription(np.random.default_rng(seed))
    wanted = words_in(found.segments) if words else found.segments
    texts = [" ".join(one.text.split()).replace("-->", "->") for one in wanted]
    by_srt = list(srt.parse(formats.srt(found, words=words), ignore_errors=False))
    assert [one.content for one in by_srt] == texts
    assert [one.end.total_seconds() for one in by_srt] == pytest.approx([one.end for one in wanted])
    by_vtt = webvtt.from_string(formats.vtt(found, words=words))
    assert [one.start_in_seconds for one in by_vtt] == [int(one.start) for one in wanted]
    unescaped = [
        one.raw_text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for one in by_vtt
    ]
    assert unescaped == texts
