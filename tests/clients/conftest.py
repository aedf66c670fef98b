# SPDX-License-Identifier: Apache-2.0
"""A server of the included model, started as a user does, and clients that reach nothing else.

The environment of these tests has the clients and not quire.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.world import SEEING
from tests.end_to_end.server import Server

ROOT = Path(__file__).parents[2]
LOCAL = {"127.0.0.1", "localhost", "::1", None}
OTHERS = ("OPENAI_", "ANTHROPIC_", "OLLAMA_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "LLM_")
"""Beginnings of variables by which a developer's own settings would reach the clients."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}
"""Clients that would call home are told not to, before they are imported."""

for name in list(os.environ):
    if name.startswith(OTHERS) or name.upper() in PROXIES:
        del os.environ[name]
os.environ.update(QUIET)
strangers: list[str] = []
# httpcore (1.0.9) waits for itself forever where a stream that a client left unread becomes garbage while it holds the
# lock of its pool. So garbage is collected between tests, when nobody holds it.
gc.disable()


def watch(event: str, args: tuple[Any, ...]) -> None:
    """Refuse and remember every attempt to reach another machine."""
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event == "socket.getaddrinfo":
        host = args[0].decode() if isinstance(args[0], bytes) else args[0]
    else:
        return
    if host not in LOCAL:
        strangers.append(host)
        raise OSError(f"a client's test tried to reach {host}")


sys.addaudithook(watch)


def pytest_addoption(parser: pytest.Parser) -> None:
    default = shlex.quote(str(ROOT / ".venv/bin/quire"))
    parser.addoption("--quire", default=default, help="the command that is tested")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect a test's garbage before the next test begins, and exempt surviving objects from later collections."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def only_local() -> Iterator[None]:
    """Also where a client passes over the refusal."""
    strangers.clear()
    yield
    assert not strangers


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of the included model."""
    command = shlex.split(pytestconfig.getoption("quire"))
    log = tmp_path_factory.mktemp("server") / "log"
    serving = Server(log=log, quire=command).wait_ready()
    yield serving.url
    assert serving.stop() == 0, log.read_text()


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """Return the base URL of the API for OpenAI's clients."""
    return f"{server}/v1"


@pytest.fixture(scope="session")
def seeing_url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server of the model in the box that sees."""
    command = shlex.split(pytestconfig.getoption("quire"))
    log = tmp_path_factory.mktemp("seeing") / "log"
    serving = Server("--model", SEEING, log=log, quire=command).wait_ready()
    yield f"{serving.url}/v1"
    assert serving.stop() == 0, log.read_text()
