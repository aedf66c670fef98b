# SPDX-License-Identifier: Apache-2.0
"""Phi-4-multimodal's spectrograms and numbers of embeddings against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import UnsupportedModelError, ValidationError
from quire.multimodal.processors.phi4_sound import Phi4Sounds
from quire.multimodal.processors.sound import FEATURES
from tests.fixtures.folded import folded
from tests.fixtures.hearing_models import RATE, sound


@given(length=st.integers(400, 20_000), seed=st.integers(0, 3))
@example(length=400, seed=0)
@example(length=559, seed=0)
@example(length=560, seed=1)
@example(length=490_000, seed=2)
@settings(max_examples=25, deadline=None)
def test_spectrograms_and_counts_are_transformers(
    length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = sound(length, seed)
    want = transformers.Phi4MultimodalFeatureExtractor()([samples], sampling_rate=RATE)
    prepared = Phi4Sounds(tmp_path_factory.mktemp("files")).prepare(samples)
    found = prepared.arrays[FEATURES]
    assert found.shape == want["audio_input_features"].shape
    assert np.abs(found - want["audio_input_features"].numpy()).max() < 2e-4
    (run,) = prepared.runs
    assert run.pieces == (("<|endoftext11|>", int(want["audio_embed_sizes"][0])),)


def test_sounds_without_a_whole_frame_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="399 samples at 16 kHz, and this model takes at least 400"):
        Phi4Sounds(tmp_path).prepare(sound(399))


@folded(
    "values",
    [
        ("preprocessor_config.json", {"hop_length": 80}),
        ("preprocessor_config.json", {"audio_downsample_rate": 2}),
        ("processor_config.json", {"audio_processor": {"preemphasis": 0.5}}),
    ],
)
def test_other_extractors_are_refused(
    values: tuple[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files")
    (path / values[0]).write_text(json.dumps(values[1]))
    with pytest.raises(UnsupportedModelError, match="must be absent or"):
        Phi4Sounds(path)


def test_published_options_are_those_of_the_extractor(tmp_path: Path) -> None:
    options = transformers.Phi4MultimodalFeatureExtractor().to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"audio_processor": options}))
    assert Phi4Sounds(tmp_path).prepare(sound(800)).arrays[FEATURES].shape == (1, 3, 80)
