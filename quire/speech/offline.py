# SPDX-License-Identifier: Apache-2.0
"""Transcription for `LLM`: windows of all sounds in rounds of requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from quire.engine.llm_engine import LLMEngine
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.outputs import RequestOutput
from quire.speech.alignment import UTILITY, token_times
from quire.speech.audio import Sound
from quire.speech.requests import FALLBACK_TEMPERATURES, Ask, SpeechOptions, TimesAsk, check_beam_size
from quire.speech.store import OwnedPcm, SpeechStore
from quire.speech.transcriber import Job, Transcriber
from quire.speech.transcript import Transcription, WindowText, transcription_of
from quire.speech.vocabulary import hears, read_vocabulary
from quire.speech.windows import Window

# A path, or samples [T] or [T, channels] with their number per second.
Audio = str | Path | tuple[Any, int]
Generate = Callable[[Sequence[Ask]], list[RequestOutput]]

OFFLINE_MAX_SECONDS = 24 * 3600.0
BLOCK_SAMPLES = 2**16
MAX_WINDOWS = 32


class _Progress:
    """State of one sound; `parts` are its windows' results by number."""

    def __init__(self, sound: OwnedPcm, windows: Iterator[Window], language: str) -> None:
        self.sound = sound
        self.language = language
        self.parts: dict[int, WindowText] = {}
        self.windows = enumerate(windows)
        self.num_open = 0
        self.is_started = False
        """True if no window is left to start."""

    @property
    def is_done(self) -> bool:
        return self.is_started and not self.num_open

    def result(self, transcriber: Transcriber) -> Transcription:
        parts = [self.parts[number] for number in sorted(self.parts)]
        task = transcriber.options.task
        return transcription_of(transcriber.words, parts, self.language, task, self.sound.seconds)


class _Running(NamedTuple):
    """Job of a window, with its unanswered request."""

    progress: _Progress
    number: int
    window: Window
    job: Job[WindowText]
    ask: Ask | TimesAsk


