# SPDX-License-Identifier: Apache-2.0
"""Processors of videos against transformers' own: the frames, the bits of the pixels, and the placeholders."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.video_utils import default_sample_indices_fn

from quire.errors import ValidationError
from quire.multimodal.processors.base import Prepared, Processor
from quire.multimodal.processors.pixels import BICUBIC, BILINEAR, CLIP_MEAN, CLIP_STD
from quire.multimodal.processors.resampling import resampled
from quire.multimodal.processors.video import VideoFacts
from tests.fixtures.torchvision_modules import import_on_torchvision
from tests.multimodal.processors.checkpoints import CASES
from tests.multimodal.processors.test_bits import expanded

MODES = {BICUBIC: "bicubic", BILINEAR: "bilinear"}
SIZES = st.tuples(st.integers(1, 160), st.integers(1, 160))
MODULES = {"qwen2-vl": "qwen2_vl", "qwen3-vl": "qwen3_vl"}
CLASSES = {"qwen2-vl": "Qwen2VL", "qwen3-vl": "Qwen3VL"}


def noise(count: int, size: tuple[int, int], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def resized_by_torch(frames: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """torchvision's resize of uint8 [..., 3, H, W], which is this function on a CPU."""
    flat = frames.reshape(-1, *frames.shape[-3:])
    made = torch.nn.functional.interpolate(flat, size=size, mode=mode, antialias=True, align_corners=False)
    return made.reshape(*frames.shape[:-2], *size)


