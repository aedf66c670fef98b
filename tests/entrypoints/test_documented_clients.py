# SPDX-License-Identifier: Apache-2.0
"""Tests that the clients documented in docs/server.md are those that `make clients` installs and tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = sorted((ROOT / "tests/clients").glob("*/requirements.txt"))
NO_CLIENTS = {"pytest", "pytest-asyncio", "mcp", "numpy"}
MODULES = {
    "llama-index-embeddings-openai-like": "llama_index.embeddings.openai_like",
    "llama-index-llms-openai": "llama_index.llms.openai",
    "llama-index-llms-openai-like": "llama_index.llms.openai_like",
    "openai-agents": "agents",
    "pydantic-ai-slim": "pydantic_ai",
}
"""Where a client is imported under another name than its package's."""


def clients(requirements: Path) -> list[str]:
    """Names of the clients of one environment."""
    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    names = [line.split("[")[0] for line in lines if line and not line.startswith("--")]
    return [name for name in names if name not in NO_CLIENTS]


def locked(requirements: Path) -> dict[str, str]:
    """Name of a package -> its version in that environment."""
    lines = requirements.with_name("locked.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_documented_clients_are_those_that_are_installed() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    section = page.split("## Clients that are tested")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z-]+) \| ([\d., ]+) \|", section, flags=re.MULTILINE)
    documented = {(name, version) for name, versions in rows for version in versions.split(", ")}
    assert documented == {(name, locked(file)[name]) for file in ENVIRONMENTS for name in clients(file)}


def test_each_client_has_a_test_in_its_environment() -> None:
    shared = (ROOT / "tests/clients/test_openai.py").read_text()
    for file in ENVIRONMENTS:
        sources = shared + "".join(test.read_text() for test in file.parent.glob("test_*.py"))
        for name in clients(file):
            package = MODULES.get(name, name.replace("-", "_"))
            pattern = rf'^(import|from) {package}\b|"-m", "{package}"'
            assert re.search(pattern, sources, re.MULTILINE), name
