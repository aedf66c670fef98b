# SPDX-License-Identifier: Apache-2.0
"""The distribution's name, and the commands that messages print to install its extras."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from quire import version

ROOT = Path(__file__).parents[1]
STRANGERS_NAME = re.compile(r"""pip install [^\n]*\bquire(?![-\w/])|['"]quire\[""")
"""An installation of `quire`, which is another project's distribution on PyPI."""


def test_sources_never_advise_the_foreign_package_quire() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in listed.stdout.split("\0")
        if name.endswith((".py", ".md", ".toml", ".yml", ".yaml", "Makefile")) and (ROOT / name).is_file()
    }
    texts.pop("tests/test_version.py", None)  # names the old form itself
    assert [name for name, text in texts.items() if STRANGERS_NAME.search(text)] == []


@pytest.mark.parametrize("extra", ["hf", "otel", "ray", "xgrammar"])
def test_install_command_names_the_extras_packages(extra: str) -> None:
    listed = metadata.requires(version.DISTRIBUTION) or []
    wanted = [line.split(";")[0].strip() for line in listed if f'"{extra}"' in line and "dev" not in line]
    assert wanted
    command = shlex.split(version.install_command(extra))
    assert command == [sys.executable, "-m", "pip", "install", *wanted]


def test_install_command_without_a_known_extra_names_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shlex.split(version.install_command("no-such"))[-1] == "quire-llm[no-such]"
    monkeypatch.setattr(version, "DISTRIBUTION", "no-such-distribution-anywhere")
    assert shlex.split(version.install_command("hf"))[-1].endswith("[hf]")


def test_install_command_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version.importlib.util, "find_spec", lambda name: None)
    assert version.install_command("hf").startswith("uv pip install --python ")
