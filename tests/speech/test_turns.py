# SPDX-License-Identifier: Apache-2.0
"""Turns of a live sound: independent of messages, without silence, and committed by the server."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect

from quire.errors import ValidationError
from quire.speech import realtime
from quire.speech.turns import Started, TurnDetection, TurnEvent, Turns, TurnStopped, read_turn_detection
from quire.speech.voice import CHUNK, VoiceDetector, VoiceStream
from tests.speech.test_realtime import address, event, serving, tell
from tests.speech.test_voice import by_torch, random_weights
from tests.speech.tiny import save_tiny_whisper

RATE = 16_000


class Loudness(VoiceDetector):
    """Detector by energy alone."""

    def __init__(self) -> None:
        pass

    def stream(self) -> VoiceStream:
        return LoudStream(self)


class LoudStream(VoiceStream):
    """Stream of `Loudness`."""

    def feed(self, chunk: np.ndarray) -> float:
        return float(np.abs(chunk).mean() > 0.01)


def noise(seconds: float, loudness: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * loudness
    return samples.astype(np.float32)


def talk() -> np.ndarray:
    """Two turns, of 1.0 and 0.6 s, the first with a short pause in it."""
    parts = [(1.2, 0), (0.5, 0.1), (0.2, 0), (0.3, 0.1), (1.5, 0), (0.6, 0.1), (1.0, 0)]
    return np.concatenate([noise(seconds, loudness) for seconds, loudness in parts])


def fed(
    parts: list[np.ndarray], rate: int = RATE, **options: Any
) -> tuple[list[TurnEvent], list[np.ndarray]]:
    """Return the begins and ends of turns, and the samples of each."""
    turns, marks, sounds = Turns(Loudness(), TurnDetection(**options), rate), list[TurnEvent](), []
    for found in [*(turns.feed(part) for part in parts), turns.finish()]:
        for one in found:
            if isinstance(one, Started | TurnStopped):
                marks.append(one)
                sounds += [[]] if isinstance(one, Started) else []
            else:
                sounds[-1].append(one.samples)
    return marks, [np.concatenate(each) for each in sounds]


def test_stream_of_chunks_equals_torch() -> None:
    samples, weights = noise(0.4, 0.3)[: 12 * CHUNK], random_weights()
    stream = VoiceDetector(weights).stream()
    found = [stream.feed(chunk) for chunk in np.split(samples, 12)]
    assert found == pytest.approx(by_torch(samples, weights), abs=2e-5)


def test_turns_have_their_speech_and_padding() -> None:
    marks, sounds = fed([talk()])
    assert [type(mark) for mark in marks] == [Started, TurnStopped] * 2
    begins = [mark.at_ms for mark in marks if isinstance(mark, Started)]
    ends = [mark.at_ms for mark in marks if isinstance(mark, TurnStopped)]
    assert begins == [pytest.approx(900, abs=64), pytest.approx(3400, abs=64)]
    assert ends == [pytest.approx(2700, abs=64), pytest.approx(4800, abs=64)]
    for begin, end, sound in zip(begins, ends, sounds, strict=True):
        assert len(sound) * 1000 / RATE == pytest.approx(end - begin, abs=1)
        assert np.array_equal(sound, talk()[begin * RATE // 1000 :][: len(sound)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [RATE, 8_000])
def test_turns_do_not_depend_on_messages(seed: int, rate: int) -> None:
    samples = talk()[:: RATE // rate]
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(samples), 40))
    whole, parts = fed([samples], rate), fed(np.split(samples, cuts), rate)
    assert whole[0] == parts[0]
    assert all(np.allclose(one, other, atol=1e-6) for one, other in zip(whole[1], parts[1], strict=True))


def test_turns_open_at_the_end_are_finished() -> None:
    marks, (sound,) = fed([np.concatenate([noise(0.5, 0), noise(0.51, 0.1)])], prefix_padding_ms=0)
    assert [type(mark) for mark in marks] == [Started, TurnStopped]
    assert len(sound) / RATE == pytest.approx(0.51, abs=0.033)
    assert fed([noise(30.0, 0)]) == ([], [])


@pytest.mark.parametrize(
    "given",
    [
        "server_vad",
        {},
        {"type": "semantic_vad"},
        {"type": "server_vad", "eagerness": "low"},
        {"type": "server_vad", "threshold": 1},
        {"type": "server_vad", "threshold": float("nan")},
        {"type": "server_vad", "threshold": True},
        {"type": "server_vad", "prefix_padding_ms": -1},
        {"type": "server_vad", "silence_duration_ms": 10**9},
        {"type": "server_vad", "silence_duration_ms": 1.5},
    ],
)
def test_wrong_turn_detection_is_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="turn_detection"):
        read_turn_detection(given)
    assert read_turn_detection(None) is None
    assert read_turn_detection({"type": "server_vad", "threshold": 0.4}) == TurnDetection(0.4)


def encoded(samples: np.ndarray) -> str:
    return base64.b64encode((samples * 32767).clip(-32768, 32767).astype("<i2").tobytes()).decode()


async def test_realtime_server_commits_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "load_detector", Loudness)
    checkpoint = save_tiny_whisper(tmp_path / "whisper")
    async with serving(checkpoint) as server, connect(address(server)) as socket:
        await event(socket)
        await tell(socket, "session.update", language="de", turn_detection={"type": "server_vad"})
        assert (await event(socket))["session"]["turn_detection"]["silence_duration_ms"] == 500
        for part in np.array_split(talk(), 9):
            await tell(socket, "input_audio_buffer.append", audio=encoded(part))
        events: list[dict[str, Any]] = []
        while [one["type"] for one in events].count("transcription.done") < 2:
            events.append(await event(socket))
        kinds = [one["type"].removeprefix("input_audio_buffer.") for one in events if "item_id" in one]
        assert kinds == ["speech_started", "speech_stopped", "committed"] * 2
        assert len({one["item_id"] for one in events if "item_id" in one}) == 2
        texts = [one["text"] for one in events if one["type"] == "transcription.done"]
        assert all(texts)
        # A commit ends an open turn, and one without speech ends nothing.
        await tell(socket, "input_audio_buffer.append", audio=encoded(noise(0.4, 0.1)))
        assert (await event(socket))["type"] == "input_audio_buffer.speech_started"
        await tell(socket, "input_audio_buffer.commit")
        last = [await event(socket) for _ in range(2)]
        assert [one["type"][19:] for one in last] == ["speech_stopped", "committed"]
        while (await event(socket))["type"] != "transcription.done":
            pass
        await tell(socket, "input_audio_buffer.append", audio=encoded(noise(0.4, 0.0)))
        await tell(socket, "input_audio_buffer.commit")
        await tell(socket, "session.update", turn_detection={"type": "other"})
        assert "turn_detection" in (await event(socket))["error"]
        await tell(socket, "session.update", session={"turn_detection": None})
        assert (await event(socket))["session"]["turn_detection"] is None


async def test_realtime_without_weights_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> VoiceDetector:
        raise ValidationError("server_vad needs the weights of silero-vad", param="turn_detection")

    monkeypatch.setattr(realtime, "load_detector", missing)
    async with serving(save_tiny_whisper(tmp_path / "whisper")) as server, connect(address(server)) as socket:
        await event(socket)
        await socket.send(json.dumps({"type": "session.update", "turn_detection": {"type": "server_vad"}}))
        found = await event(socket)
        assert (found["type"], "silero-vad" in found["error"]) == ("error", True)
        await tell(socket, "session.update")
        assert (await event(socket))["session"]["turn_detection"] is None
