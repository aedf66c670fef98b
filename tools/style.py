"""Checks of the style rules in CONTRIBUTING.md that a program can check: `python tools/style.py [FOLDER ...]`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("quire", "tests", "benchmarks", "tools", "demo_model", "examples")

MAX_TEST_NAME = 60  # characters

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


def check_file(path: Path) -> list[Finding]:
    """Return the findings in a Python file, in the order of their lines.

    Raises:
        SyntaxError: the file is no Python.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = [
        finding
        for node in ast.walk(tree)
        for check in (check_docstring, check_test_name)
        for finding in check(path, node)
    ]
    return sorted(found, key=lambda finding: finding.line)


def check_folders(folders: Sequence[Path]) -> list[Finding]:
    """Return the findings in all Python files below some folders.

    Raises:
        SystemExit: one of them is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            sys.exit(f"{folder} is no folder: name folders of Python files")
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [finding for path in files for finding in check_file(path)]


def main() -> int:
    """Print each finding as `file:line: rule`; return 1 if there is one."""
    found = check_folders([Path(name) for name in sys.argv[1:]] or [ROOT / name for name in FOLDERS])
    for path, line, rule in found:
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}:{line}: {rule}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
