# SPDX-License-Identifier: Apache-2.0
"""Videos at the door: files and frames to arrays, within limits, and with errors in words."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.errors import ValidationError
from quire.multimodal.arrays import read_arrays
from quire.multimodal.door import door as door_module
from quire.multimodal.door.door import MediaDoor
from quire.multimodal.door.layout import PreparedItem
from quire.multimodal.door.parts import MediaPart
from quire.multimodal.processors.video import VideoFacts
from tests.multimodal.door.doors import data_url, door_of, encoded, picture
from tests.multimodal.door.films import drawn_frames, film

av = pytest.importorskip("av", reason="videos need PyAV")

PREFIXES = tuple(f"messages.0.content.0{words}" for words in (": the ", ": 0 frames", " is ", ": 1 frame "))
HEAD = "data:video/mp4;base64,"


@pytest.fixture
def door(tmp_path: Path) -> Iterator[MediaDoor]:
    made = door_of(tmp_path, "qwen3-vl", offline=True)
    yield made
    made.close()


def part(source: Any, **options: Any) -> MediaPart:
    return MediaPart("messages.0.content.0", source, kind="video", **options)


def sent(content: bytes, **options: Any) -> MediaPart:
    return part(data_url(content, HEAD), **options)


def made_apart(*args: Any) -> bytes:
    """Return `film` of a process of its own: SVT-AV1 gives its process real-time priority where it may."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(film, *args).result()


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mp4", "libx264"),
        ("mov", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("matroska", "libx264"),
        ("avi", "mpeg4"),
        ("mp4", "libsvtav1"),
    ],
)
async def test_every_format_is_read(door: MediaDoor, container: str, codec: str) -> None:
    content = made_apart if codec == "libsvtav1" else film
    (item,) = (await door.admit([sent(content(drawn_frames(12, (64, 64)), 4, container, codec))])).items
    assert item.kind == "video"
    assert len(item.layout.runs) == 3  # 12 frames at 4 a second, 2 a second sampled, in pairs
    assert item.layout.text.startswith("<0.")


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "film.mp4"
    path.write_bytes(film(drawn_frames(9), 4))
    return path


def content_of(item: PreparedItem) -> bytes:
    return Path(item.path).read_bytes()


async def test_frames_of_a_file_are_those_that_av_decodes(door: MediaDoor, path: Path) -> None:
    (item,) = (await door.admit([part(str(path))])).items
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    videos = door.processor.videos
    assert videos is not None
    clip = videos.sample(VideoFacts(9, (48, 64), 4.0), {})
    want = videos.prepare(clip, (frames[index] for index in clip.indices), {})
    found = read_arrays(content_of(item))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in want.arrays.items()
    }
    assert item.layout.text == want.text


async def test_a_turned_video_is_upright(door: MediaDoor) -> None:
    plain = film(drawn_frames(8, (48, 96)), 4, codec="libx264")
    turned = _with_rotation(plain)
    wide, tall = [(await door.admit([sent(content)])).items[0].layout.grid for content in (plain, turned)]
    assert wide[1] < wide[2]
    assert tall == (wide[0], wide[2], wide[1])


def _with_rotation(content: bytes) -> bytes:
    """Write another matrix into the track's header: a turn by 90 degrees."""
    at = content.index(b"tkhd") + 4 + 40
    rows = np.array([0, 2**16, 0, -(2**16), 0, 0, 0, 0, 2**30], ">i4")
    return content[:at] + rows.tobytes() + content[at + 36 :]


