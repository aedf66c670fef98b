# SPDX-License-Identifier: Apache-2.0
"""Process that checks whether constraints compile: `python -m quire.structured_output.check_process BACKEND`.

Invariant: it is single-threaded and compiles nothing itself. A fork with a memory limit does, and is killed on
timeout. It reports ready with an empty frame, reads requests from stdin, writes results to stdout, and exits at the
end of its input. Timeouts are of CPU time, so other load on the machine refuses nothing.
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
from typing import IO, Any

import msgspec

from quire.errors import ValidationError
from quire.json_schema.schema import Path as SchemaPath
from quire.json_schema.schema import pointer
from quire.json_schema.structural_tag import at_origin, from_fields
from quire.processes import limit_memory, read_frame, write_frame
from quire.structured_output.backend import DEAD_END, Grammar, GrammarBackend, GrammarError, Masks, Matcher
from quire.structured_output.backends import resolve_backend
from quire.structured_output.checker import INTERRUPTED, WALL_FACTOR, CheckRequest, CheckResult, is_stopped
from quire.structured_output.normalize import FLEXIBLE_SPACE
from quire.structured_output.vocabulary import MaskBudget
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import BYTES_END, Vocabulary

NICENESS = 10
WATCH_S = 0.5
NUM_WALKS = 4
WALK_STEPS = 32
MAX_PLACES = 200  # most subschemas searched for the cause of an error
WHITE_SPACE = r"[ \t\n\r]*"


def answer_in_fork(question: CheckRequest) -> CheckResult:
    """Check in a fork, which exits when its CPU time is over or its parent is gone."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_child(question, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as result:
        frame = _wait(result, child, question.timeout_s * WALL_FACTOR)
    if frame is None:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    answer = _answer(question, frame, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    return msgspec.structs.replace(answer, cpu_s=usage.ru_utime + usage.ru_stime)


def _answer(question: CheckRequest, frame: bytes | None, signal_number: int) -> CheckResult:
    """Return the result of a fork from its output and terminating signal; 0 is none."""
    if frame:
        return msgspec.msgpack.decode(frame, type=CheckResult)
    if frame is None or signal_number == signal.SIGKILL:
        return INTERRUPTED  # stopped, starved, or killed by the OOM killer or by hand
    if signal_number in (signal.SIGPROF, signal.SIGXCPU):
        error = f"compiling it takes more than {question.timeout_s:g} s of CPU time"
        return CheckResult(error=error, is_of_library=False)
    how = f"signal {signal_number}" if signal_number else "an error"
    error = f"compiling it needs more than {question.memory_mb} MiB or crashes the library ({how})"
    return CheckResult(error=error, is_of_library=False)


def check(question: CheckRequest) -> CheckResult:
    """Compile, compute the first mask, and walk some steps."""
    try:
        backend = resolve_backend(question.backend)(Vocabulary.from_bytes(question.special))
        params = backend.prepare(question.params)
        _check_white_space(backend, params)
        grammar = _try(backend, params)
        for one in _from_fields(params):  # an unsatisfiable part fails at its start
            _try(backend, _alone(one, params))
    except GrammarError as error:
        return _located(question, str(error))
    budget = MaskBudget(question.params, question.mask_time_ms)
    try:
        _walk(grammar, len(backend.vocabulary.tokens), budget)
    except GrammarError as error:
        return CheckResult(error=str(error))
    return CheckResult(error=budget.refusal, is_of_library=False) if budget.is_spent else CheckResult(params)


def _try(backend: GrammarBackend, params: StructuredOutputsParams) -> Grammar:
    grammar = backend.compile(params)
    grammar.new_matcher().fill(Masks(1, len(backend.vocabulary.tokens)), 0)
    return grammar


def _walk(grammar: Grammar, vocab_size: int, budget: MaskBudget) -> None:
    """Take a step after each first token, then many along a few texts, until the budget is spent.

    Raises:
        GrammarError: a limit of the library is exceeded.
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
    """Return the allowed tokens without end tokens; none at a dead end."""
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
    """Check that a whitespace pattern matches only whitespace."""
    pattern = params.whitespace_pattern
    if not pattern or pattern == FLEXIBLE_SPACE:
        return
    try:
        backend.compile(StructuredOutputsParams(regex=pattern))
    except GrammarError as error:
        raise GrammarError(f"whitespace_pattern: {error}") from None
    if backend.matches_beyond(pattern, WHITE_SPACE):
        raise GrammarError("whitespace_pattern must match spaces, tabs and line ends only")


def _located(question: CheckRequest, error: str) -> CheckResult:
    """Return the error with a pointer to the innermost schema that has it."""
    if question.params.json is not None:
        place = _failing_path(question, json.loads(str(question.params.json)), error)
        return CheckResult(error=error if place is None else f"at {pointer(place)}: {error}")
    for one in _from_fields(question.params):
        refusal = _refusal_of(question, one, error)
        if refusal is not None:
            return CheckResult(error=refusal.message, field=refusal.param or "")
    return CheckResult(error=error)


def _from_fields(params: StructuredOutputsParams) -> list[dict[str, Any]]:
    """Return the parts of a tag that come from fields of the request."""
    return from_fields(json.loads(params.structural_tag)) if isinstance(params.structural_tag, str) else []


def _alone(one: dict[str, Any], params: StructuredOutputsParams) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=one, whitespace_pattern=params.whitespace_pattern)


def _refusal_of(question: CheckRequest, one: dict[str, Any], error: str) -> ValidationError | None:
    """Return the error as one of this part of a tag, if the part causes it."""
    if "json_schema" in one:
        place = _failing_path(question, one["json_schema"], error)
        return None if place is None else at_origin(one["origin"], place, error)
    backend = resolve_backend(question.backend)(Vocabulary.from_bytes(question.special))
    try:
        _try(backend, _alone(one, question.params))
    except GrammarError as found:
        field = one["origin"][0]
        return ValidationError(f"{field} is refused: {error}", param=field) if str(found) == error else None
    return None


def _failing_path(question: CheckRequest, schema: dict[str, Any], error: str) -> SchemaPath | None:
    """Return the path of the innermost part of a schema that has an error."""
    places = sorted(_object_paths(schema, ()), key=lambda place: -len(place[0]))[:MAX_PLACES]
    backend = resolve_backend(question.backend)(Vocabulary.from_bytes())
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


def _object_paths(value: Any, path: SchemaPath) -> Iterator[tuple[SchemaPath, dict[str, Any]]]:
    """Yield every object in a document, not only schemas, with its path."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from _object_paths(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _object_paths(inner, (*path, str(index)))


def _run_child(question: CheckRequest, writing: int, parent: int) -> None:
    """Write one result and exit; `parent` is passed in, because this process may be an orphan already."""
    log = os.dup(2)
    # Detach from the parent's pipes, and silence a crashing library.
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    try:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
        _limit(question)
        with os.fdopen(writing, "wb") as out:
            out.write(msgspec.msgpack.encode(check(question)))
    except BaseException:
        os.dup2(log, 2)
        traceback.print_exc()
    finally:
        os._exit(0)


def _exit_with(parent: int) -> None:
    """Exit when the parent, which would kill this process, is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _limit(question: CheckRequest) -> None:
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, question.timeout_s)  # its signal kills the process
    seconds = math.ceil(question.timeout_s) + 1  # in case the library resets the timer
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # the system has no such file or limit
        limit_memory(question.memory_mb * 2**20)


def _wait(result: IO[bytes], child: int, timeout_s: float) -> bytes | None:
    """Return all output of the child; None if it is stopped or does not exit in time."""
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
        answer = answer_in_fork(msgspec.msgpack.decode(frame, type=CheckRequest))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
