# SPDX-License-Identifier: Apache-2.0
"""Engine core process: `python -m quire.engine.core_process DIRECTORY PARENT_PID EXECUTOR`.

Invariant: `main` imports slow modules itself, while a thread maps torch's library if the executor computes in this
process.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from quire.processes import GROUP_SIGNALS, uncollected
from quire.torch_import import begin_torch


def main() -> int:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    directory, parent_pid, executor = sys.argv[1:]
    with uncollected():
        if executor == "uni":
            begin_torch()
        from quire.engine.core_service import serve
    return serve(Path(directory), int(parent_pid))


if __name__ == "__main__":
    sys.exit(main())
