"""The process that started this one, and owns it.

Invariant: a process that watches its parent ends within LOOK_S + GRACE_S of it, whatever it is doing, as long as native
code lets go of the interpreter's lock meanwhile.

The kernel's own signal for this (`PR_SET_PDEATHSIG`) would come too early: it is sent when the *thread* ends that
started the process, and it would leave the private directory behind.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from quire import private_directories

LOOK_S = 0.5
GRACE_S = 1.5
"""How long a process that has lost its parent may take to end in its own way."""


class Parent:
    """Known by its process id, which it hands over: who asks for `getppid` first may be an orphan already.

    Its private directory, if this process has it too, falls to this process when it is gone.
    """

    def __init__(self, pid: int, directory: Path | None = None) -> None:
        self._pid = pid
        self._directory = directory

    def is_gone(self) -> bool:
        return os.getppid() != self._pid

    def watch(self) -> None:
        """End this process, from a thread of its own, if the parent ends and this process does not."""
        threading.Thread(target=self._watch, name="quire-parent", daemon=True).start()

    def clean_up(self) -> None:
        """Remove the private directory if the parent no longer can."""
        if self._directory is not None and self.is_gone():
            private_directories.remove(self._directory)

    def _watch(self) -> None:
        while not self.is_gone():
            time.sleep(LOOK_S)
        time.sleep(GRACE_S)
        self.clean_up()
        os._exit(1)
