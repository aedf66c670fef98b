# SPDX-License-Identifier: Apache-2.0
"""Images of Gemma 3n: transformers' tokens around a plain MobileNet-v5, and the same bits in any slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.kernels.cpu.library import set_num_threads
from quire.multimodal.processors.base import make_processor
from quire.multimodal.towers import mobilenet
from quire.multimodal.towers.load import load_tower
from quire.multimodal.towers.mobilenet import Attending, Edge, Inverted
from tests.fixtures.hearing_models import (
    BINS,
    GEMMA3N_COUNT,
    GEMMA3N_EARS,
    GEMMA3N_TEXT,
    HEARING,
    IMAGE_TOKEN,
    RATE,
    SOUND_TOKEN,
    TABLE,
    sound,
    write_hearing,
)
from tests.fixtures.plain_mobilenet import PlainEyes
from tests.models.harness import prepared_config

STAGES = (
    (Edge(2, 4, 16), Edge(1, 4, 16)),
    (Inverted(3, 5, 2, 6, 24), Inverted(5, 0, 1, 4, 24)),
    (Inverted(5, 5, 2, 6, 32), Inverted(0, 0, 1, 1, 32), Attending(3, 16, 2, 32), Inverted(0, 0, 1, 2, 32)),
    (Inverted(5, 5, 2, 6, 40), Attending(4, 24, 1, 40)),
)
SIDE, ROWS, SIZE = 128, 4, 32
FIRST, LAST = 72, 73
OPTIONS = {"size": {"height": SIDE, "width": SIDE}, "do_normalize": False}


def _config() -> Any:
    return transformers.Gemma3nConfig(
        text_config=GEMMA3N_TEXT,
        audio_config=GEMMA3N_EARS,
        vision_config=TABLE | {"vocab_offset": 80, "hidden_size": SIZE},
        audio_soft_tokens_per_image=GEMMA3N_COUNT,
        vision_soft_tokens_per_image=ROWS**2,
        audio_token_id=SOUND_TOKEN,
        image_token_id=IMAGE_TOKEN,
    )


GEMMA3N = replace(
    HEARING["gemma3n"],
    config=_config,
    eyes=partial(PlainEyes, STAGES, SIZE, ROWS),
    files={
        "preprocessor_config.json": {"feature_size": BINS, **OPTIONS},
        "processor_config.json": {"audio_seq_length": GEMMA3N_COUNT},
    },
    names={"<image_soft_token>": IMAGE_TOKEN, "<start_of_image>": FIRST, "<end_of_image>": LAST},
)


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory: Any) -> Iterator[tuple[Any, Path]]:
    path = tmp_path_factory.mktemp("gemma3n")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mobilenet, "STAGES", STAGES)
        yield write_hearing(GEMMA3N, path), path


def picture(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def pixels_of(path: Path, image: Image.Image) -> np.ndarray[Any, Any]:
    processor = make_processor(GEMMA3N.architecture, path, {})
    assert processor is not None
    found: np.ndarray[Any, Any] = processor.floats(processor.prepare(image, {}).arrays)["pixel_values"]
    return found


@torch.inference_mode()
def test_tokens_equal_those_of_transformers(made: tuple[Any, Path]) -> None:
    model, path = made
    llm = LLM(str(path), device="cpu", dtype="float32", max_model_len=256, max_num_batched_tokens=16)
    never = [SOUND_TOKEN, IMAGE_TOKEN]
    params = SamplingParams(
        max_tokens=5,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logit_bias=dict.fromkeys(never, -100.0),
    )
    one, other, samples = picture(0), picture(1, (33, 200)), sound(9_000)
    prompts: list[tuple[list[int], list[Image.Image], bool]] = [
        ([1, IMAGE_TOKEN, 5, 7], [one], False),
        ([1, IMAGE_TOKEN, 5, IMAGE_TOKEN, 7], [one, other], False),
        ([1, SOUND_TOKEN, 5, IMAGE_TOKEN, 7], [other], True),
    ]
    asked = [
        {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": images} | ({"audio": (samples, RATE)} if hears else {}),
        }
        for ids, images, hears in prompts
    ]
    outputs = llm.generate(asked, params, use_tqdm=False)
    llm.shutdown()
    for output, (_, images, hears) in zip(outputs, prompts, strict=True):
        ids, tokens = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        assert ids.count(IMAGE_TOKEN) == len(images) * ROWS**2
        assert ids.count(FIRST) == ids.count(LAST) == len(images)
        seen = torch.from_numpy(np.concatenate([pixels_of(path, image) for image in images]))
        inputs = {"pixel_values": seen} | (GEMMA3N.inputs([samples]) if hears else {})
        logits = model(input_ids=torch.tensor([ids + tokens]), **inputs, use_cache=False).logits
        want = logits[0, len(ids) - 1 : -1]
        want[:, never] -= 100.0
        assert tokens == want.argmax(-1).tolist()


def test_pixels_have_the_bits_of_transformers(made: tuple[Any, Path]) -> None:
    for size in ((1, 1), (97, 389), (200, 1), (SIDE, SIDE)):
        image = picture(2, size)
        wanted = SiglipImageProcessorPil(**OPTIONS)(image, return_tensors="np")["pixel_values"]
        assert np.array_equal(pixels_of(made[1], image), wanted)


@torch.inference_mode()
def test_embeddings_depend_on_no_threads_and_round_well(made: tuple[Any, Path]) -> None:
    pixels = pixels_of(made[1], picture(3))

    def computed(side: int = SIDE, **args: Any) -> torch.Tensor:
        tower = load_tower(prepared_config(made[1], **args))
        state = tower.begin({"pixel_values": pixels[:, :, :side, :side]})
        while not tower.advance(state):
            pass
        return tower.finish(state).values.float()

    plain, threads = computed(), torch.get_num_threads()
    try:
        set_num_threads(1)
        assert torch.equal(computed(), plain)
    finally:
        set_num_threads(threads)
    for args in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        nearness = torch.nn.functional.cosine_similarity(computed(**args).flatten(), plain.flatten(), 0)
        assert 0.98 < nearness < 1
    with pytest.raises(ValidationError, match="5 x 5 positions"):
        computed(side=80)
