# SPDX-License-Identifier: Apache-2.0
"""Screenshots of every page of the console: python -m tests.console.screenshots FOLDER [--all]

Without --all, the two of docs/console.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.console.browser import Browser, Page, browser
from tests.end_to_end.server import Server

SIZES = {"light": (1200, 760), "dark": (1200, 760), "phone": (390, 780)}
LOAD = ("--num-gpu-blocks-override", "900", "--max-num-seqs", "8", "--max-model-len", "1000")
NUM_CLIENTS = 14


@contextlib.contextmanager
def load(url: str, key: str = "") -> Iterator[None]:
    """Keep requests in flight that share prefixes, some of them waiting."""
    stops = threading.Event()

    def ask(number: int) -> None:
        prompt = "You are a helpful assistant. " * 12 * (1 + number % 4)
        for turn in range(1000):
            if stops.is_set():
                return
            body = {
                "prompt": f"{prompt} {number} {turn}",
                "max_tokens": 150 + 90 * (number % 5),
                "ignore_eos": True,
            }
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            post = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with contextlib.suppress(OSError), urllib.request.urlopen(post, timeout=60) as reply:
                reply.read()

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stops.set()
        for thread in threads:
            thread.join()


def say(page: Page, text: str) -> None:
    """Send a message, and wait for the whole answer."""
    page.type("#draft", text)
    page.key("Enter")
    page.until("document.getElementById('stop').hidden && document.getElementById('draft').value === ''")


SAVED = [
    {"id": 0, "parent": None, "role": "root", "children": [1], "picked": 0},
    {"id": 1, "parent": 0, "role": "user", "children": [2], "picked": 0, "text": "How do I add two numbers in Python?"},
    {
        "id": 2, "parent": 1, "role": "assistant", "children": [], "picked": -1, "finish": "stop",
        "reasoning": "A function and a small table will do.",
        "text": "With a **function**:\n\n```python\ndef add(a: int, b: int) -> int:\n    return a + b\n```\n\n"
        "| a | b | `add(a, b)` |\n|---|---|---|\n| 12 | 30 | 42 |\n| 1 | -1 | 0 |\n\n"
        "1. *Ints* of any size work.\n2. So do floats, but `0.1 + 0.2` is not `0.3`.",
    },
]  # fmt: skip


def chat(page: Page) -> None:
    """A saved conversation, and what the included model says then."""
    say(page, "What is the capital of France?")


def shoot(started: Browser, url: str, folder: Path, kind: str, pages: list[str]) -> None:
    """Take the pages at one size and theme."""
    page = started.new_page(scheme="dark" if kind == "dark" else "light")
    page.resize(*SIZES[kind], mobile=kind == "phone")
    page.keep("keys", {"api": "", "admin": "admin"})
    page.keep("chat", {"version": 1, "nodes": SAVED})
    page.open(f"{url}/")
    for name in pages:
        page.run(f"location.hash = {json.dumps(name)}")
        if name == "chat":
            chat(page)
            page.run("document.getElementById('toggle-settings').click()" if kind != "phone" else "0")
        else:
            page.run("new Promise((done) => setTimeout(done, 6000))")  # some seconds of steps to be seen
        page.screenshot(folder / f"{name}-{kind}.png")
    assert not page.failures, page.failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs, browser() as started:
        server = Server(*LOAD, log=Path(logs) / "log").wait_ready()
        try:
            if args.all:
                every = ["chat", "requests", "cache", "metrics"]
                with load(server.url):
                    for kind in SIZES:
                        shoot(started, server.url, args.folder, kind, every)
            else:
                shoot(started, server.url, args.folder, "light", ["chat"])
                with load(server.url):
                    shoot(started, server.url, args.folder, "dark", ["cache"])
        finally:
            server.stop()


if __name__ == "__main__":
    main()
