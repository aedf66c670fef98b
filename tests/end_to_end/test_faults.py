# SPDX-License-Identifier: Apache-2.0
"""Faults and signals of a real server: a stream pauses or ends with one error, and no resource leaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import Server, free_port

NULL = ("--distributed-executor-backend", "null", "--scheduler-cls", "tests.engine.slow_schedulers:Slow")
LOOP = """{%- for message in messages %}{{ message.content }}{% if message.content == 'loop' %}
{%- for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"""


@contextmanager
def serving(tmp_path: Path, *args: str) -> Iterator[Server]:
    """A server with a temporary folder of its own, in which nothing may be left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    server = Server(*NULL, *args, log=tmp_path / "log", TMPDIR=str(folder))
    try:
        yield server.wait_ready()
    finally:
        server.process.kill() if server.process.poll() is None else None
        server.process.wait()
    assert not list(folder.iterdir())


def events(server: Server, body: dict[str, Any], on_event: Any = None) -> list[Any]:
    """The events of a streamed completion."""
    received: list[Any] = []
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                data = line.removeprefix("data: ")
                received.append(data if data == "[DONE]" else json.loads(data))
                if on_event:
                    on_event(len(received))
    return received


def whole(received: list[Any]) -> Any:
    """All that does not depend on how tokens were gathered into events."""
    assert received[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in received[:-1]:
        for choice in event["choices"]:
            mine = choices.setdefault(choice["index"], {"text": "", "logprobs": []})
            mine["text"] += choice["text"]
            mine["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            mine["finish_reason"] = choice["finish_reason"]
    return choices, received[-2]["usage"]


BODIES: list[dict[str, Any]] = [
    {"prompt": "Hello", "max_tokens": 80, "seed": index, "n": 1 + index, "logprobs": 1, "ignore_eos": True}
    | {"stream_options": {"include_usage": True}}
    for index in range(3)
]


@pytest.mark.item(43)
def test_a_killed_core_is_a_pause_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-enable-prefix-caching") as server:
        expected = [whole(events(server, body)) for body in BODIES]
        first = server.core_pid()
        assert first is not None
        begun = threading.Barrier(len(BODIES) + 1)

        def on_event(number: int) -> None:
            if number == 3:
                begun.wait(60)

        seen: set[tuple[int | None, int | None]] = set()
        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(events, server, body, on_event) for body in BODIES]
            begun.wait(60)
            os.kill(first, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while (503, 200) not in seen or not all(stream.done() for stream in streams):
                seen.add((server.health(), server.health("/livez")))
                assert time.monotonic() < deadline
        assert [whole(stream.result()) for stream in streams] == expected
        assert {live for _, live in seen} == {200}
        assert server.wait_ready().core_pid() != first
        assert whole(events(server, BODIES[0])) == expected[0]
        assert server.stop() == 0


@pytest.mark.item(48)
@pytest.mark.parametrize(
    ("number", "is_cut"),
    [(signal.SIGHUP, False), pytest.param(signal.SIGQUIT, True, marks=pytest.mark.more)],
)
def test_a_signal_ends_streams_with_an_event(number: signal.Signals, is_cut: bool, tmp_path: Path) -> None:
    # Who runs the tests may ignore it (nohup), and so would what they start.
    before = signal.signal(number, signal.SIG_DFL)
    with serving(tmp_path) as server:
        signal.signal(number, before)

        def on_event(count: int) -> None:
            if count == 2:
                server.process.send_signal(number)

        received = events(server, {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True}, on_event)
        assert received[-1] == "[DONE]"
        assert ("error" in received[-2]) == is_cut
        if not is_cut:
            assert received[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0


@pytest.mark.item(16)
@pytest.mark.more
def test_looping_template_delays_neither_requests_nor_shutdown(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text(LOOP)
    with serving(tmp_path, "--chat-template", str(template)) as server:
        url = f"{server.url}/v1/chat/completions"

        def ask(content: str) -> int:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
            try:
                return httpx.post(url, json=body, timeout=60).status_code
            except httpx.TransportError:
                return 0

        with ThreadPoolExecutor() as pool:
            loops = [pool.submit(ask, "loop") for _ in range(4)]
            time.sleep(0.2)
            assert ask("hello") == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            assert not [loop for loop in loops if loop.result() == 200]


@pytest.mark.item(53)
@pytest.mark.more
def test_unread_log_pipe_fails_no_request(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", *NULL, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            deadline = time.monotonic() + 60
            while True:
                assert time.monotonic() < deadline
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.05)
            path = "/version?" + "x" * 200
            assert {client.get(path).status_code for _ in range(600)} == {200}, "the pipe is full"
            process.stdout.close()
            assert {client.get(path).status_code for _ in range(5)} == {200}, "nobody is at its end"
            body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0.001}
            assert client.post("/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.more
@pytest.mark.item(41, 49)
def test_failed_start_reports_its_reason(tmp_path: Path) -> None:
    server = Server(*NULL, "--num-gpu-blocks-override", "2", log=tmp_path / "log")
    assert server.process.wait(60) == 1
    (reason,) = [line for line in server.log.read_text().splitlines() if line.startswith("error: ")]
    assert "KV cache blocks" in reason
