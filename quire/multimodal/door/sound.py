# SPDX-License-Identifier: Apache-2.0
"""Sounds at the door: those of callers of this process as WAV, and decoding in a process that may crash.

Invariant: a sound is bytes of a file everywhere, so all have one way to samples; its limit counts what is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ClientError, ValidationError
from quire.multimodal.arrays import array_of
from quire.multimodal.door.decoding import layout_of
from quire.multimodal.door.layout import PlaceholderLayout
from quire.multimodal.processors.base import BESIDE_IMAGES
from quire.multimodal.processors.sound import SoundProcessor
from quire.speech.audio import HIGH_RATE, LOW_RATE, decode
from quire.speech.features import RATE
from quire.speech.wav import FLOAT, MAX_CHANNELS, PCM
from quire.speech.windows import PcmFile

FORM = "samples [T] or [T, channels], a pair of them and their number per second, a path or a URL"
_INTEGERS = {np.dtype(np.uint8): 8, np.dtype(np.int16): 16, np.dtype(np.int32): 32}


def wav_of(source: Any, where: str) -> bytes:
    """Return samples as a WAV file; floats are full-scale at 1, integers at their largest.

    Args:
        source: an array [T] or [T, channels], at 16 kHz, or a pair of it and its samples per second.

    Raises:
        ValidationError: it is something else; names the field.
    """
    is_pair = isinstance(source, tuple | list) and len(source) == 2 and isinstance(source[1], int | float)
    samples, rate = source if is_pair else (source, RATE)
    samples = array_of(samples)
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "iuf" or not samples.size:
        got = (
            f"{samples.dtype} {list(samples.shape)}" if samples.dtype.kind in "iuf" else type(source).__name__
        )
        raise ValidationError(f"{where} must be {FORM}, got {got}", param=where)
    if not LOW_RATE <= rate <= HIGH_RATE or rate != int(rate):
        raise ValidationError(
            f"{where} has {rate!r:.40} samples per second; {LOW_RATE} to {HIGH_RATE} are read", param=where
        )
    channels = samples.shape[1] if samples.ndim == 2 else 1
    if channels > MAX_CHANNELS:
        raise ValidationError(
            f"{where} has {channels} channels, at most {MAX_CHANNELS} are read; the shape is [T, channels]",
            param=where,
        )
    bits = _INTEGERS.get(samples.dtype)
    kind, bits, samples = (FLOAT, 32, samples.astype("<f4")) if bits is None else (PCM, bits, samples)
    frame = channels * bits // 8
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, channels, int(rate), int(rate) * frame, frame, bits)
    data = np.ascontiguousarray(samples).tobytes()
    return b"RIFF\xff\xff\xff\xffWAVE" + head + struct.pack("<4sI", b"data", len(data)) + data


def prepare_sound(
    source: Path,
    scratch: Path,
    sounds: SoundProcessor | None,
    max_seconds: float,
    options: Mapping[str, Any],
) -> tuple[dict[str, NDArray[Any]], PlaceholderLayout]:
    """Return the arrays and the layout of a sound file.

    Args:
        scratch: file for its samples, removed afterwards.
        options: `BESIDE_IMAGES`, if the sound is beside an image and that matters.

    Raises:
        ValidationError: it is no sound, damaged, too long or not possible for the model.
        MemoryError: decoding it needs too much memory.
    """
    if sounds is None:
        raise ValidationError("this model takes no sounds")
    try:
        longest = min(sounds.longest_s, max_seconds)
        num_samples = decode(source, scratch, longest)
        prepared = sounds.prepare(PcmFile(scratch).read(0, num_samples))
    except ClientError as error:
        raise ValidationError(error.message) from None  # its field is the door's to name
    finally:
        scratch.unlink(missing_ok=True)
    place = {BESIDE_IMAGES: np.ones(1, np.int64)} if BESIDE_IMAGES in options else {}
    layout = msgspec.structs.replace(layout_of(prepared), seconds=num_samples / RATE)
    return prepared.arrays | place, layout
