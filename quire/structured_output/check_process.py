"""The process that finds out whether constraints compile: `python -m quire.structured_output.check_process BACKEND`.

Invariant: single-threaded, and it compiles nothing itself: a fork of it does, with a limit on its memory, and is killed
when its time is over. It says with an empty frame that it is ready, reads questions from its standard input, answers
them on its standard output, and ends with the input. Time is CPU time, so that other work on the machine refuses
nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
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

from quire.errors import ValidationError
from quire.structured_output.backend import (
    DEAD_END,
    Grammar,
    GrammarBackend,
    GrammarError,
    Masks,
    Matcher,
)
from quire.structured_output.backends import resolve_backend
from quire.structured_output.budget import MaskBudget
from quire.structured_output.check_messages import (
    INTERRUPTED,
    WALL_FACTOR,
    Answer,
    Question,
    is_stopped,
    read_frame,
    write_frame,
)
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.pointer import Path as Place
from quire.structured_output.pointer import pointer
from quire.structured_output.settle import FLEXIBLE_SPACE
from quire.structured_output.structural_tag import at_origin, from_fields
from quire.structured_output.vocabulary import BYTES_END, Vocabulary

NICENESS = 10
WATCH_S = 0.5
NUM_WALKS = 4
WALK_STEPS = 32
MAX_PLACES = 200
"""Schemas within a schema that are looked at for the cause of an error."""
WHITE_SPACE = r"[ \t\n\r]*"


def answer_in_fork(question: Question) -> Answer:
    """Let a fork find out, which ends when its CPU time is over, or when nobody wants the answer any more."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(question, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as result:
        frame = _wait(result, child, question.timeout_s * WALL_FACTOR)
    if frame is None:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    answer = _answer(question, frame, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    return msgspec.structs.replace(answer, cpu_s=usage.ru_utime + usage.ru_stime)


def _answer(question: Question, frame: bytes | None, signal_number: int) -> Answer:
    """The answer of a fork that wrote this, and ended by this signal; 0 is none."""
    if frame:
        return msgspec.msgpack.decode(frame, type=Answer)
    if frame is None or signal_number == signal.SIGKILL:
        return INTERRUPTED  # stopped, starved, or killed: for want of memory on the whole machine, or by hand
    if signal_number in (signal.SIGPROF, signal.SIGXCPU):
        error = f"it takes longer to compile than {question.timeout_s:g} s of CPU time"
        return Answer(error=error, is_of_library=False)
    how = f"signal {signal_number}" if signal_number else "an error"
    error = f"it needs more than {question.memory_mb} MiB to compile, or breaks the library ({how})"
    return Answer(error=error, is_of_library=False)


def find_out(question: Question) -> Answer:
    """Compile, ask for the first mask, and go some steps on."""
    try:
        backend = resolve_backend(question.backend)(Vocabulary.of_bytes(question.special))
        params = backend.prepare(question.params)
        _check_white_space(backend, params)
        grammar = _try(backend, params)
        for one in _from_fields(params):  # what nothing fits is seen where it begins
            _try(backend, _alone(one, params))
    except GrammarError as error:
        return _placed(question, str(error))
    budget = MaskBudget(question.params, question.mask_time_ms)
    try:
        _walk(grammar, len(backend.vocabulary.tokens), budget)
    except GrammarError as error:
        return Answer(error=str(error))
    return Answer(error=budget.refusal, is_of_library=False) if budget.is_spent else Answer(params)


def _try(backend: GrammarBackend, params: StructuredOutputsParams) -> Grammar:
    grammar = backend.compile(params)
    grammar.new_matcher().fill(Masks(1, len(backend.vocabulary.tokens)), 0)
    return grammar


def _walk(grammar: Grammar, vocab_size: int, budget: MaskBudget) -> None:
    """Take a step behind each first token, and then many along some texts unless these spend the budget.

    Raises:
        GrammarError: a limit of the library is met.
    """
    matcher, rng = grammar.new_matcher(), random.Random(0)
    for first in _allowed(matcher, vocab_size):
        if not (matcher.advance(first) and _allowed(matcher, vocab_size)):
            matcher = grammar.new_matcher()
            continue
        matcher.rollback(1)
    for _ in range(NUM_WALKS):
        matcher = grammar.new_matcher()
        for _ in range(WALK_STEPS):
            started_ns = time.process_time_ns()
            tokens = _allowed(matcher, vocab_size)
            if not tokens or not matcher.advance(rng.choice(tokens)):
                break
            budget.charge(time.process_time_ns() - started_ns, num_steps=2)
            if budget.is_spent:
                return


def _allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    """The tokens that may come next, without ends; none where nothing goes on."""
    masks = Masks(1, vocab_size)
    if matcher.is_complete:
        return []
    try:
        matcher.fill(masks, 0)
    except GrammarError as error:
        if str(error) == DEAD_END:
            return []
        raise
    return [token for token in range(vocab_size) if token != BYTES_END and masks.allows(0, token)]


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
    for one in _from_fields(question.params):
        refusal = _refusal_of(question, one, error)
        if refusal is not None:
            return Answer(error=refusal.message, field=refusal.param or "")
    return Answer(error=error)


def _from_fields(params: StructuredOutputsParams) -> list[dict[str, Any]]:
    """The parts of a tag that are fields of the request."""
    return from_fields(json.loads(params.structural_tag)) if isinstance(params.structural_tag, str) else []


def _alone(one: dict[str, Any], params: StructuredOutputsParams) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=one, whitespace_pattern=params.whitespace_pattern)


def _refusal_of(question: Question, one: dict[str, Any], error: str) -> ValidationError | None:
    """The error as one of this part of a tag, if that has it."""
    if "json_schema" in one:
        place = _place_of(question, one["json_schema"], error)
        return None if place is None else at_origin(one["origin"], place, error)
    backend = resolve_backend(question.backend)(Vocabulary.of_bytes(question.special))
    try:
        _try(backend, _alone(one, question.params))
    except GrammarError as found:
        field = one["origin"][0]
        return ValidationError(f"{field} is refused: {error}", param=field) if str(found) == error else None
    return None


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
    signal.setitimer(signal.ITIMER_PROF, question.timeout_s)  # its signal ends the process
    seconds = math.ceil(question.timeout_s) + 1  # for a library that takes the timer away
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no such file or limit on this system
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + question.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _wait(result: IO[bytes], child: int, timeout_s: float) -> bytes | None:
    """All that the child writes until it ends; None if it is stopped, or does not end in time."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while time.monotonic() < deadline:
        if not select.select([result], [], [], WATCH_S)[0]:
            if is_stopped(child):
                return None
            continue
        part = os.read(result.fileno(), 1 << 16)
        if not part:
            return data
        data += part
    return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resolve_backend(sys.argv[1])  # imported once, here
    write_frame(sys.stdout.buffer, b"")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        answer = answer_in_fork(msgspec.msgpack.decode(frame, type=Question))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
