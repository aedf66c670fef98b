# SPDX-License-Identifier: Apache-2.0
"""Doors of small checkpoints, and images in files."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from PIL import Image

from quire.config import EngineConfig
from quire.config.multimodal import MultimodalConfig
from quire.multimodal.door.door import MediaDoor, make_door
from quire.multimodal.door.parts import MediaPart
from tests.multimodal.processors.checkpoints import CASES

HIDDEN_SIZE = 8


def config_of(case: str, directory: Path, **options: Any) -> EngineConfig:
    """The parts of a config that a door reads."""
    checkpoint = CASES[case]
    part_of = SimpleNamespace(architecture=checkpoint.architecture, processor_files="")
    arch = SimpleNamespace(part_of=part_of, hidden_size=HIDDEN_SIZE, media_size=HIDDEN_SIZE)
    found = SimpleNamespace(
        arch=arch, multimodal=MultimodalConfig(**options), model_dir=str(checkpoint.write(directory))
    )
    return cast(EngineConfig, found)


def door_of(directory: Path, case: str = "qwen2-vl", *, offline: bool = False, **options: Any) -> MediaDoor:
    door = make_door(config_of(case, directory, **options), offline=offline)
    assert door is not None
    return door


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(content).decode()


def part(source: Any, **options: Any) -> MediaPart:
    return MediaPart("messages.0.content.0", source, **options)
