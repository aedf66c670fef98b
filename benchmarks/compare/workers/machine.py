# SPDX-License-Identifier: Apache-2.0
"""The machine itself: multiply-adds and read bandwidth, with the probes of `quire bench kernels`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.workers.worker import MARK
from quire.kernels.cpu import machine
from quire.kernels.cpu.library import set_num_threads

_PROBES = 5


def main(cases: list[str]) -> None:
    """Print the rates: `flops` per second and `read` bytes per second, each the best of a few probes."""
    set_num_threads(NUM_THREADS)
    buffer = machine.read_buffer()
    probes: dict[str, Callable[[], float]] = {
        "flops": machine.peak_flops,
        "read": lambda: machine.read_bandwidth(buffer),
    }
    for case in cases:
        rate = max(probes[case]() for _ in range(_PROBES))
        print(f"{MARK}{json.dumps({'case': case, 'rate': rate})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
