# SPDX-License-Identifier: Apache-2.0
"""Llama 4's processor against transformers' functions, whose image processor itself needs torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_transforms import split_to_tiles
from transformers.image_utils import SizeDict

from quire.errors import ValidationError
from quire.multimodal.processors.base import Processor
from tests.fixtures.torchvision_modules import import_on_torchvision
from tests.multimodal.processors.checkpoints import CASES
from tests.multimodal.processors.test_bits import SIZES, drawn, expanded
from tests.multimodal.processors.test_videos import resized_by_torch

SIDE = 28


@pytest.fixture(name="processor", scope="module")
def _processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return CASES["llama4"].read(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(name="theirs", scope="module")
def _theirs() -> Any:
    return import_on_torchvision("transformers.models.llama4.image_processing_llama4")


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels as their class computes them, in bfloat16."""
    values = pixels.to(torch.bfloat16) * (1 / 255)
    mean, std = (torch.tensor([0.5] * 3, dtype=torch.bfloat16)[:, None, None] for _ in range(2))
    return values.sub(mean).div(std)


def expected(
    theirs: Any, image: torch.Tensor, most: int, largest: bool
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The tiles and their numbers of rows and columns, by the steps of their class."""
    size = SizeDict(height=SIDE, width=SIDE)
    theirs.find_supported_resolutions.cache_clear()
    canvases = torch.tensor(theirs.find_supported_resolutions(max_num_chunks=most, patch_size=size))
    own = image.shape[-2:]
    target = theirs.get_best_fit(own, canvases, resize_to_max_canvas=largest)
    bounds = target if largest else tuple(min(max(own[axis], SIDE), target[axis]) for axis in (0, 1))
    height, width = theirs.get_max_res_without_distortion(own, bounds)
    shown = resized_by_torch(image[None], (max(int(height), 1), max(int(width), 1)), "bilinear")
    padding = (0, int(target[1]) - shown.shape[-1], 0, int(target[0]) - shown.shape[-2])
    rows, columns = int(target[0]) // SIDE, int(target[1]) // SIDE
    tiles = split_to_tiles(normalized(torch.nn.functional.pad(shown, padding)), rows, columns)[0]
    if rows * columns > 1:
        whole = normalized(resized_by_torch(image[None], (SIDE, SIDE), "bilinear"))
        tiles = torch.cat((tiles, whole))
    return tiles, (rows, columns)


@given(size=SIZES, most=st.integers(1, 16), largest=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_tiles_equal_those_of_transformers(
    processor: Processor, theirs: Any, size: tuple[int, int], most: int, largest: bool, seed: int
) -> None:
    image = drawn(size, "RGB", seed)
    prepared = processor.prepare(image, {"max_patches": most, "resize_to_max_canvas": largest})
    tiles, ratio = expected(theirs, torch.from_numpy(np.array(image)).permute(2, 0, 1), most, largest)
    floats = processor.floats(prepared.arrays)["pixel_values"]
    assert floats.tobytes() == tiles.float().contiguous().numpy().tobytes()
    module = import_on_torchvision("transformers.models.llama4.processing_llama4")
    text = module.Llama4Processor._prompt_split_image(None, ratio, 1)
    assert expanded(prepared, processor) == text


def test_too_many_tiles_are_refused_in_words(tmp_path: Path) -> None:
    processor = CASES["llama4"].read(tmp_path)
    with pytest.raises(ValidationError, match="max_patches must be an integer"):
        processor.prepare(drawn((9, 9), "RGB", 0), {"max_patches": 1000})
