# SPDX-License-Identifier: Apache-2.0
"""Sound files to mono samples at 16 kHz, written to a file while they are decoded.

WAV is read here, FLAC, Ogg and MP3 by soundfile, everything else by PyAV; both are optional. Invariant: memory holds a
block of the sound at a time, and the limit is on what is decoded, whatever a header states.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.speech.features import RATE, Samples
from quire.speech.resampling import make_resampler
from quire.speech.wav import BLOCK_FRAMES, read_header, read_wav

LOW_RATE, HIGH_RATE = 1_000, 768_000
SOUNDFILE, PYAV = "pip install 'quire-llm[audio]'", "pip install 'quire-llm[av]'"
PARAM = "file"
NO_PROTOCOLS = {"protocol_whitelist": "none"}  # Of FFmpeg.


class Sound(NamedTuple):
    """Blocks [frames, channels] of float32 with their samples per second."""

    rate: int
    blocks: Iterator[NDArray[np.float32]]


def decode(source: Path, target: Path, max_seconds: float) -> int:
    """Write a sound file's samples, float32 mono at 16 kHz, to a new file; return their number.

    Raises:
        ValidationError: the file cannot be decoded, is empty, too long or not finite; names the package that would read
            its format.
    """
    return write_samples(open_sound(source), target, max_seconds)


def write_samples(sound: Sound, target: Path, max_seconds: float) -> int:
    """Write a sound's samples, float32 mono at 16 kHz, to a new file; return their number. Raises as `decode`."""
    if not LOW_RATE <= sound.rate <= HIGH_RATE:
        raise ValidationError(
            f"the sound has {sound.rate} samples per second; {LOW_RATE} to {HIGH_RATE} are read", param=PARAM
        )
    resampler = make_resampler(sound.rate, RATE)
    num_read = num_written = 0
    with target.open("wb") as file:
        for block in sound.blocks:
            num_read += len(block)
            if num_read > max_seconds * sound.rate:
                raise ValidationError(
                    f"the sound is longer than {max_seconds:g} s, the limit; send it in parts", param=PARAM
                )
            num_written += file.write(resampler.feed(_mono(block)).data) // 4
        num_written += file.write(resampler.finish().data) // 4
    if num_written == 0:
        raise ValidationError("the sound has no samples", param=PARAM)
    return num_written


def _mono(block: NDArray[np.float32]) -> Samples:
    """Return the mean over channels.

    Raises:
        ValidationError: a sample is NaN or infinite.
    """
    if not np.isfinite(block).all():
        raise ValidationError("the sound has samples that are NaN or infinite", param=PARAM)
    mean = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float64)
    return np.ascontiguousarray(mean, dtype=np.float32)


def open_sound(source: Path) -> Sound:
    """Open a file by its content. Raises as `decode`, also from the blocks."""
    if source.stat().st_size == 0:
        raise ValidationError("the file is empty", param=PARAM)
    form = read_header(source)
    if form is not None and form.is_plain:
        return Sound(form.rate, read_wav(source, form))
    with source.open("rb") as file:
        head = file.read(12)
    name = _name_of(head)
    if form is not None or name in ("flac", "ogg", "mp3"):
        return _by_soundfile(source, name)
    return _by_av(source, name)


def _name_of(head: bytes) -> str:
    """Return a format's name by the first bytes of a file; "" if it is unknown."""
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] >= b"\xe0" and head[1] & 0x06):
        return "mp3"
    if head[4:8] == b"ftyp":
        return "mp4"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "webm"
    return "wav" if head[8:12] == b"WAVE" else ""


def _by_soundfile(source: Path, name: str) -> Sound:
    soundfile = _module("soundfile", name, SOUNDFILE)
    try:
        file = soundfile.SoundFile(str(source))
    except (RuntimeError, OSError) as error:
        if has_av():
            return _by_av(source, name)
        raise _broken(name, error) from None

    def blocks() -> Iterator[NDArray[np.float32]]:
        with file:
            try:
                while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
                    yield block
            except (RuntimeError, OSError) as error:
                raise _broken(name, error) from None

    return Sound(int(file.samplerate), blocks())


def has_av() -> bool:
    """Return whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def _by_av(source: Path, name: str) -> Sound:
    av = _module("av", name, PYAV)
    file = source.open("rb")
    try:
        # A file that names others, such as a playlist, opens none of them.
        container = av.open(file, container_options=NO_PROTOCOLS, io_open=_refuse_to_open)
    except (av.FFmpegError, ValueError) as error:
        file.close()
        raise _broken(name, error) from None
    if not container.streams.audio:
        container.close()
        file.close()
        raise ValidationError("the file has no sound", param=PARAM)
    rate = int(container.streams.audio[0].rate or 0)
    return Sound(rate, _av_blocks(av, container, file, name))


def _refuse_to_open(*_: Any) -> Any:
    raise ValueError("a sound is one file")


def _av_blocks(av: Any, container: Any, file: BinaryIO, name: str) -> Iterator[NDArray[np.float32]]:
    rate = int(container.streams.audio[0].rate or 0)
    resampler = av.AudioResampler(format="fltp", rate=rate)  # Same rate: it only converts the samples' form.
    with file, container:
        try:
            for frame in container.decode(audio=0):
                for plain in resampler.resample(frame):
                    yield np.ascontiguousarray(plain.to_ndarray().T)
        except (av.FFmpegError, ValueError) as error:
            raise _broken(name, error) from None


def _module(package: str, name: str, install: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        what = f"the file is {name}" if name else "the file is no WAV, FLAC, Ogg or MP3"
        raise ValidationError(
            f"{what}, which needs {package} on the server: {install}", param=PARAM
        ) from None


def _broken(name: str, error: Exception) -> ValidationError:
    """Return the error of a decoder, in words without paths of the server."""
    what = f"the {name} file" if name else "the file"
    why = getattr(error, "strerror", None) or getattr(error, "error_string", None) or type(error).__name__
    return ValidationError(f"{what} cannot be decoded: {why!s:.200}", param=PARAM)
