# SPDX-License-Identifier: Apache-2.0
"""Transcription for `LLM`: windows of all sounds in rounds of requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.outputs import RequestOutput
from quire.speech.audio import Sound
from quire.speech.requests import FALLBACK_TEMPERATURES, Ask, SpeechOptions
from quire.speech.store import OwnedPcm, SpeechStore
from quire.speech.transcriber import Job, Transcriber
from quire.speech.transcript import Transcription, WindowText, transcription_of
from quire.speech.vocabulary import hears, read_vocabulary
from quire.speech.windows import Window, windows_of

# A path, or samples [T] or [T, channels] with their number per second.
Audio = str | Path | tuple[Any, int]
Generate = Callable[[Sequence[Ask]], list[RequestOutput]]

OFFLINE_MAX_SECONDS = 24 * 3600.0
BLOCK_SAMPLES = 2**16


@dataclass
class _Progress:
    """State of one sound; `parts` are its windows' results by number."""

    sound: OwnedPcm
    transcriber: Transcriber
    language: str
    windows: Iterator[tuple[int, Window]]
    parts: dict[int, WindowText] = field(default_factory=dict)

    def result(self) -> Transcription:
        parts = [self.parts[number] for number in sorted(self.parts)]
        words, options = self.transcriber.words, self.transcriber.options
        return transcription_of(words, parts, self.language, options.task, self.sound.seconds)


