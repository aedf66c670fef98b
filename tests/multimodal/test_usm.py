# SPDX-License-Identifier: Apache-2.0
"""Sounds of Gemma 3n and Gemma 4: bits of transformers' spectrograms, tokens with tables, images beside sounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.errors import StartupError, UnsupportedModelError, ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.door.door import make_door
from quire.multimodal.door.parts import MediaPart
from quire.multimodal.processors.base import make_processor
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.processors.usm import Gemma3nSpectrogram, Gemma4Spectrogram, Spectrogram
from quire.multimodal.towers.load import load_tower
from tests.fixtures.folded import folded
from tests.fixtures.hearing_models import (
    BINS,
    HEARING,
    IMAGE_TOKEN,
    RATE,
    SOUND_TOKEN,
    VIDEO_TOKEN,
    gemma3n_extractor,
    gemma4_extractor,
    make_hearing,
    sound,
    write_files,
)
from tests.models.harness import load_tiny, logits_of, prepared_config
from tests.models.test_parity import assert_close
from tests.models.test_stages import InARow
from tests.models.test_tensor_parallel import together
from tests.multimodal.door.test_sounds import config_of

GEMMAS = ("gemma3n", "gemma4")
NEVER = [SOUND_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN]
KINDS: dict[str, tuple[type[Spectrogram], Any]] = {
    "gemma3n": (Gemma3nSpectrogram, "Gemma3nAudioFeatureExtractor"),
    "gemma4": (Gemma4Spectrogram, "Gemma4AudioFeatureExtractor"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "few bands": {"feature_size": BINS, "max_frequency": 4000.0, "min_frequency": 60.0},
    "emphasis": {"preemphasis": 0.9, "preemphasis_htk_flavor": False, "input_scale_factor": 0.5},
    "htk": {"preemphasis": 0.97, "fft_overdrive": True, "frame_length_ms": 25.0},
    "normed": {
        "feature_size": 4,
        "per_bin_mean": [-1.0, -2.0, 0.5, 0.1],
        "per_bin_stddev": [1.5, 0.3, 2.0, 1.1],
        "mel_floor": 0.01,
    },
}
CASES = [(name, options) for name in GEMMAS for options in OPTIONS]


@folded(("name", "options"), CASES)
def test_spectrograms_have_the_bits_of_transformers(name: str, options: str) -> None:
    import transformers

    ours, theirs = KINDS[name]
    extractor = getattr(transformers, theirs)(**OPTIONS[options])
    spectrogram = ours(JsonObject("file", {"dither": 0.0, **json.loads(json.dumps(OPTIONS[options]))}))
    for seed, length in enumerate((700, 768, 769, 16_000, 33_333)):
        samples = sound(length, seed)
        wanted = extractor([samples], return_tensors="np")
        valid = int(wanted["input_features_mask"][0].sum())
        found = spectrogram.compute(samples)
        assert found.dtype == np.float32
        assert np.array_equal(found[:valid], wanted["input_features"][0][:valid])


def test_processors_take_sounds_as_transformers_does(tmp_path: Path) -> None:
    """Frames that count, and the number of embeddings, of the shortest sounds and at every boundary behind."""
    for name, make in (("gemma3n", gemma3n_extractor), ("gemma4", gemma4_extractor)):
        sounds = processor_of(name, tmp_path)
        extractor, least = make(), {"gemma3n": 513, "gemma4": 161}[name]
        for length in (least, least + 1, 800, 801, 960, 961, 1_280, 1_281, 9_999):
            wanted = extractor([sound(length)], return_tensors="np")
            valid = wanted["input_features_mask"][0]
            prepared = sounds.prepare(sound(length))
            assert np.array_equal(prepared.arrays[FEATURES][0], wanted["input_features"][0][valid])
            (run,) = prepared.runs
            assert run.pieces == ((HEARING[name].marker, HEARING[name].count(length)),)
        with pytest.raises(ValidationError, match=f"has {least - 1} samples .* at least {least}"):
            sounds.prepare(sound(least - 1))
        assert sounds.longest_s == HEARING[name].longest_s
    assert (
        "\n\n<start_of_audio><audio_soft_token><end_of_audio>\n\n"
        in processor_of("gemma3n", tmp_path).prepare(sound(900)).text
    )


def processor_of(name: str, path: Path, **changes: Any) -> Any:
    """Return the sounds' processor of files, of which some have other values."""
    config = HEARING[name].config().to_dict()
    config["audio_config"] |= changes.pop("audio_config", {})
    (path / "config.json").write_text(json.dumps(config))
    write_files(name, path)
    for file, values in changes.items():
        place = path / f"{file}.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | values))
    processor = make_processor(HEARING[name].architecture, path, {})
    assert processor is not None
    return processor.sounds


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "noise": ("gemma3n", {"preprocessor_config": {"dither": 0.1}}, "dither"),
    "rate": ("gemma3n", {"preprocessor_config": {"sampling_rate": 8000}}, "sampling_rate"),
    "bands": ("gemma3n", {"preprocessor_config": {"feature_size": 20}}, "input_feat_size"),
    "number": ("gemma3n", {"processor_config": {"audio_seq_length": 13}}, "audio_seq_length"),
    "means": ("gemma3n", {"preprocessor_config": {"per_bin_mean": [1.0]}}, "16 numbers"),
    "strides": ("gemma3n", {"audio_config": {"sscp_conv_stride_size": [2, 2]}}, "2 pairs of integers"),
    "channels": ("gemma4", {"audio_config": {"subsampling_conv_channels": [32, 8]}}, "16 bands"),
    "one channel": ("gemma4", {"audio_config": {"subsampling_conv_channels": [32]}}, "2 integers"),
}


