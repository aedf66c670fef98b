# SPDX-License-Identifier: Apache-2.0
"""Requests in OpenAI's batch format, one a line, and their answers.

Invariant: every non-blank input line has one output line, even if the request is invalid, unless an earlier run
answered it; those of one run are in input order. Of lines with the same custom_id only the first is a request. A
request without a seed gets one that its custom_id determines, so that a resumed run samples what one run would have.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.batch.client import Ask, BatchResponse
from quire.batch.line_file import LineFile, drop_lines, lock, opened_lines, partial_of, put_in_place
from quire.batch.summary import RunCounts
from quire.entrypoints.openai.parsing import parse_json
from quire.errors import ClientError, PayloadTooLargeError, ValidationError
from quire.progress import Progress

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
    "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
SEEDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # URLs whose requests may have a seed.
ID_PREFIX = "batch_req_"
BEGIN = f'{{"id":"{ID_PREFIX}'.encode()  # Start of each output line.
Call = tuple[str, bytes]  # URL and body of a request.


@dataclass
class EarlierAnswers:
    """Answers of earlier runs: their number by custom_id (None: lines without one), and how many are errors."""

    ids: Counter[str | None]
    num_failed: int = 0


class OutputLine(msgspec.Struct):
    """Output line for one input line; exactly one of `response` and `error` is null."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: dict[str, str] | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