@given(size=SIZES, target=SIZES, resample=st.sampled_from(sorted(MODES)), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_resizing_equals_that_of_torchvision(
    size: tuple[int, int], target: tuple[int, int], resample: int, seed: int
) -> None:
    (frame,) = noise(1, size, seed)
    theirs = resized_by_torch(torch.from_numpy(frame).permute(2, 0, 1), target, MODES[resample])
    assert (
        resampled(frame, target, resample).tobytes() == theirs.permute(1, 2, 0).contiguous().numpy().tobytes()
    )


class Oracle:
    """transformers' class without torchvision: its sampling, sizes and patches are its own; resizing is torch's."""

    def __init__(self, name: str, **options: Any) -> None:
        module = import_on_torchvision(
            f"transformers.models.{MODULES[name]}.video_processing_{MODULES[name]}"
        )
        self.kind = getattr(module, f"{CLASSES[name]}VideoProcessor")
        usual = {key: value for key, value in vars(self.kind).items() if not callable(value)}
        self.me = SimpleNamespace(**{**usual, "num_frames": None, "fps": usual.get("fps"), **options})
        self.module = module

    def sampled(self, facts: VideoFacts, **options: Any) -> list[int]:
        metadata = SimpleNamespace(total_num_frames=facts.num_frames, fps=facts.fps or None)
        found = self.kind.sample_frames(self.me, metadata, **options)
        return [
            min(int(index), facts.num_frames - 1) for index in found
        ]  # theirs may be one too high, an error

    def pixels(self, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return `pixel_values_videos` of these frames."""
        video = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
        size = self.size(video)
        values = resized_by_torch(video, size, "bicubic").to(torch.float32)
        mean, std = (torch.tensor(one) * 255.0 for one in (self.me.image_mean, self.me.image_std))
        values = (values - mean[:, None, None]) / std[:, None, None]
        me = self.me
        patches, *_ = self.kind.patchify(me, values, me.patch_size, me.merge_size, me.temporal_patch_size)
        return patches[0].contiguous().numpy()

    def size(self, video: torch.Tensor) -> tuple[int, int]:
        me, (count, height, width) = self.me, (video.shape[1], *video.shape[-2:])
        limits = {
            "factor": me.patch_size * me.merge_size,
            "min_pixels": me.size["shortest_edge"],
            "max_pixels": me.size["longest_edge"],
        }
        volume = {} if "qwen2" in self.module.__name__ else {"num_frames": count, "temporal_factor": 2}
        return self.module.smart_resize(height=height, width=width, **volume, **limits)


@pytest.fixture(scope="module", params=sorted(MODULES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def processor(name: str, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return CASES[name].read(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(name: str) -> Oracle:
    return Oracle(name, size=CASES[name].image["size"])


@given(total=st.integers(4, 4000), fps=st.floats(0.5, 120), wanted=st.none() | st.floats(0.1, 30))
@settings(max_examples=200, deadline=None)
def test_sampled_frames_equal_those_of_transformers(
    processor: Processor, oracle: Oracle, total: int, fps: float, wanted: float | None
) -> None:
    facts = VideoFacts(total, (40, 60), fps)
    options = {} if wanted is None else {"fps": wanted}
    assert processor.videos is not None
    found = processor.videos.sample(facts, options).indices
    assert list(found) == oracle.sampled(facts, fps=wanted or 2.0)


@given(total=st.integers(2, 600), count=st.integers(2, 90))
def test_a_number_of_frames_is_sampled_as_by_transformers(
    processor: Processor, oracle: Oracle, total: int, count: int
) -> None:
    facts = VideoFacts(total, (40, 60), 30.0)
    assert processor.videos is not None
    if round(count / 2) * 2 > total and "Qwen2" in oracle.kind.__name__:
        with pytest.raises(ValidationError, match="and the video has"):
            processor.videos.sample(facts, {"num_frames": count})
        return
    oracle.me.fps = None
    found = processor.videos.sample(facts, {"num_frames": count}).indices
    assert list(found) == oracle.sampled(facts, num_frames=count)


@given(size=SIZES, count=st.integers(2, 7), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_floats_of_videos_equal_those_of_transformers(
    processor: Processor, oracle: Oracle, size: tuple[int, int], count: int, seed: int
) -> None:
    frames = noise(count, size, seed)
    floats = processor.floats(prepared(processor, frames, do_sample_frames=False).arrays)
    assert floats["pixel_values_videos"].tobytes() == oracle.pixels(frames).tobytes()
    assert np.prod(floats["video_grid_thw"]) == len(floats["pixel_values_videos"])


def prepared(processor: Processor, frames: NDArray[np.uint8], rate: float = 0.0, **options: Any) -> Prepared:
    videos = processor.videos
    assert videos is not None
    clip = videos.sample(VideoFacts(len(frames), frames.shape[1:3], rate, is_encoded=False), options)
    return videos.prepare(clip, (frames[index] for index in clip.reads), options)


@pytest.mark.parametrize(("count", "fps"), [(2, 24.0), (7, 3.0), (12, 29.97)])
def test_placeholders_of_videos_equal_those_of_transformers(
    processor: Processor, name: str, count: int, fps: float
) -> None:
    found = prepared(processor, noise(count, (60, 80)), fps, do_sample_frames=False)
    module = importlib.import_module(f"transformers.models.{MODULES[name]}.processing_{MODULES[name]}")
    kind = getattr(module, f"{CLASSES[name]}Processor")
    assert processor.videos is not None
    me = SimpleNamespace(
        video_token=processor.videos.placeholder,
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )
    me._calculate_timestamps = lambda *args: kind._calculate_timestamps(me, *args)
    grid = processor.floats(found.arrays)["video_grid_thw"]
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(count)))
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = kind.replace_video_token(me, inputs, 0)
    text = SimpleNamespace(placeholder=processor.videos.placeholder)
    assert expanded(found, text) == theirs  # type: ignore[arg-type]


def test_time_of_qwen25_is_that_of_its_sampled_frames(tmp_path: Path) -> None:
    processor = CASES["qwen2-vl"].read(tmp_path)
    frames = noise(8, (56, 56))
    assert prepared(processor, frames, 8.0, do_sample_frames=False).seconds_per_frame == 2 / 8
    assert prepared(processor, frames, 8.0, do_sample_frames=True, fps=4).seconds_per_frame == 2 / 4
    assert prepared(processor, frames, do_sample_frames=False).seconds_per_frame == 2 / 24


def test_frames_that_the_caller_sampled_keep_their_times(tmp_path: Path) -> None:
    processor = CASES["qwen3-vl"].read(tmp_path)
    videos = processor.videos
    assert videos is not None
    facts = VideoFacts(100, (60, 80), 10.0, is_encoded=False, chosen=(0, 20, 40, 60))
    clip = videos.sample(facts, {})
    assert (clip.indices, clip.reads) == ((0, 20, 40, 60), (0, 1, 2, 3))
    text = videos.prepare(clip, iter(noise(4, (60, 80))), {}).text
    assert text.startswith("<1.0 seconds>")
    assert "<5.0 seconds>" in text


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen2-vl", {"fps": 0}, "fps must be a number"),
        ("qwen2-vl", {"fps": 1, "num_frames": 4}, "num_frames must be absent if fps is set"),
        ("qwen2-vl", {"num_frames": 900}, "and the video has 30 frames"),
        ("qwen3-vl", {"num_frames": 5000}, "5000 frames would be read"),
        ("qwen3-vl", {"num_frames": 1}, "this model takes 2 at least"),
        ("qwen2-vl", {"min_pixels": 2**30, "max_pixels": 2**30}, "would be resized to"),
    ],
)
def test_bad_options_of_videos_are_refused_in_words(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    processor = CASES[name].read(tmp_path)
    with pytest.raises(ValidationError, match=words):
        prepared(processor, noise(30, (40, 40)), 30.0, do_sample_frames=True, **options)


def test_options_are_those_of_their_kind(tmp_path: Path) -> None:
    processor = CASES["qwen2-vl"].read(tmp_path)
    given_options = {"fps": 1, "max_pixels": 9, "videos_kwargs": {"max_pixels": 8}}
    assert processor.checked_options(given_options) == {"max_pixels": 9}
    assert processor.checked_options(given_options, "video") == {"fps": 1, "max_pixels": 8}
    with pytest.raises(ValidationError, match=r"videos_kwargs has 'pages'"):
        processor.checked_options({"videos_kwargs": {"pages": 1}})
    with pytest.raises(ValidationError, match=r"images_kwargs has 'fps'"):
        processor.checked_options({"images_kwargs": {"fps": 1}}, "video")


def test_frames_of_onevision_are_those_of_transformers(tmp_path: Path) -> None:
    processor = CASES["llava-onevision"].read(tmp_path)
    videos = processor.videos
    assert videos is not None
    for total, fps, options in (
        (7, 30.0, {"num_frames": 3}),
        (90, 24.0, {"fps": 2}),
        (200, 25.0, {"num_frames": 32}),
    ):
        found = videos.sample(VideoFacts(total, (9, 9), fps), options)
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        assert list(found.indices) == default_sample_indices_fn(metadata, **options).tolist()
    frames = noise(5, (33, 50))
    made = prepared(processor, frames)
    values = resized_by_torch(torch.from_numpy(frames).permute(0, 3, 1, 2), (42, 42), "bicubic")
    mean, std = (torch.tensor(one) * 255.0 for one in (CLIP_MEAN, CLIP_STD))
    want = (values.to(torch.float32) - mean[:, None, None]) / std[:, None, None]
    assert (
        processor.floats(made.arrays)["pixel_values_videos"].tobytes() == want.contiguous().numpy().tobytes()
    )
    assert made.runs[0].pieces == (("<video>", 5 * 4 + 1),)
