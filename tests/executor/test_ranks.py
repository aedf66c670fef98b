# SPDX-License-Identifier: Apache-2.0
"""Tests of an executor's view of its ranks, with fake ranks that compute nothing and follow a script."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import EngineError, RankLostError, ValidationError
from quire.executor.ranks import handles, rank_processes
from quire.executor.ranks.handles import Ranks
from quire.executor.ranks.rank_processes import HostStarter
from quire.scheduler.output import SchedulerOutput

RANK = """
import os, queue, signal, sys, threading, time
from multiprocessing.connection import Connection
import msgspec
from quire.errors import RankLostError, ValidationError
from quire.executor.ranks.handles import CallFailed, CallReturned, RankCall, StepResult, ToRank
from quire.scheduler.output import ModelRunnerOutput

directory, rank, address, fd = sys.argv[1:]
connection, decoder = Connection(int(fd)), msgspec.msgpack.Decoder(ToRank)

def say(message):
    connection.send_bytes(msgspec.msgpack.encode(message))

def step(number):
    if number == LOSES:
        time.sleep(0.2 if rank == "1" else 0)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        say(CallFailed.from_error(RankLostError([1], "gone")))
    elif number == FAILS:
        time.sleep(0.2 if rank == "1" else 0)
        say(CallFailed.from_error(ValueError("nan") if rank == "1" else RankLostError([1], "gone")))
    elif rank == "0":
        say(StepResult(ModelRunnerOutput(number, {})))

def read():
    while True:
        try:
            frames.put(connection.recv_bytes())
        except EOFError:
            os._exit(0)

frames = queue.SimpleQueue()
threading.Thread(target=read, daemon=True).start()
while True:
    message = decoder.decode(frames.get())
    if not isinstance(message, RankCall):
        step(message.plan.step_id)
    elif message.method == "refuse" and rank != "0":
        say(CallFailed.from_error(ValidationError("by " + rank), message.number))
    else:
        say(CallReturned(message.number, [rank, *message.args]))
"""
LOSES, FAILS = 1000, 1001
PROGRAM = ("-c", f"LOSES, FAILS = {LOSES}, {FAILS}\n{RANK}")


def plan(number: int) -> SchedulerOutput:
    return SchedulerOutput(number, [], [], [])


@contextmanager
def three() -> Iterator[Ranks]:
    starter = HostStarter(EngineConfig(), 3, PROGRAM)
    ranks = Ranks(starter)
    yield ranks
    ranks.close()
    ranks.close()
    assert len(starter.pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in starter.pids.values())


def pids(ranks: Ranks) -> dict[int, int]:
    assert isinstance(ranks._starter, HostStarter)
    return ranks._starter.pids


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Those of all tests after which they are as they were."""
    with three() as ranks:
        yield ranks


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(handles, "DEATH_S", 120.0)  # a busy machine ends processes late
    monkeypatch.setattr(rank_processes, "DEATH_S", 120.0)
    with three() as ranks:
        yield ranks


def test_all_answer_and_the_first_has_the_results(ranks: Ranks) -> None:
    for number in range(3):
        ranks.step(plan(number))
    late = ranks.call("say", "a", 1)
    assert [ranks.output().step_id for _ in range(3)] == [0, 1, 2]
    assert late.result() == [[str(rank), "a", 1] for rank in range(3)]
    assert late.done()
    assert late.exception() is None


def test_the_directory_is_there_until_they_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    starter = HostStarter(EngineConfig(), 1, PROGRAM)
    ranks = Ranks(starter)
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    starter.release_directory()
    assert not list(tmp_path.iterdir())
    ranks.close()


def test_an_answer_is_there_once_all_have_answered(ranks: Ranks) -> None:
    answers = ranks.call("say")
    waited = threading.Event()
    while not answers.done():
        waited.wait(0.01)
    assert len(answers.result()) == 3


def test_a_call_that_some_refuse_costs_only_itself(ranks: Ranks) -> None:
    for _ in range(2):
        with pytest.raises(ValidationError, match="by 1"):
            ranks.call("refuse").result()
    assert len(ranks.call("say").result()) == 3


def test_large_messages_go_both_ways_at_once(ranks: Ranks) -> None:
    text = "x" * 10**6
    answers = [ranks.call("say", text) for _ in range(3)]
    assert [one.result()[2][1] for one in answers] == [text] * 3


def test_a_rank_that_ends_is_named_now_and_later(mortal: Ranks) -> None:
    mortal.call("say").result()
    os.kill(pids(mortal)[2], signal.SIGKILL)
    answers = mortal.call("say")
    for _ in range(2):
        with pytest.raises(
            RankLostError, match=rf"rank 2 is lost; it says: process {pids(mortal)[2]}: killed by signal 9"
        ):
            answers.result()
    with pytest.raises(RankLostError, match="rank 2 is lost"):
        mortal.output()


def test_a_rank_that_is_stopped_is_given_up_and_killed(
    mortal: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.ranks.handles.STOPPED_POLLS", 2)
    os.kill(pids(mortal)[0], signal.SIGSTOP)
    mortal.step(plan(0))
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"rank 0 is lost; it says: process \d+ is stopped"):
            mortal.output()


def test_lost_rank_is_named_before_the_ranks_that_lost_it(mortal: Ranks) -> None:
    mortal.step(plan(LOSES))
    with pytest.raises(RankLostError, match=r"rank 1 is lost; it says: process \d+: killed by signal 9"):
        mortal.output()


def test_failed_rank_is_named_and_not_its_observers(mortal: Ranks) -> None:
    mortal.step(plan(FAILS))
    with pytest.raises(EngineError, match="rank 1 failed: ValueError: nan"):
        mortal.output()
