# SPDX-License-Identifier: Apache-2.0
"""`python -O` takes every assert out: no refusal may hang on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OF_REQUESTS = ("bad_input", "bad_tools", "constraints", "fuzz", "field_policy", "relations")
OF_ROUTES = (
    "admission", "keys", "auth", "tenants_and_limits", "failures", "disconnect", "connection", "openapi", "completions",
    "chat_completions", "responses",
)  # fmt: skip


@pytest.mark.more
@pytest.mark.item(27)
@pytest.mark.parametrize(
    "files",
    [
        ["tests/reliability/test_input.py"],
        [f"tests/entrypoints/openai/test_{name}.py" for name in OF_REQUESTS],
        [f"tests/entrypoints/openai/test_{name}.py" for name in OF_ROUTES],
        ["tests/entrypoints/anthropic", "tests/entrypoints/ollama"],
        ["tests/scheduler", "tests/kv_cache"],
    ],
    ids=["a real server", "requests", "routes", "other APIs", "scheduler and cache"],
)
def test_the_same_requests_are_refused_without_asserts(files: list[str]) -> None:
    """pytest makes statements of its tests' asserts, so these still count; the server has none left."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *files]
    quiet = ["-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *quiet],
        env={**environment, "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.more
def test_asserts_of_tests_count_without_asserts(tmp_path: Path) -> None:
    """pytest's asserts fail under `python -O`, which the test above relies on."""
    (tmp_path / "test_false.py").write_text("def test_false():\n    assert not __debug__\n    assert False\n")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_false.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout
    assert "assert False" in done.stdout
