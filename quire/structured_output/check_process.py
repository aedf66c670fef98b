"""The process that finds out whether constraints compile: `python -m quire.structured_output.check_process BACKEND`.

Invariant: single-threaded, and it compiles nothing itself: a fork of it does, with a limit on its memory, and is killed
when its time is over. It says with an empty frame that it is ready, reads questions from its standard input, answers
them on its standard output, and ends with the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from quire.structured_output.backend import GrammarBackend, GrammarError, Masks
from quire.structured_output.backends import resolve_backend
from quire.structured_output.check_messages import Answer, Question, read_frame, write_frame
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.pointer import Path as Place
from quire.structured_output.pointer import pointer
from quire.structured_output.settle import FLEXIBLE_SPACE
from quire.structured_output.structural_tag import at_origin, parts_of
from quire.structured_output.vocabulary import Vocabulary

NICENESS = 10
WATCH_S = 0.5
MAX_PLACES = 200
"""Schemas within a schema that are looked at for the cause of an error."""
WHITE_SPACE = r"[ \t\n\r]*"


def answer_in_fork(question: Question) -> Answer:
    """Let a fork find out, and kill it when its time is over, or when nobody wants the answer any more."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(question, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as result:
        frame = _wait(result, question.timeout_s)
    if frame is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if frame:
        return msgspec.msgpack.decode(frame, type=Answer)
    if frame is None:
        return Answer(error=f"it takes longer to compile than {question.timeout_s:g} s")
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error"
    return Answer(
        error=f"it needs more than {question.memory_mb} MiB to compile, or breaks the library ({how})"
    )


def find_out(question: Question) -> Answer:
    """Compile, and ask for the first mask."""
    try:
        backend = resolve_backend(question.backend)(Vocabulary.of_bytes(question.special))
        params = backend.prepare(question.params)
        _check_white_space(backend, params)
        _try(backend, params)
        return Answer(params)
    except GrammarError as error:
        return _placed(question, str(error))


def _try(backend: GrammarBackend, params: StructuredOutputsParams) -> None:
    backend.compile(params).new_matcher().fill(Masks(1, len(backend.vocabulary.tokens)), 0)


def _check_white_space(backend: GrammarBackend, params: StructuredOutputsParams) -> None:
    """A pattern of white space must match nothing else: then there is no text that matches it and not that."""
    pattern = params.whitespace_pattern
    if not pattern or pattern == FLEXIBLE_SPACE:
        return
    try:
        backend.compile(StructuredOutputsParams(regex=pattern))
    except GrammarError as error:
        raise GrammarError(f"whitespace_pattern: {error}") from None
    if backend.matches_beyond(pattern, WHITE_SPACE):
        raise GrammarError("whitespace_pattern must match spaces, tabs and line ends only")


def _placed(question: Question, error: str) -> Answer:
    """The error with a pointer to the innermost schema that has it."""
    if question.params.json is not None:
        place = _place_of(question, json.loads(str(question.params.json)), error)
        return Answer(error=error if place is None else f"at {pointer(place)}: {error}")
    tag = json.loads(str(question.params.structural_tag or "{}"))
    for one in parts_of(tag):
        place = _place_of(question, one["json_schema"], error) if "origin" in one else None
        if place is not None:
            refusal = at_origin(one["origin"], place, error)
            return Answer(error=refusal.message, field=refusal.param or "")
    return Answer(error=error)


def _place_of(question: Question, schema: dict[str, Any], error: str) -> Place | None:
    """Where the innermost part of a schema is that has an error."""
    places = sorted(_places(schema, ()), key=lambda place: -len(place[0]))[:MAX_PLACES]
    backend = resolve_backend(question.backend)(Vocabulary.of_bytes())
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema
    }
    for path, inner in places:
        alone = StructuredOutputsParams(json={**shared, **inner}, whitespace_pattern="")
        try:
            _try(backend, alone)
        except GrammarError as found:
            if str(found) == error:
                return path
    return None


def _places(value: Any, path: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every object in a document, which need not be a schema."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from _places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*path, str(index)))


def _be_child(question: Question, writing: int, parent: int) -> None:
    """Answer once, and end without coming back; `parent` as it was, since who asks for it may be an orphan already."""
    log = os.dup(2)
    # The parent's pipes are not the child's, and a library that breaks has much to say.
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    try:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        _limit(question)
        with os.fdopen(writing, "wb") as out:
            out.write(msgspec.msgpack.encode(find_out(question)))
    except BaseException:
        os.dup2(log, 2)
        traceback.print_exc()
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """End when there is nobody any more to kill this process."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _limit(question: Question) -> None:
    os.nice(NICENESS)
    seconds = int(question.timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no such file or limit on this system
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + question.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _wait(result: IO[bytes], timeout_s: float) -> bytes | None:
    """All that the child writes until it ends; None if it does not end in time."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([result], [], [], left_s)[0]:
            return None
        part = os.read(result.fileno(), 1 << 16)
        if not part:
            return data
        data += part


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resolve_backend(sys.argv[1])  # imported once, here
    write_frame(sys.stdout.buffer, b"")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        answer = answer_in_fork(msgspec.msgpack.decode(frame, type=Question))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
