# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/reliability.md: `python -m tests.reliability.table`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.reliability.items import ITEMS, SECTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- written by python -m tests.reliability.table -->", "<!-- until here -->"


@functools.cache
def marked_tests() -> dict[int, list[tuple[str, str]]]:
    """Item -> (file, test) of those that hold it; the test is empty where the whole file is marked."""
    found: dict[int, list[tuple[str, str]]] = {number: [] for number in ITEMS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.item(" in source:
            for test, numbers in _marked(ast.parse(source)):
                for number in numbers:
                    found[number].append((str(path.relative_to(ROOT / "tests")), test))
    return found


def _marked(module: ast.Module) -> Iterator[tuple[str, list[int]]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                yield from ((node.name, numbers) for numbers in _numbers(decorator))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from (("", numbers) for numbers in _numbers(node.value))


def _numbers(mark: ast.expr) -> Iterator[list[int]]:
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.item":
        yield [int(ast.literal_eval(argument)) for argument in mark.args]


def table() -> str:
    """All sections."""
    found = marked_tests()
    lines: list[str] = []
    for title, items in SECTIONS.items():
        lines += ["", f"## {title}", "", "| # | what | tests | broke elsewhere |", "|---|---|---|---|"]
        lines += [
            f"| {number} | {item.promise} | {_cell(found[number])} | {item.elsewhere} |"
            for number, item in items.items()
        ]
    return "\n".join([*lines, ""])


def _cell(tests: list[tuple[str, str]]) -> str:
    """The tests by file, so that a path stands once."""
    files: dict[str, list[str]] = {}
    for path, test in tests:
        files.setdefault(path, []).append(test)
    cells = [
        f"[{path}](../tests/{path})" + "".join(f" `{test}`" for test in names if test)
        for path, names in files.items()
    ]
    return ", ".join(cells)


def page() -> str:
    """The page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
