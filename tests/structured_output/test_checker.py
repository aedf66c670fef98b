# SPDX-License-Identifier: Apache-2.0
"""Any constraint compiles within the limits or is refused with a reason, without effect on other requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import UnavailableError, ValidationError
from quire.structured_output import checker as checker_module
from quire.structured_output.checker import Checker, CheckLimitError, CheckProcess, CheckRequest
from quire.structured_output.normalize import normalize
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings
from tests.fixtures.folded import folded

SETTINGS = StructuredOutputsSettings(compile_timeout_s=60.0)
SLOW = StructuredOutputsParams(json={"type": "integer", "multipleOf": 99_998_300})
"""Takes minutes and gigabytes."""
HANG_S = 120.0


def chain(length: int) -> dict[str, Any]:
    """References one behind the other."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def doubled(depth: int, word: str) -> dict[str, Any]:
    """A schema that is small as a text and 2 ** depth when it is written out."""
    links = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{depth}": {"type": "object"}}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"json": {"enum": [f"value {i}" for i in range(10**5)]}}, "the limit is 65536"),
    "too deep": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "more than 64 levels deep"),
    "far too deep": ({"json": "[" * 60_000}, "more than 64 levels deep"),
    "reference loop": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "at /: no value"),
    "remote reference": ({"json": {"properties": {"a": {"$ref": "http://x.y/z"}}}}, "at /properties/a/$ref: "),
    "file": ({"json": {"$ref": "file:///etc/passwd"}}, "references are not fetched"),
    "30k parentheses": ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "nested parentheses"),
    "30k open parentheses": ({"regex": "(" * 30_000}, "the expression is not supported"),
    "64 KiB of an expression": ({"regex": "a" * 65_537}, "the limit is 65536"),
    "many times of many": ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "too many expressions"),
    "nested Lark": ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "too deeply nested"),
    "nested GBNF": ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "nested too deeply"),
    "products": (
        {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}},
        "schema too large",
    ),
    "overlap": ({"json": {"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}}}, "at /properties/a: oneOf"),
    "nothing": ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "at /: "),
    "no white space": ({"json": {}, "whitespace_pattern": "x?"}, "must match spaces"),
    "broken white space": ({"json": {}, "whitespace_pattern": "("}, "whitespace_pattern: "),
}  # fmt: skip

COMPILED: dict[str, dict[str, Any]] = {
    "backtracking": {"regex": "(a+)+$"},
    "many times": {"regex": "a{1,100000}"},
    "states": {"regex": "(.*a.{12}b){50}"},
    "64 KiB": {"regex": "|".join(f"ab{i}" for i in range(8000))[:65_536]},
    "references": {"json": chain(1500)},
    "doubled any": {"json": doubled(40, "anyOf")},
    "doubled all": {"json": doubled(20, "allOf")},
    "recursion": {"json": {"type": "array", "items": {"$ref": "#"}}},
    "long texts": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "long lists": {"json": {"type": "array", "minItems": 10**6}},
    "ambiguous": {"grammar": 'start: start start | "a"'},
    "2000 properties": {"json": {"properties": {f"p{i}": {} for i in range(2000)}}},
}


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    made = Checker(SETTINGS)
    yield made
    made.close()


def check(checker: Checker, fields: dict[str, Any]) -> StructuredOutputsParams:
    return checked(checker, normalize(StructuredOutputsParams(**fields), SETTINGS))


def checked(checker: Checker, params: StructuredOutputsParams) -> StructuredOutputsParams:
    with checker.turns.take("") as turn:
        turn.granted.result(HANG_S)
        return checker.checked(params, turn)


@pytest.mark.item(12)
@folded("name", REFUSED)
def test_unsupported_constraint_is_refused_with_a_reason(checker: Checker, name: str) -> None:
    fields, reason = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(ValidationError) as error:
        check(checker, fields)
    assert reason in error.value.message
    assert len(error.value.message) < 600
    assert error.value.param in [f"structured_outputs.{field}" for field in fields]
    assert time.monotonic() - started < HANG_S


@folded("name", COMPILED)
def test_constraint_that_only_looks_bad_compiles(checker: Checker, name: str) -> None:
    check(checker, COMPILED[name])


@pytest.mark.item(12)
def test_time_is_limited() -> None:
    checker = Checker(StructuredOutputsSettings(compile_timeout_s=0.3, compile_memory_mb=4096))
    with (
        checker.turns.take("") as turn,
        pytest.raises(CheckLimitError, match=r"compiling it takes more than 0\.3 s of CPU"),
    ):
        checker.checked(SLOW, turn)
    assert (
        turn.cost_s >= 0.1
    )  # the kernel ends it by ticks that it counts, and so somewhat early on a busy machine
    checker.close()


def test_constraint_with_slow_masks_is_refused() -> None:
    """As far as that shows within the first bytes of a text."""
    checker = Checker(StructuredOutputsSettings(mask_time_ms=0.1))
    slow = " | ".join(f'"b{number}"' for number in range(3000))
    with pytest.raises(CheckLimitError, match=r"more than 0\.1 ms of CPU time per step"):
        check(checker, {"grammar": f'start: e\ne: e e e | e e | "a" | {slow}'})
    check(checker, {"grammar": f'start: "a" | {slow}'})
    checker.close()


def test_memory_is_limited() -> None:
    checker = Checker(StructuredOutputsSettings(compile_timeout_s=60.0, compile_memory_mb=16))
    with pytest.raises(CheckLimitError, match="compiling it needs more than 16 MiB"):
        checked(checker, SLOW)
    check(checker, {"regex": "a"})
    checker.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_idle_checkers_that_are_lost_are_replaced(number: signal.Signals) -> None:
    """All of them, however many there are."""
    checker = Checker(SETTINGS)
    checker._idle = [CheckProcess() for _ in range(3)]
    lost = [process._process.pid for process in checker._idle]
    for pid in lost:
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    check(checker, {"regex": "b"})
    assert not {process._process.pid for process in checker._idle} & {*lost}
    checker.close()


def work_of(process: CheckProcess) -> int | None:
    """The process that compiles for a checker, if there is one now."""
    children = Path(f"/proc/{process._process.pid}/task/{process._process.pid}/children")
    with contextlib.suppress(OSError):
        return next(map(int, children.read_text().split()), None)
    return None


def recorded_processes(monkeypatch: pytest.MonkeyPatch) -> list[CheckProcess]:
    """The processes that checkers start from now on."""
    made: list[CheckProcess] = []

    def recorded(backend: str) -> CheckProcess:
        made.append(CheckProcess(backend))
        return made[-1]

    monkeypatch.setattr(checker_module, "CheckProcess", recorded)
    return made


def attack(made: list[CheckProcess], number: signal.Signals, *, fork: bool, times: int) -> None:
    """Send a signal to so many checks, each once it is at work."""
    victims = set[int]()
    while len(victims) < times:
        work = work_of(made[-1]) if made else None
        victim = work if fork or work is None else made[-1]._process.pid
        if victim is not None and victim not in victims:
            victims.add(victim)
            os.kill(victim, number)
        time.sleep(0.01)


@pytest.mark.item(50)
@pytest.mark.parametrize("fork", [False, True], ids=["checker", "fork"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_checker_interrupted_twice_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, fork: bool
) -> None:
    made = recorded_processes(monkeypatch)
    checker = Checker(SETTINGS)
    attacker = threading.Thread(
        target=attack, args=(made, number), kwargs={"fork": fork, "times": 2}, daemon=True
    )
    attacker.start()
    with pytest.raises(UnavailableError, match="killed or stopped"):
        checked(checker, SLOW)
    attacker.join(HANG_S)
    check(checker, {"regex": "b"})
    checker.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_checker_interrupted_once_answers(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    made = recorded_processes(monkeypatch)
    checker = Checker(StructuredOutputsSettings(compile_timeout_s=2.0, compile_memory_mb=4096))
    check(checker, {"regex": "a"})
    os.kill(made[0]._process.pid, number)
    check(checker, {"regex": "hello[0-9]{3}"})
    attacker = threading.Thread(
        target=attack, args=(made, number), kwargs={"fork": True, "times": 1}, daemon=True
    )
    attacker.start()
    with pytest.raises(CheckLimitError, match="compiling it takes more than"):
        checked(checker, SLOW)
    checker.close()


@pytest.mark.item(13)
def test_a_slow_constraint_does_not_keep_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorded_processes(monkeypatch)
    checker = Checker(StructuredOutputsSettings(compile_timeout_s=HANG_S, compile_memory_mb=4096))
    slow = threading.Thread(target=_swallow, args=(checked, checker, SLOW))
    slow.start()
    while not made:
        time.sleep(0.01)
    check(checker, {"regex": "b"})
    assert slow.is_alive()
    checker.close()
    slow.join(HANG_S)
    assert not slow.is_alive()
    with pytest.raises(UnavailableError, match="shutting down"):
        check(checker, {"regex": "c"})


def _swallow(work: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(ValidationError, UnavailableError):
        work(*args)


def test_a_checker_ends_with_its_parent() -> None:
    process = CheckProcess()
    process._to.close()
    assert process._process.wait(HANG_S) == 0
    process._from.close()


def busy_process() -> tuple[CheckProcess, threading.Thread, int]:
    """Return a process whose fork works for long, the thread that waits for its answer, and the fork's pid."""
    process = CheckProcess()
    asking = threading.Thread(
        target=process.ask, args=(CheckRequest(SLOW, (), "auto", HANG_S, 4096, 5.0), HANG_S), daemon=True
    )
    asking.start()
    while (fork := work_of(process)) is None:
        time.sleep(0.01)
    return process, asking, fork


def test_a_fork_ends_with_its_parent() -> None:
    process, asking, fork = busy_process()
    os.kill(process._process.pid, signal.SIGKILL)
    asking.join(HANG_S)
    process.kill()
    wait_for_end(fork)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_check_that_is_stopped_as_a_whole_leaves_nothing() -> None:
    process, asking, fork = busy_process()
    os.killpg(process._process.pid, signal.SIGSTOP)
    asking.join(HANG_S)
    process.kill()
    wait_for_end(fork)


def test_a_grammar_of_llama_cpp_comes_back_as_one_of_lark(checker: Checker) -> None:
    found = check(checker, {"grammar": 'root ::= "a" [0-9]+'})
    assert found.grammar is not None
    assert "start:" in found.grammar
    assert json.loads(json.dumps(found.grammar)) == found.grammar
