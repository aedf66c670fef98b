# SPDX-License-Identifier: Apache-2.0
"""Spectrograms, beside transformers."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from quire.speech.features import log_mel


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", [1, 1600, 47_999, 480_000])
def test_log_mel_any_length_has_bits_of_transformers(bins: int, length: int) -> None:
    samples = (np.random.default_rng(length).standard_normal(length) * 0.1).astype(np.float32)
    padded = np.zeros(480_000, dtype=np.float32)
    padded[:length] = samples
    wanted = WhisperFeatureExtractor(feature_size=bins)._np_extract_fbank_features(padded[None], "cpu")[0]
    assert np.array_equal(log_mel(samples, bins, 3000), wanted)
