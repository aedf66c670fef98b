# SPDX-License-Identifier: Apache-2.0
"""The door: media to files and layouts, within limits, and with errors in words."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.errors import ConfigError, UnavailableError, ValidationError
from quire.multimodal.arrays import read_arrays, write_arrays
from quire.multimodal.door import door as door_module
from quire.multimodal.door.decoding import read_image
from quire.multimodal.door.door import MediaDoor
from quire.multimodal.door.layout import PreparedItem
from tests.multimodal.door.doors import HIDDEN_SIZE, data_url, door_of, encoded, part, picture


@pytest.fixture
def door(tmp_path: Path) -> Iterator[MediaDoor]:
    made = door_of(tmp_path, allowed_local_media_path=str(tmp_path))
    yield made
    made.close()


def content_of(item: PreparedItem) -> bytes:
    return Path(item.path).read_bytes()


async def test_an_image_becomes_the_processors_arrays(door: MediaDoor) -> None:
    image = picture()
    admitted = await door.admit([part(data_url(encoded(image)))])
    (item,) = admitted.items
    prepared = door.processor.prepare(image, {})
    arrays = read_arrays(content_of(item))
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in prepared.arrays.items()
    }
    assert item.layout.grid == prepared.grid
    assert item.layout.num_pixels == 2400
    assert Path(item.path).name == f"{item.digest.hex()}.safetensors"


async def test_a_warm_door_has_a_process_for_the_first_image(door: MediaDoor) -> None:
    door._pool.warm_up()
    (process,) = door._pool._idle
    await door.admit([part(data_url(encoded(picture())))])
    assert door._pool._idle == [process]
    door.close()
    door.warm_up()
    door._pool.warm_up()
    assert door._pool._idle == []


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
async def test_every_format_is_read(door: MediaDoor, kind: str) -> None:
    (item,) = (await door.admit([part(data_url(encoded(picture(), kind)))])).items
    assert item.layout.num_pixels == 2400


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:image/png;charset=utf-8;base64,",
        "data:;base64,",
    ],
)
async def test_forms_of_data_urls_mean_the_same(door: MediaDoor, head: str) -> None:
    content = encoded(picture())
    items = [
        (await door.admit([part(data_url(content, how))])).items[0]
        for how in (head, "data:image/png;base64,")
    ]
    assert items[0].digest == items[1].digest


async def test_options_and_content_are_in_the_digest(door: MediaDoor) -> None:
    one, other = data_url(encoded(picture())), data_url(encoded(picture(seed=1)))
    small = {"max_pixels": 28 * 28 * 4}
    found = [
        (await door.admit([part(url)], options)).items[0].digest
        for url, options in ((one, {}), (one, small), (other, {}), (one, {}))
    ]
    assert found[0] == found[3]
    assert len(set(found)) == 3


async def test_the_same_image_twice_at_once_is_processed_once(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    run = door._pool.run
    monkeypatch.setattr(door._pool, "run", lambda *args: (jobs.append(args), run(*args))[1])
    url = data_url(encoded(picture()))
    admitted = await door.admit([part(url)] * 5)
    assert len({item.path for item in admitted.items}) == 1
    assert len(jobs) == 1


async def test_exif_orientation_is_applied(door: MediaDoor) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(picture(112, 28), "JPEG", exif=exif.tobytes())
    (item,) = (await door.admit([part(data_url(turned))])).items
    rows, columns = item.layout.grid[1:]
    assert rows > columns


async def test_a_file_lives_as_long_as_its_request(tmp_path: Path) -> None:
    door = door_of(tmp_path, mm_processor_cache_gb=0.0)
    first = await door.admit([part(data_url(encoded(picture())))])
    second = await door.admit([part(data_url(encoded(picture(seed=1))))])
    paths = [Path(admitted.items[0].path) for admitted in (first, second)]
    assert [path.exists() for path in paths] == [True, True]
    del first
    assert [path.exists() for path in paths] == [False, True]
    directory = door.files.directory
    door.close()
    assert not directory.exists()


async def test_files_without_requests_stay_within_a_limit(tmp_path: Path) -> None:
    door = door_of(tmp_path, mm_processor_cache_gb=20_000 / 2**30)
    for seed in range(6):
        await door.admit([part(data_url(encoded(picture(seed=seed))))])
    assert 0 < door.files.num_bytes <= 20_000
    kept = sum(path.stat().st_size for path in door.files.directory.glob("*.safetensors"))
    assert kept == door.files.num_bytes
    door.close()


async def test_a_uuid_stands_for_data_that_was_sent(door: MediaDoor) -> None:
    (sent,) = (await door.admit([part(data_url(encoded(picture())), uuid="a")], tenant="me")).items
    (named,) = (await door.admit([part(None, uuid="a")], tenant="me")).items
    assert named == sent
    for tenant, options in (("you", {}), ("me", {"max_pixels": 10**5})):
        with pytest.raises(ValidationError, match="send its data again"):
            await door.admit([part(None, uuid="a")], options, tenant)


async def test_files_are_read_below_the_directory_only(door: MediaDoor, tmp_path: Path) -> None:
    inside, outside = tmp_path / "a picture.png", tmp_path.parent / f"{tmp_path.name}.png"
    for path in (inside, outside):
        path.write_bytes(encoded(picture()))
    (tmp_path / "link.png").symlink_to(outside)
    (tmp_path / "good.png").symlink_to(inside)
    os.mkfifo(tmp_path / "pipe")
    good = [inside.as_uri(), (tmp_path / "good.png").as_uri(), f"FILE://localhost{inside.as_uri()[7:]}"]
    assert len((await door.admit([part(url) for url in good])).items) == 3
    bad = [
        outside,
        tmp_path / "link.png",
        tmp_path / "pipe",
        tmp_path,
        tmp_path / "none.png",
        Path("/etc/passwd"),
    ]
    climbing = f"{tmp_path.as_uri()}/../{outside.name}"
    for url in (*(path.as_uri() for path in bad), climbing):
        with pytest.raises(ValidationError, match="names no readable file below the directory"):
            await door.admit([part(url)])
    for url in ("file://host/a.png", f"{inside.as_uri()}?x"):
        with pytest.raises(ValidationError, match="must be file:///"):
            await door.admit([part(url)])


async def test_files_are_not_read_by_default(tmp_path: Path) -> None:
    door = door_of(tmp_path)
    with pytest.raises(ValidationError, match="--allowed-local-media-path"):
        await door.admit([part("file:///etc/passwd")])
    with pytest.raises(ValidationError, match="must be a URL that begins with"):
        await door.admit([part("/etc/passwd")])


async def test_the_number_of_images_is_limited(tmp_path: Path) -> None:
    for limit in (1, {"count": 1}):
        door = door_of(tmp_path, limit_mm_per_prompt={"image": limit})
        with pytest.raises(ValidationError, match="has 2 images, the limit is 1"):
            await door.admit([part("data:,")] * 2)


async def test_bytes_and_pixels_of_a_request_are_limited(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [data_url(encoded(picture(seed=seed))) for seed in range(3)]
    monkeypatch.setattr(door_module, "MAX_REQUEST_PIXELS", 2 * 2400)
    with pytest.raises(ValidationError, match=r"pixels"):
        await door.admit([part(url) for url in urls])
    await door.admit([part(url) for url in urls[:2]])
    monkeypatch.setattr(door_module, "MAX_REQUEST_BYTES", 9000)
    with pytest.raises(ValidationError, match="9000 bytes"):
        await door.admit([part(url) for url in urls[:2]])


async def test_a_bomb_is_refused_by_its_header(door: MediaDoor) -> None:
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, "PNG")
    with pytest.raises(ValidationError, match="pixels"):
        await door.admit([part(data_url(file.getvalue()))])


async def test_a_late_decoder_costs_its_image_only(door: MediaDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    await door.admit([part(data_url(encoded(picture())))])  # the process has started
    (process,) = door._pool._idle
    monkeypatch.setattr(door_module, "LIMIT_S", 0.0)
    with pytest.raises(ValidationError, match="takes longer than 0 s"):
        await door.admit([part(data_url(encoded(picture(seed=1))))])
    assert not process.is_alive
    monkeypatch.setattr(door_module, "LIMIT_S", 60.0)
    assert (await door.admit([part(data_url(encoded(picture(seed=1))))])).items


async def test_a_killed_decoder_costs_its_image_only(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await door.admit([part(data_url(encoded(picture())))])
    (process,) = door._pool._idle
    ask = process.ask

    def die(*args: Any) -> Any:
        process.stop()
        return ask(*args)

    monkeypatch.setattr(process, "ask", die)
    with pytest.raises(ValidationError, match="crashes its decoder"):
        await door.admit([part(data_url(encoded(picture(seed=1))))])
    assert (await door.admit([part(data_url(encoded(picture(seed=1))))])).items


async def test_a_request_that_is_gone_kills_its_decoder(
    door: MediaDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await door.admit([part(data_url(encoded(picture())))])
    (process,) = door._pool._idle
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(*args: Any) -> None:
        loop.call_soon_threadsafe(started.set)
        process._process.wait()

    monkeypatch.setattr(process, "ask", hang)
    task = asyncio.create_task(door.admit([part(data_url(encoded(picture(seed=1))))]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.is_alive
    assert len(list(door.files.directory.glob("*"))) == 2  # the first image, and the directory's lock


async def test_a_closed_door_refuses(door: MediaDoor) -> None:
    door.close()
    door.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await door.admit([part(data_url(encoded(picture())))])


async def test_offline_callers_pass_images_arrays_and_paths(tmp_path: Path) -> None:
    door = door_of(tmp_path, offline=True)
    image = picture()
    path = tmp_path / "a.png"
    path.write_bytes(encoded(image))
    array = np.asarray(image)
    admitted = await door.admit([part(image), part(array), part(str(path))])
    contents = {content_of(item) for item in admitted.items}
    assert len(contents) == 1
    gray = await door.admit([part(array[:, :, 0])])
    assert content_of(gray.items[0]) not in contents
    for wrong in (array.astype(np.float32), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2, 3), np.uint8), 3):
        with pytest.raises(ValidationError, match="must be a PIL image"):
            await door.admit([part(wrong)])
    door.close()


def npy(values: np.ndarray, **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, values, **options)
    return base64.b64encode(file.getvalue()).decode()


async def test_embeddings_are_taken_as_they_are(tmp_path: Path) -> None:
    door = door_of(tmp_path, "llava", enable_mm_embeds=True)
    values = np.random.default_rng(0).standard_normal((9, HIDDEN_SIZE)).astype(np.float16)
    write_arrays(tmp_path / "values.safetensors", {"image": values.astype(np.float32)})
    stored = base64.b64encode((tmp_path / "values.safetensors").read_bytes()).decode()
    admitted = await door.admit([part(npy(values), is_embeds=True), part(stored, is_embeds=True)])
    for item in admitted.items:
        assert item.kind == "embeds"
        assert (read_arrays(content_of(item))["values"] == values).all()
    door.close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros((9, HIDDEN_SIZE + 1), np.float32), "must have 8 numbers each, got 9"),
        (np.zeros((8, HIDDEN_SIZE), np.float32), "has 9 embeddings, got 8"),
        (np.full((9, HIDDEN_SIZE), np.nan, np.float32), "must be finite"),
        (np.full((9, HIDDEN_SIZE), 1e300), "must be finite"),
        (np.zeros(72, np.float32), r"shape \[n, hidden size\]"),
        (np.zeros((9, HIDDEN_SIZE), np.int64), "one matrix of floats"),
        (np.array([[{}]], dtype=object), r"no safetensors or \.npy file"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
async def test_bad_embeddings_are_refused_in_words(tmp_path: Path, values: np.ndarray, words: str) -> None:
    door = door_of(tmp_path, "llava", enable_mm_embeds=True)
    with pytest.raises(ValidationError, match=words):
        await door.admit([part(npy(values, allow_pickle=True), is_embeds=True)])
    door.close()


async def test_embeddings_are_refused_by_default(door: MediaDoor) -> None:
    with pytest.raises(ValidationError, match="--enable-mm-embeds"):
        await door.admit([part("AAAA", is_embeds=True)])


UNUSABLE: dict[str, tuple[Any, str]] = {
    "device": ("/dev/null", "^/dev/null cannot be read: it is no regular file"),
    "missing": ("none.png", "^none.png cannot be read: No such file"),
    "path": (Path("none.png"), "^none.png cannot be read: No such file"),
    "null": ("a\0b", "is no path of a file"),
    "heic": (b"\0\0\0\x18ftypheic", "the file is an image in HEIC or AVIF; formats are PNG"),
    "drawing": (b'<?xml version="1.0"?><svg/>', "the file is an SVG drawing"),
    "bytes": (b"hello", "the bytes are no image"),
    "floats": (Image.new("F", (4, 4)), "one number of 32 bits for each pixel"),
    "ragged": ([[1], [1, 2]], "must be a PIL image, a path"),
    "scaled": (np.zeros((4, 4, 3), np.float32), r"got ndarray of float32 \[4, 4, 3\]"),
}
"""Name -> what a caller of this process sends, and words of the error."""


async def test_what_callers_here_send_is_refused_in_words(tmp_path: Path) -> None:
    door = door_of(tmp_path, offline=True)
    for source, words in UNUSABLE.values():
        with pytest.raises(ValidationError, match=words):
            await door.admit([part(source)])
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    same = [tmp_path / "a.png", str(tmp_path / "a.png"), encoded(picture())]
    assert len({item.digest for item in (await door.admit(list(map(part, same)))).items}) == 1
    door.close()


def test_gray_values_of_sixteen_bits_are_scaled() -> None:
    gray = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for kind in ("PNG", "TIFF"):
        found = np.asarray(read_image(encoded(Image.fromarray(gray), kind), 64))
        assert np.array_equal(found, gray >> 8)


def test_limits_and_options_of_the_operator_are_checked(tmp_path: Path) -> None:
    for limit in ("a", -1, {"count": 1.5}):
        with pytest.raises(ConfigError, match="it must be a number of items"):
            door_of(tmp_path, limit_mm_per_prompt={"image": limit})
    for options in ({"max_pixel": 1}, {"images_kwargs": {"max_pixel": 1}}):
        with pytest.raises(ConfigError, match="'max_pixel', which this model's processor does not read"):
            door_of(tmp_path, mm_processor_kwargs=options)
    door_of(tmp_path, mm_processor_kwargs={"max_pixels": 9999, "do_normalize": True}).close()
