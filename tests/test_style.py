# SPDX-License-Identifier: Apache-2.0
"""Tests of `tools/style.py`: its findings, their lines and the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.folded import folded

TOOL = Path(__file__).parents[1] / "tools" / "style.py"


LICENSE = "SPDX-License-Identifier: Apache-2.0"


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Check a folder that holds one file, with the license behind its first line."""
    (folder / "module.py").write_text(source.replace("\n", f"  # {LICENSE}\n", 1))
    return check(folder)


def check(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], check=False, capture_output=True, text=True)


@folded("word", ["What", "Who", "Whom", "Whose", "Which", "How", "Where", "When", "Why", "That", "Of"])
def test_style_docstring_that_begins_with_a_clause_is_found(word: str, tmp_path: Path) -> None:
    source = f'"""Module."""\n\n\nclass A:\n    """{word} it does."""\n\n    def f(self) -> None:\n        """Run."""\n'
    done = run(tmp_path, source)
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path / 'module.py'}:5: a docstring begins with {word!r}: name the subject, or use an imperative\n"
    )


def test_style_findings_of_all_kinds_are_sorted_by_line(tmp_path: Path) -> None:
    source = (
        '"""How."""\n\n\nclass A:\n    """Why, said."""\n\n    async def f(self) -> None:\n        """When."""\n\n\n'
        'def g() -> None:\n    """\n    Of.\n    """\n'
    )
    done = run(tmp_path, source)
    assert done.returncode == 1
    lines = [
        line.removeprefix(f"{tmp_path / 'module.py'}:").partition(":")[0] for line in done.stderr.splitlines()
    ]
    assert lines == ["1", "5", "8", "12"]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1\n",
        '"""Offset of a token."""\n\n\ndef f() -> None:\n    """Whether."""\n',
        '"""Whatever."""\n\nx = 1\n"""What it is, as a string behind a constant."""\n',
    ],
)
def test_style_other_text_is_no_finding(source: str, tmp_path: Path) -> None:
    done = run(tmp_path, source)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("start", ["def", "async def"])
def test_style_long_test_name_is_found(start: str, tmp_path: Path) -> None:
    long, fits = "test_" + 56 * "x", "test_" + 55 * "x"
    source = (
        f"class A:\n    {start} {long}(self): ...\n\n\n{start} {fits}(): ...\n\n\ndef other_{long}(): ...\n"
    )
    done = run(tmp_path, source)
    assert done.returncode == 1
    rule = "a test's name has 61 characters: at most 60 are allowed"
    assert done.stderr == f"{tmp_path / 'module.py'}:2: {rule}\n"


def test_style_missing_license_is_found_and_fixed(tmp_path: Path) -> None:
    sources = {
        "a.py": ("x = 1\n", f"# {LICENSE}\nx = 1\n"),
        "b.cpp": ("int x;\n", f"// {LICENSE}\nint x;\n"),
        "c.sh": ("#!/bin/sh\ntrue\n", f"#!/bin/sh\n# {LICENSE}\ntrue\n"),
        "d.h": (f"// {LICENSE}\n", f"// {LICENSE}\n"),
        "e.py": ("", ""),
        "f.txt": ("text", "text"),
    }
    for name, (source, _) in sources.items():
        (tmp_path / name).write_text(source)
    assert check(tmp_path).stderr.splitlines() == [
        f"{tmp_path / 'a.py'}:1: the license is missing: # {LICENSE}",
        f"{tmp_path / 'b.cpp'}:1: the license is missing: // {LICENSE}",
        f"{tmp_path / 'c.sh'}:2: the license is missing: # {LICENSE}",
    ]
    assert check("--fix", tmp_path).returncode == 0
    assert {name: (tmp_path / name).read_text() for name in sources} == {
        name: fixed for name, (_, fixed) in sources.items()
    }


def test_style_british_spelling_is_found_in_code_and_pages(tmp_path: Path) -> None:
    british, american = "quantis" + "ed_colo" + "ur", "quantized_color"
    (tmp_path / "page.md").write_text(f"{american}\n{british} and hourly centers\n")
    (tmp_path / "a.py").write_text(f"# {LICENSE}\n{british} = {american} = precise = otherwise = 1\n")
    rules = [
        f"{word!r} is British spelling: use the American one" for word in ("quantis" + "ed", "colo" + "ur")
    ]
    places = [f"{tmp_path / 'a.py'}:2", f"{tmp_path / 'page.md'}:2"]
    assert check(tmp_path).stderr.splitlines() == [f"{place}: {rule}" for place in places for rule in rules]


def test_style_missing_folder_is_an_error(tmp_path: Path) -> None:
    done = check(tmp_path / "none")
    assert done.returncode == 1
    assert "none is no folder" in done.stderr


def test_style_class_names_of_the_package_are_unique(tmp_path: Path) -> None:
    package = tmp_path / "quire"
    (package / "below").mkdir(parents=True)
    source = f"# {LICENSE}\nclass Row:\n    pass\n\n\nclass {{name}}:\n    pass\n"
    (package / "first.py").write_text(source.format(name="A"))
    (package / "below" / "second.py").write_text(source.format(name="B"))
    done = check(package)
    assert done.returncode == 1
    place = f"{package / 'first.py'}:2"
    rule = "the class name Row is taken by below/second.py: choose one that no other class has"
    assert done.stderr == f"{place}: {rule}\n"
