# SPDX-License-Identifier: Apache-2.0
"""The package in examples/plugins/io_processor, installed by pip and served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.end_to_end.server import Server

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugins" / "io_processor"


@pytest.mark.more
def test_the_example_answers_with_the_outlier(tmp_path: Path) -> None:
    sources = shutil.copytree(EXAMPLE, tmp_path / "sources")  # building writes beside them
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(sources)], check=True, timeout=120)
    paths = [str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = Server(
        "quire-demo-embed",
        "--io-processor-plugin",
        "outliers",
        log=tmp_path / "log",
        PYTHONPATH=os.pathsep.join(paths),
    ).wait_ready()
    texts = [
        "The capital of Japan is Tokyo.",
        "The capital of Italy is Rome.",
        "A young cow is called a calf.",
    ]
    body = json.dumps({"data": {"texts": texts}}).encode()
    asked = urllib.request.Request(f"{server.url}/pooling", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as reply:
        answer = json.load(reply)
    assert server.stop() == 0, server.log.read_text()
    assert answer["data"]["odd_one"] == texts[2], answer
