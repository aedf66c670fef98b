# SPDX-License-Identifier: Apache-2.0
"""A core gets the spare process, once, if that suits it and runs; else one of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.config.device import HostShare
from quire.engine import core_start
from quire.engine.core_start import keep_spare, start_core

CONFIG = EngineConfig.from_args(distributed_executor_backend="uni")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Arguments of all processes, each of which only repeats its standard input."""
    args_of_all: list[list[str]] = []
    processes: list[subprocess.Popen[bytes]] = []

    def start(args: list[str], environment: object, *, stdin: int) -> subprocess.Popen[bytes]:
        args_of_all.append(args)
        processes.append(subprocess.Popen(["cat"], stdin=stdin, stdout=subprocess.PIPE))
        return processes[-1]

    monkeypatch.setattr(core_start, "_start", start)
    yield args_of_all
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_spare_becomes_the_next_core_alone(started: list[list[str]], tmp_path: Path) -> None:
    keep_spare({})
    first, second = start_core(CONFIG, tmp_path / "1"), start_core(CONFIG, tmp_path / "2")
    assert first.stdout is not None
    assert first.stdout.read() == f"{tmp_path}/1\n".encode()
    assert [args[0] for args in started] == ["-", f"{tmp_path}/2"]
    assert second.stdin is None


@pytest.mark.parametrize("why", ["executor", "share", "ended"])
def test_spare_that_does_not_suit_is_ended(started: list[list[str]], tmp_path: Path, why: str) -> None:
    keep_spare({})
    (spare,) = core_start._spares
    config = CONFIG
    if why == "executor":
        config = EngineConfig.from_args(distributed_executor_backend="null")
    elif why == "share":
        config = replace(CONFIG, share=HostShare(2, 0))
    else:
        spare.process.kill()
        spare.process.wait()
    process = start_core(config, tmp_path)
    assert process is not spare.process
    assert spare.process.poll() is not None
    assert [args[0] for args in started] == ["-", str(tmp_path)]
