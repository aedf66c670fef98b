# SPDX-License-Identifier: Apache-2.0
"""`LLM.transcribe`: sounds and windows in flight together, each with the text that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import LLM
from quire.errors import ValidationError
from quire.speech import offline, store
from quire.speech.voice import CHUNK, VoiceDetector
from quire.speech.windows import PcmFile
from tests.speech.tiny import save_tiny_whisper


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")
    found = LLM(str(path), dtype="float32", gpu_memory_utilization=0.02)
    found.transcribe(noise(0.2, 0), use_tqdm=False)
    yield found
    found.shutdown()


def noise(seconds: float, seed: int) -> tuple[np.ndarray, int]:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * 16_000)) * 0.1
    return samples.astype(np.float32), 16_000


def pcm_files(llm: LLM) -> list[str]:
    assert llm._speech is not None
    return [
        path.name for path in llm._speech._store._files.directory.iterdir() if path.name.startswith("pcm")
    ]


@pytest.mark.parametrize("language", [None, "de"])
def test_transcribe_together_equals_each_alone(llm: LLM, language: str | None) -> None:
    sounds = [noise(seconds, seed) for seed, seconds in enumerate((0.3, 2.0, 0.6, 1.1))]
    together = llm.transcribe(sounds, language=language, temperature=0.0, use_tqdm=False)
    alone = [llm.transcribe(one, language=language, temperature=0.0, use_tqdm=False)[0] for one in sounds]
    assert together == alone
    assert [one.duration for one in together] == [0.3, 2.0, 0.6, 1.1]
    assert pcm_files(llm) == []


def test_transcribe_any_number_in_flight_gives_same_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sounds = [noise(0.8, seed) for seed in range(3)]
    wanted = llm.transcribe(sounds, language="en", use_tqdm=False)
    assert llm._speech is not None
    for width in (1, 5):
        monkeypatch.setattr(llm._speech, "_width", width)
        assert llm.transcribe(sounds, language="en", use_tqdm=False) == wanted


def test_transcribe_long_sound_reads_windows_as_they_start(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._speech is not None
    read: list[int] = []
    asked: list[int] = []
    features, generate = llm._speech._store.features, llm._speech._generate
    monkeypatch.setattr(
        llm._speech._store, "features", lambda *args: (read.append(len(asked)), features(*args))[1]
    )
    monkeypatch.setattr(llm._speech, "_generate", lambda asks: (asked.append(len(asks)), generate(asks))[1])
    monkeypatch.setattr(llm._speech, "_width", 4)
    llm.transcribe(noise(12.0, 1), language="en", temperature=0.0, timestamps=False, use_tqdm=False)
    assert max(asked) == 4
    assert read.count(0) == 4  # the other windows are read when there is room for them
    assert len(read) >= 20


def test_transcribe_bad_sound_among_others_leaves_no_file(llm: LLM, tmp_path: Path) -> None:
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF")
    with pytest.raises(ValidationError, match=r"bad\.wav"):
        llm.transcribe([noise(0.5, 0), bad], language="en", use_tqdm=False)
    assert pcm_files(llm) == []
    assert llm.transcribe(noise(0.5, 0), language="en", use_tqdm=False)[0].duration == 0.5


def test_windows_in_flight_fit_the_cache(llm: LLM) -> None:
    config, ready = llm.llm_engine.config, llm.llm_engine.core_ready
    width = offline._most_windows(llm.llm_engine)
    assert 1 <= width <= config.scheduler.max_num_seqs
    assert width * config.model.max_model_len <= ready.num_blocks * ready.block_size


def test_transcribe_with_vad_filter_skips_silence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, rate = noise(3.0, 5)
    silent = np.concatenate([np.zeros(32_000, np.float32), samples, np.zeros(64_000, np.float32)])
    monkeypatch.setattr(store, "load_detector", _Loudness)
    options = {"language": "de", "temperature": 0.0, "use_tqdm": False}
    (found,) = llm.transcribe((silent, rate), vad_filter=True, **options)
    assert found.duration == 9.0
    times = [(one.start, one.end) for one in found.segments]
    assert times == [(a, b) for a, b in times if 1.5 <= a <= b <= 5.5]
    (nothing,) = llm.transcribe((np.zeros(48_000, np.float32), rate), vad_filter=True, **options)
    assert (nothing.text, nothing.segments) == ("", [])
    assert llm.transcribe((np.zeros(9_000, np.float32), rate), vad_filter=True, use_tqdm=False)[0].language


class _Loudness(VoiceDetector):
    """Detector by energy alone."""

    def __init__(self) -> None:
        pass

    def probabilities(self, sound: PcmFile) -> Iterator[np.ndarray]:
        samples = sound.read(0, sound.num_samples)
        padded = np.pad(samples, (0, -len(samples) % CHUNK)).reshape(-1, CHUNK)
        yield (np.abs(padded).mean(axis=1) > 0.01).astype(np.float32)
