# SPDX-License-Identifier: Apache-2.0
"""Live transcription over a WebSocket: vLLM's events, JSON texts of one object each.

The client sends `session.update`, `input_audio_buffer.append` (base64 of 16-bit samples, mono), `.commit` and `.clear`;
the server `session.created`, `session.updated`, `transcription.delta`, `transcription.done` and `error`. Samples are
transcribed in windows: one that is full while the client goes on, cut where it is quietest, the rest at a commit. With
`turn_detection` the server commits, too, at the end of each turn (`quire.speech.turns`), and says when turns begin and
end.

Invariant: a session holds at most two windows of samples and `MAX_WAITING` windows that wait; a client that sends
faster is not read from. Its end aborts its requests and removes its files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.errors import ClientError, QuireError, ValidationError
from quire.speech.audio import Sound
from quire.speech.desk import SpeechDesk
from quire.speech.features import RATE, Samples
from quire.speech.formats import TokenUsage, usage_tokens
from quire.speech.requests import SpeechOptions
from quire.speech.resampling import Resampler, make_resampler
from quire.speech.transcript import Transcription
from quire.speech.turns import (
    FIELD,
    Speech,
    Started,
    TurnDetection,
    TurnEvent,
    Turns,
    TurnStopped,
    read_turn_detection,
)
from quire.speech.voice import load_detector
from quire.speech.windows import SEARCHED, quietest

LOW_RATE, HIGH_RATE = 8_000, 48_000
MAX_WAITING = 4
MAX_ERRORS = 16
SETTINGS = ("model", "language", "prompt", "sample_rate", FIELD)
Event = dict[str, Any]


class SessionEndError(Exception):
    """Raised if a session must end; the message is for the client."""


@dataclass(frozen=True)
class Settings:
    """Settings of a session, which `session.update` changes between two texts."""

    options: SpeechOptions
    rate: int = RATE
    turns: TurnDetection | None = None


class SampleBuffer:
    """Samples that wait for a window: at most a window and what one event adds."""

    def __init__(self, window_samples: int) -> None:
        self._window = window_samples
        self._samples = np.empty(0, dtype=np.float32)
        self._resampler: Resampler | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def is_empty(self) -> bool:
        """True before the first samples, and behind a commit."""
        return self._resampler is None

    def add(self, samples: Samples, rate: int) -> None:
        """Add samples."""
        if self._resampler is None:
            self._resampler = make_resampler(rate, RATE)
        self._samples = np.concatenate([self._samples, self._resampler.feed(samples)])

    def pop_window(self) -> Samples | None:
        """Return a full window, cut where it is quietest near its end; None: there are too few samples."""
        if len(self._samples) <= self._window:
            return None
        first = self._window - max(int(self._window * SEARCHED), 1)
        cut = first + quietest(self._samples[first : self._window])
        found, self._samples = self._samples[:cut], self._samples[cut:]
        return found

    def finish(self) -> None:
        """Add what the resampler holds back; windows may follow."""
        if self._resampler is not None:
            self._samples = np.concatenate([self._samples, self._resampler.finish()])

    def pop_rest(self) -> Samples:
        """Return the rest, and begin anew."""
        found, self._samples = self._samples, np.empty(0, dtype=np.float32)
        self._resampler = None
        return found


class _Text:
    """Transcript of one commit as it grows."""

    def __init__(self) -> None:
        self.whole = ""
        self._before = ""
        self.usage = [0, 0, 0]  # positions of sounds, tokens of prompts, sampled tokens

    def growth(self, found: Transcription) -> str:
        """Return what a window's text adds."""
        own = f"{self._before} {found.text}" if self._before and found.text else self._before or found.text
        added, self.whole = own[len(self.whole) :], own
        return added

    def end_window(self, found: Transcription) -> None:
        """Continue with the next window."""
        self._before = self.whole
        counts = (found.num_audio_tokens, found.num_prompt_tokens, found.num_tokens)
        self.usage = [sum(pair) for pair in zip(self.usage, counts, strict=True)]

    def total(self) -> TokenUsage:
        """Return the usage."""
        audio, text, sampled = self.usage
        return usage_tokens(
            Transcription("", "", 0.0, num_audio_tokens=audio, num_prompt_tokens=text, num_tokens=sampled)
        )


