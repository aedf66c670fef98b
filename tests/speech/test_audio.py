# SPDX-License-Identifier: Apache-2.0
"""Sound files to samples."""

import io
import itertools
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from quire.errors import ValidationError
from quire.speech.audio import Sound, decode, write_samples
from quire.speech.resampling import SincResampler, make_resampler
from quire.speech.windows import PcmFile, quietest, windows_of
from tests.fixtures.folded import folded


def tone(rate: int, seconds: float = 1.0, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def decoded(path: Path, tmp_path: Path, limit: float = 60.0) -> np.ndarray:
    target = tmp_path / "pcm"
    count = decode(path, target, limit)
    samples = np.fromfile(target, np.float32)
    assert len(samples) == count
    return samples


@folded(
    ("subtype", "error"),
    [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 1e-6), ("PCM_32", 1e-6), ("FLOAT", 0), ("DOUBLE", 0)],
)
@folded("channels", [1, 2])
def test_decode_wav_of_any_depth_gives_samples(
    subtype: str, error: float, channels: int, tmp_path: Path
) -> None:
    path, samples = tmp_path / "a.wav", tone(16_000)
    soundfile.write(path, np.stack([samples] * channels, axis=1), 16_000, subtype=subtype)
    assert np.abs(decoded(path, tmp_path) - samples).max() <= error


@pytest.mark.parametrize("kind", ["flac", "ogg", "mp3"])
def test_decode_compressed_gives_samples(kind: str, tmp_path: Path) -> None:
    path, samples = tmp_path / f"a.{kind}", tone(44_100)
    soundfile.write(path, samples, 44_100)
    found = decoded(path, tmp_path)
    assert abs(len(found) - 16_000) < 2_000
    spectrum = np.abs(np.fft.rfft(found[:16_000]))
    assert abs(int(spectrum.argmax()) * 16_000 / min(len(found), 16_000) - 440) < 3


def wav_bytes(data: bytes, *, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(data)
    return file.getvalue()


@folded(
    ("content", "words"),
    [
        (b"", "empty"),
        (wav_bytes(b""), "no samples"),
        (wav_bytes(b"\0\0" * 9, rate=7), "samples per second"),
        (wav_bytes(b"\0\0" * 9)[:20], "ends inside its header"),
        (wav_bytes(b"\0\0" * 9)[:12], "before its samples"),
        (b"fLaC" + b"\0" * 40, "cannot be decoded"),
        (wav_bytes(b"\0\0" * 16_000 * 3), "longer than 2 s"),
    ],
)
def test_decode_unusable_file_says_why(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ValidationError, match=words):
        decode(path, tmp_path / "pcm", 2.0)


def test_decode_truncated_wav_gives_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(struct.pack("<4h", 1, 2, 3, 4))[:-3])
    assert (decoded(path, tmp_path) * 32768).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_write_samples_not_finite_is_refused(bad: float, tmp_path: Path) -> None:
    block = np.array([[0.0], [bad]], dtype=np.float32)
    with pytest.raises(ValidationError, match="NaN or infinite"):
        write_samples(Sound(16_000, iter([block])), tmp_path / "pcm", 60.0)


def test_decode_without_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"\0\0\0\x20ftypM4A \0\0\0\0")

    def refuse(name: str, *args: Any) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(
        ValidationError, match=r"mp4, which needs av on the server: pip install 'quire-llm\[av\]'"
    ):
        decode(path, tmp_path / "pcm", 2.0)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_sinc_resampler_any_blocks_has_same_bits(rate: int) -> None:
    samples, rng = tone(rate), np.random.default_rng(rate)
    whole = SincResampler(rate, 16_000)
    wanted = np.concatenate([whole.feed(samples), whole.finish()])
    parts, at = SincResampler(rate, 16_000), 0
    found = []
    while at < len(samples):
        size = int(rng.integers(1, 4000))
        found.append(parts.feed(samples[at : at + size]))
        at += size
    assert np.array_equal(np.concatenate([*found, parts.finish()]), wanted)
    assert np.abs(wanted - tone(16_000))[300:-300].max() < 1e-4


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_sinc_resampler_agrees_with_soxr(rate: int) -> None:
    samples = tone(rate, hertz=1000.0)
    ours, theirs = (make_resampler(rate, 16_000, use_soxr=use) for use in (False, True))
    one = np.concatenate([ours.feed(samples), ours.finish()])
    two = np.concatenate([theirs.feed(samples), theirs.finish()])
    size = min(len(one), len(two))
    assert np.abs(one[:size] - two[:size])[300:-300].max() < 1e-3


def test_sinc_resampler_suppresses_what_would_alias() -> None:
    resampler = SincResampler(48_000, 16_000)
    found = resampler.feed(tone(48_000, hertz=11_000.0))
    assert np.abs(found[300:]).max() < 1e-3


def test_windows_of_long_sound_cut_where_it_is_quiet(tmp_path: Path) -> None:
    samples = np.ones(50_000, dtype=np.float32)
    samples[18_500:20_500] = 0
    path = tmp_path / "pcm"
    samples.tofile(path)
    first, *rest = windows_of(PcmFile(path), 20_000)
    assert 18_500 < first.end < 20_000
    ends = [first, *rest]
    assert all(a.end == b.start for a, b in itertools.pairwise(ends))
    assert ends[-1].end == 50_000
    assert all(0 < one.end - one.start <= 20_000 for one in ends)


def test_quietest_silence_returns_the_last() -> None:
    assert quietest(np.zeros(16_000, dtype=np.float32)) == 16_000 - 800
