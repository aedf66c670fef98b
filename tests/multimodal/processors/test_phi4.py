# SPDX-License-Identifier: Apache-2.0
"""Phi-4-multimodal's image processor against transformers', whose resizing, torchvision's, is torch's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.image_utils import SizeDict

from quire.errors import StartupError, ValidationError
from quire.multimodal.processors.base import Processor
from tests.fixtures.torchvision_modules import import_on_torchvision
from tests.multimodal.processors.checkpoints import CASES, Case
from tests.multimodal.processors.test_bits import SIZES, drawn
from tests.multimodal.processors.test_videos import resized_by_torch

SIDE, PATCH = 56, 14


@pytest.fixture(name="processor", scope="module")
def _processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return CASES["phi4"].read(tmp_path_factory.mktemp("phi4"))


def padded(image: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill[0])


def shrunk(image: torch.Tensor, size: Any, resample: Any, antialias: bool) -> torch.Tensor:
    assert not antialias
    found = torch.nn.functional.interpolate(image[None], size=(size.height, size.width), mode="bicubic")
    return found[0]


def normalized(image: torch.Tensor, *_: Any) -> torch.Tensor:
    mean, std = (torch.tensor([value] * 3) * (1.0 / (1 / 255)) for value in (0.5, 0.5))
    return (image.float() - mean[:, None, None]) / std[:, None, None]


@pytest.fixture(name="theirs", scope="module")
def _theirs() -> Any:
    """Their class, whose steps are its own but for torchvision's functions."""
    module = import_on_torchvision("transformers.models.phi4_multimodal.image_processing_phi4_multimodal")
    steps = {"resize": staticmethod(shrunk), "rescale_and_normalize": staticmethod(normalized)}
    kind = type("Theirs", (module.Phi4MultimodalImageProcessor,), steps | {"__repr__": lambda _: "theirs"})
    found = kind.__new__(kind)
    resize = lambda image, size: resized_by_torch(image, tuple(size), "bilinear")  # noqa: E731
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "tvF", SimpleNamespace(resize=resize, pad=padded))
        yield found


def expected(theirs: Any, image: torch.Tensor, most: int) -> dict[str, Any]:
    size, halves = SizeDict(height=SIDE, width=SIDE), [0.5] * 3
    found = theirs._preprocess([image], True, size, 3, True, 1 / 255, True, halves, halves, PATCH, most, "pt")
    return dict(found.data)


@given(size=SIZES, most=st.integers(1, 36), seed=st.integers(0, 9))
@example(size=(57, 112), most=36, seed=0)
@example(size=(56, 56), most=36, seed=0)
@settings(max_examples=60, deadline=None)
def test_crops_equal_those_of_transformers(
    processor: Processor, theirs: Any, size: tuple[int, int], most: int, seed: int
) -> None:
    image = drawn(size, "RGB", seed)
    try:
        want = expected(theirs, torch.from_numpy(np.array(image)).permute(2, 0, 1), most)
    except ValueError:
        with pytest.raises(ValidationError, match="10 pixels at least"):
            processor.prepare(image, {"dynamic_hd": most})
        return
    prepared = processor.prepare(image, {"dynamic_hd": most})
    found = processor.floats(prepared.arrays)
    crops, theirs_crops = found["image_pixel_values"], want["image_pixel_values"].numpy()
    assert crops.shape == theirs_crops.shape
    assert crops[:, 1:].tobytes() == theirs_crops[:, 1:].tobytes()
    assert np.abs(crops[:, 0] - theirs_crops[:, 0]).max() < 2e-5
    for name in ("image_sizes", "image_attention_mask"):
        assert np.array_equal(found[name], want[name].numpy())
    # Their number is that of crops of 448 pixels, whose whole image has 16 rows of 16 and their ends.
    (run,) = prepared.runs
    assert run.pieces == (("<|endoftext10|>", int(want["num_img_tokens"][0]) - 16 * 17 + 2 * 3),)


def test_options_that_do_not_fit_are_refused_in_words(processor: Processor, tmp_path: Path) -> None:
    image = drawn((90, 90), "RGB", 0)
    for most in (0, 65, "many"):
        with pytest.raises(ValidationError, match="dynamic_hd"):
            processor.prepare(image, {"dynamic_hd": most})
    with pytest.raises(StartupError, match="size"):
        Case("Phi4MultimodalForCausalLM", lambda: None, {"size": {"height": 42, "width": 42}}).read(tmp_path)
