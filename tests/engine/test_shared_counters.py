# SPDX-License-Identifier: Apache-2.0
"""Counters that several processes share."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.queue_limits import SharedWaiting
from quire.engine.shared_counters import CounterField, SharedCounters

OTHER = """
import sys
from quire.engine.shared_counters import CounterField, SharedCounters

ledger = SharedCounters(2, 1, open(int(sys.argv[1]), "r+b"))
page, account = ledger.slot(1), ledger.account(0)
for _ in range(20_000):
    page.add(CounterField.WAITING, 1)
    with ledger.locked():
        account[0] += 1
"""
DIES = """
import os, signal, sys
from quire.engine.shared_counters import SharedCounters

with SharedCounters(1, 0, open(int(sys.argv[1]), "r+b")).locked():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_write_at_once_lose_no_count() -> None:
    with closing(SharedCounters.create(2, 1)) as ledger:
        number = ledger.fileno()
        with subprocess.Popen([sys.executable, "-c", OTHER, str(number)], pass_fds=[number]) as other:
            account = ledger.account(0)
            for _ in range(20_000):
                ledger.slot(0).add(CounterField.WAITING, 1)
                with ledger.locked():
                    account[0] += 1
        assert other.returncode == 0
        assert (ledger.total(CounterField.WAITING), account[0]) == (40_000, 40_000)


def test_a_lock_is_let_go_by_a_process_that_dies() -> None:
    with closing(SharedCounters.create(1, 0)) as ledger:
        command = [sys.executable, "-c", DIES, str(ledger.fileno())]
        assert subprocess.run(command, pass_fds=[ledger.fileno()], check=False).returncode == -signal.SIGKILL
        with ledger.locked():
            pass


def test_a_shared_ledger_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(SharedCounters.create(2, 2)) as ledger:
        assert not list(tmp_path.iterdir())
        assert ledger.total(CounterField.HANDED) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 50)), max_size=30))
def test_waiting_tokens_count_until_they_or_the_process_leave(
    events: list[tuple[int, int, int]],
) -> None:
    """A sequence that is there already leaves; each has one prompt."""
    ledger = SharedCounters(3)
    waiting = [SharedWaiting(ledger.slot(index)) for index in range(3)]
    expected: dict[tuple[int, int], int] = {}
    for page, name, num_tokens in events:
        if (page, name) in expected:
            waiting[page].remove(str(name))
            waiting[page].remove(str(name))
            del expected[page, name]
        else:
            waiting[page].add(str(name), num_tokens)
            waiting[page].add(str(name), num_tokens)
            expected[page, name] = num_tokens
        assert {len(one) for one in waiting} == {len(expected)}
        assert {one.num_tokens for one in waiting} == {sum(expected.values())}
    ledger.clear(1)
    left = [num_tokens for (page, _), num_tokens in expected.items() if page != 1]
    assert (len(waiting[0]), waiting[0].num_tokens) == (len(left), sum(left))
