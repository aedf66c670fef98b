# SPDX-License-Identifier: Apache-2.0
"""Engine core process: `python -m quire.engine.core_process DIRECTORY PARENT_PID EXECUTOR`.

Invariant: `main` imports slow modules itself, while a thread maps torch's library if the executor computes in this
process. With `-` as DIRECTORY it imports first, then reads the name of the directory, and ends if there is none.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

from quire.processes import GROUP_SIGNALS, leave, read_order, uncollected
from quire.torch_import import begin_torch

SPARE = "-"
"""In place of a directory: its name comes by the standard input."""
AHEAD = (
    "quire.executor.uniproc",
    "quire.worker.cpu",
    "quire.worker.recorded_forward",
    "quire.worker.multi_step_decode",
    "quire.kernels.cpu.attention",
    "quire.kernels.cpu.sampling",
    "quire.kernels.cpu.sized_graph",
)
"""Modules that most cores import when they have read their configuration."""


def main() -> int:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    directory, parent_pid, executor = sys.argv[1:]
    with uncollected():
        if executor == "uni":
            begin_torch()
        from quire.engine.core_service import serve

        if directory == SPARE:
            _import_ahead()
    if directory == SPARE:
        directory = read_order()
        if not directory:
            return 0
    return serve(Path(directory), int(parent_pid))


def _import_ahead() -> None:
    from quire.features import CORE_FEATURES, MEDIA_ENCODER, WORKER_FEATURES

    places = (*CORE_FEATURES.values(), *WORKER_FEATURES.values(), MEDIA_ENCODER)
    for name in (*AHEAD, *(place.partition(":")[0] for place in places)):
        import_module(name)


if __name__ == "__main__":
    leave(main())
