# SPDX-License-Identifier: Apache-2.0
"""A feature is one folder and its rows in `quire.features`: without both, the engine and the server still work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from tests.fixtures.quick import quick

PACKAGE = Path(quire.__file__).parent
FEATURES = (
    "batch",
    "beam_search",
    "console",
    "disagg",
    "entrypoints/llama_server",
    "entrypoints/ollama",
    "kv_store",
    "lora",
    "pooling",
    "profiling",
    "routing",
    "simulate",
    "sleep",
    "spec_decode",
    "speech",
    "structured_output",
    "supervision",
    "training",
)
QUICK_FEATURES = ("kv_store", "lora", "spec_decode", "speech", "supervision")
"""Features with the most seams; of all of them `.importlinter` says that no core module imports them."""
PROGRAM = """
import asyncio, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import httpx, quire
from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app

assert quire.__file__.startswith(sys.argv[1]), quire.__file__
from quire import LLM
import quire.entrypoints.cli.main


async def chat():
    engine = AsyncLLM(EngineConfig.from_args(model="quire-demo"), in_process=True)
    await engine.wait_ready()
    transport = httpx.ASGITransport(build_app(engine, ServerConfig(admin_api_key="admin")))
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post("/v1/chat/completions", json=body)
        document = await client.get("/openapi.json")
    await engine.shutdown()
    print(reply.json()["choices"][0]["message"]["content"], document.status_code)


asyncio.run(chat())
"""


@pytest.mark.parametrize("feature", quick(FEATURES, QUICK_FEATURES))
def test_engine_serves_without_a_removed_feature(feature: str, tmp_path: Path) -> None:
    copy = tmp_path / "quire"
    shutil.copytree(
        PACKAGE, copy, symlinks=True
    )  # with what is compiled, which takes longer than all else here
    shutil.rmtree(copy / feature)
    rows = copy / "features.py"
    text, place = rows.read_text(encoding="utf-8"), feature.replace("/", r"\.")
    rows.write_text(
        re.sub(rf'    "\w+": "quire\.{place}\.[^"]*",\n|"\w+": "quire\.{place}\.[^"]*"', "", text)
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "The capital of France is Paris. 200\n", done.stderr
