# SPDX-License-Identifier: Apache-2.0
"""Sounds against transformers: spectrograms, numbers of placeholders, and embeddings of random tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.multimodal.processors.base import Processor, make_processor
from quire.multimodal.processors.sound import FEATURES, SoundProcessor
from quire.multimodal.towers.base import Tower
from quire.multimodal.towers.load import load_tower
from tests.fixtures.hearing_models import (
    HEARING,
    SOUND_TOKEN,
    Samples,
    make_hearing,
    sound,
    write_files,
)
from tests.models.harness import prepared_config

LENGTHS = {
    "gemma3n": (513, 640, 1_700, 9_000, 30_720),
    "gemma4": (161, 641, 5_000, 16_000, 31_999),
    "qwen2-audio": (321, 400, 801, 5_000, 7_999, 15_840, 16_000),
    "ultravox": (1, 5_000, 16_000, 16_001, 40_000),
    "voxtral": (1, 5_000, 16_000, 16_001, 40_000),
}


def processor_of(name: str, path: Path) -> Processor:
    processor = make_processor(HEARING[name].architecture, path, {})
    assert processor is not None
    return processor


def sounds_of(name: str, path: Path) -> SoundProcessor:
    sounds = processor_of(name, path).sounds
    assert sounds is not None
    return sounds


@pytest.fixture(name="family", scope="module", params=list(HEARING))
def _family(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, make_hearing(request.param, path), path


@torch.inference_mode()
def features_of(name: str, model: Any, samples: Samples) -> torch.Tensor:
    """Return the embeddings that transformers puts in the stream, of one sound."""
    inputs = HEARING[name].inputs([samples])
    if name == "ultravox":
        embeddings: torch.Tensor = model.embeddings(inputs["input_features"][0])
        return embeddings
    if name == "voxtral":
        found: torch.Tensor = model.get_audio_features(inputs["input_features"]).pooler_output
        return found
    caught: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, named: caught.append(named["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.tensor([[3, *[SOUND_TOKEN] * HEARING[name].count(len(samples)), 4]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    hook.remove()
    return caught[0][0, 1:-1]


@torch.inference_mode()
def computed(tower: Tower, processor: SoundProcessor, samples: Samples) -> torch.Tensor:
    state = tower.begin(processor.prepare(samples).arrays)
    while not tower.advance(state):
        pass
    return tower.finish(state).values


def test_embeddings_equal_those_of_transformers(family: tuple[str, Any, Path]) -> None:
    name, model, path = family
    tower, processor = load_tower(prepared_config(path)), sounds_of(name, path)
    for seed, length in enumerate(LENGTHS[name]):
        samples = sound(length, seed)
        got, want = computed(tower, processor, samples), features_of(name, model, samples)
        assert len(got) == HEARING[name].count(length)
        assert want.abs().mean() > 1e-2
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["qwen2-audio", "voxtral"])
@settings(max_examples=25, deadline=None)
@given(length=st.integers(321, 16_000), seed=st.integers(0, 3))
def test_spectrograms_and_counts_are_transformers(
    name: str, length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files")
    (path / "config.json").write_text(json.dumps(HEARING[name].config().to_dict()))
    write_files(name, path)
    samples = sound(length, seed)
    prepared, inputs = sounds_of(name, path).prepare(samples), HEARING[name].inputs([samples])
    found, want = prepared.arrays[FEATURES], inputs["input_features"].numpy()
    assert found.shape[-1] <= want.shape[-1]
    assert np.abs(found - want[..., : found.shape[-1]]).max() < 2e-5
    (run,) = prepared.runs
    assert run.pieces[-1] == (HEARING[name].marker, HEARING[name].count(length))
    if name == "qwen2-audio":
        assert int(prepared.arrays["num_frames"][0]) == int(inputs["feature_attention_mask"].sum())
