# SPDX-License-Identifier: Apache-2.0
"""Transcription for the server: windows of a sound as concurrent requests, their results in order.

Invariant: the event loop neither decodes nor computes features; threads do, in bounded number. Closing the generator of
a transcription aborts its requests, kills its decoder and removes its files.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import EngineError
from quire.outputs import RequestOutput
from quire.speech.requests import Ask, SpeechOptions
from quire.speech.store import Decoding, OwnedPcm, SpeechStore
from quire.speech.transcriber import Job, Transcriber
from quire.speech.transcript import Transcription, WindowText, transcription_of
from quire.speech.vocabulary import read_vocabulary
from quire.speech.windows import Window, windows_of

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

T = TypeVar("T")
MAX_WINDOWS = 4  # Of one sound at once, so that a long one leaves room for others.
NUM_THREADS = 2


class SpeechDesk:
    """Transcription on an asynchronous engine; one per server process."""

    def __init__(self, engine: AsyncLLM) -> None:
        assert engine.tokenizer is not None, "a model that transcribes has a tokenizer"
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._words = read_vocabulary(engine.config, engine.tokenizer.file)
        self.store = SpeechStore(self._words)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-speech")

    def checked(self, options: SpeechOptions) -> SpeechOptions:
        """Return options with the language's code. Raises ValidationError."""
        self._words.check_task(options.task)
        return replace(options, language=self._words.checked_language(options.language))

    async def transcribe(
        self, source: Path, options: SpeechOptions, request_id: str, **terms: Any
    ) -> AsyncGenerator[Transcription, None]:
        """Yield the transcript so far after each window; the last one is whole.

        Args:
            source: sound file.
            options: checked.
            terms: of `AsyncLLM.generate`.

        Raises:
            ValidationError: the sound or the prompt is invalid; QuireError: the engine failed.
        """
        sound = await self._decoded(source)
        try:
            run = _Run(self, sound, self._transcriber(options), request_id, terms)
            async with aclosing(run.parts()) as parts:
                done: list[WindowText] = []
                async for part in parts:
                    done.append(part)
                    yield transcription_of(self._words, done, run.language, options.task, sound.seconds)
        finally:
            sound.close()

    async def in_thread(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run blocking work of a sound."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def generate(
        self, ask: Ask, request_id: str, terms: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a request."""
        return self._engine.generate(ask.prompt, ask.params, request_id, **terms)

    def windows(self, sound: OwnedPcm) -> Iterator[Window]:
        """Return a sound's windows."""
        return windows_of(sound, self._words.window_samples)

    def _transcriber(self, options: SpeechOptions) -> Transcriber:
        tokenizer = self._tokenizer
        return Transcriber(
            self._words,
            options,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            lambda tokens: tokenizer.decode(tokens),
        )

    async def _decoded(self, source: Path) -> OwnedPcm:
        decoding = Decoding()
        work = asyncio.ensure_future(self.in_thread(self.store.decode, source, decoding))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            decoding.cancel()
            work.add_done_callback(_close_result)
            raise


def _close_result(work: asyncio.Future[OwnedPcm]) -> None:
    """Remove the samples that nobody waits for any more."""
    if not work.cancelled() and work.exception() is None:
        work.result().close()


class _Run:
    """Transcription of one sound; `language` is known before the first part."""

    def __init__(
        self,
        desk: SpeechDesk,
        sound: OwnedPcm,
        transcriber: Transcriber,
        request_id: str,
        terms: dict[str, Any],
    ) -> None:
        self._desk = desk
        self._sound = sound
        self._transcriber = transcriber
        self._id = request_id
        self._terms = terms
        self._numbers = itertools.count()
        self._previous = transcriber.previous()
        self.language = transcriber.options.language or ""

    async def parts(self) -> AsyncGenerator[WindowText, None]:
        """Yield the results of windows, in order."""
        windows = self._desk.windows(self._sound)
        if not self.language:
            self.language = await self._detected(next(self._desk.windows(self._sound)))
        tasks = deque(map(self._start, itertools.islice(windows, MAX_WINDOWS)))
        try:
            while tasks:
                part = await tasks[0]
                tasks.popleft()
                tasks.extend(map(self._start, itertools.islice(windows, 1)))
                yield part
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, window: Window) -> asyncio.Task[WindowText]:
        return asyncio.create_task(self._window(window))

    async def _window(self, window: Window) -> WindowText:
        audio = await self._desk.in_thread(self._desk.store.features, self._sound, window)
        return await self._finished(self._transcriber.window(audio, window, self.language, self._previous))

    async def _detected(self, window: Window) -> str:
        audio = await self._desk.in_thread(self._desk.store.features, self._sound, window)
        return await self._finished(self._transcriber.detect_language(audio))

    async def _finished(self, job: Job[T]) -> T:
        ask = next(job)
        while True:
            output = await self._answer(ask)
            try:
                ask = job.send(output)
            except StopIteration as end:
                result: T = end.value
                return result

    async def _answer(self, ask: Ask) -> RequestOutput:
        last: RequestOutput | None = None
        request_id = f"{self._id}-{next(self._numbers)}"
        async with aclosing(self._desk.generate(ask, request_id, self._terms)) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise EngineError("the engine ended a request without an output")
        return last
