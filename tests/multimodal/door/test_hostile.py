# SPDX-License-Identifier: Apache-2.0
"""1,000 hostile files: each is an error in words, or an image, and never a crash; the decoder's memory stays flat.

Those that are made on purpose go through a door and its process; mutations through the function of the process.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quire.errors import ValidationError
from quire.multimodal.door.decode_process import run
from quire.multimodal.door.door import MediaDoor
from quire.multimodal.door.jobs import DecodeJob, DecodeSetup
from tests.multimodal.door.doors import data_url, door_of, encoded, part, picture
from tests.multimodal.processors.checkpoints import CASES

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
NUM_DAMAGED = 12  # Of each kind and way.
ALLOWED_GROWTH = 64 * 2**20


def png_of(width: int, height: int, data: bytes = b"", depth: int = 8, color: int = 2) -> bytes:
    """A PNG file that states a size, whatever its data are."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def damaged() -> Iterator[tuple[str, bytes]]:
    """Files of every format that are cut off, overwritten, repeated or of another beginning."""
    random = np.random.default_rng(0)
    for kind in KINDS:
        whole = encoded(picture(33, 21), kind)
        for number in range(NUM_DAMAGED):
            place = int(random.integers(1, len(whole)))
            yield f"{kind} cut off {number}", whole[:place]
            yield f"{kind} without its beginning {number}", whole[place:]
            noise = bytearray(whole)
            for at in random.integers(0, len(whole), 8):
                noise[at] = int(random.integers(256))
            yield f"{kind} with noise {number}", bytes(noise)
            head = bytearray(whole)
            for at in random.integers(0, min(40, len(whole)), 3):
                head[at] = int(random.integers(256))
            yield f"{kind} with a noisy head {number}", bytes(head)


def made() -> Iterator[tuple[str, bytes]]:
    """Files that are what they are on purpose."""
    whole = encoded(picture())
    frames = [picture(seed=seed) for seed in range(20)]
    yield "no bytes", b""
    yield "one byte", b"\x89"
    yield "bomb", png_of(30_000, 30_000)
    yield "wide bomb", png_of(2**31 - 1, 1)
    yield "no width", png_of(0, 5)
    yield "less data than stated", png_of(500, 500, b"x")
    yield "much data", png_of(1, 1, b"\0" * 10**7)
    yield "too long for the model", png_of(1, 300, b"\0\1\2\3" * 300)
    yield "text", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "document", b"%PDF-1.7\n"
    yield "archive", b"PK\x03\x04" + b"\0" * 64
    yield "other format", encoded(picture(), "PPM")
    yield "icon", encoded(picture(), "ICO")
    yield "two files", whole + encoded(picture(), "JPEG")
    yield "animated GIF", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "animated WEBP", encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    yield "pages", encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    yield "one pixel", encoded(picture(1, 1))
    for kind in ("PNG", "TIFF"):
        yield f"16 bits {kind}", encoded(Image.fromarray(np.full((9, 9), 60_000, np.uint16)), kind)
    yield "float TIFF", encoded(Image.fromarray(np.full((9, 9), np.nan, np.float32)), "TIFF")


FILES = [*made(), *damaged()]
NUM_MUTATED = 1000 - len(FILES)


def mutated(seed: int) -> bytes:
    """A file of some format after a few steps of a mutator: cuts, copies, noise, sizes, parts of another file."""
    random = np.random.default_rng(seed)
    content = bytearray(
        encoded(picture(*map(int, random.integers(1, 60, 2)), seed=seed), KINDS[seed % len(KINDS)])
    )
    for _ in range(int(random.integers(1, 5))):
        first, last = sorted(map(int, random.integers(0, len(content) + 1, 2)))
        match int(random.integers(6)):
            case 0:
                del content[first : max(last, first + 1)]
            case 1:
                content[first:first] = content[first : min(last, first + 999)]
            case 2:
                content[first : first + 4] = struct.pack(">I", int(random.integers(2**32)))
            case 3:
                content[first : first + 2] = struct.pack("<H", int(random.choice([0, 1, 0x7FFF, 0xFFFF])))
            case 4:
                content[first:last] = bytes(map(int, random.integers(0, 256, last - first)))
            case _:
                content[first:] = encoded(picture(9, 9), KINDS[int(random.integers(len(KINDS)))])
    return bytes(content)


def test_mutated_files_are_errors_in_words(tmp_path: Path) -> None:
    processor = CASES["qwen2-vl"].read(tmp_path)
    setup = DecodeSetup(CASES["qwen2-vl"].architecture, str(tmp_path), {}, 2**31)
    source, target = tmp_path / "input", tmp_path / "output.safetensors"
    refused = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the process does: Pillow's, about damaged files
        for seed in range(NUM_MUTATED):
            source.write_bytes(mutated(seed))
            reply = run(DecodeJob("image", str(source), str(target), {}, 2**22), processor, setup)
            assert (reply.layout is None) == bool(reply.error), seed
            refused += [reply.error] if reply.error else []
    assert NUM_MUTATED // 3 < len(refused) < NUM_MUTATED
    odd = {words for words in refused if not words.startswith("the ") or str(tmp_path) in words}
    assert not odd


@pytest.fixture
def door(tmp_path: Path) -> Iterator[MediaDoor]:
    opened = door_of(tmp_path, mm_processor_cache_gb=0.0)
    yield opened
    opened.close()


def memory_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


async def refusal(door: MediaDoor, content: bytes) -> str:
    """The error of a file; empty if it is an image."""
    try:
        await door.admit([part(data_url(content))])
    except ValidationError as error:
        return error.message
    return ""


async def test_hostile_files_are_errors_in_words(door: MediaDoor) -> None:
    await door.admit([part(data_url(encoded(picture())))])
    (process,) = door._pool._idle
    before = memory_of(process._process.pid)
    refused = {name: words for name, content in FILES if (words := await refusal(door, content))}
    assert all(words.startswith("messages.0.content.0: the ") for words in refused.values()), refused
    assert not any(str(door.files.directory) in words or "Traceback" in words for words in refused.values())
    assert len(refused) > len(FILES) // 3
    (still,) = door._pool._idle
    assert still is process, "no file has ended the decoder"
    assert memory_of(process._process.pid) - before < ALLOWED_GROWTH
    assert len(list(door.files.directory.glob("*.safetensors"))) <= 1
    assert not list(door.files.directory.glob("input-*"))