class _Status(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    """As much of an output line as a later run needs."""

    custom_id: str | None
    id: str
    response: _Status | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_written = msgspec.json.Decoder(_Written)


@dataclass(frozen=True)
class InputLine:
    """Input line that has no answer yet: its request, or what is wrong with it."""

    custom_id: str | None
    asked: Call | ClientError


class LineReader:
    """Reader of input lines; skips those that earlier runs answered.

    Args:
        seed: of the engine's configuration, from which the seeds of requests without one are derived.
        max_bytes: limit of a line.
    """

    def __init__(self, earlier: EarlierAnswers, counts: RunCounts, *, seed: int, max_bytes: int) -> None:
        self._answered = earlier.ids
        self._counts = counts
        self._seed, self._max_bytes = seed, max_bytes
        self._seen: set[bytes] = set()

    def read(self, lines: BinaryIO) -> Iterator[InputLine]:
        """Yield the lines that have no answer yet."""
        for text in bounded_lines(lines, self._max_bytes):
            line = self._read(text)
            if line is None:
                self._counts.num_skipped += 1
            else:
                yield line

    def _read(self, text: bytes | None) -> InputLine | None:
        custom_id: str | None = None
        asked: Call | ClientError
        try:
            if text is None:
                raise PayloadTooLargeError(f"the line is longer than {self._max_bytes} bytes")
            request = parse_json(text)
            given = request.get("custom_id")
            custom_id = given if isinstance(given, str) else None
            asked = _checked(request, self._seed)
        except ClientError as error:
            asked = error
        if self._is_answered(custom_id):
            return None
        try:
            if custom_id is not None:
                self._check_first(custom_id)
        except ValidationError as error:
            asked = error
        return InputLine(custom_id, asked)

    def _is_answered(self, custom_id: str | None) -> bool:
        is_there = self._answered[custom_id] > 0
        self._answered[custom_id] -= is_there
        if is_there and custom_id is not None:
            self._seen.add(_digest(custom_id))
        return is_there

    def _check_first(self, custom_id: str) -> None:
        """Raise ValidationError if an earlier line has this id."""
        digest = _digest(custom_id)
        if digest in self._seen:
            raise ValidationError(
                f"custom_id {custom_id!r:.80} is that of an earlier line; each line needs one of its own",
                param="custom_id",
            )
        self._seen.add(digest)


async def answer_line(ask: Ask, line: InputLine) -> OutputLine:
    """Return the answer to one line.

    Raises:
        QuireError: the engine has failed.
    """
    answer = OutputLine(f"{ID_PREFIX}{secrets.token_hex(12)}", line.custom_id, None, None)
    if isinstance(line.asked, ClientError):
        answer.error = {"code": line.asked.type, "message": str(line.asked)}
    else:
        answer.response = await ask(*line.asked)
    return answer


class AnswerLines:
    """Writer of answers that counts them."""

    def __init__(self, out: LineFile, counts: RunCounts, progress: Progress) -> None:
        self._out, self._counts, self._progress = out, counts, progress

    def write(self, answer: OutputLine) -> None:
        """Write one answer; raises QuireError if it cannot be written."""
        self._out.append(answer)
        self._counts.num_answered += 1
        self._counts.num_failed += answer.failed
        self._progress.update()


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """Yield the non-blank lines; None for a line longer than `max_bytes`, whose rest is skipped."""
    while line := file.readline(max_bytes + 2):
        if len(line.rstrip(b"\r\n")) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield None
        elif line.strip():
            yield line


def _checked(request: dict[str, Any], seed: int) -> Call:
    """Return URL and body of a line.

    Raises:
        ValidationError: a field does not match the batch format.
    """
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str):
        raise ValidationError("custom_id must be text", param="custom_id")
    if request.get("method", "POST") != "POST":
        raise ValidationError("method must be POST", param="method")
    if url not in URLS:
        raise ValidationError(f"url must be one of {', '.join(URLS)}", param="url")
    if not isinstance(body, dict):
        raise ValidationError("body must be a JSON object", param="body")
    if body.get("stream"):
        raise ValidationError("body.stream is not supported in a batch", param="body.stream")
    if url in SEEDED and body.get("seed") is None:
        body = {**body, "seed": seed_of(seed, custom_id)}
    return str(url), json.dumps(body).encode()


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a request that brings none: 62 bits of the engine's seed and the request's name."""
    return int.from_bytes(_digest(f"{seed}/{name}")[:8]) >> 2


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:16]


@contextmanager
def opened_output(
    path: Path, *, overwrite: bool = False, retry_failed: bool = False
) -> Iterator[tuple[LineFile, EarlierAnswers]]:
    """Open the output file behind its answers, and count these.

    Args:
        overwrite: write all answers beside the file, and replace it at the end. A run that is ended before is continued
            by the next one without `overwrite`.
        retry_failed: drop the answers that are errors first.

    Raises:
        ConfigError: it holds something else than answers, or another run is writing it.
        OSError: it cannot be opened or rewritten.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which stores nothing
        with open(path, "wb", buffering=0) as out:
            yield LineFile(out), EarlierAnswers(Counter())
        return
    path, partial = path.resolve(), partial_of(path.resolve())
    is_beside = partial.exists() or (overwrite and path.exists() and path.stat().st_size > 0)
    target = partial if is_beside else path
    with ExitStack() as stack:
        if is_beside and path.exists():
            lock(stack.enter_context(open(path, "rb", buffering=0)), path)
        if retry_failed and not overwrite and target.exists():
            drop_lines(target, BEGIN, _failed)
        lines = stack.enter_context(opened_lines(target, BEGIN, anew=overwrite and is_beside))
        try:
            yield lines, _earlier(lines)
        except BaseException:
            if is_beside and lines.is_empty:
                partial.unlink()
            raise
        if is_beside:
            lines.sync()
            put_in_place(partial, path)


@contextmanager
def opened_stream(out: BinaryIO) -> Iterator[tuple[LineFile, EarlierAnswers]]:
    """Return a stream, such as standard output, as an output without earlier answers."""
    yield LineFile(out), EarlierAnswers(Counter())


def _earlier(lines: LineFile) -> EarlierAnswers:
    earlier = EarlierAnswers(Counter())
    for number, (_, line) in enumerate(lines.read(), 1):
        try:
            written = _written.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise lines.foreign(number) from None
        earlier.ids[written.custom_id] += 1
        earlier.num_failed += written.failed
    return earlier


def _failed(line: bytes) -> bool:
    return _written.decode(line).failed