class OfflineSpeech:
    """Transcription on an engine in this process.

    Args:
        generate: returns the outputs of requests, in order.

    Raises:
        ValidationError: the model does not transcribe.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, generate: Generate) -> None:
        if not hears(config):
            raise ValidationError(f"{config.model.model} does not transcribe; load a Whisper model")
        self._words = read_vocabulary(config, tokenizer.file)
        self._store = SpeechStore(self._words, OFFLINE_MAX_SECONDS)
        self._tokenizer = tokenizer
        self._generate = generate
        self._width = max(1, min(config.scheduler.max_num_seqs, 32))

    def transcribe(
        self, audio: Sequence[Audio], options: SpeechOptions, use_tqdm: bool
    ) -> list[Transcription]:
        """Return the transcripts of sounds, in order.

        Raises:
            ValidationError: a sound or an option is invalid.
        """
        self._words.check_task(options.task)
        language = self._words.checked_language(options.language)
        options = replace(options, language=language)
        transcriber = Transcriber(self._words, options, self._encode, self._tokenizer_decode)
        previous = transcriber.previous()
        results = []
        with tqdm(total=0, unit="s", desc="Transcribed", disable=not use_tqdm or None) as bar:
            for one in audio:
                with closing(self._opened(one)) as sound:
                    bar.total = (bar.total or 0) + round(sound.seconds)
                    bar.refresh()
                    results.append(self._one(sound, transcriber, previous, bar))
        return results

    def close(self) -> None:
        """Remove all files; idempotent."""
        self._store.close()

    def _one(self, sound: OwnedPcm, transcriber: Transcriber, previous: list[int], bar: Any) -> Transcription:
        windows = windows_of(sound, self._words.window_samples)
        language = transcriber.options.language
        if language is None:
            first = next(windows_of(sound, self._words.window_samples))
            (language,) = self._run([transcriber.detect_language(self._store.features(sound, first))])
        progress = _Progress(sound, transcriber, language, enumerate(windows))
        jobs: dict[int, tuple[Job[WindowText], Ask, Window]] = {}
        while self._top_up(progress, jobs, previous):
            outputs = self._generate([ask for _, ask, _ in jobs.values()])
            for number, output in zip(list(jobs), outputs, strict=True):
                job, _, window = jobs[number]
                try:
                    jobs[number] = (job, job.send(output), window)
                except StopIteration as end:
                    progress.parts[number] = end.value
                    del jobs[number]
                    bar.update(round(window.end_s) - round(window.start_s))
        return progress.result()

    def _top_up(
        self,
        progress: _Progress,
        jobs: dict[int, tuple[Job[WindowText], Ask, Window]],
        previous: list[int],
    ) -> bool:
        """Start jobs of further windows until there are enough; return False if there are none at all."""
        while len(jobs) < self._width:
            following = next(progress.windows, None)
            if following is None:
                break
            number, window = following
            audio = self._store.features(progress.sound, window)
            job = progress.transcriber.window(audio, window, progress.language, previous)
            jobs[number] = (job, next(job), window)
        return bool(jobs)

    def _run(self, jobs: list[Job[Any]]) -> list[Any]:
        """Return the results of jobs of one request each."""
        outputs = self._generate([next(job) for job in jobs])
        return [_ended(job, output) for job, output in zip(jobs, outputs, strict=True)]

    def _opened(self, audio: Audio) -> OwnedPcm:
        if isinstance(audio, str | Path):
            path = Path(audio).expanduser()
            if not path.is_file():
                raise ValidationError(f"there is no file {str(path)!r:.200}", param="audio")
            try:
                return self._store.decode(path)
            except ValidationError as error:
                raise ValidationError(f"{str(path)!r:.200}: {error}", param="audio") from None
        return self._store.keep(_in_memory(audio))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _tokenizer_decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class EngineSpeech(OfflineSpeech):
    """Transcription on an engine that serves nothing else meanwhile.

    Raises:
        ValidationError: the model does not transcribe.
    """

    def __init__(self, engine: LLMEngine) -> None:
        if engine.tokenizer is None:
            raise ValidationError("transcription needs a tokenizer; drop --skip-tokenizer-init")
        self._engine = engine
        self._requests = itertools.count()
        super().__init__(engine.config, engine.tokenizer, self._answered)

    def _answered(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        ids = [str(next(self._requests)) for _ in asks]
        for request_id, ask in zip(ids, asks, strict=True):
            self._engine.add_request(request_id, ask.prompt, ask.params)
        last: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            last.update((output.request_id, output) for output in self._engine.step())
        return [last[request_id] for request_id in ids]


def _ended(job: Job[Any], output: RequestOutput) -> Any:
    try:
        job.send(output)
    except StopIteration as end:
        return end.value
    raise AssertionError("the job has one request")


def _in_memory(audio: tuple[Any, int]) -> Sound:
    """Return a sound of samples in memory.

    Raises:
        ValidationError: they are no numbers of the form [T] or [T, channels] with a rate.
    """
    wrong = "audio must be a path, or a pair of samples [T] or [T, channels] and their number per second"
    if not isinstance(audio, tuple) or len(audio) != 2 or not isinstance(audio[1], int | np.integer):
        raise ValidationError(wrong, param="audio")
    samples = np.asarray(audio[0])
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim != 2 or samples.shape[1] == 0 or samples.dtype.kind not in "iuf":
        raise ValidationError(wrong, param="audio")
    if samples.dtype.kind != "f":
        raise ValidationError(
            f"{wrong}; samples must be floats in [-1, 1], got {samples.dtype}", param="audio"
        )
    starts = range(0, len(samples), BLOCK_SAMPLES)
    return Sound(int(audio[1]), (samples[at : at + BLOCK_SAMPLES].astype(np.float32) for at in starts))


def options_of(
    language: str | None, task: str, prompt: str, temperature: float | Sequence[float] | None, **rest: Any
) -> SpeechOptions:
    """Return options from a caller's arguments; a single temperature is the only one tried."""
    if temperature is None:
        temperatures: tuple[float, ...] = FALLBACK_TEMPERATURES
    elif isinstance(temperature, int | float):
        temperatures = (float(temperature),)
    else:
        temperatures = tuple(map(float, temperature))
    if not temperatures:
        raise ValidationError("temperature must be a number or a list that is not empty", param="temperature")
    return SpeechOptions(language, task, prompt, temperatures=temperatures, **rest)
