# SPDX-License-Identifier: Apache-2.0
"""The soak finds what it is there to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.__main__ import leaks
from benchmarks.soak.clients import Clients, Findings
from benchmarks.soak.memory import Growth, slope
from benchmarks.soak.said import (
    messages_stream,
    ollama_stream,
    openai_stream,
    pooled_lines,
    pooled_whole,
    responses_stream,
)
from benchmarks.soak.traffic import good_requests
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import live_server
from tests.fixtures.folded import folded


def test_a_slope_is_that_of_the_line_through_the_noise() -> None:
    line = [(float(x), 3.0 * x + 5 + (-1) ** x) for x in range(1000)]
    assert slope(line) == pytest.approx(3.0, abs=0.01)
    assert slope([(1.0, 5.0)] * 3) == slope([]) == 0.0


@pytest.mark.parametrize(
    ("mb_per_hour", "gained_mb", "is_leak"), [(400.0, 3.0, False), (29.0, 700.0, False), (31.0, 25.0, True)]
)
def test_a_leak_is_fast_and_more_than_noise(mb_per_hour: float, gained_mb: float, is_leak: bool) -> None:
    assert leaks(Growth("x", 100.0, mb_per_hour, gained_mb), max_slope=30.0) == is_leak


def chunk(reason: str | None) -> str:
    ended = "null" if reason is None else f'"{reason}"'
    return f'data: {{"choices": [{{"index": 0, "text": "a", "finish_reason": {ended}}}]}}'


@folded(
    ("read", "lines"),
    [
        (openai_stream, []),
        (openai_stream, [chunk("stop")]),
        (openai_stream, [chunk(None), "data: [DONE]"]),
        (openai_stream, [chunk("stop"), chunk("stop"), "data: [DONE]"]),
        (openai_stream, ['data: {"error": {}}', "data: [DONE]"]),
        (responses_stream, ['data: {"type": "response.failed"}']),
        (messages_stream, ['data: {"type": "error"}']),
        (ollama_stream, ['{"done": false, "message": {"content": "a"}}']),
    ],
)
def test_wrong_end_of_a_stream_is_reported(read: Any, lines: list[str]) -> None:
    with pytest.raises(ValueError, match=r"end|error"):
        read(lines)
    assert openai_stream([chunk(None), chunk("stop"), "data: [DONE]"]) == [["aa", [], "stop"]]


def test_another_answer_to_the_same_request_is_noticed() -> None:
    findings, good = Findings(), good_requests()[0]
    for text in ("a", "a", "b"):
        findings.compare(good, [[text, [], "stop"]])
    assert len(findings.complaints) == findings.outcomes["violations"] == 1


async def test_undocumented_statuses_are_complaints() -> None:
    """This server has another model."""
    async with live_server(FakeEngine()) as server:
        clients = Clients(server.url, 4, seed=1)
        await clients.run(0.5)
    assert clients.findings.complaints
    assert all("404" in complaint for complaint in clients.findings.complaints)


async def test_absent_server_is_reported() -> None:
    clients = Clients("http://127.0.0.1:9", 2, seed=1)
    await clients.run(0.2)
    assert "the connection broke" in clients.findings.complaints[0]


def soak(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.soak", *args]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.more
@pytest.mark.item(59)
def test_a_server_holds() -> None:
    done = soak("--seconds", "15")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all held\n")


LEAK = """
import time

def make(config):
    return Leak()

class Leak:
    def __init__(self):
        self.kept, self.last = [], time.monotonic()

    def record(self, *statistics):
        now = time.monotonic()
        self.kept.append(b"x" * int(20e6 * (now - self.last)))
        self.last = now
"""
"""20 MB in a second, however many steps that has."""


@pytest.mark.more
@pytest.mark.item(59)
def test_a_server_that_leaks_does_not(tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAK)
    info = tmp_path / "leaking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leaking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.stat_loggers]\nleak = leaking:make\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    done = soak("--seconds", "20", PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION: API process" in done.stdout
    assert "is a leak" in done.stdout


def test_numbers_are_compared_exactly_and_without_ids() -> None:
    reply = {"id": "a", "created": 1, "data": [{"index": 0, "embedding": [0.1, 2.0]}]}
    assert pooled_whole(reply) == pooled_lines(json.dumps(reply, indent=1).splitlines())
    assert pooled_whole(reply) == pooled_whole({**reply, "id": "b", "created": 2})
    assert pooled_whole(reply) != pooled_whole({"data": [{"index": 0, "embedding": [0.1, 2.0000002]}]})