async def test_arrays_images_and_pairs_are_taken(door: MediaDoor) -> None:
    frames = drawn_frames(8)
    images = [Image.fromarray(frame) for frame in frames]
    every = {"do_sample_frames": False}
    items = [
        (await door.admit([part(source)], every)).items[0]
        for source in (frames, images, (frames, {"fps": 24.0}), (frames, {"fps": 2.0}))
    ]
    assert [len(item.layout.runs) for item in items] == [4] * 4
    assert [item.layout.text[:5] for item in items] == ["<0.0 ", "<0.0 ", "<0.0 ", "<0.2 "]
    contents = list(map(content_of, items))
    assert contents[0] == contents[1] == contents[2]
    assert len({item.digest for item in items}) == 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((2, 8, 8, 3), np.float32), "must be uint8 frames"),
        (np.zeros((0, 8, 8, 3), np.uint8), "must be uint8 frames"),
        (np.zeros((8, 8, 3), np.uint8), "must be uint8 frames"),
        ([picture(8, 8), picture(9, 8)], "frames of different sizes"),
        ((drawn_frames(4), {"speed": 1}), "the metadata of messages.0.content.0 have 'speed'"),
        ((drawn_frames(4), {"fps": 0}), "must be a number above 0"),
        ((drawn_frames(4), {"total_num_frames": 9}), "or more beside frames_indices"),
        ((drawn_frames(4), {"frames_indices": [3, 2, 1, 0]}), "4 ascending numbers below 4"),
        (3, "must be uint8 frames"),
    ],
)
async def test_frames_of_another_form_are_refused(door: MediaDoor, source: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        await door.admit([part(source)])


async def test_a_request_says_which_frames_are_read(door: MediaDoor) -> None:
    content = film(drawn_frames(20), 10)
    counts = [
        len((await door.admit([sent(content)], options)).items[0].layout.runs)
        for options in ({}, {"num_frames": 12}, {"fps": 5}, {"videos_kwargs": {"fps": 10}})
    ]
    assert counts == [2, 6, 5, 10]


async def test_the_number_of_videos_is_limited(tmp_path: Path) -> None:
    door = door_of(tmp_path, limit_mm_per_prompt={"video": 1})
    with pytest.raises(ValidationError, match="has 2 videos, the limit is 1"):
        await door.admit([sent(b"x")] * 2)


async def test_a_model_of_images_takes_no_video(tmp_path: Path) -> None:
    door = door_of(tmp_path, "gemma3")
    with pytest.raises(ValidationError, match="is a video, and this model takes images"):
        await door.admit([sent(b"x")])


async def test_pixels_of_a_requests_videos_are_limited(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    films = [film(drawn_frames(8, seed=seed), 4) for seed in range(2)]
    monkeypatch.setattr(door_module, "MAX_VIDEO_PIXELS", 5 * 48 * 64)
    await door.admit([sent(films[0])])
    with pytest.raises(ValidationError, match="pixels"):
        await door.admit([sent(one) for one in films])


async def test_a_video_without_pyav_is_refused_in_words(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"pip install 'quire-llm\[av\]'"):
        await door.admit([sent(film(drawn_frames(8), 4))])


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files that are damaged, of another kind, or refer to other files."""
    random = np.random.default_rng(0)
    for container, codec in (("mp4", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")):
        whole = film(drawn_frames(6), 4, container, codec)
        for number in range(25):
            place = int(random.integers(1, len(whole)))
            yield f"{container} cut off {number}", whole[:place]
            noise = bytearray(whole)
            for at in random.integers(0, len(whole), 12):
                noise[at] = int(random.integers(256))
            yield f"{container} with noise {number}", bytes(noise)
    yield "no bytes", b""
    yield "image", encoded(picture())
    yield "playlist", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    yield "concatenation", b"ffconcat version 1.0\nfile '/etc/passwd'\n"
    yield "text", b"<svg/>"
    yield "sound", b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(32)


async def test_hostile_videos_are_errors_in_words(door: MediaDoor) -> None:
    refused = {}
    for name, content in hostile():
        try:
            await door.admit([sent(content)])
        except ValidationError as error:
            refused[name] = error.message
    odd = {name: words for name, words in refused.items() if not words.startswith(PREFIXES)}
    assert not odd
    assert not any(str(door.files.directory) in words for words in refused.values())
    assert len(refused) > 50
    assert {"no bytes", "image", "playlist", "concatenation", "text", "sound"} <= refused.keys()
    assert not list(door.files.directory.glob("input-*"))
