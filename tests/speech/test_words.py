# SPDX-License-Identifier: Apache-2.0
"""Times of words: warping, attention and division into words, beside transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper import generation_whisper, tokenization_whisper

from quire import LLM
from quire.media import MediaItem
from quire.speech.alignment import UTILITY, Alignment, first_frames, token_times
from quire.speech.words import words_of
from tests.speech.test_offline import noise
from tests.speech.tiny import save_tiny_whisper


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_tied", [False, True])
def test_first_frames_equal_transformers(seed: int, is_tied: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rng.integers(1, 40), rng.integers(1, 90))).astype(np.float32)
    if is_tied:
        weights = np.round(weights)
    rows, columns = generation_whisper._dynamic_time_warping(-weights.astype(np.float64))
    starts = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    assert first_frames(weights).tolist() == columns[starts].tolist()


class _Tokenizer:
    """Tokenizer of bytes, with the methods that transformers' functions call."""

    eos_token_id = 10_000
    language = None

    def __init__(self, path: Path) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(self._backend.decode(tokens))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")


TEXTS = (
    ' Hello, world! It\'s (really) "fine" - a 3.14 test...',
    " ¿Qué? ¡No! – éàü ß \u20ac5 ",
    "word",
    ' "\'" ( [ { - ',
    " 你好，世界。今天 fine!",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("code", "language"), [("en", "english"), ("zh", "chinese")])
def test_words_of_any_text_equal_transformers(text: str, code: str, language: str, checkpoint: Path) -> None:
    tokenizer = _Tokenizer(checkpoint)
    tokens = tokenizer.encode(text)
    wanted, _, indices = tokenization_whisper._combine_tokens_into_words(tokenizer, list(tokens), language)
    times = [(float(at), at + 0.5) for at in range(len(tokens))]
    found = words_of(tokens, times, code, tokenizer.decode)
    assert [one.text for one in found] == wanted
    assert [(one.start, one.end) for one in found] == [(at[0], at[-1] + 0.5) for at in indices]


def test_words_of_broken_characters_keeps_every_token(checkpoint: Path) -> None:
    tokenizer = _Tokenizer(checkpoint)
    tokens = np.random.default_rng(0).integers(0, 256, 60).tolist()
    wanted, _, _ = tokenization_whisper._combine_tokens_into_words(tokenizer, list(tokens), "english")
    found = words_of(tokens, [(0.0, 0.0)] * 60, "en", tokenizer.decode)
    assert [one.text for one in found][: len(wanted) - 1] == wanted[:-1]
    assert found[len(wanted) - 1].text.startswith(wanted[-1])  # theirs drop what no character ends


@torch.inference_mode()
def times_by_transformers(checkpoint: Path, features: torch.Tensor, asked: Alignment) -> list[float]:
    model = WhisperForConditionalGeneration.from_pretrained(checkpoint, attn_implementation="eager").eval()
    model.config.median_filter_width = asked.median_width
    ids = torch.tensor([[*asked.prompt, *asked.tokens]])
    out = model(input_features=features, decoder_input_ids=ids, output_attentions=True)
    generated = SimpleNamespace(cross_attentions=[out.cross_attentions], sequences=ids)

    class Outputs(SimpleNamespace):
        def __contains__(self, name: str) -> bool:
            return hasattr(self, name)

    found = model._extract_token_timestamps(
        Outputs(**vars(generated)), asked.heads, num_frames=asked.num_frames, num_input_ids=len(asked.prompt)
    )
    return [round(time, 2) for time in found[0, len(asked.prompt) : -1].tolist()]


def test_times_of_tokens_equal_transformers(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", gpu_memory_utilization=0.02)
    try:
        (found,) = llm.transcribe(noise(0.5, 3), language="de", temperature=0.0, words=True, use_tqdm=False)
        assert found.segments
        speech, engine = llm._speech, llm.llm_engine
        assert speech is not None
        words = speech._words
        file = next(speech._store._files.directory.glob("*.safetensors"), None)
        file = file or next(one for one in speech._store._files.directory.iterdir() if one.is_file())
        features = torch.randn(1, 8, words.num_frames, generator=torch.Generator().manual_seed(0))
        from safetensors.torch import save_file

        save_file({"input_features": features}, file)
        item = MediaItem(b"\1" * 32, "audio", 0, 64, [(0, words.num_encoded)], str(file))
        for seed, (size, frames, width) in enumerate([(30, 60, 7), (12, 50, 3), (1, 41, 1), (5, 2, 7)]):
            tokens = np.random.default_rng(seed).integers(0, 256, size).tolist()
            asked = Alignment([words.start, words.start + 1], tokens, frames, [(0, 1), (1, 0), (1, 3)], width)
            for _ in range(2):  # from a dict as well, as another process sends it
                packed = engine.call_core(UTILITY, asked, msgspec.structs.asdict(item))
                assert token_times(packed) == times_by_transformers(checkpoint, features, asked)
    finally:
        llm.shutdown()


def test_transcribe_words_of_segments_are_in_order(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", gpu_memory_utilization=0.02)
    try:
        found = llm.transcribe([noise(1.5, 0), noise(0.2, 1)], language="en", words=True, use_tqdm=False)
        for one in found:
            for segment in one.segments:
                assert segment.words
                times = [time for word in segment.words for time in (word.start, word.end)]
                assert times == sorted(times)
                assert times[-1] <= one.duration
        plain = llm.transcribe(noise(1.5, 0), language="en", use_tqdm=False)[0]
        assert plain.text == found[0].text
        assert not any(segment.words for segment in plain.segments)
    finally:
        llm.shutdown()
