# SPDX-License-Identifier: Apache-2.0
"""Sounds and features of an engine, as files in one private directory.

Invariant: a window's features stay while a lease on them lives, and as a cache within a limit of bytes afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from quire.errors import UnavailableError, ValidationError
from quire.multimodal.arrays import write_arrays
from quire.multimodal.door.files import MediaFiles
from quire.multimodal.door.layout import PlaceholderLayout
from quire.processes import ONE_THREAD, exit_reason, start_python
from quire.speech.audio import Sound, decode, write_samples
from quire.speech.features import log_mel
from quire.speech.requests import WindowAudio
from quire.speech.vocabulary import SpeechVocabulary
from quire.speech.voice import load_detector, voiced_windows
from quire.speech.wav import read_header
from quire.speech.windows import PcmFile, Window, windows_of

CACHE_BYTES = 256 * 2**20
FEATURES = "input_features"
MAX_SECONDS = 3 * 3600.0
LIMIT_S = 300.0
VERSION = b"whisper features 1"


class SpeechStore:
    """Directory of sounds and features; methods block, and may be called from several threads.

    Args:
        max_seconds: longest sound.
    """

    def __init__(self, words: SpeechVocabulary, max_seconds: float = MAX_SECONDS) -> None:
        self._words = words
        self._max_seconds = max_seconds
        self._files = MediaFiles(CACHE_BYTES)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def new_path(self, kind: str) -> Path:
        """Return a new name in the directory; its owner removes the file."""
        try:
            return self._files.directory / f"{kind}-{os.getpid()}-{next(self._numbers)}"
        except OSError as error:
            raise UnavailableError(f"sounds cannot be stored: {error.strerror}") from None

    def decode(self, source: Path, decoding: Decoding | None = None) -> OwnedPcm:
        """Return the samples of a sound file.

        Plain WAV is read here; all else in a process that is killed after `LIMIT_S` seconds or by `decoding`.

        Raises:
            ValidationError: the file cannot be decoded.
            UnavailableError: there is no room, no process, or the work was cancelled.
        """
        target = self.new_path("pcm")
        try:
            form = read_header(source)
            if form is not None and form.is_plain:
                decode(source, target, self._max_seconds)
            else:
                (decoding or Decoding()).run(source, target, self._max_seconds)
            return OwnedPcm(target)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise UnavailableError(f"the sound cannot be stored: {error.strerror}") from None
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def keep(self, sound: Sound) -> OwnedPcm:
        """Return the samples of a sound in memory. Raises as `decode`."""
        target = self.new_path("pcm")
        try:
            write_samples(sound, target, self._max_seconds)
            return OwnedPcm(target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def features(self, sound: PcmFile, window: Window) -> WindowAudio:
        """Return the features of a window, computed unless their file exists.

        Raises:
            UnavailableError: the file cannot be written.
        """
        words = self._words
        samples = sound.read(*window)
        size = f"{words.num_bins} {words.num_frames} {len(samples)} ".encode()
        digest = hashlib.sha256(VERSION + size + samples.tobytes()).digest()
        with self._lock:
            item = self._files.find(digest)
            if item is None:
                features = log_mel(samples, words.num_bins, words.num_frames)[None]
                try:
                    num_bytes = write_arrays(self._files.path_of(digest), {FEATURES: features})
                except OSError as error:
                    raise UnavailableError(f"features cannot be stored: {error.strerror}") from None
                item = self._files.add(digest, "audio", PlaceholderLayout("", []), num_bytes)
            lease = self._files.lease(digest)
        return WindowAudio(digest, item.path, (lease,))

    def windows(self, sound: PcmFile, *, vad_filter: bool) -> Iterator[Window]:
        """Return a sound's windows, or those with a voice, computed one by one.

        Raises:
            ValidationError: the detector's weights are missing.
        """
        size = self._words.window_samples
        return voiced_windows(sound, size, load_detector()) if vad_filter else windows_of(sound, size)

    def first_window(self, sound: PcmFile, *, vad_filter: bool) -> Window:
        """Return the window that shows a sound's language: the first, with a voice if one has. Raises as `windows`."""
        plain = next(windows_of(sound, self._words.window_samples))
        return next(self.windows(sound, vad_filter=vad_filter), plain)

    def close(self) -> None:
        """Remove the directory; idempotent."""
        self._files.close()


class OwnedPcm(PcmFile):
    """File of samples that is removed by `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path

    def close(self) -> None:
        """Remove the file; idempotent."""
        self._path.unlink(missing_ok=True)


class Decoding:
    """Decoding of one file in a process, which another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Kill the process, now or as soon as it has started."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def run(self, source: Path, target: Path, max_seconds: float) -> None:
        """Decode a file. Raises as `SpeechStore.decode`."""
        program = ["-m", "quire.speech.decode_process", str(source), str(target), str(max_seconds)]
        with self._lock:
            if self._is_cancelled:
                raise UnavailableError("the request was cancelled before its sound was decoded")
            self._process = start_python(program, os.environ | ONE_THREAD, stdout=subprocess.PIPE)
        with self._process as process:
            try:
                reply, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ValidationError(
                    f"the sound takes longer than {LIMIT_S:g} s to decode; send it in parts", param="file"
                ) from None
        self._check(process.returncode, reply)

    def _check(self, code: int, reply: bytes) -> None:
        if self._is_cancelled:
            raise UnavailableError("the request was cancelled while its sound was decoded")
        if code != 0:
            raise ValidationError(
                f"the sound crashes its decoder ({exit_reason(code)}); send it in another format",
                param="file",
            )
        error = json.loads(reply).get("error")
        if error is not None:
            raise ValidationError(error, param="file")
