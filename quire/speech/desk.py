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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import EngineError
from quire.outputs import RequestOutput
from quire.speech.alignment import UTILITY, token_times
from quire.speech.requests import Ask, SpeechOptions, TimesAsk
from quire.speech.store import Decoding, OwnedPcm, SpeechStore
from quire.speech.transcriber import Job, Transcriber
from quire.speech.transcript import Transcription, WindowText, joined, transcription_of
from quire.speech.vocabulary import read_vocabulary
from quire.speech.windows import Window

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.openai.state import ServerState

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

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self._words.window_samples

    def check_prompt(self, options: SpeechOptions) -> None:
        """Raise ValidationError if the prompt of options cannot be used."""
        self._transcriber(options).previous()

    def checked(self, options: SpeechOptions) -> SpeechOptions:
        """Return options with the language's code. Raises ValidationError."""
        self._words.check_task(options.task)
        return replace(options, language=self._words.checked_language(options.language))

    async def transcribe(
        self, source: Path, options: SpeechOptions, request_id: str, **terms: Any
    ) -> AsyncGenerator[Transcription, None]:
        """Yield the transcript so far after each window, or whenever it has grown if it is live; the last is whole.

        Args:
            source: sound file.
            options: checked.
            terms: of `AsyncLLM.generate`.

        Raises:
            ValidationError: the sound or the prompt is invalid; QuireError: the engine failed.
        """
        sound = await self._decoded(source)
        try:
            async with aclosing(self.transcribe_samples(sound, options, request_id, **terms)) as states:
                async for state in states:
                    yield state
        finally:
            sound.close()

    def transcribe_samples(
        self, sound: OwnedPcm, options: SpeechOptions, request_id: str, **terms: Any
    ) -> AsyncGenerator[Transcription, None]:
        """Yield transcripts of decoded samples, which stay their caller's; see `transcribe`."""
        return _Run(self, sound, self._transcriber(options), request_id, terms).states()

    def close(self) -> None:
        """Remove all files, and end the threads when their work is done; idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    async def in_thread(self, function: Callable[..., T], /, *args: Any) -> T:
        """Run blocking work of a sound."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def generate(
        self, ask: Ask, request_id: str, terms: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a request."""
        return self._engine.generate(ask.prompt, ask.params, request_id, **terms)

    async def times(self, ask: TimesAsk) -> list[float]:
        """Return the times of a window's tokens, in seconds of the window."""
        weights = await self._engine.call_core(UTILITY, ask.alignment, ask.item)
        return await self.in_thread(token_times, weights)

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


def desk_of(app: Starlette) -> SpeechDesk:
    """Return the desk of a server's app, made at the first request and closed with the server."""
    desk: SpeechDesk | None = getattr(app.state, "speech", None)
    if desk is None:
        server: ServerState = app.state.server
        desk = app.state.speech = SpeechDesk(server.engine)
        server.closers.append(desk.close)
    return desk


def _close_result(work: asyncio.Future[OwnedPcm]) -> None:
    """Remove the samples that nobody waits for any more."""
    if not work.cancelled() and work.exception() is None:
        work.result().close()


class _Started:
    """Window whose text is being sampled; `text` is what of it is final."""

    def __init__(self) -> None:
        self.text = ""
        self.task: asyncio.Task[WindowText]


class _Run:
    """Transcription of one sound, of which a few windows are in flight at once."""

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
        self._language = transcriber.options.language or ""
        self._started = deque[_Started]()
        self._done: list[WindowText] = []
        self._has_news = asyncio.Event()

    async def states(self) -> AsyncGenerator[Transcription, None]:
        """Yield the transcript so far, as windows end and live texts grow."""
        desk, vad_filter = self._desk, self._transcriber.options.vad_filter
        if not self._language:
            first = await desk.in_thread(partial(desk.store.first_window, self._sound, vad_filter=vad_filter))
            self._language = await self._detected(first)
        windows = desk.store.windows(self._sound, vad_filter=vad_filter)
        try:
            await self._top_up(windows)
            while self._started:
                first_one = self._started[0]
                if first_one.task.done():
                    self._done.append(first_one.task.result())
                    self._started.popleft()
                    yield self._so_far("")
                    await self._top_up(windows)
                    continue
                await self._has_news.wait()
                self._has_news.clear()
                if first_one.text and not first_one.task.done():
                    yield self._so_far(first_one.text)
            if not self._done:
                yield self._so_far("")
        finally:
            await self._cancel()

    def _so_far(self, growing: str) -> Transcription:
        """Return the transcript of the windows that are done, and of the next one's text as far as it is final."""
        words, task = self._transcriber.words, self._transcriber.options.task
        found = transcription_of(words, self._done, self._language, task, self._sound.seconds)
        return replace(found, text=joined(found.segments, growing)) if growing else found

    async def _top_up(self, windows: Iterator[Window]) -> None:
        """Start windows until there are enough."""
        while len(self._started) < MAX_WINDOWS:
            window = await self._desk.in_thread(next, windows, None)
            if window is None:
                break
            started = _Started()
            started.task = asyncio.create_task(self._window(window, started))
            started.task.add_done_callback(lambda _: self._has_news.set())
            self._started.append(started)

    async def _cancel(self) -> None:
        for one in self._started:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in self._started), return_exceptions=True)

    async def _window(self, window: Window, started: _Started) -> WindowText:
        audio = await self._desk.in_thread(self._desk.store.features, self._sound, window)
        job = self._transcriber.window(audio, window, self._language, self._previous)
        return await self._finished(job, started)

    async def _detected(self, window: Window) -> str:
        audio = await self._desk.in_thread(self._desk.store.features, self._sound, window)
        return await self._finished(self._transcriber.detect_language(audio), _Started())

    async def _finished(self, job: Job[T], started: _Started) -> T:
        ask = next(job)
        while True:
            answer = self._answer(ask, started) if isinstance(ask, Ask) else self._desk.times(ask)
            try:
                ask = job.send(await answer)
            except StopIteration as end:
                result: T = end.value
                return result

    async def _answer(self, ask: Ask, started: _Started) -> RequestOutput:
        last: RequestOutput | None = None
        request_id = f"{self._id}-{next(self._numbers)}"
        async with aclosing(self._desk.generate(ask, request_id, self._terms)) as outputs:
            async for last in outputs:
                if ask.is_live and not last.finished:
                    started.text = self._transcriber.text_so_far(last)
                    self._has_news.set()
        if last is None:
            raise EngineError("the engine ended a request without an output")
        return last
