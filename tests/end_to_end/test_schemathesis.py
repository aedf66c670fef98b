"""Schemathesis believes the document that a real server publishes, and holds the server to every word of it.

Data that fit the schema must be accepted, data that do not must be refused, and every reply must be one that is
described: never a 5xx, never a hang.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server

pytestmark = pytest.mark.more
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("schemathesis.toml")
LIMIT_S = 900
SMALL = ("--max-model-len", "96", "--request-timeout", "1", "--enable-tokenizer-info-endpoint")
KEYS = ("--api-key", "key", "--admin-api-key", "admin")
STRICT = ("--unknown-fields", "reject", "--admin-api-key", "admin")
# Who sleeps answers 503 until it is woken, as it should; so what puts a server to sleep has one of its own.
SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
AWAKE = ["--exclude-path=/sleep"]
ASLEEP = [f"--include-path={path}" for path in SLEEP]


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    server = Server(*SMALL, *request.param, log=tmp_path / "log").wait_ready()
    yield server
    assert server.stop() == 0, server.log.read_text()


def document(server: Server, path: Path) -> Path:
    """A file with what the server says of itself."""
    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"x-api-key": "key"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        path.write_bytes(reply.read())
    return path


@pytest.mark.parametrize(
    ("server", "paths"),
    [
        pytest.param(KEYS, AWAKE, id="keys"),
        pytest.param(STRICT, AWAKE, id="strict"),
        pytest.param(KEYS, ASLEEP, id="sleep"),
    ],
    indirect=["server"],
)
def test_the_server_is_as_it_says(server: Server, paths: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
    command += [str(document(server, tmp_path / "openapi.json")), "--url", server.url]
    command += [*paths, "--checks", "all", "--max-examples", "20", "--no-color"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    assert "Tested: " in run.stdout
    assert "Traceback" not in server.log.read_text()
