# SPDX-License-Identifier: Apache-2.0
"""One request decoded between probes of the memory, in one process: `... beside_probe bf16 DIRECTORY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.workers.worker import MARK
from quire.bench import step_profile

_WEIGHTS = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}


def main(precision: str, model: Path) -> None:
    """Print the share of what the probes read that a step reads of weights; the model has the checkpoint's shape."""
    (step,) = step_profile.measure([_WEIGHTS[precision]], [1], model=model, threads=NUM_THREADS).results
    print(f"{MARK}{json.dumps({'case': 'share', 'rate': step.of_probe})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
