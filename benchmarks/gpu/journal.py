# SPDX-License-Identifier: Apache-2.0
"""Journal of a run: a line of JSON for each event, in a file that outlives the process.

A kernel that reads where it must not ends all use of the device in its process, and a graph can hang; neither is to
cost more than the one thing that was being done. So the work is done by a process of its own, and where that is lost,
another goes on behind what the journal says was begun.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOST = 3
"""Exit code of a process whose device does not answer any more."""
SILENCE_S = 200.0
"""How long a process may do one thing: compiling all kernels of a model takes up to this."""
Clock = Callable[[], float]
Fact = Mapping[str, Any]


@dataclass
class Entry:
    """One thing that was begun."""

    facts: list[Fact] = field(default_factory=list)
    trouble: str | None = None
    """Why it failed, or "" if it did not; None: it has not ended."""
    seconds: float = 0.0


class Journal:
    """Journal of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.notes: list[str] = []
        self.entries: dict[str, Entry] = {}
        for line in path.read_text().splitlines():
            self._take(json.loads(line))

    def note(self, text: str) -> None:
        """Something to be said of the run as a whole."""
        self._write({"note": text})

    def begin(self, name: str) -> None:
        self._write({"begin": name})

    def add(self, name: str, fact: Fact) -> None:
        """Add a result of an entry that was begun, or one part of it."""
        self._write({"name": name, "fact": fact})

    def end(self, name: str, seconds: float, trouble: str = "") -> None:
        self._write({"end": name, "seconds": seconds, "trouble": trouble})

    def refuse(self, name: str, trouble: str) -> None:
        """Something that is not begun at all, and why."""
        self.begin(name)
        self.end(name, 0.0, trouble)

    def attempt(self, name: str, run: Callable[[], Iterator[Fact]], clock: Clock = time.monotonic) -> Entry:
        """Do a thing; what goes wrong with it is written down and costs it alone."""
        self.begin(name)
        started, trouble = clock(), ""
        try:
            for fact in run():
                self.add(name, fact)
        except Exception:  # whatever it is, what comes after it is to run
            trouble = traceback.format_exc()
        self.end(name, max(clock() - started, 1e-9), trouble)
        return self.entries[name]

    @property
    def unfinished(self) -> list[str]:
        """Return the names of entries that were begun and have not ended."""
        return [name for name, entry in self.entries.items() if entry.trouble is None]

    def _write(self, event: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")
        self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if "note" in event:
            if event["note"] not in self.notes:
                self.notes.append(event["note"])
        elif "begin" in event:
            self.entries[event["begin"]] = Entry()
        elif "fact" in event:
            self.entries[event["name"]].facts.append(event["fact"])
        else:
            entry = self.entries[event["end"]]
            entry.seconds, entry.trouble = event["seconds"], event["trouble"]


def supervise(command: Sequence[str], path: Path, limit_s: float, silence_s: float = SILENCE_S) -> int:
    """Run `command --journal PATH --limit SECONDS`, and again while its process is lost; returns the last exit code."""
    started = time.monotonic()
    while True:
        num_begun = len(Journal(path).entries)
        left = limit_s - (time.monotonic() - started)
        code = _watch([*command, "--journal", str(path), "--limit", f"{left:.1f}"], path, silence_s)
        journal = Journal(path)
        for name in journal.unfinished:
            journal.end(
                name, time.time() - path.stat().st_mtime, f"its process was lost, with exit code {code}"
            )
            print(f"-- {name}: {journal.entries[name].trouble}", file=sys.stderr, flush=True)
        if code in (0, 1) or len(journal.entries) == num_begun:
            return code


def _watch(command: Sequence[str], path: Path, silence_s: float) -> int:
    """The exit code of a process, which is aborted when it has written nothing for a while."""
    with subprocess.Popen(command) as process:
        started = time.time()
        try:
            while True:
                try:
                    return process.wait(1.0)
                except subprocess.TimeoutExpired:
                    if time.time() - max(path.stat().st_mtime, started) > silence_s:
                        process.send_signal(signal.SIGABRT)  # at which it says where it stands
                        return process.wait(10.0)
        finally:
            process.kill()
