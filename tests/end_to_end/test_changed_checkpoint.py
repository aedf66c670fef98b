# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is replaced under a running server, and then its core dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

import quire
from tests.end_to_end.server import Server
from tests.end_to_end.test_faults import NULL


@pytest.mark.item(54)
@pytest.mark.parametrize(
    "args", [(), pytest.param(("--api-server-count", "2"), marks=pytest.mark.more)], ids=["one", "two"]
)
def test_server_ends_rather_than_go_on_as_another_model(
    args: tuple[str, ...], null_checkpoint: Path, tmp_path: Path
) -> None:
    server = Server(*NULL, "--model", str(null_checkpoint), *args, log=tmp_path / "log").wait_ready()
    try:
        core, last = server.core_pid(), ""
        assert core is not None
        body = {"prompt": [1, 2], "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            for number, line in enumerate(filter(None, reply.iter_lines())):
                last = line if line != "data: [DONE]" else last
                if number == 3:
                    draft = null_checkpoint / "new"
                    shutil.copy2(null_checkpoint / "config.json", draft)
                    draft.rename(null_checkpoint / "config.json")
                    os.kill(core, signal.SIGKILL)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
        assert server.process.wait(60) == 1
    finally:
        server.process.kill()
        server.process.wait()
    assert "it is not replaced: files of the model have changed" in server.log.read_text()
    assert "config.json" in server.log.read_text()


@pytest.fixture
def null_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of this test's own: the included model."""
    return Path(shutil.copytree(Path(quire.__path__[0]) / "assets" / "quire-demo", tmp_path / "model"))