@folded("case", list(REFUSED))
def test_files_that_do_not_fit_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, words = REFUSED[case]
    with pytest.raises(StartupError, match=words):
        processor_of(name, tmp_path, **changes)


@pytest.fixture(name="made", scope="module", params=GEMMAS)
def _made(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, make_hearing(request.param, path), path


@folded(
    ("name", "changes", "words"),
    [
        ("gemma3n", {"conf_attention_context_right": 1}, "conf_attention_context_right"),
        ("gemma3n", {"vocab_offset": 80}, "token 95"),
        ("gemma3n", {"hidden_size": 30}, "a multiple of conf_num_attention_heads"),
        ("gemma4", {"attention_context_right": 1}, "attention_context_right"),
        ("gemma4", {"attention_chunk_size": 6}, "attention_chunk_size"),
    ],
)
def test_encoders_of_another_kind_are_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = HEARING[name].config().to_dict() | {"architectures": [HEARING[name].architecture]}
    config["audio_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=words):
        load_tower(prepared_config(tmp_path))


@torch.inference_mode()
def test_tokens_with_tables_are_embedded_as_in_transformers(tmp_path: Path) -> None:
    """Tokens from 80 on have rows of the images' table, those from 88 on rows of the sounds'."""
    model = make_hearing("gemma3n", tmp_path)
    sequences = [[1, 5, 79, 80, 87, 6], [1, 88, 89, 90, 95, 7, 94, 30, 86]]
    wanted = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float() for ids in sequences]
    found = logits_of(load_tiny(tmp_path), sequences, chunk_sizes=[3, 1, 7])
    assert_close(found, wanted)
    in_stages: Any = InARow(prepared_config(tmp_path), 2)
    assert all(map(torch.equal, logits_of(in_stages, sequences, chunk_sizes=[7]), found))
    for of_rank in together(tmp_path, 2, lambda rank: logits_of(rank, sequences, chunk_sizes=[7])):
        assert_close(of_rank, wanted)
    plain = model.model.language_model(input_ids=torch.tensor(sequences[:1]), use_cache=False)
    assert not torch.allclose(model.lm_head(plain.last_hidden_state)[0].float(), wanted[0], atol=1e-2)


async def test_media_are_those_that_each_model_takes(tmp_path: Path) -> None:
    door = make_door(config_of(tmp_path, "gemma3n"), offline=True)
    assert door is not None
    assert door.kinds == ["audio"]
    with pytest.raises(ValidationError, match="is an image, and this model takes sounds"):
        await door.admit([MediaPart("here", Image.new("RGB", (16, 16)))])
    with pytest.raises(ValidationError, match=r"longer than 1\.92 s"):
        await door.admit([MediaPart("here", sound(31_000), kind="audio")])
    door.close()
    sees_too = make_door(config_of(tmp_path, "gemma4"), offline=True)
    assert sees_too is not None
    assert sees_too.kinds == ["image", "video", "audio"]
    sees_too.close()


@torch.inference_mode()
def test_images_and_sounds_stand_in_any_order(tmp_path: Path) -> None:
    model = make_hearing("gemma4", tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=256, max_num_batched_tokens=32)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 33, 3), dtype=np.uint8)
    picture, samples = Image.fromarray(pixels), sound(9_000)
    params = SamplingParams(
        max_tokens=5,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        logit_bias=dict.fromkeys(NEVER, -100.0),
    )
    data = {"image": picture, "audio": (samples, RATE)}
    orders = ([1, IMAGE_TOKEN, 5, SOUND_TOKEN, 7], [1, SOUND_TOKEN, 5, IMAGE_TOKEN, 7])
    prompts = [{"prompt_token_ids": ids, "multi_modal_data": data} for ids in orders]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    processor: Any = make_processor(HEARING["gemma4"].architecture, tmp_path, {})
    seen = processor.floats(processor.prepare(picture, {}).arrays)
    inputs = {name: torch.from_numpy(array) for name, array in seen.items()}
    inputs |= HEARING["gemma4"].inputs([samples])
    for output in outputs:
        ids, tokens = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        assert ids.count(SOUND_TOKEN) == HEARING["gemma4"].count(9_000)
        logits = model(input_ids=torch.tensor([ids + tokens]), **inputs, use_cache=False).logits
        want = logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        rows = output.outputs[0].logprobs
        found = [row[token].logprob for token, row in zip(tokens, rows or [], strict=True)]
        assert np.allclose(found, want[range(5), tokens].numpy(), atol=2e-3)
        want[:, NEVER] -= 100.0
        assert tokens == want.argmax(-1).tolist()
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


@torch.inference_mode()
def test_rounded_weights_give_nearly_the_same(made: tuple[str, Any, Path]) -> None:
    name, _, path = made
    processor: Any = make_processor(HEARING[name].architecture, path, {})
    arrays = processor.sounds.prepare(sound(9_000)).arrays

    def computed(**args: Any) -> torch.Tensor:
        tower = load_tower(prepared_config(path, **args))
        state = tower.begin(arrays)
        while not tower.advance(state):
            pass
        return tower.finish(state).values.float()

    plain = computed()
    for args in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        rounded = computed(**args)
        assert not torch.equal(rounded, plain)
        nearness = torch.nn.functional.cosine_similarity(rounded.flatten(), plain.flatten(), 0)
        assert nearness > 0.98
