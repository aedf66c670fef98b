# SPDX-License-Identifier: Apache-2.0
"""A signal ends a start whatever becomes of the exception that it raises."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.entrypoints.openai.start_signals import StartSignals


def raised() -> None:
    signal.raise_signal(signal.SIGTERM)


def turned_into_another() -> None:
    try:
        raised()
    except BaseException as error:
        raise RuntimeError("a library's own words") from error


def swallowed() -> None:
    with contextlib.suppress(BaseException):
        raised()


def sent_twice() -> None:
    try:
        raised()
    finally:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.item(49)
@pytest.mark.parametrize(
    "act", [raised, turned_into_another, swallowed, sent_twice], ids=lambda act: act.__name__
)
def test_a_signal_ends_the_block_without_an_error(act: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    went_on = False
    with StartSignals() as signals:
        act()
        signals.check()
        went_on = True
    assert not went_on
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_a_signal_errors_leave_the_block() -> None:
    with pytest.raises(ZeroDivisionError), StartSignals():
        _ = 1 // 0


def test_signal_raised_in_exec_keeps_the_exit_code() -> None:
    program = """
import signal, sys
from quire.entrypoints.openai.start_signals import StartSignals
with StartSignals():
    exec("signal.raise_signal(signal.SIGINT)")
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
