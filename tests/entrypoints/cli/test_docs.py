# SPDX-License-Identifier: Apache-2.0
"""The pages about the command line are true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from quire.entrypoints.cli.docs import ENVIRONMENT, PAGE, configuration_page
from quire.entrypoints.cli.main import COMMANDS, cli, main

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs/cli.md", ROOT / "benchmarks/README.md")
COMMAND_LINES = [
    line.removeprefix("$ ")
    for page in PAGES
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("$ quire ")
]


def test_configuration_page_is_current() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == configuration_page(), "run: python -m quire.entrypoints.cli.docs"


def test_every_environment_variable_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "quire").rglob("*.py"))
    used = set(re.findall(r"environ(?:\.get\(|\[)\s*\"(QUIRE_\w+)\"", source))
    assert used == set(ENVIRONMENT)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_of_the_pages_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [argument for argument in shlex.split(line)[1:] if argument not in ("--config", "serve.yaml")]
    command: click.Command = cli
    context = click.Context(cli, info_name="quire", **cli.context_settings)  # type: ignore[arg-type]
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments.pop(0))
        assert found is not None
        command = found
        context = click.Context(command, parent=context)
    command.make_context(command.name, arguments, parent=context)


def test_every_command_has_a_section_and_an_example() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## (.+)$", text, flags=re.MULTILINE)).split()
    assert set(COMMANDS) <= set(headings)
    assert all(f"\n$ quire {name}" in text for name in COMMANDS)


def test_docs_prints_every_page_that_a_message_names(capsys: pytest.CaptureFixture[str]) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "quire").rglob("*.py"))
    for page in set(re.findall(r"docs/[a-z_]+\.md", source)):
        assert main(["docs", page]) == 0
        assert capsys.readouterr().out.rstrip("\n") == (ROOT / page).read_text(encoding="utf-8").rstrip("\n")
    assert main(["docs"]) == 0
    assert "\nbatch " in f"\n{capsys.readouterr().out}"
    assert main(["docs", "bach"]) == 2
    assert "did you mean 'batch'?" in capsys.readouterr().err
