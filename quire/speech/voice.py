# SPDX-License-Identifier: Apache-2.0
"""Voice activity detection by Silero's network (Silero Team, 2021, MIT) in numpy; its weights are a package's.

The network maps 512 samples at 16 kHz, and the 64 before them, to the probability of speech: a short-time Fourier
transform, four convolutions and an LSTM.

Shapes: N chunks. Invariant: memory holds a block of the sound at a time, and blocks are cut at the same places always.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.multimodal.arrays import read_arrays
from quire.speech.features import RATE, Samples
from quire.speech.windows import PcmFile, Window, windows_of

PACKAGE, FILE = "silero_vad", "data/silero_vad_16k.safetensors"
INSTALL = "pip install --no-deps silero-vad"
PARAM = "vad_filter"
CHUNK, CONTEXT = 512, 64
BLOCK_CHUNKS = 1024  # 33 s
FFT, FFT_STEP, BINS, SIZE = 256, 128, 129, 128
SHAPES = {
    "stft_conv.weight": (2 * BINS, 1, FFT),
    **{f"conv{number}.bias": (outputs,) for number, outputs in enumerate((128, 64, 64, 128), start=1)},
    "conv1.weight": (128, BINS, 3),
    "conv2.weight": (64, 128, 3),
    "conv3.weight": (64, 64, 3),
    "conv4.weight": (128, 64, 3),
    **{f"lstm_cell.weight_{side}": (4 * SIZE, SIZE) for side in ("ih", "hh")},
    **{f"lstm_cell.bias_{side}": (4 * SIZE,) for side in ("ih", "hh")},
    "final_conv.weight": (1, SIZE, 1),
    "final_conv.bias": (1,),
}
STRIDES = {"conv1": 1, "conv2": 2, "conv3": 2, "conv4": 1}
SPEECH_PROB, SILENCE_PROB = 0.5, 0.35
MIN_SPEECH, MIN_SILENCE, PADDING = RATE // 4, RATE, 2 * RATE // 5

Floats = NDArray[np.float32]


class VoiceDetector:
    """Network with its weights.

    Raises:
        ValueError: a weight is missing or has another shape.
    """

    def __init__(self, weights: Mapping[str, NDArray[Any]]) -> None:
        for name, shape in SHAPES.items():
            found = weights[name].shape if name in weights else None
            if found != shape:
                raise ValueError(f"{name} must be {shape}, and is {found}")
        self._weights = {name: np.asarray(weights[name], dtype=np.float32) for name in SHAPES}

    def probabilities(self, sound: PcmFile) -> Iterator[Floats]:
        """Yield the probabilities of speech in a sound's chunks, block by block."""
        state = np.zeros((2, SIZE), dtype=np.float32)
        size = BLOCK_CHUNKS * CHUNK
        for start in range(0, sound.num_samples, size):
            end = min(start + size, sound.num_samples)
            before = min(CONTEXT, start)
            samples = np.zeros(CONTEXT + size, dtype=np.float32)
            samples[CONTEXT - before : CONTEXT + end - start] = sound.read(start - before, end)
            features = self._features(
                np.lib.stride_tricks.sliding_window_view(samples, CONTEXT + CHUNK)[::CHUNK]
            )
            yield self._recur(features[: -(-(end - start) // CHUNK)], state)

    def next_probability(self, samples: Samples, state: Floats) -> float:
        """Samples [1, 576] of the next chunk, with those before it; the LSTM's state [2, 128] is changed."""
        return float(self._recur(self._features(samples), state)[0])

    def stream(self) -> VoiceStream:
        """Return the detection in a sound that arrives chunk by chunk."""
        return VoiceStream(self)

    def _features(self, chunks: Samples) -> Floats:
        """chunks [N, 576] -> [N, 128]."""
        padded = np.pad(chunks, ((0, 0), (0, CONTEXT)), mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, FFT, axis=1)[:, ::FFT_STEP]
        waves = frames @ self._weights["stft_conv.weight"][:, 0].T
        x = np.sqrt(waves[..., :BINS] ** 2 + waves[..., BINS:] ** 2)
        for name, stride in STRIDES.items():
            x = self._convolved(name, x, stride)
        return x[:, 0]

    def _convolved(self, name: str, x: Floats, stride: int) -> Floats:
        """x [N, frames, K] -> [N, frames / stride, outputs], with a kernel of three and no negative output."""
        weight = self._weights[f"{name}.weight"]
        padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
        taps = [padded[:, tap : tap + x.shape[1] : stride] @ weight[:, :, tap].T for tap in range(3)]
        summed: Floats = np.maximum(sum(taps) + self._weights[f"{name}.bias"], 0.0)
        return summed

    def _recur(self, features: Floats, state: Floats) -> Floats:
        """features [N, 128] -> probabilities [N]; the LSTM's state [2, 128] is changed."""
        weights = self._weights
        bias = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        given, recurrent = features @ weights["lstm_cell.weight_ih"].T + bias, weights["lstm_cell.weight_hh"]
        outputs = np.empty((len(features), SIZE), dtype=np.float32)
        hidden, cell = state
        for number, own in enumerate(given):
            gates = own + recurrent @ hidden
            let_in, keep, let_out = (_sigmoid(gates[at * SIZE : (at + 1) * SIZE]) for at in (0, 1, 3))
            cell = keep * cell + let_in * np.tanh(gates[2 * SIZE : 3 * SIZE])
            hidden = let_out * np.tanh(cell)
            outputs[number] = hidden
        state[:] = hidden, cell
        return _sigmoid(
            np.maximum(outputs, 0.0) @ weights["final_conv.weight"][0, :, 0] + weights["final_conv.bias"]
        )


class VoiceStream:
    """Detection in a sound that arrives chunk by chunk."""

    def __init__(self, detector: VoiceDetector) -> None:
        self._detector = detector
        self._state = np.zeros((2, SIZE), dtype=np.float32)
        self._before = np.zeros(CONTEXT, dtype=np.float32)

    def feed(self, chunk: Samples) -> float:
        """Return the probability of speech in the next 512 samples."""
        samples = np.concatenate([self._before, chunk])
        self._before = samples[-CONTEXT:]
        return self._detector.next_probability(samples[None], self._state)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float32)


class SpeechSpan(NamedTuple):
    """Samples [start, end) with speech."""

    start: int
    end: int


def spans_of(probabilities: Iterator[Floats], num_samples: int) -> Iterator[SpeechSpan]:
    """Yield the spans with speech, from the probabilities of chunks.

    Speech begins above 0.5 and ends with a second below 0.35. Spans under a quarter of a second are dropped, the others
    are widened by 0.4 s, and joined where they meet then.
    """
    last: SpeechSpan | None = None
    for span in _raw_spans(probabilities):
        if span.end - span.start < MIN_SPEECH:
            continue
        wide = SpeechSpan(max(0, span.start - PADDING), min(num_samples, span.end + PADDING))
        if last is not None and wide.start <= last.end:
            last = SpeechSpan(last.start, wide.end)
            continue
        if last is not None:
            yield last
        last = wide
    if last is not None:
        yield last


def _raw_spans(probabilities: Iterator[Floats]) -> Iterator[SpeechSpan]:
    start: int | None = None
    end = chunk_start = 0
    for probability in (float(one) for block in probabilities for one in block):
        if probability >= SPEECH_PROB or (start is not None and probability >= SILENCE_PROB):
            start = chunk_start if start is None else start
            end = chunk_start + CHUNK
        elif start is not None and chunk_start + CHUNK - end >= MIN_SILENCE:
            yield SpeechSpan(start, end)
            start = None
        chunk_start += CHUNK
    if start is not None:
        yield SpeechSpan(start, end)


def voiced_windows(sound: PcmFile, window_samples: int, detector: VoiceDetector) -> Iterator[Window]:
    """Yield windows of at most `window_samples` that cover all speech, cut in pauses, and in a long speech's quiet."""
    open_at: SpeechSpan | None = None
    for span in spans_of(detector.probabilities(sound), sound.num_samples):
        if open_at is not None and span.end - open_at.start <= window_samples:
            open_at = SpeechSpan(open_at.start, span.end)
            continue
        if open_at is not None:
            yield from windows_of(sound, window_samples, *open_at)
        open_at = span
    if open_at is not None:
        yield from windows_of(sound, window_samples, *open_at)


@functools.cache
def load_detector() -> VoiceDetector:
    """Return the detector with the weights of the package `silero-vad`, of which no code runs.

    Raises:
        ValidationError: it is not installed, or its weights are others.
    """
    found = importlib.util.find_spec(PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    path = next((one for one in (Path(folder) / FILE for folder in folders) if one.is_file()), None)
    if path is None:
        raise ValidationError(
            f"{PARAM} and server_vad need the weights of silero-vad on the server: {INSTALL}", param=PARAM
        )
    try:
        return VoiceDetector(read_arrays(path.read_bytes()))
    except ValueError as error:
        raise ValidationError(f"{PARAM} cannot use the installed silero-vad: {error}", param=PARAM) from None
