# SPDX-License-Identifier: Apache-2.0
"""`quire transcribe` on a tiny random Whisper: forms, folders and files that are not there."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from quire.entrypoints.cli.main import main
from tests.speech.tiny import save_tiny_whisper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper"))


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "speech.wav"
    samples = np.random.default_rng(0).standard_normal(16_000) * 3000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.astype("<i2").tobytes())
    return path


def test_transcribe_missing_file_is_named_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "nothere.wav", "--model", "no-such-model"]) == 2
    assert "there is no file 'nothere.wav'" in capsys.readouterr().err


def test_transcribe_goes_on_without_files_it_cannot_read(
    model: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.wav").write_bytes(b"")
    files = [str(tmp_path / "empty.wav"), str(sound)]
    assert main(["transcribe", *files, "--model", model, "--temperature", "0"]) == 1
    printed = capsys.readouterr()
    assert "error: '" in printed.err
    assert "empty.wav': the file is empty" in printed.err
    assert printed.out.strip()


def test_transcribe_writes_no_file_twice(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(sound), str(sound), "--output-dir", str(tmp_path)]
    assert main(["transcribe", *files, "--model", "no-such-model"]) == 2
    assert "two files would be written to" in capsys.readouterr().err


def test_transcribe_writes_a_file_per_sound(model: str, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    args = ["--model", model, "--temperature", "0", "--language", "en", "--output-dir", str(folder)]
    assert main(["transcribe", str(sound), "--json", *args]) == 0
    found = json.loads((folder / "speech.json").read_text())
    assert found["duration"] == 1.0
    assert main(["transcribe", str(sound), "--vtt", *args]) == 0
    assert (folder / "speech.vtt").read_text().startswith("WEBVTT\n")
