# SPDX-License-Identifier: Apache-2.0
"""Videos whose frames are images (Gemma 4, MiniCPM-V), against transformers: frames, bits of pixels, placeholders."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from quire.errors import StartupError, ValidationError
from quire.multimodal.processors.base import Processor
from quire.multimodal.processors.video import VideoFacts, VideoProcessor
from tests.fixtures.torchvision_modules import import_on_torchvision
from tests.multimodal.processors.checkpoints import CASES
from tests.multimodal.processors.test_bits import expanded
from tests.multimodal.processors.test_videos import noise, prepared, resized_by_torch

SIZES = st.tuples(st.integers(10, 250), st.integers(10, 250))
MEAN = {"gemma4": 0.0, "minicpmv": 0.5}
STD = {"gemma4": 1.0, "minicpmv": 0.5}
MODULES = {"gemma4": ("gemma4", "Gemma4"), "minicpmv": ("minicpmv4_6", "MiniCPMV4_6")}
MINICPM = {"scale_resolution": 112, "patch_size": 14, "max_slice_nums": 9}
MARKERS = {"image_start_token": "<image>", "image_end_token": "</image>"} | {
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
}


class Oracle:
    """transformers' class without torchvision: all steps are its own, but for torch's resizing and normalizing."""

    def __init__(self, name: str) -> None:
        module, kind = MODULES[name]
        found = import_on_torchvision(f"transformers.models.{module}.video_processing_{module}")
        self.name, self.module = name, found
        self.kind = getattr(found, f"{kind}VideoProcessor")
        self.me = object.__new__(self.kind)
        self.me.resize = lambda video, size, **_: self.resized(video, (size.height, size.width))
        self.me.aspect_ratio_preserving_resize = self.fitted
        self.me.rescale_and_normalize = self.normalized

    @staticmethod
    def resized(video: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return video if video.shape[-2:] == size else resized_by_torch(video, size, "bicubic")

    def fitted(self, video: torch.Tensor, resample: Any, **options: Any) -> torch.Tensor:
        height, width = video.shape[-2:]
        return self.resized(
            video, self.module.get_aspect_ratio_preserving_size(height=height, width=width, **options)
        )

    def normalized(self, values: torch.Tensor, *_: Any) -> torch.Tensor:
        mean, std = (torch.tensor([stat[self.name]] * 3) * 255.0 for stat in (MEAN, STD))
        return (values.to(torch.float32) - mean[:, None, None]) / std[:, None, None]

    def processed(self, frames: NDArray[np.uint8]) -> dict[str, Any]:
        video = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
        usual = (
            "do_resize",
            "do_rescale",
            "rescale_factor",
            "do_normalize",
            "image_mean",
            "image_std",
            "resample",
        )
        own = (
            {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}
            if self.name == "gemma4"
            else {
                **MINICPM,
                "slice_mode": True,
                "stack_frames": 1,
                "max_num_frames": 128,
                "video_metadata": [None],
            }
        )
        options = {**dict.fromkeys(usual, True), **own, "return_tensors": "pt"}
        return dict(self.kind._preprocess(self.me, [video], **options))

    def text(self, processed: dict[str, Any], fps: float) -> str:
        module, kind = MODULES[self.name]
        processor = getattr(
            importlib.import_module(f"transformers.models.{module}.processing_{module}"), f"{kind}Processor"
        )
        if self.name == "gemma4":
            me = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>")
            count = int(processed["num_frames_per_video"][0])
            metadata = VideoMetadata(count, fps, frames_indices=list(range(0, 40 * count, 40)))
            return str(processor.replace_video_token(me, {**processed, "video_metadata": [metadata]}, 0))
        me = SimpleNamespace(**MARKERS, video_token="<|video_pad|>", video_slice_mode=True)
        arrays = {key: np.asarray(value) for key, value in processed.items()}
        return str(processor.replace_video_token(me, arrays, 0, video_token_divisor=16))


@pytest.fixture(scope="module", params=sorted(MODULES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def processor(name: str, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return CASES[name].read(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(name: str) -> Oracle:
    return Oracle(name)


@given(size=SIZES, count=st.integers(1, 3), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_frames_and_placeholders_equal_those_of_transformers(
    processor: Processor, oracle: Oracle, size: tuple[int, int], count: int, seed: int
) -> None:
    frames, fps = noise(count, size, seed), 2.5
    assert processor.videos is not None
    chosen = tuple(range(0, 40 * count, 40))
    clip = processor.videos.sample(VideoFacts(40 * count, size, fps, False, chosen), {})
    made = processor.videos.prepare(clip, iter(frames), {})
    floats, theirs = processor.floats(made.arrays), oracle.processed(frames)
    assert "pixel_values_videos" in floats
    for key, array in floats.items():
        assert array.shape == tuple(theirs[key].shape)
        assert array.tobytes() == theirs[key].contiguous().numpy().tobytes(), key
    shown = SimpleNamespace(placeholder=processor.videos.placeholder)
    assert expanded(made, shown) == oracle.text(theirs, fps)  # type: ignore[arg-type]


def videos_of(processor: Processor) -> VideoProcessor:
    assert processor.videos is not None
    return processor.videos


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VideoProcessor]:
    return {name: videos_of(CASES[name].read(tmp_path_factory.mktemp("checkpoint"))) for name in MODULES}


@given(total=st.integers(1, 6000), fps=st.floats(0.5, 120), most=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_minicpm_samples_the_frames_of_transformers(
    videos: dict[str, VideoProcessor], total: int, fps: float, most: int
) -> None:
    oracle = Oracle("minicpmv")
    metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
    theirs = oracle.kind.sample_frames(oracle.me, metadata, max_num_frames=most, stack_frames=1)
    found = videos["minicpmv"].sample(VideoFacts(total, (40, 60), fps), {"max_num_frames": most}).indices
    assert list(found) == [min(int(index), total - 1) for index in theirs]


@given(
    total=st.integers(1, 600), fps=st.floats(0.5, 120), count=st.integers(1, 90), wanted=st.floats(0.1, 30)
)
@settings(max_examples=50, deadline=None)
def test_gemma4_samples_the_frames_of_transformers(
    videos: dict[str, VideoProcessor], total: int, fps: float, count: int, wanted: float
) -> None:
    gemma = videos["gemma4"]
    facts = VideoFacts(total, (40, 60), fps)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    usual = default_sample_indices_fn(metadata, num_frames=min(32, total))
    assert list(gemma.sample(facts, {}).indices) == usual.tolist()
    if wanted <= fps:
        theirs = default_sample_indices_fn(metadata, fps=wanted)
        assert list(gemma.sample(facts, {"fps": wanted}).indices) == theirs.tolist()
    if count <= total:
        theirs = default_sample_indices_fn(metadata, num_frames=count)
        assert list(gemma.sample(facts, {"num_frames": count}).indices) == theirs.tolist()
    elif count != 32:
        with pytest.raises(ValidationError, match="and the video has"):
            gemma.sample(facts, {"num_frames": count})


def test_arrays_are_sampled_by_their_rate(tmp_path: Path) -> None:
    frames = noise(30, (60, 80))
    gemma, minicpm = (CASES[name].read(tmp_path) for name in ("gemma4", "minicpmv"))
    assert len(prepared(gemma, frames, 10.0, num_frames=3).runs) == 3
    assert prepared(gemma, frames, 0.5, num_frames=2).text.startswith(
        "00:00 <|image><|video|><image|> 00:30 "
    )
    assert len(prepared(minicpm, frames, 10.0, max_slice_nums=1).runs) == 3
    assert len(prepared(minicpm, frames, do_sample_frames=False, slice_mode=False).runs) == 30
    with pytest.raises(ValidationError, match="the rate of these is unknown; send them with metadata"):
        prepared(minicpm, frames)
    for bad, words in (
        ({"max_num_frames": 10**6}, "max_num_frames must be an integer in"),
        ({"max_slice_nums": 65}, "max_slice_nums must be an integer in"),
    ):
        with pytest.raises(ValidationError, match=words):
            prepared(minicpm, frames, 10.0, **bad)
    with pytest.raises(ValidationError, match="max_soft_tokens must be one of 70"):
        prepared(gemma, frames, 10.0, max_soft_tokens=71)
    with pytest.raises(StartupError, match="stack_frames = 2 is not supported"):
        CASES["minicpmv"].read(tmp_path, stack_frames=2)


def test_values_of_a_video_may_be_scaled_only(tmp_path: Path) -> None:
    gemma = CASES["gemma4"].read(tmp_path, videos_kwargs={"do_normalize": False})
    table = prepared(gemma, noise(1, (40, 40)), 1.0).arrays["table"]
    wanted = torch.arange(256, dtype=torch.uint8) * (1 / 255)
    assert table[2].tobytes() == wanted.numpy().tobytes()
