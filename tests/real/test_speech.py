# SPDX-License-Identifier: Apache-2.0
"""Real weights of Whisper tiny.en, beside transformers, offline and through OpenAI's client."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM
from quire.speech.audio import decode
from quire.speech.features import log_mel
from tests.real.tiny_en import convert

pytestmark = pytest.mark.real
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Yesterday we walked along the river, and it rained for the whole afternoon.",
    "In the evening there was a concert in the park, with music by three young composers.",
)


@pytest.fixture(scope="module")
def checkpoint(real: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whisper") / "tiny_en"
    convert(real("tiny_en"), target)
    return target


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is missing")
    made = tmp_path_factory.mktemp("sounds")
    paths = [made / f"{number}.wav" for number in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        subprocess.run([program, "-w", str(path), text], check=True)
    return paths


def test_transcribe_tiny_en_equals_transformers(checkpoint: Path, sounds: list[Path], tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    llm = LLM(str(checkpoint), dtype="float32", gpu_memory_utilization=0.05)
    try:
        for timestamps in (False, True):
            found = llm.transcribe(sounds, temperature=0.0, timestamps=timestamps, use_tqdm=False)
            for path, one in zip(sounds, found, strict=True):
                decode(path, tmp_path / "pcm", 60.0)
                features = log_mel(np.fromfile(tmp_path / "pcm", np.float32), 80, 3000)
                with torch.no_grad():
                    ids = model.generate(torch.from_numpy(features)[None], return_timestamps=timestamps)
                wanted = llm.get_tokenizer().decode([token for token in ids[0].tolist() if token < 50256])
                assert one.text == wanted.strip()
        alone = [llm.transcribe(path, temperature=0.0, use_tqdm=False)[0] for path in reversed(sounds)]
        assert alone[::-1] == llm.transcribe(sounds, temperature=0.0, use_tqdm=False)
    finally:
        llm.shutdown()
