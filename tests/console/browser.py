# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over a pipe by its own protocol, so that tests need no other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
TIMEOUT_S = 60.0
# The browser reads commands from descriptor 3 and writes to 4.
TAKE_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
LOUD = ("error", "assert", "warning")  # Console messages that fail a test.


class PageError(AssertionError):
    """A script failed, or a condition did not become true."""


class Page:
    """One tab. `failures` are errors and warnings of its console, refused loads and uncaught exceptions; `requests`
    are the URLs that it has asked for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.failures: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        return self._browser.send(method, params, self._session)

    def keep(self, name: str, value: Any) -> None:
        """Let every document of this tab find something in the console's session storage."""
        item, text = f"'quire.{name}'", json.dumps(json.dumps(value))
        source = f"sessionStorage.getItem({item}) ?? sessionStorage.setItem({item}, {text})"
        self.send("Page.addScriptToEvaluateOnNewDocument", source=source)

    def open(self, url: str) -> None:
        """Go to a page and wait until its script has run."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && globalThis.quireConsole !== undefined")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        reply = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            raise PageError(reply["exceptionDetails"].get("exception", {}).get("description", str(reply)))
        return reply["result"].get("value")

    def until(self, condition: str, within_s: float = TIMEOUT_S) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + within_s
        waiting = (
            "new Promise((done) => { const end = Date.now() + 1000; const look = () => { let value = false;"
            f" try {{ value = ({condition}); }} catch {{ /* not yet */ }}"
            " if (value || Date.now() > end) done(value); else setTimeout(look, 20); }; look(); })"
        )
        while time.monotonic() < deadline:
            with contextlib.suppress(PageError, LookupError):  # the page is being loaded
                value = self.run(waiting)
                if value:
                    return value
        raise PageError(f"not within {within_s:g} s: {condition}; {self.failures}")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Write into a field as a person would, at once."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def key(self, key: str, **extra: Any) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" and not extra else {}
        code = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowRight": 39}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            down = text if kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **down, **extra
            )

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile,
        )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Save what is visible as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keep an event that a test may ask about."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.failures.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in LOUD:
            self.failures.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in LOUD:
            self.failures.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class Browser:
    """A browser process with a profile of its own."""

    def __init__(self, *flags: str) -> None:
        assert CHROMIUM is not None, "there is no Chromium"
        self._profile = tempfile.mkdtemp(prefix="quire-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [
            CHROMIUM,
            *FLAGS,
            *flags,
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_PIPES, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def new_page(self, *, scheme: str = "light") -> Page:
        """Open a tab in a context without the others' storage."""
        context = self.send("Target.createBrowserContext", {})["browserContextId"]
        target = self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.resize(1280, 800)
        return page

    def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Send a command and wait for its result; events that come first are kept by their pages."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise LookupError(f"{method}: {reply['error']}")
                result: dict[str, Any] = reply["result"]
                return result
            page = self._pages.get(reply.get("sessionId", ""))
            if page is not None and "method" in reply:
                page.note(reply["method"], reply["params"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT_S)
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise PageError("the browser does not answer")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """End the process and remove its profile."""
        with contextlib.suppress(OSError, PageError, LookupError):
            self.send("Browser.close", {})
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Browser]:
    started = Browser(*flags)
    try:
        yield started
    finally:
        started.close()
