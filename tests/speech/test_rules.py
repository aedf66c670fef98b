# SPDX-License-Identifier: Apache-2.0
"""Rules of sampling, beside transformers."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from quire.speech.rules import RequestRules
from quire.speech.vocabulary import SpeechVocabulary

SIZE = 60
WORDS = SpeechVocabulary(
    end=20,
    start=21,
    previous=22,
    no_speech=23,
    no_timestamps=24,
    languages={},
    tasks={},
    suppressed=(3, 21, 22, 23),
    suppressed_first=(5, 20),
    max_initial=6,
    num_encoded=64,
    context=40,
    num_bins=80,
    num_frames=60,
)


def wanted(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    config = GenerationConfig(
        eos_token_id=WORDS.end, no_timestamps_token_id=WORDS.no_timestamps, max_initial_timestamp_index=6
    )
    ids = torch.tensor([[WORDS.start, *output_ids]])
    scores = SuppressTokensLogitsProcessor(list(WORDS.suppressed), "cpu")(ids, logits[None].clone())
    if not output_ids:
        scores = SuppressTokensLogitsProcessor(list(WORDS.suppressed_first), "cpu")(ids, scores)
    scores[:, WORDS.no_timestamps] = -torch.inf
    return WhisperTimeStampLogitsProcessor(config, begin_index=1)(ids, scores)[0]


@pytest.mark.parametrize("seed", range(20))
def test_rules_of_sampled_texts_equal_transformers(seed: int) -> None:
    rng, rules = np.random.default_rng(seed), RequestRules(WORDS, timestamps=True)
    output_ids: list[int] = []
    for _ in range(16):
        logits = torch.from_numpy((3 * rng.standard_normal(SIZE)).astype(np.float32))
        expected = wanted(output_ids, logits)
        rules([0] * 64, output_ids, logits)
        assert torch.equal(logits, expected)
        output_ids.append(int(torch.multinomial(logits.softmax(0), 1)))
        if output_ids[-1] == WORDS.end:
            break
    times = [token for token in output_ids if token > WORDS.no_timestamps]
    assert times == sorted(times)
    assert times[0] - WORDS.first_timestamp <= WORDS.max_initial


def test_rules_without_timestamps_sample_none() -> None:
    logits = torch.zeros(SIZE)
    RequestRules(WORDS, timestamps=False)([0], [1], logits)
    assert torch.isinf(logits[WORDS.first_timestamp :]).all()
    assert logits[1] == 0