class OfflineSpeech:
    """Transcription on an engine in this process.

    The windows of all sounds are in flight together, in rounds of one request each. A window's first request is for its
    probability of silence: so all encoders have run before the first text, and the texts are sampled in one batch.
    Encoders that ran between the steps of texts would leave each step a row or two.

    Args:
        generate: returns the outputs of requests, in order.

    Raises:
        ValidationError: the model does not transcribe.
    """

    def __init__(self, engine: LLMEngine, tokenizer: Tokenizer, generate: Generate) -> None:
        config = engine.config
        if not hears(config):
            raise ValidationError(f"{config.model.model} does not transcribe; load a Whisper model")
        self._words = read_vocabulary(config, tokenizer.file)
        self._store = SpeechStore(self._words, OFFLINE_MAX_SECONDS)
        self._tokenizer = tokenizer
        self._generate = generate
        self._engine = engine
        self._width = _most_windows(engine)

    def transcribe(
        self,
        audio: Sequence[Audio],
        options: SpeechOptions,
        use_tqdm: bool,
        refused: dict[int, ValidationError] | None = None,
    ) -> list[Transcription]:
        """Return the transcripts of sounds, in order.

        Args:
            refused: receives the errors of sounds that cannot be read, by index; these have no transcript. None: the
                first ends the call.

        Raises:
            ValidationError: a sound or an option is invalid.
        """
        self._words.check_task(options.task)
        language = self._words.checked_language(options.language)
        options = replace(options, language=language, no_speech=True)
        transcriber = Transcriber(self._words, options, self._encode, self._tokenizer_decode)
        with (
            tqdm(total=0, unit="s", desc="Transcribed", disable=not use_tqdm or None) as bar,
            ExitStack() as opened,
        ):
            return self._all(self._opened_sounds(audio, transcriber, opened, bar, refused), transcriber, bar)

    def close(self) -> None:
        """Remove all files; idempotent."""
        self._store.close()

    def _all(self, sounds: Iterator[_Progress], transcriber: Transcriber, bar: Any) -> list[Transcription]:
        """Return the transcripts; a sound's samples are removed when its last window is done."""
        found: list[_Progress] = []
        waiting = self._started(sounds, transcriber, found)
        running = list(itertools.islice(waiting, self._width))
        while running:
            outputs = self._outputs_of([one.ask for one in running])
            answered = map(self._answered, running, outputs, itertools.repeat(bar))
            running = [one for one in answered if one is not None]
            running += itertools.islice(waiting, self._width - len(running))
        return [progress.result(transcriber) for progress in found]

    def _started(
        self, sounds: Iterator[_Progress], transcriber: Transcriber, found: list[_Progress]
    ) -> Iterator[_Running]:
        """Yield the windows of all sounds, each computed when it is wanted; add the sounds to `found`."""
        previous = transcriber.previous()
        for progress in sounds:
            found.append(progress)
            for number, window in progress.windows:
                features = self._store.features(progress.sound, window)
                job = transcriber.window(features, window, progress.language, previous)
                progress.num_open += 1
                yield _Running(progress, number, window, job, next(job))
            progress.is_started = True
            if progress.is_done:
                progress.sound.close()

    def _outputs_of(self, asks: Sequence[Ask | TimesAsk]) -> list[Any]:
        """Return an answer to each request, in order; those for texts are sampled in one batch."""
        texts = iter(self._generate([ask for ask in asks if isinstance(ask, Ask)]))
        return [next(texts) if isinstance(ask, Ask) else self._times(ask) for ask in asks]

    def _times(self, ask: TimesAsk) -> list[float]:
        return token_times(self._engine.call_core(UTILITY, ask.alignment, ask.item))

    def _answered(self, one: _Running, output: Any, bar: Any) -> _Running | None:
        """Send a job its output; return it with its next request, or None if it is done."""
        progress, window = one.progress, one.window
        try:
            return one._replace(ask=one.job.send(output))
        except StopIteration as end:
            progress.parts[one.number] = end.value
        progress.num_open -= 1
        if progress.is_done:
            progress.sound.close()
        bar.update(round(window.end_s) - round(window.start_s))
        return None

    def _opened_sounds(
        self,
        audio: Sequence[Audio],
        transcriber: Transcriber,
        opened: ExitStack,
        bar: Any,
        refused: dict[int, ValidationError] | None,
    ) -> Iterator[_Progress]:
        """Yield sounds with their language: one by one if it is given, else so many that a batch detects it."""
        language = transcriber.options.language
        size = 1 if language is not None else self._width
        for start in range(0, len(audio), size):
            sounds = self._readable(audio[start : start + size], start, opened, refused)
            bar.total += sum(round(sound.seconds) for sound in sounds)
            bar.refresh()
            languages = [language] * len(sounds) if language else self._detected(sounds, transcriber)
            for sound, spoken in zip(sounds, languages, strict=True):
                windows = self._store.windows(sound, vad_filter=transcriber.options.vad_filter)
                yield _Progress(sound, windows, spoken)

    def _readable(
        self,
        audio: Sequence[Audio],
        start: int,
        opened: ExitStack,
        refused: dict[int, ValidationError] | None,
    ) -> list[OwnedPcm]:
        """Open sounds, the first of which has index `start`; see `transcribe`."""
        sounds: list[OwnedPcm] = []
        for index, one in enumerate(audio, start):
            try:
                sounds.append(opened.enter_context(closing(self._opened(one))))
            except ValidationError as error:
                if refused is None:
                    raise
                refused[index] = error
        return sounds

    def _detected(self, sounds: Sequence[OwnedPcm], transcriber: Transcriber) -> list[str]:
        """Return the language of each sound's first window."""
        firsts = [
            self._store.first_window(sound, vad_filter=transcriber.options.vad_filter) for sound in sounds
        ]
        features = map(self._store.features, sounds, firsts)
        jobs = [transcriber.detect_language(one) for one in features]
        outputs = self._outputs_of([next(job) for job in jobs])
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
        self._requests = itertools.count()
        super().__init__(engine, engine.tokenizer, self._outputs)

    def _outputs(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        ids = [str(next(self._requests)) for _ in asks]
        for request_id, ask in zip(ids, asks, strict=True):
            self._engine.add_request(request_id, ask.prompt, ask.params)
        last: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            last.update((output.request_id, output) for output in self._engine.step())
        return [last[request_id] for request_id in ids]


def _most_windows(engine: LLMEngine) -> int:
    """Return the windows whose encoders' outputs the KV cache holds at once, with their texts."""
    ready, config = engine.core_ready, engine.config
    capacity = ready.num_blocks * ready.block_size // config.model.max_model_len
    return max(1, min(config.scheduler.max_num_seqs, capacity, MAX_WINDOWS))


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
    check_beam_size(rest.get("beam_size", 1))
    return SpeechOptions(language, task, prompt, temperatures=temperatures, **rest)
