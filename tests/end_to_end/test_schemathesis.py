# SPDX-License-Identifier: Apache-2.0
"""Schemathesis believes the document that a real server publishes, and holds the server to every word of it.

Data that fit the schema must be accepted, data that do not must be refused, and every reply must be one that is
described: never a 5xx, never a hang. What is true of the server after every test is true of it after all that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.service import ADMIN, Baseline, Service, serving

pytestmark = pytest.mark.more
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("schemathesis.toml")
LIMIT_S = 900
SMALL = ("--max-model-len", "96", "--request-timeout", "1", "--enable-tokenizer-info-endpoint")
KEYS = ("--api-key", "key")
STRICT = ("--unknown-fields", "reject")
POOLING = ("quire-demo-embed",)
ADAPTERS = (
    "--enable-lora", "--max-loras", "2",
    "--lora-modules", "pirate=quire-demo-pirate", "--lora-modules", "json=quire-demo-json",
)  # fmt: skip
# Who sleeps answers 503 until it is woken, as it should; so what puts a server to sleep has one of its own.
SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
AWAKE = ["--exclude-path=/sleep"]
ASLEEP = [f"--include-path={path}" for path in SLEEP]
# All else is as without adapters, but for names of models.
OF_ADAPTERS = [
    f"--include-path={path}"
    for path in (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/models",
        "/v1/completions",
        "/api/generate",
    )
]


def documents(service: Service, folder: Path) -> tuple[Path, Path]:
    """Files with what the server says of itself, and with that but for what fields of requests ask of each other."""
    whole, simple = folder / "openapi.json", folder / "simple.json"
    whole.write_bytes(service.client.get("/openapi.json").content)
    written = json.loads(whole.read_bytes())
    for schema in written["components"]["schemas"].values():
        schema.pop("allOf", None)
    simple.write_text(json.dumps(written))
    return whole, simple


@pytest.mark.item(57)
@pytest.mark.parametrize(
    ("args", "paths"),
    [
        pytest.param(KEYS, AWAKE, id="keys"),
        pytest.param(STRICT, AWAKE, id="strict"),
        pytest.param(KEYS, ASLEEP, id="sleep"),
        pytest.param((*POOLING, *KEYS), AWAKE, id="pooling"),
        pytest.param((*POOLING, *STRICT), AWAKE, id="strict pooling"),
        pytest.param((*ADAPTERS, *KEYS), OF_ADAPTERS, id="adapters"),
    ],
)
def test_server_conforms_to_its_openapi_document(
    args: tuple[str, ...], paths: list[str], tmp_path: Path
) -> None:
    pools = args[: len(POOLING)] == POOLING
    with serving(tmp_path, *args, *SMALL, key="key", pools=pools) as service:
        if not pools:  # who checks constraints stays from the first one on
            service.chat(response_format={"type": "json_object"})
        service.baseline = Baseline(service)
        believe(service, paths, tmp_path)
        service.client.post("/wake_up", headers=ADMIN)
        service.baseline.check()
        assert service.stop() == 0, service.process.log.read_text()


def believe(service: Service, paths: list[str], tmp_path: Path) -> None:
    """Let schemathesis try it."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
    published, simple = documents(service, tmp_path)
    command += [str(simple), "--url", service.url]
    command += [*paths, "--checks", "all", "--max-examples", "12", "--no-color"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PUBLISHED_DOCUMENT": str(published)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    assert "Tested: " in run.stdout
