# SPDX-License-Identifier: Apache-2.0
"""Beam search of transcriptions: transformers' beams under Whisper's rules, offline and over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import SuppressTokensLogitsProcessor, WhisperTimeStampLogitsProcessor

from quire import LLM
from quire.errors import ValidationError
from quire.speech.requests import SpeechOptions, WindowAudio, decoder_ids, text_request
from quire.speech.vocabulary import SpeechVocabulary, read_vocabulary
from tests.speech.tiny import FRAMES, save_tiny_whisper

WIDTH, LENGTH = 4, 12


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Path]]:
    path = save_tiny_whisper(tmp_path_factory.mktemp("tiny") / "whisper")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "layer_norm" in name
            parameter.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.1 if is_norm else 0.35)
    model.tie_weights()
    model.save_pretrained(path)
    llm = LLM(str(path), dtype="float32", gpu_memory_utilization=0.02)
    llm.transcribe((np.zeros(3200, np.float32), 16_000), language="de", use_tqdm=False)
    yield llm, model, path
    llm.shutdown()


def words_of(llm: LLM) -> SpeechVocabulary:
    return read_vocabulary(llm.llm_engine.config, llm.get_tokenizer().file)


def window(path: Path, seed: int) -> tuple[torch.Tensor, WindowAudio]:
    """Return a random spectrogram, and a window whose file has it."""
    features = torch.randn(1, 8, FRAMES, generator=torch.Generator().manual_seed(seed))
    file = path / f"window-{seed}.safetensors"
    save_file({"input_features": features}, file)
    return features, WindowAudio(hashlib.sha256(file.name.encode()).digest(), str(file))


def beams_of(
    model: Any, words: SpeechVocabulary, features: torch.Tensor, ids: list[int], *, timestamps: bool
) -> tuple[list[list[int]], list[float]]:
    """Return transformers' sequences behind the decoder's prompt, and their scores."""
    config = transformers.GenerationConfig(
        eos_token_id=words.end,
        no_timestamps_token_id=words.no_timestamps,
        max_initial_timestamp_index=words.max_initial,
    )
    banned = (
        [words.no_timestamps] if timestamps else list(range(words.first_timestamp, model.config.vocab_size))
    )
    rules: list[Any] = [SuppressTokensLogitsProcessor([*words.suppressed, *banned], "cpu")]
    if timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(ids)))
    found = transformers.GenerationMixin.generate(
        model,
        input_features=features,
        decoder_input_ids=torch.tensor([ids]),
        logits_processor=transformers.LogitsProcessorList(rules),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        max_new_tokens=LENGTH,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return [one[len(ids) :] for one in found.sequences.tolist()], found.sequences_scores.tolist()


@pytest.mark.parametrize("timestamps", [True, False])
def test_beams_of_speech_equal_transformers(loaded: tuple[LLM, Any, Path], timestamps: bool) -> None:
    llm, model, path = loaded
    words = words_of(llm)
    options = SpeechOptions(timestamps=timestamps, beam_size=WIDTH, max_tokens=LENGTH)
    ids = decoder_ids(words, options, "de", [])
    windows = [window(path, seed) for seed in range(5)]
    asks = [text_request(words, options, audio, ids, 0.0) for _, audio in windows]
    together = llm._answer_asks(asks)
    for (features, _), output in zip(windows, together, strict=True):
        sequences, scores = beams_of(model, words, features, ids, timestamps=timestamps)
        for one, wanted, score in zip(output.outputs, sequences, scores, strict=True):
            tokens = list(one.token_ids)
            assert tokens == wanted[: len(tokens)]
            assert set(wanted[len(tokens) :]) <= {words.end}
            assert (one.cumulative_logprob or 0.0) / len(tokens) == pytest.approx(score, abs=1e-4)
    llm.llm_engine.reset_prefix_cache()
    alone = [llm._answer_asks([ask])[0] for ask in asks]
    assert [one.outputs for one in alone] == [one.outputs for one in together]


def test_transcribe_searches_at_temperature_zero_alone(loaded: tuple[LLM, Any, Path]) -> None:
    llm, _, _ = loaded
    samples = (np.random.default_rng(1).standard_normal(16_000) * 0.1).astype(np.float32)
    options: dict[str, Any] = {"language": "de", "use_tqdm": False}
    (greedy,) = llm.transcribe((samples, 16_000), temperature=0.0, **options)
    (searched,) = llm.transcribe((samples, 16_000), temperature=0.0, beam_size=5, **options)
    (again,) = llm.transcribe((samples, 16_000), temperature=0.0, beam_size=5, **options)
    assert searched == again
    assert searched.segments != greedy.segments
    (hot,) = llm.transcribe((samples, 16_000), temperature=0.7, beam_size=5, **options)
    assert hot == llm.transcribe((samples, 16_000), temperature=0.7, **options)[0]
    for wrong in (0, 65, 1.5, "5"):
        with pytest.raises(ValidationError, match="beam_size must be an integer in"):
            llm.transcribe((samples, 16_000), beam_size=wrong, **options)