class Session:
    """One client's session.

    Args:
        send: sends an event; waits while the client does not read.
        checked_model: returns the name of a model that the client may use. Raises QuireError.
        terms: of `AsyncLLM.generate`.
    """

    def __init__(
        self,
        desk: SpeechDesk,
        session_id: str,
        send: Callable[[Event], Awaitable[None]],
        checked_model: Callable[[str], str],
        terms: Event,
    ) -> None:
        self._desk = desk
        self._id = session_id
        self._send = send
        self._checked_model = checked_model
        self._terms = terms
        self._settings = Settings(desk.checked(SpeechOptions(is_live=True)))
        self._buffer = SampleBuffer(desk.window_samples)
        self._waiting: asyncio.Queue[tuple[Samples | None, Settings]] = asyncio.Queue(MAX_WAITING)
        self._num_errors = self._num_windows = self._num_turns = 0
        self._turns: Turns | None = None

    async def run(self, messages: AsyncIterator[str]) -> None:
        """Answer messages until there are no more.

        Raises:
            SessionEndError: the client sends nothing but errors, or the engine failed.
        """
        worker = asyncio.create_task(self._transcribe())
        reader = asyncio.create_task(self._read(messages))
        try:
            await asyncio.wait({worker, reader}, return_when=asyncio.FIRST_COMPLETED)
            for task in (worker, reader):
                if task.done():
                    task.result()
        finally:
            for task in (worker, reader):
                task.cancel()
            await asyncio.gather(worker, reader, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[str]) -> None:
        async for message in messages:
            try:
                await self._handle(_parsed(message))
            except ClientError as error:
                await self._report(error)

    async def _report(self, error: ClientError) -> None:
        """Send a client's mistake back; too many end the session."""
        self._num_errors += 1
        if self._num_errors > MAX_ERRORS:
            raise SessionEndError("the session had too many errors")
        await self._send({"type": "error", "error": str(error), "code": error.type})

    async def _handle(self, event: Event) -> None:
        match event["type"]:
            case "session.update":
                await self._update(self._updated(event))
                await self._send({"type": "session.updated", "session": self._described()})
            case "input_audio_buffer.append":
                await self._append(_samples(event.get("audio")))
            case "input_audio_buffer.commit":
                await self._commit(is_final=event.get("final") is True)
            case "input_audio_buffer.clear":
                self._buffer.pop_rest()
                await self._update(self._settings)
            case other:
                raise ValidationError(
                    f"type is {other!r:.60}; it must be session.update, input_audio_buffer.append, .commit or .clear",
                    param="type",
                )

    async def _update(self, settings: Settings) -> None:
        """Set the settings; the detection of turns, which they may ask for, begins anew."""
        turns = None
        if settings.turns is not None:
            detector = await self._desk.in_thread(load_detector)
            first = 0 if self._turns is None else self._turns.num_samples
            turns = Turns(detector, settings.turns, settings.rate, first)
        self._settings, self._turns = settings, turns

    async def _append(self, samples: Samples) -> None:
        if self._turns is None:
            self._buffer.add(samples, self._settings.rate)
            await self._pass_windows()
            return
        await self._take_turns(await self._desk.in_thread(self._turns.feed, samples))

    async def _take_turns(self, events: list[TurnEvent]) -> None:
        """Send the client where turns begin and end, and pass on their samples."""
        for event in events:
            match event:
                case Started(at_ms):
                    self._num_turns += 1
                    await self._send_turn("speech_started", audio_start_ms=at_ms)
                case Speech(samples):
                    self._buffer.add(samples, RATE)
                    await self._pass_windows()
                case TurnStopped(at_ms):
                    await self._send_turn("speech_stopped", audio_end_ms=at_ms)
                    await self._end_text()
                    await self._send_turn("committed")

    async def _send_turn(self, kind: str, **fields: int) -> None:
        item = f"{self._id}-turn-{self._num_turns}"
        await self._send({"type": f"input_audio_buffer.{kind}", **fields, "item_id": item})

    async def _pass_windows(self) -> None:
        while (window := self._buffer.pop_window()) is not None:
            await self._waiting.put((window, self._settings))

    async def _commit(self, *, is_final: bool) -> None:
        """End a text: pass on the rest of its samples. An empty commit that is not final only begins a text."""
        if self._turns is not None and self._turns.is_open:
            await self._take_turns(await self._desk.in_thread(self._turns.finish))
            await self._update(self._settings)
        elif not self._buffer.is_empty or is_final:
            await self._end_text()

    async def _end_text(self) -> None:
        self._buffer.finish()
        await self._pass_windows()
        rest = self._buffer.pop_rest()
        if len(rest):
            await self._waiting.put((rest, self._settings))
        await self._waiting.put((None, self._settings))

    def _updated(self, event: Event) -> Settings:
        """Return the settings that an event asks for, in its `session` or beside it. Raises ValidationError."""
        nested = event.get("session", {})
        given = {**nested, **event} if isinstance(nested, dict) else event
        unknown = given.keys() - {"type", "session", "event_id", *SETTINGS}
        if unknown:
            raise ValidationError(
                f"session.update has {min(unknown)!r:.60}; known are {', '.join(SETTINGS)}",
                param=min(unknown)[:64],
            )
        if given.get("model") is not None:
            self._checked_model(_text(given, "model"))
        options, rate = self._settings.options, given.get("sample_rate", self._settings.rate)
        if type(rate) is not int or not LOW_RATE <= rate <= HIGH_RATE:
            raise ValidationError(
                f"sample_rate must be {LOW_RATE} to {HIGH_RATE}, got {rate!r:.40}", param="sample_rate"
            )
        if rate != self._settings.rate and not self._buffer.is_empty:
            raise ValidationError(
                "sample_rate cannot change before a commit of what was sent", param="sample_rate"
            )
        turns = read_turn_detection(given[FIELD]) if FIELD in given else self._settings.turns
        if turns != self._settings.turns and not self._buffer.is_empty:
            raise ValidationError(f"{FIELD} cannot change before a commit of what was sent", param=FIELD)
        if "language" in given:
            options = replace(options, language=_text(given, "language"))
        if "prompt" in given:
            options = replace(options, prompt=_text(given, "prompt"))
        self._desk.check_prompt(options)
        return Settings(self._desk.checked(options), rate, turns)

    def _described(self) -> Event:
        options = self._settings.options
        return {
            "id": self._id,
            "language": options.language,
            "prompt": options.prompt,
            "sample_rate": self._settings.rate,
            FIELD: None if self._settings.turns is None else self._settings.turns.described(),
        }

    async def _transcribe(self) -> None:
        """Transcribe what waits, in order."""
        text = _Text()
        while True:
            samples, settings = await self._waiting.get()
            if samples is None:
                usage = text.total()
                done = {"text": text.whole, "usage": {**_fields(usage)}}
                await self._send({"type": "transcription.done", **done})
                text = _Text()
                continue
            try:
                await self._window(samples, settings.options, text)
            except ClientError as error:
                await self._report(error)
            except QuireError as error:
                raise SessionEndError(f"the samples could not be transcribed: {error}") from None

    async def _window(self, samples: Samples, options: SpeechOptions, text: _Text) -> None:
        self._num_windows += 1
        sound = await self._desk.in_thread(self._desk.store.keep, Sound(RATE, iter([samples[:, None]])))
        last: Transcription | None = None
        try:
            states = self._desk.transcribe_samples(
                sound, options, f"{self._id}-{self._num_windows}", **self._terms
            )
            async with aclosing(states):
                async for last in states:
                    if added := text.growth(last):
                        await self._send({"type": "transcription.delta", "delta": added})
        finally:
            sound.close()
        assert last is not None, "a sound has a transcript"
        text.end_window(last)


def _fields(usage: TokenUsage) -> Event:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
    }


def _text(event: Event, name: str) -> str:
    value = event[name]
    if not isinstance(value, str) or len(value) > 16_384:
        raise ValidationError(f"{name} must be a text of at most 16384 characters", param=name)
    return value


def _parsed(message: str) -> Event:
    """Return a message's event. Raises ValidationError."""
    try:
        event = json.loads(message)
    except (ValueError, RecursionError):
        raise ValidationError("a message must be a JSON object") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ValidationError("a message must be a JSON object with a type", param="type")
    return event


def _samples(audio: object) -> Samples:
    """Return samples from base64 of 16-bit integers, little-endian. Raises ValidationError."""
    if not isinstance(audio, str):
        raise ValidationError("audio must be base64 of 16-bit samples", param="audio")
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise ValidationError("audio is not valid base64", param="audio") from None
    if not data or len(data) % 2:
        raise ValidationError(f"audio must be whole 16-bit samples, got {len(data)} bytes", param="audio")
    return np.asarray(np.frombuffer(data, dtype="<i2") / np.float32(32768), dtype=np.float32)
