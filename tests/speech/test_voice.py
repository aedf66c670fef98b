# SPDX-License-Identifier: Apache-2.0
"""Voice detection beside torch's layers, spans, and windows that cover them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.errors import ValidationError
from quire.multimodal.arrays import write_arrays
from quire.speech import voice
from quire.speech.voice import (
    CHUNK,
    SHAPES,
    SpeechSpan,
    VoiceDetector,
    load_detector,
    spans_of,
    voiced_windows,
)
from quire.speech.windows import PcmFile


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def by_torch(samples: np.ndarray, weights: dict[str, np.ndarray]) -> list[float]:
    w = {name: torch.from_numpy(array) for name, array in weights.items()}
    cell = torch.nn.LSTMCell(128, 128)
    cell.load_state_dict({name.removeprefix("lstm_cell."): w[name] for name in w if "lstm" in name})
    padded = F.pad(torch.from_numpy(samples), (64, -len(samples) % CHUNK))
    state, found = (torch.zeros(1, 128), torch.zeros(1, 128)), []
    with torch.no_grad():
        for start in range(0, len(padded) - 64, CHUNK):
            x = F.pad(padded[None, None, start : start + CHUNK + 64], (0, 64), mode="reflect")
            x = F.conv1d(x, w["stft_conv.weight"], stride=128)
            x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
            for number, stride in enumerate((1, 2, 2, 1), start=1):
                name = f"conv{number}"
                x = F.conv1d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=stride, padding=1).relu()
            state = cell(x[:, :, 0], state)
            out = F.conv1d(state[0].relu()[:, :, None], w["final_conv.weight"], w["final_conv.bias"])
            found.append(float(out.sigmoid()))
    return found


def pcm(path: Path, samples: np.ndarray) -> PcmFile:
    samples.astype(np.float32).tofile(path)
    return PcmFile(path)


@pytest.mark.parametrize("length", [1, 511, 512, 20_000])
def test_probabilities_equal_torch(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(length).standard_normal(length).astype(np.float32) * 0.3
    sound, weights = pcm(tmp_path / "pcm", samples), random_weights()
    wanted = by_torch(samples, weights)
    monkeypatch.setattr(voice, "BLOCK_CHUNKS", 7)
    found = np.concatenate(list(VoiceDetector(weights).probabilities(sound)))
    assert found == pytest.approx(wanted, abs=2e-5)


def test_detector_of_other_weights_is_refused() -> None:
    weights = random_weights()
    del weights["conv1.bias"]
    with pytest.raises(ValueError, match=r"conv1\.bias must be \(128,\), and is None"):
        VoiceDetector(weights)


def chunks(*parts: tuple[float, float]) -> Iterator[np.ndarray]:
    """Return blocks of probabilities, given as (seconds, probability)."""
    whole = np.concatenate([np.full(round(seconds * 16_000 / CHUNK), value) for seconds, value in parts])
    return iter(np.array_split(whole.astype(np.float32), 5))


def test_spans_short_pause_joins_and_click_is_dropped() -> None:
    found = list(
        spans_of(chunks((2, 0.0), (1, 0.9), (0.5, 0.1), (1, 0.9), (4, 0.1), (0.1, 0.9), (2, 0)), 170_000)
    )
    assert len(found) == 1
    assert found[0].start == pytest.approx(1.6 * 16_000, abs=CHUNK)
    assert found[0].end == pytest.approx(4.9 * 16_000, abs=2 * CHUNK)


def test_spans_speech_continues_at_middling_probability() -> None:
    assert list(spans_of(chunks((1, 0.4), (1, 0.6), (3, 0.4)), 80_000)) == [
        SpeechSpan(pytest.approx(9_600, abs=CHUNK), 80_000)  # type: ignore[arg-type]
    ]


def test_spans_of_silence_are_none() -> None:
    assert list(spans_of(chunks((5, 0.2)), 80_000)) == []


class _Scripted(VoiceDetector):
    def __init__(self, probabilities: Iterator[np.ndarray]) -> None:
        self._scripted = probabilities

    def probabilities(self, sound: PcmFile) -> Iterator[np.ndarray]:
        return self._scripted


@pytest.mark.parametrize("seed", range(5))
def test_voiced_windows_cover_all_speech_in_order(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    parts = [(float(rng.uniform(0.3, 9)), float(at % 2)) for at in range(20)]
    size = sum(round(seconds * 16_000 / CHUNK) for seconds, _ in parts) * CHUNK
    sound = pcm(tmp_path / "pcm", rng.standard_normal(size))
    limit = 10 * 16_000
    windows = list(voiced_windows(sound, limit, _Scripted(chunks(*parts))))
    covered = np.zeros(size, dtype=bool)
    for window in windows:
        assert 0 < window.end - window.start <= limit
        assert not covered[window.start : window.end].any()
        covered[window.start : window.end] = True
    assert [one.start for one in windows] == sorted(one.start for one in windows)
    for span in spans_of(chunks(*parts), size):
        assert covered[span.start : span.end].all()


def test_load_detector_without_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice, "PACKAGE", "no_such_package")
    load_detector.cache_clear()
    with pytest.raises(ValidationError, match="pip install --no-deps silero-vad"):
        load_detector()


def test_load_detector_runs_no_code_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "made_up_vad"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_arrays(package / voice.FILE, random_weights())
    monkeypatch.setattr(voice, "PACKAGE", package.name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    load_detector.cache_clear()
    assert isinstance(load_detector(), VoiceDetector)
    load_detector.cache_clear()
