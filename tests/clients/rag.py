# SPDX-License-Identifier: Apache-2.0
"""The example programs that join a vector store, embeddings and a chat model, run beside a server of both models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of the chat model and the embedding included model."""
    log = tmp_path_factory.mktemp("models") / "log"
    command = [pytestconfig.getoption("quire")]
    serving = Server("--models", str(ROOT / "examples/many_models.yaml"), log=log, quire=command).wait_ready()
    yield serving.url
    assert serving.stop() == 0, log.read_text()


def answer(example: str, url: str, *question: str) -> str:
    """Return what an example prints."""
    command = [sys.executable, str(ROOT / "examples" / example), *question]
    environment = os.environ | {"QUIRE_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
