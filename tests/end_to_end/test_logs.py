# SPDX-License-Identifier: Apache-2.0
"""Tests of a whole server's log in both formats, which never holds text of its clients."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import Server

SECRET = "xylophonic-brontosaurus"
FAILING = "{% for message in messages %}{{ {'a': 1}[message.content].b.c }}{% endfor %}"


def requests(client: httpx.Client) -> None:
    """All that a client may do with its secret, well and badly."""
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8}
    options: dict[str, Any] = {"headers": {"authorization": f"Bearer {SECRET}", "x-secret": SECRET}}
    for stream in (False, True):
        client.post("/v1/completions", json={"prompt": SECRET, "stop": SECRET, "stream": stream}, **options)
        client.post("/v1/chat/completions", json={**chat, "stream": stream, "user": SECRET}, **options)
    client.post(f"/v1/completions?api_key={SECRET}", json={"prompt": SECRET, SECRET: SECRET, "n": SECRET})
    client.post("/v1/completions", json={"prompt": SECRET, "temperature": 1e-9})
    client.post("/v1/messages", json=chat)
    client.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 8})
    client.post("/api/chat", json={**chat, "stream": False})
    client.post("/api/generate", json={"prompt": SECRET, "stream": False, "options": {"num_predict": 4}})
    client.post("/tokenize", json={"prompt": SECRET})
    client.post("/v1/completions", content=f'{{"prompt": "{SECRET}", ')
    client.get("/v1/models", params={"key": SECRET})
    with client.stream(
        "POST", "/v1/completions", json={"prompt": SECRET, "max_tokens": 900, "stream": True}
    ) as answer:
        next(answer.iter_raw())


def run(log: Path, words: Path, *args: str) -> tuple[str, int, int]:
    """The log of a server that is asked, loses its core, is asked again and ends; the pids of both processes."""
    server = Server("--log-level", "debug", "--uvicorn-log-level", "trace", *args, log=log, words=words)
    try:
        server.wait_ready()
        core = server.core_pid()
        assert core is not None
        with httpx.Client(base_url=server.url, timeout=60) as client:
            requests(client)
            os.kill(core, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while server.core_pid() in (core, None) or server.health() != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            requests(client)
        new_core = server.core_pid()
        assert new_core is not None
        assert server.stop() == 0
        return log.read_text(), server.process.pid, new_core
    finally:
        server.process.kill()


@pytest.mark.more
def test_json_log_lines_hold_no_client_text(tmp_path: Path) -> None:
    log, api, core = run(tmp_path / "log", tmp_path / "words", "--log-format", "json")
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message", "pid"} <= line.keys() for line in lines)
    assert {api, core} <= {line["pid"] for line in lines}, "both processes write JSON"
    assert "uvicorn.error" not in {line["logger"] for line in lines}, "a start is no error"
    access = [line for line in lines if line["logger"] == "uvicorn.access"]
    completions = [line for line in access if line.get("path") == "/v1/completions"]
    assert {line["status"] for line in completions} == {200, 400}
    assert len({line["request_id"] for line in completions}) == len(completions)
    assert SECRET not in log.lower()


@pytest.mark.more
def test_lines_of_text_hold_nothing_that_clients_wrote(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text(FAILING)
    log, _, _ = run(tmp_path / "log", tmp_path / "words", "--chat-template", str(template))
    assert "the chat template of --chat-template failed with UndefinedError at its line 1" in log
    assert '"POST /v1/completions HTTP/1.1" 400' in log
    assert SECRET not in log.lower()


def test_failed_start_is_logged_as_json(tmp_path: Path) -> None:
    server = Server(
        "--model", "/no/such/model", "--log-format", "json", log=tmp_path / "log", words=tmp_path / "words"
    )
    assert server.process.wait(60) == 1
    last = [json.loads(line) for line in server.log.read_text().splitlines()][-1]
    assert last["level"] == "CRITICAL"
    assert "/no/such/model" in last["message"]
