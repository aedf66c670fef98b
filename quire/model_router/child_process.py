# SPDX-License-Identifier: Apache-2.0
"""Entry point of a model's server: `python -m quire.model_router.child_process PARENT_PID DIRECTORY CONFIG`.

Invariant: it never outlives the router. If the router is killed, it ends, removes the router's private directory, and
its own engine core follows.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    parent, directory, config = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    from quire.engine.core_service import Parent

    Parent(parent, directory).watch()

    from quire.entrypoints.cli.main import main as run_command

    return run_command(["serve", "--config", config])


if __name__ == "__main__":
    sys.exit(main())
