# SPDX-License-Identifier: Apache-2.0
"""The working directory of a server is deleted while it runs, or before it starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server import QUIRE, Server
from tests.end_to_end.test_faults import BODIES, NULL, events, whole

ROOT = str(Path(__file__).parents[2])


@pytest.mark.item(43)
@pytest.mark.parametrize("args", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_server_without_its_directory_replaces_its_core(args: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    options = (*NULL, "--no-enable-prefix-caching", "--chat-template", "chat.jinja", *args)
    server = Server(*options, log=tmp_path / "log", sh=f'cd {folder} && exec "$@"', PYTHONPATH=ROOT)
    try:
        server.wait_ready()
        expected = whole(events(server, BODIES[0]))
        shutil.rmtree(folder)
        first = server.core_pid()
        assert first is not None

        def on_event(number: int) -> None:
            if number == 3:
                os.kill(first, signal.SIGKILL)

        assert whole(events(server, BODIES[0], on_event)) == expected
        constrained = {"prompt": "Hello", "max_tokens": 5, "structured_outputs": {"choice": ["a", "b"]}}
        reply = httpx.post(f"{server.url}/v1/completions", json=constrained, timeout=60)
        assert reply.status_code == 200, reply.text
        assert {os.readlink(f"/proc/{pid}/cwd") for pid in server.children("quire.")} == {"/"}
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_start_in_a_deleted_directory_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = [
        "sh",
        "-c",
        f'cd {folder} && rmdir {folder} && exec "$@"',
        "sh",
        *QUIRE,
        "serve",
        *NULL,
        "--port",
        "0",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the working directory was deleted; change to one that exists" in done.stderr
