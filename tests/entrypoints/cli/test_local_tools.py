# SPDX-License-Identifier: Apache-2.0
"""Functions that a model calls: discovery, confirmation, execution, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.run import DENIED, LocalTools, find_functions
from quire.errors import ConfigError
from tests.fixtures.folded import folded

SOURCE = '''
import json
from os.path import join

def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b

async def later(text: str) -> str:
    return text.upper()

def fail() -> None:
    raise KeyError("gone")

def odd() -> object:
    return {"a": {1}}

def _hidden() -> None: ...
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(SOURCE)
    return path


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tools(file: Path, asked: list[str], *, allowed: bool = True) -> LocalTools:
    def confirm(text: str) -> bool:
        asked.append(text)
        return allowed

    return LocalTools(find_functions([str(file)]), confirm)


def test_a_file_gives_the_public_functions_that_it_defines(file: Path) -> None:
    assert [function.__name__ for function in find_functions([str(file)])] == ["add", "later", "fail", "odd"]
    assert [function.__name__ for function in find_functions([f"{file}:fail"])] == ["fail"]
    assert [function.__name__ for function in find_functions(["textwrap:dedent"])] == ["dedent"]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", '{"a": 1, "b": 2}', "3"),
        ("add", '{"a": 1}', "2"),
        ("later", '{"text": "x"}', "X"),
        ("odd", "", '{"a": "{1}"}'),
        ("fail", "{}", "Error: KeyError: 'gone'"),
        ("add", '{"a": "x", "b": 1}', "Error: TypeError"),
    ],
)
def test_call_is_confirmed_and_its_result_or_error_is_text(
    file: Path, name: str, arguments: str, result: str
) -> None:
    asked: list[str] = []
    message = tools(file, asked).answer(call(name, arguments))
    assert (message["role"], message["tool_call_id"]) == ("tool", "1")
    assert message["content"].startswith(result)
    assert len(asked) == 1
    assert asked[0].startswith(f"{name}(")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("add", "{"), ("add", "[1]"), ("add", "5"), ("add", "{}"), ("add", '{"a": 1, "c": 2}'), ("rm", "{}")],
)
def test_uncallable_tool_is_reported_without_a_question(file: Path, name: str, arguments: str) -> None:
    asked: list[str] = []
    assert tools(file, asked).answer(call(name, arguments))["content"].startswith("Error: ")
    assert not asked


def test_a_refusal_runs_nothing(file: Path) -> None:
    assert tools(file, [], allowed=False).answer(call("fail", "{}"))["content"] == DENIED


def test_arguments_are_shown_without_control_characters(file: Path) -> None:
    asked: list[str] = []
    tools(file, asked).answer(call("later", json.dumps({"text": "\x1b[2J\r"})))
    assert asked == [r"later(text='\x1b[2J\r')"]


@folded(
    "name",
    [
        "add",
        "no_such_module:add",
        "textwrap:nothing",
        "textwrap:_whitespace",
        ":add",
        "/no/such/file.py",
        "x:",
    ],
)
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--tool"):
        find_functions([name])


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"broken\.py: ZeroDivisionError"):
        find_functions([str(broken)])


def test_two_functions_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="two functions are called add"):
        LocalTools(find_functions([f"{file}:add", f"{file}:add"]), lambda _: True)
