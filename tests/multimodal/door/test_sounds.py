# SPDX-License-Identifier: Apache-2.0
"""Sounds at the door: every form has the same samples, and what is no sound is refused in words."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import av
import numpy as np
import pytest
import soundfile

from quire.config import EngineConfig
from quire.config.multimodal import MultimodalConfig
from quire.errors import ConfigError, ValidationError
from quire.multimodal.arrays import read_arrays
from quire.multimodal.door import door as door_module
from quire.multimodal.door.door import MediaDoor, make_door
from quire.multimodal.door.parts import MediaPart
from quire.multimodal.processors.sound import FEATURES
from tests.fixtures.hearing_models import HEARING, RATE, Samples, sound, write_files

WHERE = "messages.0.content.1"
SAMPLES = sound(9_000)


def config_of(path: Path, name: str = "qwen2-audio", **options: Any) -> EngineConfig:
    """The parts of a config that a door reads."""
    family = HEARING[name]
    (path / "config.json").write_text(json.dumps(family.config().to_dict()))
    write_files(name, path)
    part_of = SimpleNamespace(architecture=family.architecture, processor_files="")
    arch = SimpleNamespace(part_of=part_of, hidden_size=64, media_size=64)
    found = SimpleNamespace(arch=arch, multimodal=MultimodalConfig(**options), model_dir=str(path))
    return cast(EngineConfig, found)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[MediaDoor]:
    made = make_door(config_of(tmp_path, allowed_local_media_path=str(tmp_path)), max_sound_bytes=2**20)
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[MediaDoor]:
    made = make_door(config_of(tmp_path, "voxtral"), offline=True)
    assert made is not None
    yield made
    made.close()


def part(source: Any, **fields: Any) -> MediaPart:
    return MediaPart(WHERE, source, kind="audio", **fields)


def wav(samples: Samples = SAMPLES, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        scaled = samples * (127 if width == 1 else 32767) + (128 if width == 1 else 0)
        out.writeframes(np.repeat(scaled.astype(np.uint8 if width == 1 else "<i2"), channels).tobytes())
    return file.getvalue()


def in_format(name: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES, RATE, format=name, subtype=subtype)
    return file.getvalue()


def m4a() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(SAMPLES[None], format="fltp", layout="mono")
        frame.rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    return file.getvalue()


def base(content: bytes) -> str:
    return base64.b64encode(content).decode()


def features_in(path: str) -> np.ndarray:
    return np.array(read_arrays(Path(path).read_bytes())[FEATURES])


async def features_of(door: MediaDoor, one: MediaPart) -> np.ndarray:
    (item,) = (await door.admit([one])).items
    assert item.kind == "audio"
    return features_in(item.path)


async def test_every_way_to_send_a_sound_is_the_same(door: MediaDoor, tmp_path: Path) -> None:
    content = wav()
    (tmp_path / "a.wav").write_bytes(content)
    found = [
        (await door.admit([one])).items[0].digest
        for one in (
            part(base(content), is_base64=True),
            part(f"data:audio/wav;base64,{base(content)}"),
            part(f"data:;base64,{base(content)}"),
            part(f"file://{tmp_path}/a.wav"),
        )
    ]
    assert len(set(found)) == 1


async def test_samples_are_those_of_the_processor(door: MediaDoor) -> None:
    found = await features_of(door, part(base(wav()), is_base64=True))
    rounded = ((SAMPLES * 32767).astype("<i2") / 32768).astype(np.float32)
    assert door.processor.sounds is not None
    assert np.array_equal(found, door.processor.sounds.prepare(rounded).arrays[FEATURES])


async def test_other_formats_sound_alike(door: MediaDoor) -> None:
    plain = await features_of(door, part(base(wav()), is_base64=True))
    long = np.interp(np.arange(int(9_000 * 44_100 / RATE)) * RATE / 44_100, np.arange(9_000), SAMPLES)
    contents = {
        "stereo": wav(channels=2),
        "8 bits": wav(width=1),
        "44100": wav(long.astype(np.float32), rate=44_100),
        "flac": in_format("FLAC"),
        "ogg": in_format("OGG", "VORBIS"),
        "mp3": in_format("MP3"),
        "m4a": m4a(),
    }
    for name, content in contents.items():
        found = await features_of(door, part(base(content), is_base64=True))
        assert abs(found.shape[2] - plain.shape[2]) < 20, name
        assert np.abs(found.mean(axis=2) - plain.mean(axis=2)).mean() < 0.2, name


async def test_offline_arrays_and_paths_are_read(offline: MediaDoor, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav())
    want = await features_of(offline, part(str(path)))
    integers = (SAMPLES * 32767).astype(np.int16)
    for source in (
        (integers, RATE),
        integers,
        (integers.astype(np.float32) / 32768, RATE),
        ((integers / 32768).tolist(), RATE),
        (np.stack([integers, integers], axis=1), RATE),
    ):
        assert np.array_equal(await features_of(offline, part(source)), want)


async def test_a_long_sound_has_several_windows(offline: MediaDoor) -> None:
    (item,) = (await offline.admit([part(sound(40_000))])).items
    assert item.layout.runs == [[("[BEGIN_AUDIO]", 1), ("[AUDIO]", 30)]]
    assert item.layout.seconds == 2.5


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "no sound": (b"hello, world" * 9, "cannot be decoded"),
    "no samples": (wav(SAMPLES[:0]), "no samples"),
    "too short": (wav(SAMPLES[:100]), "at least 321"),
    "too long": (wav(sound(16_161)), "longer than 1 s"),
    "cut header": (wav()[:30], "ends inside its header"),
    "cut flac": (in_format("FLAC")[:3000], "cannot be decoded"),
    "cut m4a": (m4a()[:900], "cannot be decoded"),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "cannot be decoded"),
    "concat": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "cannot be decoded"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(64), "has no sound"),
    "large": (wav(np.zeros(600_000, dtype=np.float32)), "--max-audio-bytes"),
}


async def test_what_is_no_sound_is_refused_in_words(door: MediaDoor) -> None:
    for content, words in BAD.values():
        with pytest.raises(ValidationError) as error:
            await door.admit([part(base(content), is_base64=True)])
        assert words in error.value.message
        assert error.value.message.startswith(WHERE)
        assert error.value.param == WHERE
    assert not list(door.files.directory.glob("*.pcm")), "no samples are left"


async def test_samples_that_are_no_numbers_are_refused(offline: MediaDoor) -> None:
    for value in (np.nan, np.inf):
        samples = SAMPLES.copy()
        samples[77] = value
        with pytest.raises(ValidationError, match="NaN or infinite"):
            await offline.admit([part(samples)])


async def test_another_form_is_refused_by_name(offline: MediaDoor) -> None:
    for source in (
        *(np.zeros((2, 3, 4)), np.zeros(0), np.zeros((2, 99)), {"array": 1}, object()),
        *((SAMPLES, 0), (SAMPLES, 1.5), (SAMPLES, np.nan), ("a", 16_000)),
    ):
        with pytest.raises(ValidationError, match=WHERE):
            await offline.admit([part(source)])


async def test_a_bomb_is_stopped_while_it_is_decoded(door: MediaDoor) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16_000 * 600, dtype=np.int16), RATE, format="FLAC")
    with pytest.raises(ValidationError, match="longer than 1 s"):
        await door.admit([part(base(file.getvalue()), is_base64=True)])


async def test_seconds_of_a_request_have_a_limit(offline: MediaDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_REQUEST_SECONDS", 2.0)
    assert len((await offline.admit([part(sound(RATE, seed)) for seed in (0, 1)])).items) == 2
    with pytest.raises(ValidationError, match="longer than"):
        await offline.admit([part(sound(RATE, seed)) for seed in (0, 1, 2)])


async def test_a_codec_without_its_package_names_it(
    door: MediaDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ModuleNotFoundError(\"No module named 'av'\", name='av')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValidationError, match=r"the file is mp4, which needs av .*quire-llm\[av\]"):
        await door.admit([part(base(m4a()), is_base64=True)])


async def test_other_media_and_counts_are_refused(tmp_path: Path) -> None:
    door = make_door(config_of(tmp_path, limit_mm_per_prompt={"audio": 1}))
    assert door is not None
    assert door.kinds == ["audio"]
    with pytest.raises(ValidationError, match="is an image, and this model takes sounds"):
        await door.admit([MediaPart(WHERE, "data:image/png;base64,AAAA")])
    with pytest.raises(ValidationError, match="has 2 sounds, the limit is 1"):
        await door.admit([part(base(wav()), is_base64=True)] * 2)
    door.close()


def test_options_of_a_processor_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_pixels"):
        make_door(config_of(tmp_path, mm_processor_kwargs={"max_pixels": 1}))
