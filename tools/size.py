# SPDX-License-Identifier: Apache-2.0
"""Line budgets of the source, license lines aside: `python tools/size.py [--update]`.

`tools/size.toml` names the parts of the package and the lines that each may have. A change that exceeds a budget
deletes something, or raises the number in the same commit and says why. `--update` lowers budgets to the present size.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LICENSE = "# SPDX-License-Identifier: "
BUDGETS = Path(__file__).with_name("size.toml")


def files_of(patterns: list[str]) -> Iterator[Path]:
    """Yield the Python files below the package that match any of some globs.

    Raises:
        SystemExit: a glob matches nothing.
    """
    for pattern in patterns:
        found = sorted(path for path in ROOT.glob(pattern) if path.suffix == ".py")
        if not found:
            sys.exit(f"{BUDGETS.name}: {pattern} matches no file")
        yield from found


def size_of(patterns: list[str]) -> tuple[int, int]:
    """Return the number of files and of lines that some globs match."""
    files = set(files_of(patterns))
    return len(files), sum(map(num_lines, files))


def num_lines(path: Path) -> int:
    """Return the number of lines of a file without that of its license."""
    text = path.read_text(encoding="utf-8")
    return text.count("\n") - text.startswith(LICENSE)


def main() -> int:
    """Print every part's size beside its budget; return 1 if one is exceeded."""
    text = BUDGETS.read_text(encoding="utf-8")
    exceeded = False
    for name, part in tomllib.loads(text).items():
        files, lines = size_of(part["files"])
        over = lines > part["lines"]
        exceeded |= over
        if over or "--update" not in sys.argv:
            print(f"{name:<14} {files:>4} files {lines:>7} lines of {part['lines']:>7}" + " EXCEEDED" * over)
        elif lines < part["lines"]:
            text = re.sub(rf"(\[{name}\][^\n]*\nlines = )\d+", rf"\g<1>{lines}", text)
    if "--update" in sys.argv:
        BUDGETS.write_text(text, encoding="utf-8")
    if exceeded:
        print(
            f"delete lines, or raise the budget in tools/{BUDGETS.name} and say why in the commit",
            file=sys.stderr,
        )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
