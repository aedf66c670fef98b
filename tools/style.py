# SPDX-License-Identifier: Apache-2.0
"""Checks of the style rules in CONTRIBUTING.md that a program can check: `python tools/style.py [--fix] [FOLDER ...]`.

`--fix` adds the license line to files that lack it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "quire"
FOLDERS = (PACKAGE, "csrc", "tests", "benchmarks", "tools", "demo_model", "examples", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

MAX_TEST_NAME = 60  # characters
LICENSE = "SPDX-License-Identifier: Apache-2.0"
COMMENTS = {".py": "#", ".sh": "#", ".cpp": "//", ".h": "//"}
"""File name's end -> beginning of a comment, for the source files that are checked."""
PAGE = ".md"  # end of a page's name; of pages only the spelling is checked
FREE_SPELLING = ("benchmarks/results/", "demo_model/facts.py", "demo_model/phrases.py", "demo_model/talk.py")
"""Beginnings of paths of records and of training texts, whose spelling is theirs."""

_BRITISH = re.compile(
    r"(?:quant|penal|capital|general|optim|random|recogn|summar|util|vector|serial|token|initial|normal|synchron|special"
    r"|organ|author|minim|maxim|final|custom|parallel|standard)is(?:e[drs]?|ers|ing|ations?)(?![a-z])"
    r"|analys(?:e|ed|ing)(?![a-z])|(?:col|behavi|fav|hon|neighb)our|(?<![a-z])centr(?:e|es|ed)(?![a-z])|licence"
    r"|(?<![a-z])(?:un)?(?:label|model|level|dial)l(?:ed|ing)(?![a-z])|(?<![a-z])grey(?![a-z])",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(What|Who|Whom|Whose|Which|How|Where|When|Why|That|Of)\b")


class Finding(NamedTuple):
    """A violation of a rule, at a line of a file."""

    path: Path
    line: int
    rule: str


def check_docstring(path: Path, node: ast.AST) -> Iterator[Finding]:
    """Yield a finding if the node's docstring begins with a clause instead of its subject."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    clause = _CLAUSE.match(ast.get_docstring(node) or "")
    if clause:
        rule = f"a docstring begins with {clause[1]!r}: name the subject, or use an imperative"
        yield Finding(path, node.body[0].lineno, rule)


def check_test_name(path: Path, node: ast.AST) -> Iterator[Finding]:
    """Yield a finding if the node is a test function whose name is too long."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith("test_"):
        return
    if len(node.name) > MAX_TEST_NAME:
        rule = f"a test's name has {len(node.name)} characters: at most {MAX_TEST_NAME} are allowed"
        yield Finding(path, node.lineno, rule)


def check_class_names(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each class below a folder whose name another one has, so that a name finds one class."""
    seen: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if not isinstance(node, ast.ClassDef):
                continue
            if node.name in seen:
                first = seen[node.name].relative_to(folder)
                rule = f"the class name {node.name} is taken by {first}: choose one that no other class has"
                yield Finding(path, node.lineno, rule)
            seen.setdefault(node.name, path)


def check_spelling(path: Path, text: str) -> Iterator[Finding]:
    """Yield a finding for each word that American English spells otherwise."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
    if name.startswith(FREE_SPELLING) or path == Path(__file__):
        return
    for number, line in enumerate(text.split("\n"), 1):
        for word in _BRITISH.findall(line):
            yield Finding(path, number, f"{word!r} is British spelling: use the American one")


def check_license(path: Path, text: str) -> Iterator[Finding]:
    """Yield a finding if neither the first line, nor the one behind `#!`, names the license."""
    lines = text.split("\n", 2)
    place = 1 if lines[0].startswith("#!") else 0
    if text and LICENSE not in lines[place]:
        yield Finding(path, place + 1, f"the license is missing: {COMMENTS[path.suffix]} {LICENSE}")


def add_license(path: Path, text: str) -> None:
    """Write the license as the first line of a file, or behind `#!`."""
    first, end, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    path.write_text(f"{first}{end}{COMMENTS[path.suffix]} {LICENSE}\n{rest}", encoding="utf-8")


def check_file(path: Path, *, fix: bool = False) -> list[Finding]:
    """Return the findings in a source file or a page, in the order of their lines.

    Args:
        fix: add a missing license, in place of its finding.

    Raises:
        SyntaxError: the file ends with .py and is no Python.
    """
    text = path.read_text(encoding="utf-8")
    misspelled = list(check_spelling(path, text))
    if path.suffix == PAGE:
        return misspelled
    unlicensed = list(check_license(path, text))
    if unlicensed and fix:
        add_license(path, text)
        return check_file(path)
    if path.suffix != ".py":
        return [*unlicensed, *misspelled]
    tree = ast.parse(text, str(path))
    found = [
        finding
        for node in ast.walk(tree)
        for check in (check_docstring, check_test_name)
        for finding in check(path, node)
    ]
    return sorted([*unlicensed, *misspelled, *found], key=lambda finding: finding.line)


def check_folders(folders: Sequence[Path], *, fix: bool = False) -> list[Finding]:
    """Return the findings in all source files and pages below some folders; `fix` as in `check_file`.

    Raises:
        SystemExit: one of them is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            sys.exit(f"{folder} is no folder: name folders of source files")
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in {*COMMENTS, PAGE}
    ]
    return [finding for path in files for finding in check_file(path, fix=fix)]


def main() -> int:
    """Print each finding as `file:line: rule`; return 1 if there is one."""
    names = [name for name in sys.argv[1:] if name != "--fix"]
    folders = [Path(name) for name in names] or [ROOT / name for name in FOLDERS]
    found = check_folders(folders, fix="--fix" in sys.argv)
    for page in PAGES if not names else ():
        found += check_file(ROOT / page)
    for package in folders:
        if package.name == PACKAGE:
            found += check_class_names(package)
    for path, line, rule in found:
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}:{line}: {rule}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
