# SPDX-License-Identifier: Apache-2.0
"""Pictures for the documentation, by headless Chromium: a page, or a command typed on a terminal.

    python tools/screenshot.py page docs/assets/console.png http://localhost:8000/
    python tools/screenshot.py terminal docs/assets/terminal.png "quire run" "What is 12 + 30?" /bye

A terminal's picture shows the command, its output, and the lines typed at each of its prompts (">>> ").
"""

from __future__ import annotations

import html
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, COLUMNS, LINE_HEIGHT, MARGIN = 860, 88, 21, 62
PROMPT = b">>> "
TIMEOUT_S = 120.0
_DIM = re.compile(r"\x1b\[2m(.*?)\x1b\[(?:0|22)?m", re.DOTALL)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_STYLE = """
body {{ margin: 0; padding: 14px; background: #fff; }}
.window {{ background: #14212b; border-radius: 8px; padding: 10px 16px 14px; }}
.bar {{ color: #546e7a; font: 16px sans-serif; letter-spacing: 3px; }}
pre {{ margin: 6px 0 0; font: 15px/{line}px "DejaVu Sans Mono", monospace; color: #e0e6ea; white-space: pre-wrap; }}
b {{ color: #4db6ac; font-weight: normal; }}
i {{ color: #78909c; font-style: normal; }}
"""


def shoot(url: str, target: Path, width: int, height: int) -> None:
    """Write a picture of a page, once its scripts have run.

    Raises:
        SystemExit: there is no browser, or it wrote nothing.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=10000",
    ]
    command = [browser, *options, f"--window-size={width},{height}", f"--screenshot={target.resolve()}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    if not target.exists():
        raise SystemExit(f"{browser} wrote no picture of {url}")


def typed(command: Sequence[str], lines: Sequence[str]) -> str:
    """Return what a terminal of 90 columns shows while lines are typed at the prompts of a command."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "90", "QUIRE_LOG_LEVEL": "ERROR"}
        os.execvp(command[0], list(command))
    shown = b""
    for line in lines:
        shown += _read(terminal, PROMPT)
        os.write(terminal, f"{line}\n".encode())
    shown += _read(terminal, None)
    os.waitpid(pid, 0)
    return shown.decode()


def _read(terminal: int, end: bytes | None) -> bytes:
    """Return what comes up to a prompt, or until the command ends."""
    read, deadline = b"", time.monotonic() + TIMEOUT_S
    while end is None or not read.endswith(end):
        if not select.select([terminal], [], [], deadline - time.monotonic())[0]:
            raise SystemExit(f"the command says nothing more: {read!r}")
        try:
            read += os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
    return read


def page_of(command: str, shown: str) -> tuple[str, int]:
    """Return the HTML of a terminal's window, and its height in pixels."""
    text = html.escape(_CONTROL.sub("", _DIM.sub("\0\\1\1", shown)).strip("\n"))
    text = text.replace("\0", "<i>").replace("\1", "</i>")
    text = re.sub(r"^(&gt;&gt;&gt;) (.*)$", r"<i>\1</i> <b>\2</b>", text, flags=re.MULTILINE)
    body = f"<i>$</i> <b>{html.escape(command)}</b>\n{text}"
    rows = sum(1 + len(html.unescape(re.sub("<.>|</.>", "", line))) // COLUMNS for line in body.splitlines())
    height = MARGIN + LINE_HEIGHT * rows + 20
    window = f'<div class="window"><div class="bar">●●●</div><pre>{body}</pre></div>'
    style = _STYLE.format(line=LINE_HEIGHT)
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{window}", height


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["page", target, url]:
            shoot(url, Path(target), 1280, 860)
        case ["terminal", target, command, *lines]:
            page, height = page_of(command, typed(shlex.split(command), lines))
            with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
                file.write(page)
                file.flush()
                shoot(Path(file.name).as_uri(), Path(target), WIDTH, height)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
